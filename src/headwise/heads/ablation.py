"""Removing heads from a model, and how much each one matters.

A head is removed by zeroing its slice of the output projection's input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import NotFired, SettingError, require_integer
from headwise.heads.capture import require_joined
from headwise.heads.head_slice import OutputProjection
from headwise.heads.heads import Heads, Site, require_heads
from headwise.nn.checkpointing import is_in_checkpoint
from headwise.nn.hooks import Handle, read_first_argument, replace_first_argument


class Ablation(Handle):
    """Heads removed from a model until `remove()` or the end of a `with` block; returned by `ablate`.

    On leaving the block it raises `NotFired` where no forward pass went through a site.
    """

    def __init__(self, heads: Heads, indices: tuple[int, ...]) -> None:
        super().__init__()
        self.heads, self.indices = heads, indices
        self._reached: set[str] = set()
        # all output projections are found before the first is hooked: an error leaves the model as it was
        for site, output_projection in [(site, site.expose()) for site in heads.sites]:
            projection = output_projection.module
            # before all other hooks, so that these read the input that W_O gets
            self._hook_before(projection, self._make_zeroing(site), prepend=True)
            self._hook_before(site.module, _make_check(site, output_projection, projection))

    @property
    def called(self) -> bool:
        """Whether a forward pass went through every ablated site."""
        return all(site.name in self._reached for site in self.heads.sites)

    def verify(self) -> None:
        """Raise `NotFired` unless a forward pass went through every ablated site."""
        silent = [site.label for site in self.heads.sites if site.name not in self._reached]
        if silent:
            raise NotFired(
                f"no forward pass went through the ablated heads of {len(silent)} of {len(self.heads)} sites "
                f"({', '.join(silent[:6])}); the score cannot show their removal."
            )

    def _on_exit(self) -> None:
        self.verify()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_reached": set()}

    def _make_zeroing(self, site: Site) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict]]:
        def zero(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if is_in_checkpoint():
                raise NotFired(
                    f"{site.label}: heads are removed for evaluation; a backward pass after the block "
                    "would compute this activation checkpoint again with the heads in place. Turn checkpointing off, "
                    "or gradients."
                )
            self._reached.add(site.name)
            outputs = read_first_argument(module, args, kwargs)
            require_joined(outputs, site)
            keep = torch.ones(site.num_heads, dtype=outputs.dtype, device=outputs.device)
            keep[list(self.indices)] = 0.0
            return replace_first_argument(args, kwargs, site.scale_heads(outputs, keep))

        return zero


def _make_check(
    site: Site, output_projection: OutputProjection, projection: nn.Module
) -> Callable[[nn.Module, tuple, dict], None]:
    def require(_module: nn.Module, _args: tuple, _kwargs: dict) -> None:
        if output_projection.module is not projection:
            raise NotFired(
                f"{site.label}: its output projection is now a "
                f"{type(output_projection.module).__name__}, set after ablate(), and would get the removed "
                "heads unchanged; call remove() on the ablation and ablate again."
            )

    return require


@dataclass(frozen=True)
class Importance:
    """What removing each head costs.

    Attributes:
        baseline: The score of the whole model.
        drops: Baseline minus the score without the head, for each site [H]; negative where removal helps.
    """

    baseline: float
    drops: dict[str, Tensor]

    def __str__(self) -> str:
        lines = [f"score of the whole model {self.baseline:.4g}; drop without each head:"]
        width = max(len(name) for name in self.drops)
        for name, drops in self.drops.items():
            lines.append(f"{name.ljust(width)}  " + " ".join(f"{float(drop):+.4f}" for drop in drops))
        return "\n".join(lines)


def ablate(heads: Heads, *indices: int) -> Ablation:
    """Remove heads, by index, from every site of `heads`; returns a handle that restores them.

    O_h = 0 for each h in `indices` before W_O (Michel et al. 2019 call it masking a head).

    Args:
        heads: The sites; select one with `.where(...)` or `.layer(...)`.
        indices: Heads to remove, from 0.

    Raises:
        SettingError: No index was given, or a site does not have that many heads.
        LayoutError: The output projection of a site was not found.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with ablate(hw.find_heads(model), 1) as ablation:
        ...     _ = model(torch.randn(3, 5, 8))
        >>> ablation.called
        True
    """
    require_heads(heads)
    if not indices:
        raise SettingError("ablate was given no head; expected at least one index, counted from 0.")
    for site in heads.sites:
        for index in indices:
            require_integer(f"head of {site.label}", index, high=site.num_heads - 1)
    return Ablation(heads, indices)


@torch.no_grad()
def importance(heads: Heads, score: Callable[[], float]) -> Importance:
    """Return how much the score drops when each head is removed alone.

    Args:
        heads: The sites whose heads are removed, one at a time.
        score: Runs the model on the user's data and returns its score; called once for the whole model and once per
            head, without gradients.

    Raises:
        NotFired: `score` did not run the model.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> x = torch.randn(3, 5, 8)
        >>> result = importance(hw.find_heads(model), lambda: float(model(x).std()))
        >>> result.drops["self_attn"].shape
        torch.Size([2])
    """
    require_heads(heads)
    baseline = float(score())
    drops: dict[str, Tensor] = {}
    for site in heads.sites:
        one = Heads(heads.model, (site,), heads.projections, heads.found)
        scores = []
        for head in range(site.num_heads):
            with ablate(one, head) as ablation:
                scores.append(float(score()))
                ablation.verify()
        drops[site.name or "(model)"] = baseline - torch.tensor(scores, dtype=torch.float64)
    return Importance(baseline, drops)
