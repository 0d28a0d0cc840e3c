"""Removing heads from a model.

A head is removed by zeroing its slice of the output projection's input.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, NotFired, SettingError, require_integer
from headwise.heads.capture import require_joined
from headwise.heads.functional import explain_uncalled, hands_output
from headwise.heads.head_slice import OutputProjection
from headwise.heads.heads import Heads, Site, require_heads
from headwise.nn.checkpointing import is_in_checkpoint
from headwise.nn.hooks import Handle, read_first_argument, replace_first_argument
from headwise.nn.multihead import walk_once
from headwise.nn.scores import Observer


@dataclass(eq=False)
class _Removal:
    """A site whose heads are removed, and whether a forward pass reached it.

    Its own object, so that layers that torch.compile compiles one by one share a graph.
    """

    site: Site
    reached: bool = False
    factors: Tensor | None = None


class Ablation(Handle):
    """Heads removed from a model until `remove()` or the end of a `with` block; returned by `ablate`.

    On leaving the block it raises `NotFired` where no forward pass went through a site.
    """

    def __init__(self, heads: Heads, indices: tuple[int, ...]) -> None:
        super().__init__()
        self.heads, self.indices = heads, indices
        require_unshared(heads)
        # all output projections are found before the first is hooked: an error leaves the model as it was
        within = [site.output_projection is None and site.gives("outputs") for site in heads.sites]
        self._removals = [_Removal(site) for site in heads.sites]
        with self._attaching(), walk_once(heads.model):
            keep = self._removers.append
            projections = [None if own else site.expose(keep) for site, own in zip(heads.sites, within, strict=True)]
        for removal, output_projection in zip(self._removals, projections, strict=True):
            if output_projection is None:
                listener = Observer(ignore, edit=partial(self._zero_outputs, removal))
                self._removers.append(removal.site.reach_scores(keep).listen(listener))
                continue
            projection = output_projection.module
            # before all other hooks, so that these read the input that W_O gets
            self._hook_before(projection, self._make_zeroing(removal), prepend=True)
            self._hook_before(removal.site.module, make_check(removal.site, output_projection, "hw.ablate"))

    @property
    def called(self) -> bool:
        """Whether a forward pass went through every ablated site."""
        return all(removal.reached for removal in self._removals)

    def verify(self) -> None:
        """Raise `NotFired` unless a forward pass went through every ablated site."""
        silent = [removal.site.label for removal in self._removals if not removal.reached]
        if silent:
            uncalled = next(
                (site for site in (r.site for r in self._removals if not r.reached) if hands_output(site)), None
            )
            raise NotFired(
                f"no forward pass went through the ablated heads of {len(silent)} of {len(self.heads)} sites "
                f"({', '.join(silent[:6])}); the score cannot show their removal."
                + ("" if uncalled is None else f" In {uncalled.label}, {explain_uncalled(uncalled, 'outputs')}")
            )

    def _describe(self) -> str:
        return f"heads {', '.join(map(str, self.indices))} of each of {len(self.heads)} sites"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_removals": [_Removal(site) for site in self.heads.sites]}

    def _make_zeroing(self, removal: _Removal) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict]]:
        site = removal.site

        def zero(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            outputs = read_first_argument(module, args, kwargs)
            keep = self._make_factors(removal, outputs)
            require_joined(outputs, site)
            return replace_first_argument(args, kwargs, site.scale_heads(outputs, keep))

        return zero

    def _zero_outputs(self, removal: _Removal, outputs: Tensor) -> Tensor:
        """Return the outputs of heads [B, Q, H, e] without those removed, where they pass through no module."""
        keep = self._make_factors(removal, outputs)
        return outputs * removal.site.select_own_heads(keep, 0, outputs.shape[2])[:, None]

    def _make_factors(self, removal: _Removal, outputs: Tensor) -> Tensor:
        """Return 0 for the heads that are removed and 1 for the others, [H]."""
        site = removal.site
        if is_in_checkpoint():
            raise NotFired(
                f"{site.label}: heads are removed for evaluation; a backward pass after the block "
                "would compute this activation checkpoint again with the heads in place. Turn checkpointing off, "
                "or gradients."
            )
        removal.reached = True
        if torch.compiler.is_compiling():
            return self._multiply_by(site, outputs)
        # made once: the indices are numbers of the host
        kept = removal.factors
        if kept is None or kept.dtype != outputs.dtype or kept.device != outputs.device:
            kept = removal.factors = self._multiply_by(site, outputs)
        return kept

    def _multiply_by(self, site: Site, outputs: Tensor) -> Tensor:
        keep = torch.ones(site.num_heads, dtype=outputs.dtype, device=outputs.device)
        keep[list(self.indices)] = 0.0
        return keep


def ignore(_attended: object) -> None:
    """Do nothing with what an attention computed."""


def require_unshared(heads: Heads) -> None:
    """Raise `LayoutError` for an attention whose output projection another one calls, whose heads it gets too."""
    called = Counter(id(site.output_projection.module) for site in heads.found if site.output_projection is not None)
    for site in heads:
        if site.output_projection is not None and called[id(site.output_projection.module)] > 1:
            raise LayoutError(
                f"{site.label} calls the same output projection as another attention, whose heads would be changed "
                "too; give each attention an output projection of its own."
            )


def make_check(
    site: Site, output_projection: OutputProjection, attached_by: str, *, training_only: bool = False
) -> Callable[[nn.Module, tuple, dict], None]:
    """Return a hook on an attention that raises `NotFired` where its output projection is another module than now."""
    projection = output_projection.module

    def require(module: nn.Module, _args: tuple, _kwargs: dict) -> None:
        if output_projection.module is not projection and (module.training or not training_only):
            raise NotFired(
                f"{site.label}: its output projection is now a {type(output_projection.module).__name__}, set after "
                f"{attached_by}, and would get all heads unchanged; call remove(), and {attached_by} again."
            )

    return require


def ablate(heads: Heads, *indices: int | Iterable[int]) -> Ablation:
    """Remove heads, by index, from every site of `heads`; returns a handle that restores them.

    O_h = 0 for each h in `indices` before W_O (Michel et al. 2019 call it masking a head).

    Args:
        heads: The sites. The indices hold for each of them: `ablate(heads, [0, 3])` of a model of six sites removes
            twelve heads. Select one site with `.where(...)` or `.layer(...)`.
        indices: Heads to remove, from 0, one by one or in a list: `ablate(heads, 0, 3)` is `ablate(heads, [0, 3])`. A
            tensor or an array of integers is a list too.

    Raises:
        SettingError: No index was given, one is no integer, or a site does not have that many heads.
        LayoutError: The output projection of a site was not found, or another attention calls it too.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with ablate(hw.find_heads(model), 1) as ablation:
        ...     _ = model(torch.randn(3, 5, 8))
        >>> ablation.called
        True
    """
    require_heads(heads)
    listed = tuple(index for given in indices for index in _list_indices(given))
    if not listed:
        raise SettingError("ablate was given no head; expected at least one index, counted from 0.")
    for site in heads.sites:
        for index in listed:
            require_integer(f"head of {site.label}", index, high=site.num_heads - 1)
    return Ablation(heads, listed)


def _list_indices(given: Any) -> list[Any]:
    """Return the indices in a list, a tensor or an array, or the one index."""
    given = given.tolist() if hasattr(given, "tolist") else given
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
