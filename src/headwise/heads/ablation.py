"""Heads removed for the length of a block or dropped at random in training, and how much each head matters.

A head is removed by zeroing its slice of the output projection's input. Its importance is exact, by removing it, or to
first order, by one backward pass for all heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headwise.errors import (
    HeadwiseError,
    LayoutError,
    NotFired,
    SettingError,
    ShapeError,
    require_choice,
    require_integer,
    require_range,
)
from headwise.heads.capture import require_joined
from headwise.heads.heads import LINES, Heads, Site, require_heads, shorten
from headwise.heads.layouts.functional import explain_uncalled, hands_output
from headwise.heads.method import Method
from headwise.nn.checkpointing import is_in_checkpoint, is_recomputing
from headwise.nn.hooks import Handle, read_first_argument, replace_first_argument, uncompiled
from headwise.nn.multihead import walk_once
from headwise.nn.scores import Observer
from headwise.settings import Rate


class _EditedOutputs(Handle):
    """Heads changed where W_O gets them, until `remove()`; a copy of the model has them as they were.

    Each attention has an object of its own with what is done to it, so that layers that torch.compile compiles one by
    one share a graph.
    """

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        require_heads(heads)
        self.heads = heads
        projections = Counter(id(one.output_projection.module) for one in heads.found if one.output_projection)
        for site in heads:
            if site.output_projection is not None and projections[id(site.output_projection.module)] > 1:
                raise LayoutError(
                    f"{site.label} calls the same output projection as another attention, whose heads would be changed "
                    "too; give each attention an output projection of its own."
                )

    def edit_outputs(
        self,
        site: Site,
        edit: Callable[[Tensor], Tensor],
        within: Callable[[Tensor], Tensor] | None = None,
        *,
        prepend: bool = False,
        attached_by: str = "",
        training_only: bool = False,
    ) -> None:
        """Change what W_O gets, [..., H * e], by `edit`, or outputs [B, Q, H, e] that no module gets by `within`.

        With `prepend`, hooks that are there already get the changed outputs. If a call that attached this is named,
        later calls raise `NotFired` where W_O is another module than now.
        """
        undo = self._removers.append
        if within is not None and site.output_projection is None and site.gives("outputs"):
            undo(site.reach_scores(undo).listen(Observer(_ignore, edit=within)))
            return
        output_projection = site.expose(undo)
        projection = output_projection.module

        def change(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            joined = read_first_argument(module, args, kwargs)
            require_joined(joined, site)
            return replace_first_argument(args, kwargs, edit(joined))

        def require(module: nn.Module, _args: tuple, _kwargs: dict[str, Any]) -> None:
            if output_projection.module is not projection and (module.training or not training_only):
                raise NotFired(
                    f"{site.label}: its output projection is now a {type(output_projection.module).__name__}, set "
                    f"after {attached_by}, and would get all heads unchanged; call remove(), and {attached_by} again."
                )

        self.hook_before(projection, change, prepend=prepend)
        if attached_by:
            self.hook_before(site.module, require)


def _ignore(_attended: object) -> None:
    return None


@dataclass(eq=False)
class _Removal:
    """A site whose heads are removed, and whether a forward pass reached it."""

    site: Site
    indices: list[int]
    reached: bool = False
    factors: Tensor | None = None

    def zero(self, joined: Tensor) -> Tensor:
        """Return what W_O gets, [..., H * e], without the heads that are removed."""
        return self.site.scale_heads(joined, self._make_factors(joined))

    def zero_within(self, outputs: Tensor) -> Tensor:
        """Return outputs [B, Q, H, e] without these heads."""
        return outputs * self.site.select_own_heads(self._make_factors(outputs), 0, outputs.shape[2])[:, None]

    def _make_factors(self, outputs: Tensor) -> Tensor:
        """Return 0 for the heads that are removed and 1 for the others, [H]."""
        if is_in_checkpoint():
            raise NotFired(
                f"{self.site.label}: heads are removed for evaluation; a backward pass after the block "
                "would compute this activation checkpoint again with the heads in place. Turn checkpointing off, "
                "or gradients."
            )
        self.reached = True
        kept = self.factors
        compiling = torch.compiler.is_compiling()
        # made once: the indices are numbers of the host
        if compiling or kept is None or kept.dtype != outputs.dtype or kept.device != outputs.device:
            kept = torch.ones(self.site.num_heads, dtype=outputs.dtype, device=outputs.device)
            kept[self.indices] = 0.0
            self.factors = self.factors if compiling else kept
        return kept


class Ablation(_EditedOutputs):
    """Heads removed from a model until `remove()` or the end of a `with` block; returned by `ablate`.

    On leaving the block it raises `NotFired` where no forward pass went through a site.
    """

    def __init__(self, heads: Heads, indices: tuple[int, ...]) -> None:
        super().__init__(heads)
        self.indices = indices
        self._removals = [_Removal(site, list(indices)) for site in heads.sites]
        with self._attaching(), walk_once(heads.model):
            for removal in self._removals:
                # before all other hooks, so that these read the input that W_O gets
                self.edit_outputs(
                    removal.site, removal.zero, removal.zero_within, prepend=True, attached_by="hw.ablate"
                )

    @property
    def called(self) -> bool:
        """Whether a forward pass went through every ablated site."""
        return all(removal.reached for removal in self._removals)

    def check(self) -> None:
        """Raise `NotFired` unless a forward pass went through every ablated site."""
        silent = [removal.site for removal in self._removals if not removal.reached]
        if silent:
            uncalled = next((site for site in silent if hands_output(site)), None)
            raise NotFired(
                f"no forward pass went through the ablated heads of {len(silent)} of {len(self.heads)} sites "
                f"({', '.join(site.label for site in silent[:6])}); the score cannot show their removal."
                + ("" if uncalled is None else f" In {uncalled.label}, {explain_uncalled(uncalled, 'outputs')}")
            )

    def _describe(self) -> str:
        return f"heads {', '.join(map(str, self.indices))} of each of {len(self.heads)} sites"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_removals": [_Removal(site, []) for site in self.heads.sites]}


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


@dataclass(frozen=True)
class Ablate(Method):
    """Heads removed: `ablate`, as a value.

    Attributes:
        indices: Indices of the heads, counted from 0, in each attention.

    Example:
        >>> Ablate((0, 2), layers=(1,)).indices
        (0, 2)
    """

    indices: tuple[int, ...]

    def attach(self, heads: Heads) -> Ablation:
        """Remove them from the selected attentions; errors as of `ablate`."""
        return ablate(self.select(heads), self.indices)


def _list_indices(given: Any) -> list[Any]:
    """Return the indices in a list, a tensor or an array, or the one index."""
    given = given.tolist() if hasattr(given, "tolist") else given
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


@dataclass(eq=False)
class _Dropped:
    """A site, and whether heads of it could be dropped."""

    site: Site
    acted: bool = False


class HeadDropping(_EditedOutputs):
    """Heads dropped at random in training mode until `remove()` or the end of a `with` block; see `drop_heads`.

    What was attached before (taps, penalties, measures) reads heads as they were computed. A copy of the model drops
    none.

    Attributes:
        heads: The attentions.
        generator: What is drawn from; None for torch's generator of the device.
    """

    def __init__(self, heads: Heads, rate: float, *, seed: int | None = None) -> None:
        super().__init__(heads)
        self.rate = rate
        if seed is not None:
            require_integer("seed", seed)
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._dropped = [_Dropped(site) for site in heads]
        with self._attaching():
            for dropped in self._dropped:
                site = dropped.site
                if site.divided:
                    raise LayoutError(
                        f"{site.label}: its heads are divided over processes, which would drop others each."
                    )
                drop = partial(self._drop, dropped)
                self.edit_outputs(site, drop, attached_by="hw.drop_heads", training_only=True)

    def check(self) -> None:
        """Raise `NotFired` unless heads of every attention could be dropped in some call in training mode."""
        silent = [dropped.site.label for dropped in self._dropped if not dropped.acted]
        if silent:
            raise NotFired(
                f"no call in training mode went through {len(silent)} of {len(self.heads)} attentions "
                f"({', '.join(silent[:6])}), so none of their heads was dropped; call model.train(), and run a forward "
                "pass."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator; nothing where torch's own is drawn from."""
        return {} if self.generator is None else {"generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on drawing from what `state_dict` returned.

        Raises:
            SettingError: It is no such state.
        """
        if self.generator is None:
            return super().load_state_dict(state)
        try:
            self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise SettingError(f"expected the state of a generator that drops heads; {error}") from error

    @property
    def rate(self) -> float:
        """Probability of dropping a head, in [0, 0.99]; set it between steps for a schedule."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        require_range("rate", rate, low=0.0, high=0.99)
        self._rate = rate

    def _drop(self, dropped: _Dropped, joined: Tensor) -> Tensor:
        """Return what W_O gets with some heads dropped, in training mode."""
        site = dropped.site
        if not (site.output_projection and site.output_projection.module.training):
            return joined
        dropped.acted = True
        factors = self._draw(site, joined).repeat_interleave(site.head_size, dim=-1).to(joined)
        return joined * factors.view(joined.shape[0], *[1] * (joined.dim() - 2), joined.shape[-1])

    def _draw(self, site: Site, joined: Tensor) -> Tensor:
        """Return m_h H / sum_h m_h of each row, [B, H]."""
        shape = (joined.shape[0], site.num_heads)
        if self.generator is None:
            drawn = torch.rand(shape, device=joined.device)
        elif is_in_checkpoint() or is_recomputing():
            raise NotFired(
                f"{site.label}: an activation checkpoint is computed again in the backward pass, where a generator of "
                "its own would drop other heads; leave seed out, since checkpoints restore torch's generator."
            )
        else:
            drawn = torch.rand(shape, generator=self.generator, device="cpu")
        kept = (drawn >= self.rate).float()
        kept = torch.where(kept.sum(dim=-1, keepdim=True) > 0, kept, torch.ones_like(kept))
        return kept * (site.num_heads / kept.sum(dim=-1, keepdim=True))

    def _describe(self) -> str:
        return f"{self.rate:g} of the heads of {len(self.heads)} attentions"


@dataclass(frozen=True)
class DropHeads(Method):
    """Whole heads zeroed at random while training (Zhou et al. 2020): `drop_heads`, as a value.

    Attributes:
        rate: Probability of zeroing a head, in [0, 0.99].
        start: Probability at the first step of a schedule, in [0, 0.99]; None keeps `rate` throughout.
        seed: As for `drop_heads`.

    Raises:
        SettingError: A setting is out of range; or as of `Method`.

    Example:
        >>> DropHeads(0.1).rate_at(7, steps=20, warmup=5)
        0.1
    """

    rate: Rate
    start: Rate | None = None
    seed: int | None = None

    def attach(self, heads: Heads) -> HeadDropping:
        """Drop heads at the rate of the first step; errors as of `drop_heads`."""
        return HeadDropping(self.select(heads), self.rate if self.start is None else self.start, seed=self.seed)

    def rate_at(self, step: int, steps: int, warmup: int) -> float:
        """Return the rate of a step, counted from 0, of a training of `steps` steps of which `warmup` warm up.

        With a `start` it falls linearly from there to 0 while the learning rate warms up, and then rises linearly to
        `rate` at the end of training: "scheduled DropHead". Without a warmup it only rises.

        Example:
            >>> schedule = DropHeads(0.2, start=0.4)
            >>> [round(schedule.rate_at(step, 101, 20), 6) for step in (0, 10, 20, 60, 100)]
            [0.4, 0.2, 0.0, 0.1, 0.2]
        """
        if self.start is None:
            return self.rate
        if step < warmup:
            return self.start * (1.0 - step / warmup)
        return self.rate * (step - warmup) / max(1, steps - 1 - warmup)


def drop_heads(heads: Heads, rate: float, *, seed: int | None = None) -> HeadDropping:
    """Zero each head of each example with probability `rate` while training, and scale the others up: DropHead.

    O_h <- O_h m_h H / sum_h m_h before W_O, with m_h ~ Bernoulli(1 - rate) drawn for each example and attention (Zhou
    et al. 2020, section 3, Eq. 3). An example is a row of what W_O gets, such as a window of Swin. Where every head of
    an example would be dropped, all stay. For scheduled DropHead, set `rate` of the handle between steps.

    Args:
        heads: The attentions.
        rate: Probability of dropping a head, in [0, 0.99].
        seed: Seed of a generator of its own, so that dropout and the order of the data are those of a run without;
            None draws from torch's generator of the device, as dropout does.

    Raises:
        SettingError: `heads` is something else, or `rate` or `seed` is out of range.
        LayoutError: An attention has no output projection that is a module, or one that another attention calls too, or
            is divided over processes.
        NotFired: In a call, an activation checkpoint is computed under a seed, or the output projection is another
            module than when this was attached.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> dropping = drop_heads(hw.find_heads(model), 0.2)
        >>> dropping.rate = 0.1
        >>> dropping
        HeadDropping(0.1 of the heads of 1 attentions)
    """
    return HeadDropping(heads, rate, seed=seed)


@dataclass(frozen=True)
class Importance:
    """How much each head matters.

    Attributes:
        baseline: The score of the whole model; for "first_order" the mean loss of the items.
        drops: For each site [H]. For "exact", baseline minus the score without the head; negative where removal helps.
            For "first_order", E |dL/dxi_h|, never negative: how much the loss of an item would change, one way or the
            other, if it were linear in the head.
        method: "exact" or "first_order".
    """

    baseline: float
    drops: dict[str, Tensor]
    method: str = "exact"

    def __str__(self) -> str:
        exact = self.method == "exact"
        title = "score of the whole model {:.4g}; drop without each head:"
        title = title if exact else "mean loss of the whole model {:.4g}; E |dL/dxi| of each head:"
        width = max(len(name) for name in self.drops)
        rows = [
            f"{name.ljust(width)}  " + " ".join(f"{float(drop):{'+.4f' if exact else '.3g'}}" for drop in drops)
            for name, drops in self.drops.items()
        ]
        first, left_out, last = shorten(rows, LINES - 1)
        middle = [f"... {left_out} more sites ..."] if left_out else []
        return "\n".join([title.format(self.baseline), *first, *middle, *last])


def importance(
    heads: Heads,
    score: Callable[[], float | Tensor | Iterable[Tensor]],
    *,
    method: Literal["exact", "first_order"] = "exact",
) -> Importance:
    """Return how much each head matters, exactly or to first order.

    "exact": how much the score drops when the head is removed alone; one evaluation for each head.

    "first_order": I_h = E_x |dL(x)/dxi_h| at xi_h = 1, where W_O gets xi_h O_h in the place of O_h (Michel et al. 2019,
    section 4.1); one forward and one backward pass for all heads. The absolute value is taken for each item x, so that
    items cannot cancel. Unlike in the paper, I_h is not divided by its l2 norm over the heads of a layer. It is a
    linear estimate and does not see what heads do together, or what saturates: compare it with exact drops on a sample.

    For "first_order" the items of a batch are along the first axis of the losses and of what the attention computes.
    Average the loss of an item over its own tokens, use the evaluation mode, and no layer that mixes items (batch
    normalization). Aggregated heads have their xi_h before the aggregator. Gradients of parameters are left as they
    were, and a compiled model runs uncompiled.

    Args:
        heads: The sites whose heads are judged.
        score: For "exact", runs the model on your data and returns its score, the larger the better; called once for
            the whole model and once per head, without gradients. For "first_order", runs it once and returns the
            losses (or scores) of the items, [items], with their graph, or yields them batch by batch.
        method: "exact" or "first_order".

    Raises:
        NotFired: `score` did not run the model, or the losses do not depend on the heads of a site or have no graph.
        ShapeError: The losses are not one number for each item, or a site computed another number of items.
        HeadwiseError: A score, a loss or a gradient is not finite.
        LayoutError: The output projection of a site was not found, or another attention calls it too; or, for
            "first_order", tensor parallelism divides its heads.
        SettingError: `method` is another one, `score` is no function, or what it returns is no number, or for
            "first_order" no losses of items.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> x = torch.randn(3, 5, 8)
        >>> result = importance(hw.find_heads(model), lambda: float(model(x).std()))
        >>> result.drops["self_attn"].shape
        torch.Size([2])
        >>> fast = importance(hw.find_heads(model), lambda: model(x).std((1, 2)), method="first_order")
        >>> bool((fast.drops["self_attn"] > 0).all())
        True
    """
    require_heads(heads)
    require_choice("method", method, ("exact", "first_order"))
    if not callable(score):
        raise SettingError(
            f"score is a {type(score).__name__}; expected a function without arguments that runs the model on your "
            "data, such as lambda: accuracy(model)."
        )
    with uncompiled(), heads.exposed():
        return _remove_each(heads, score) if method == "exact" else _differentiate(heads, score)


@torch.no_grad()
def _remove_each(heads: Heads, score: Callable[[], Any]) -> Importance:
    baseline, drops = _read_score(score()), {}
    for site in heads.sites:
        alone, scores = replace(heads, sites=(site,)), []
        for head in range(site.num_heads):
            with ablate(alone, head):
                scores.append(_read_score(score()))
        drops[site.shown] = baseline - torch.tensor(scores, dtype=torch.float64, device="cpu")
    return Importance(baseline, drops)


def _read_score(given: Any) -> float:
    """Return a score as a number; raise unless it is one, and finite."""
    try:
        number = float(given)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise SettingError(
            f'score returned {what}; method="exact" expects one number, the larger the better, and '
            'method="first_order" the losses of the items.'
        ) from error
    if not math.isfinite(number):
        raise HeadwiseError(f"score returned {number}, by which no head can be judged; check the data for NaN.")
    return number


def _differentiate(heads: Heads, score: Callable[[], Any]) -> Importance:
    baseline, drops = differentiate(heads, score)
    return Importance(baseline, {site.shown: drops[site.shown] for site in heads}, "first_order")


@torch.enable_grad()
def differentiate(
    heads: Heads, score: Callable[[], Any], neurons: Mapping[str, tuple[nn.Module, bool]] | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss, and E |dL/dxi| of each head by site and of each input of other linear maps by name.

    `score` runs the model and returns or yields losses, as for `importance`; `neurons` are the maps by name, and
    whether items are the first axis of what each gets, or the second.
    """
    with _Gates(heads, neurons or {}) as gates:
        found = score()
        if not isinstance(found, Iterable):
            raise SettingError(
                f'score returned a {type(found).__name__}; method="first_order" expects the losses of the items, a '
                "tensor [items], or yields one such tensor for each batch."
            )
        total, items, sums = 0.0, 0, {}
        for losses in [found] if isinstance(found, Tensor) else found:
            for name, gradient in gates.differentiate(losses).items():
                sums[name] = sums.get(name, 0.0) + gradient.abs().sum(0)
            total, items = total + float(losses.detach().double().sum()), items + len(losses)
    if not items:
        raise NotFired("score gave no item; expected the losses of at least one.")
    gates.require_reached()
    return total / items, {name: found / items for name, found in sums.items()}


@torch.enable_grad()
def differentiate_heads(heads: Heads, losses: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return dL(x)/dxi_h of each item, [items, H], for each site; `losses` runs the model, as for `importance`."""
    with uncompiled(), heads.exposed(), _Gates(heads) as gates:
        found = [gates.differentiate(batch) for batch in losses]
    gates.require_reached()
    return {site.shown: torch.cat([batch[site.shown] for batch in found]) for site in heads}


def _require_losses(losses: object) -> None:
    """Raise unless these are the finite losses of the items of a batch, with a graph."""
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.is_floating_point():
        given = f"a tensor of {losses.dtype}, {list(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise ShapeError(
            f"score gave {given} as losses; expected one number for each item of the batch, a floating-point tensor "
            '[items]: in torch reduction="none", and then the mean over the tokens of each item.'
        )
    if not losses.requires_grad:
        raise NotFired(
            "the losses carry no gradient of the heads: score ran the model under torch.no_grad() or "
            "torch.inference_mode(), detached what it computed, or did not run it."
        )
    if not bool(losses.isfinite().all()):
        raise HeadwiseError("a loss is not finite, so no head can be judged by it; leave that item out.")


@dataclass(eq=False)
class _Gated:
    """The gates of the heads of one site, or of the inputs of one linear map, in the batch that is running."""

    name: str
    label: str
    count: int
    size: int
    gates: list[Tensor]
    flat: bool = False
    reached: bool = False

    def gate_joined(self, joined: Tensor) -> Tensor:
        """Return what a linear map gets, [rows, ..., count * size], times new gates."""
        return self.gate(joined.unflatten(-1, (self.count, self.size))).flatten(-2)

    def gate(self, outputs: Tensor) -> Tensor:
        """Return outputs [rows, ..., count, size] times new gates [rows, count]."""
        if not torch.is_grad_enabled():
            raise NotFired(
                f"{self.label} ran without gradients: under torch.no_grad(), or in a reentrant activation "
                "checkpoint (use_reentrant=False is needed)."
            )
        rows, count = (outputs.shape[0] if outputs.dim() > 2 else 1), outputs.shape[-2]
        gates = torch.ones(rows, count, dtype=outputs.dtype, device=outputs.device, requires_grad=True)
        self.gates.append(gates)
        between = (1,) * max(outputs.dim() - 3, 0)
        return outputs * gates.view((rows, *between, count, 1)[-outputs.dim() :])


class _Gates(_EditedOutputs):
    """A gate of 1 on each head of each item, at the input of W_O, and on each input of some linear maps."""

    def __init__(self, heads: Heads, neurons: Mapping[str, tuple[nn.Module, bool]] | None = None) -> None:
        super().__init__(heads)
        self.sites = []
        with self._attaching():
            for site in heads:
                gated = _Gated(site.shown, site.label, site.num_heads, site.head_size, [])
                self.edit_outputs(site, gated.gate_joined, gated.gate)
                if site.divided:
                    raise LayoutError(
                        f"{site.label}: under tensor parallelism no process computes the outputs of all heads; use "
                        'method="exact".'
                    )
                self.sites.append(gated)
            for name, (module, batch_first) in (neurons or {}).items():
                self.sites.append(self._gate_inputs(name, module, batch_first=batch_first))

    def _gate_inputs(self, name: str, module: nn.Module, *, batch_first: bool) -> _Gated:
        gated = _Gated(name, name, 0, 1, [])

        def change(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            given = read_first_argument(module, args, kwargs)
            gated.count = given.shape[-1]
            if batch_first or given.dim() < 3:
                # an MLP may get the tokens of all items in one row
                gated.flat = batch_first and given.dim() == 2
                return replace_first_argument(args, kwargs, gated.gate_joined(given))
            return replace_first_argument(args, kwargs, gated.gate_joined(given.transpose(0, 1)).transpose(0, 1))

        self.hook_before(module, change)
        return gated

    def differentiate(self, losses: Tensor) -> dict[str, Tensor]:
        """Return the derivatives of the losses of a batch, [items, H], for each site that they depend on."""
        _require_losses(losses)
        taken = [(gated, gate) for gated in self.sites for gate in gated.gates]
        if not taken:
            return {}
        gradients = torch.autograd.grad(losses.sum(), [gate for _, gate in taken], allow_unused=True)
        for gated in self.sites:
            # also gates of recomputed checkpoints
            gated.gates = []
        sums: dict[_Gated, Tensor] = {}
        for (gated, gate), gradient in zip(taken, gradients, strict=True):
            if gradient is not None:
                sums[gated] = sums.get(gated, 0.0) + _group(gradient, gate, len(losses), gated)
        for gated, gradient in sums.items():
            if not bool(gradient.isfinite().all()):
                raise HeadwiseError(f"{gated.label}: the gradient of a head or neuron is not finite.")
            gated.reached = True
        return {gated.name: gradient for gated, gradient in sums.items()}

    def require_reached(self) -> None:
        """Raise `NotFired` unless the losses depend on the heads of every site."""
        silent = [gated.label for gated in self.sites if not gated.reached]
        if silent:
            raise NotFired(
                f"the losses depend on no head of {len(silent)} of {len(self.sites)} sites ({', '.join(silent[:6])}); "
                "no forward pass went through them, or what they computed was detached. Select other heads."
            )


def _group(gradient: Tensor, gate: Tensor, items: int, gated: _Gated) -> Tensor:
    """Return the gradients of the gates of each item, [items, count], in double precision."""
    gradient = gradient.detach().double().cpu()
    if items == 1:
        # all rows are the one item's, for example the windows of an image
        return gradient.sum(0, keepdim=True)
    if gated.flat and len(gate) % items == 0:
        return gradient.unflatten(0, (items, -1)).sum(1)
    if len(gate) != items:
        raise ShapeError(
            f"{gated.label} computed {len(gate)} rows in a call, and there are {items} losses; expected one row for "
            "each item. Give the losses of one item at a time."
        )
    return gradient
