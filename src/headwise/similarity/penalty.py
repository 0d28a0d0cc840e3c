"""A differentiable penalty on the similarity of heads, from what they computed in the last forward pass.

The weight of a penalty at each attention, from the gradients of penalty and loss there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from headwise.errors import (
    LayoutError,
    NotFired,
    SettingError,
    ShapeError,
    require_boolean,
    require_choice,
    require_integer,
    require_range,
)
from headwise.heads.capture import Capture
from headwise.heads.heads import KINDS, Heads, Site, require_heads
from headwise.heads.method import Method
from headwise.heads.sharding import average_finite_over, average_over, is_distributed
from headwise.heads.taps import Taps, count_effective_heads, require_reachable
from headwise.heads.view import is_sharded
from headwise.nn.hooks import Handle
from headwise.similarity.terms import (
    PARAMETERS,
    READABLE,
    GroupedQueries,
    Similarity,
    SiteSimilarity,
    Sum,
    list_parts,
    measure_together,
    sum_and_count,
)
from headwise.strength import (
    DEFAULT,
    Control,
    Relative,
    Target,
    advance,
    read_controls,
    require_strength,
    tell_saturated,
)

# Kinds of attention that a term has a weight for, in the order of `Penalize.kind_weights`.
WEIGHTED_KINDS = KINDS[:3]
# How much of the logarithm of a weight is kept at each measurement.
KEPT = 0.9
# A weight stays below this multiple of its first value: at the least similarity its gradient vanishes.
MOST = 100.0
# A gradient below this share of the loss's tells nothing of the strength.
LEAST = 1e-12
# Gradients through half precision, where small ones vanish, are measured at this scale, halved where they overflow.
SCALE = 2.0**16
# What is kept is in single precision.
HIGHEST = torch.finfo(torch.float32).max


class RelativeWeights:
    """Weights w of penalties s, one for each attention, with |grad(w s)| = ratio |grad L| on its parameters.

    At each measurement w = ratio |grad L| / |grad s|, averaged over measurements in its logarithm, and constant in the
    step, as the adaptive weights of GradNorm (Chen et al. 2018) and VQGAN (Esser et al. 2021) are. Until the first one
    that tells anything, a weight is 0. The ratio is given by a `Relative`, or by the controllers of a `Target`,
    times the weight of the attention's kind.

    Attributes:
        strength: The ratio, or the target.
        every: Number of steps from one measurement to the next.
        steps: Number of steps so far.
        shares: Last measured |grad(w s)| / |grad L| of each attention by name, with the weight of the step.
        controls: The controller of each attention with several heads, by name; none for a `Relative`.
    """

    def __init__(
        self, heads: Heads, strength: Relative | Target, every: int, kind_weights: Mapping[str, float]
    ) -> None:
        require_integer("every", every, low=1)
        self.strength, self.every, self.steps = strength, every, 0
        self.shares: dict[str, Tensor] = {}
        self.controls: dict[str, Control] = {}
        if isinstance(strength, Target):
            require_reachable(strength, heads)
            self.controls = {site.name: Control() for site in heads if site.num_heads > 1}
        self._sites = {site.name: site for site in heads}
        # the sign of a weight is in the penalty
        self._factors = {site.name: abs(kind_weights[site.kind]) for site in heads}
        for site in heads:
            _list_parameters(site)
        # of the weight at a ratio of 1
        self._logarithms: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}

    def weigh(
        self,
        loss: Tensor,
        values: Sequence[tuple[Site, Tensor]],
        across: Any,
        captures: Sequence[Capture] = (),
        keep: Tensor | None = None,
    ) -> Tensor:
        """Return the sum over attentions of w s, and measure the weights before if it is time to.

        Gradients are averaged over the processes in `across`. A `Target` needs the outputs in `captures`.
        """
        if self.steps % self.every == 0:
            if awaits_static_graph(loss):
                return loss.new_zeros(())
            half = any(one is not None and one.dtype == torch.float16 for call in captures for one in call.read)
            self._measure(loss, values, across, SCALE if half else 1.0)
            self._control(captures, across, keep)
        self.steps += 1
        total = loss.new_zeros(())
        for site, value in values:
            logarithm = self._logarithms.get(site.name)
            ratio = self._ratio(site.name)
            if logarithm is not None and ratio:
                total = total + ratio * logarithm.exp().to(value) * value.to(total.device)
        return total

    def _ratio(self, name: str) -> float:
        source = self.strength if isinstance(self.strength, Relative) else self.controls.get(name, Control())
        return self._factors[name] * source.ratio

    def _measure(self, loss: Tensor, values: Sequence[tuple[Site, Tensor]], across: Any, scale: float) -> None:
        # parameters may have been replaced, or frozen
        owned = [_list_parameters(self._sites[site.name]) for site, _ in values]
        found, used = _differentiate(loss, [parameter for own in owned for parameter in own], scale)
        gradients = iter(found)
        squares = []
        for own, (_, value) in zip(owned, values, strict=True):
            squares.append(_add_squares([next(gradients) for _ in own], loss) / used**2)
            pushed, factor = _differentiate(value, own, scale) if value.requires_grad else ((), scale)
            squares.append(_add_squares(pushed, loss) / factor**2)
        if across is not None:
            squares = average_over(across, squares)
        for (site, _), of_loss, of_value in zip(values, squares[::2], squares[1::2], strict=True):
            self._update(site.name, of_loss.sqrt(), of_value.sqrt())

    def _update(self, name: str, of_loss: Tensor, of_value: Tensor) -> None:
        """Average the logarithm of a weight; norms that are not finite, or tell nothing, change nothing."""
        if not bool((of_value > LEAST * of_loss) & of_value.isfinite() & of_loss.isfinite() & (of_loss > 0)):
            return
        wanted = (of_loss / of_value).log()
        before = self._logarithms.get(name)
        kept = wanted if before is None else KEPT * before + (1 - KEPT) * wanted
        self._logarithms[name] = torch.minimum(kept, self._first.setdefault(name, wanted) + math.log(MOST))
        self.shares[name] = self._ratio(name) * self._logarithms[name].exp() * of_value / of_loss

    def _control(self, captures: Sequence[Capture], across: Any, keep: Tensor | None) -> None:
        """Advance the controllers by the effective number of heads of this step, the mean over processes that know."""
        if not isinstance(self.strength, Target) or not self.controls:
            return
        calls = {name: [call for call in captures if call.site.name == name] for name in self.controls}
        measured = [count_effective_heads(own, keep) for own in calls.values()]
        if across is not None:
            measured = average_finite_over(across, measured)
        for name, number in zip(calls, measured, strict=True):
            heads = self._sites[name].num_heads
            self.controls[name] = advance(self.controls[name], self.strength, float(number), heads)
            tell_saturated(name, self.controls[name], self.strength)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs for the same weights, as plain numbers."""
        kept = {"logarithms": self._logarithms, "first": self._first, "shares": self.shares}
        return {
            "steps": self.steps,
            **{key: {name: float(value) for name, value in own.items()} for key, own in kept.items()},
            "controls": {name: asdict(control) for name, control in self.controls.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            SettingError: It is no such state, or names an attention that is not among the heads. Nothing is changed.
        """
        keys = ("steps", "logarithms", "first", "shares", "controls")
        if not isinstance(state, Mapping) or any(key not in state for key in keys):
            raise SettingError(f"the state of the penalty is {state!r}; expected a mapping with {', '.join(keys)}.")
        require_integer("steps", state["steps"])
        logarithms, first, shares = (self._read_numbers(key, state[key]) for key in keys[1:4])
        if logarithms.keys() != first.keys():
            raise SettingError(f"the state of the penalty has other attentions in {keys[1]} than in {keys[2]}.")
        self.controls = read_controls(state["controls"], self.controls)
        self.steps = state["steps"]
        self._logarithms, self._first, self.shares = logarithms, first, shares

    def _read_numbers(self, key: str, numbers: Any) -> dict[str, Tensor]:
        if not isinstance(numbers, Mapping):
            raise SettingError(f"the state of the penalty has {key}={numbers!r}; expected a number by attention.")
        for name, number in numbers.items():
            if name not in self._sites:
                raise SettingError(f"the state of the penalty names {name!r}, which is not among its attentions.")
            require_range(f"{key} of {name}", number, low=-HIGHEST, high=HIGHEST)
        return {name: torch.tensor(float(number), dtype=torch.float32) for name, number in numbers.items()}


def awaits_static_graph(loss: Tensor) -> bool:
    """Return whether DistributedDataParallel(static_graph=True) has yet to see its first backward pass.

    It averages gradients from the end of that pass on; a measurement before would end this for good.
    """
    if not is_distributed():
        return False
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        wrapper: Any = getattr(node, "ddp_weakref", None)
        module = None if wrapper is None else wrapper()
        if module is not None and module.static_graph and not module._static_graph_delay_allreduce_enqueued:
            return True
        waiting += [other for other, _ in node.next_functions]
    return False


def _list_parameters(site: Site) -> list[nn.Parameter]:
    """Return the trainable parameters of an attention's projections, W_O's included."""
    found: dict[nn.Parameter, None] = {}
    for part in (*site.slices, site.output):
        if part is None:
            continue
        held = [own.owner._parameters.get(own.attribute) for own in part.parts]
        own = [parameter for parameter in held if parameter is not None and parameter.requires_grad]
        if not own and part.module is not None:
            # a frozen weight below adapters
            own = [parameter for parameter in part.module.parameters() if parameter.requires_grad]
        found |= dict.fromkeys(own)
    if any(is_sharded(parameter) for parameter in found):
        raise LayoutError(
            f"{site.label} is sharded over processes, where gradients of one attention cannot be measured alone; "
            "give the penalty a weight instead of a relative strength."
        )
    if not found:
        raise NotFired(f"{site.label}: no parameter of its heads is trainable; unfreeze them or select other heads.")
    return list(found)


def _differentiate(scalar: Tensor, parameters: Sequence[Tensor], scale: float) -> tuple[Sequence[Tensor | None], float]:
    """Return the gradients of a scalar times a scale, and the scale: the one given, halved until they are finite."""
    while True:
        factor = torch.full_like(scalar, scale)
        gradients = torch.autograd.grad(scalar, parameters, factor, retain_graph=True, allow_unused=True)
        # in single precision a gradient that is not finite stays so
        if scale <= 1.0 or all(bool(own.isfinite().all()) for own in gradients if own is not None):
            return gradients, scale
        scale /= 2


def _add_squares(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    squares = (own.float().square().sum().to(like.device) for own in gradients if own is not None)
    return sum(squares, torch.zeros((), device=like.device))


def _require_kind_weights(name: str, value: tuple[float, ...]) -> None:
    if len(value) != len(WEIGHTED_KINDS):
        raise SettingError(f"{name} is {value}; expected one number for each of {WEIGHTED_KINDS}.")
    for weight in value:
        require_range(name, weight)


Weight = Annotated[float | Relative | Target, require_strength]
KindWeights = Annotated[tuple[float, ...], _require_kind_weights]


@dataclass(frozen=True)
class Penalize(Method):
    """A similarity of heads added to the loss: `Disagreement`, as a value.

    Attributes:
        term: The similarity.
        weight: Its strength: a `Relative` or a `Target`, measured against the loss; or a number, the weight lambda of
            Li et al. 2021 (1 there). With 0 the similarity is measured and not added.
        kind_weights: Weights of the term on self, decoder and cross attention; None for 1 each. The released code of
            Li et al. 2021 has 1, 0.5 and 0.5.
        grouping: Under grouped queries, "within" for the query heads of each group, "across" for groups; None for all
            query heads. See `GroupedQueries`, whose terms read outputs or weights.
        across: As for `Disagreement`.

    Raises:
        SettingError: `term` is something else, a weight is not finite, `kind_weights` are not three, or a term cannot
            be grouped; or as of `Method`.

    Example:
        >>> import headwise as hw
        >>> Penalize(hw.similarity.Output() + 0.5 * hw.similarity.Subspace(), weight=0.1).weighted
        ((0.1, Output()), (0.05, Subspace()))
    """

    term: Similarity | SiteSimilarity | Sum
    weight: Weight = DEFAULT
    kind_weights: KindWeights | None = None
    grouping: Literal["within", "across"] | None = None
    across: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._list_grouped()

    @property
    def weighted(self) -> tuple[tuple[float, Similarity | SiteSimilarity], ...]:
        """The similarities, each with its weight, or with its share of a relative strength."""
        factor = 1.0 if isinstance(self.weight, Relative | Target) else self.weight
        return tuple((factor * weight, similarity) for weight, similarity in self._list_grouped())

    def attach(self, heads: Heads) -> Disagreement:
        """Return the penalty on the heads of a model, which leaves evaluation alone; errors as of `Disagreement`."""
        chosen = self.select(heads)
        there = {site.kind for site in chosen}
        given = zip(WEIGHTED_KINDS, self.kind_weights or (), strict=False)
        weights = {kind: weight for kind, weight in given if kind in there}
        term = self.term if self.grouping is None else Sum(self._list_grouped())
        return Disagreement(chosen, term, weights=weights, across=self.across, training_only=True, strength=self.weight)

    def _list_grouped(self) -> tuple[tuple[float, Similarity | SiteSimilarity], ...]:
        parts = tuple(list_parts(self.term))
        if self.grouping is None:
            return parts
        return tuple((weight, GroupedQueries(similarity, self.grouping)) for weight, similarity in parts)


# Attentions, and their shares of a penalty: of several, [S], or of one, [].
Measured = tuple[tuple[Site, ...], Tensor]


class Disagreement(Handle):
    """A penalty that makes heads disagree: add it to the loss.

    loss = task loss + lambda * sum_kind w_kind * mean_site s(site), with s the chosen similarity averaged over the
    valid tokens of all calls since the last reading (Li et al. 2021, section 3.1, where lambda is 1). `Output()`
    counts all H^2 pairs including i = j, so orthogonal heads score 1/H, and heads that cancel 0. Attach before
    `torch.compile`.

    Args:
        heads: The heads to act on.
        term: What to lower: `CKA()` or another of those that tricks do not fool (`SquaredCosine`, `HSIC`,
            `CrossCorrelation`, `LogDeterminant`, `SpanOverlap`, `MapCosine`); the papers' `Output()`, `Subspace()`,
            `Position()`, `PositionSquaredDifference()`, `Frobenius()`; or a weighted sum of such.
        weights: Weight of each kind of attention ("self", "decoder", "cross"); 1 where absent. The released code's
            are {"decoder": 0.5, "cross": 0.5}.
        across: The process group over which each batch is divided, if lengths differ between processes and gradients
            are averaged (DistributedDataParallel, FSDP2): the mean is then over the tokens of all processes. None
            averages over this process's tokens.
        training_only: Whether evaluation is left alone: in evaluation mode and without gradients nothing is read, and
            the penalty is 0.
        strength: How strongly `loss` pushes: a `Relative`, a share of the loss's own gradient; a `Target`, which pushes
            until an attention has as many effective heads as wanted; or a number, lambda. None is `Relative(0.1)`.
            With a number or None a call returns the penalty for a weight of your own.
        every: Number of steps from one measurement of `loss` to the next.

    Attributes:
        relative: The weights that `loss` uses, with the last measured shares and controllers; None before.
        last: The similarity at the last reading, without these weights; None before the first.

    The similarity of an attention with one head (for values: one key/value head) is constant. It still counts in the
    mean over several, and printing the penalty lists it.

    Raises:
        LayoutError: An attention cannot be read that way, the model was changed since its heads were found, or no
            attention has more than one head of what a term reads.
        SettingError: `heads` or `term` has the wrong type, a weight names an unknown kind or one that `heads` does not
            contain, a custom term reads a field that captures do not have, or a target is above the number of heads.

    Example:
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> penalty = Disagreement(hw.find_heads(model), hw.similarity.CKA(), strength=hw.Relative(0.3))
        >>> loss = model(torch.randn(3, 5, 8)).square().mean()
        >>> penalty.loss(loss).backward()
    """

    def __init__(
        self,
        heads: Heads,
        term: Similarity | SiteSimilarity | Sum,
        *,
        weights: Mapping[str, float] | None = None,
        across: Any = None,
        training_only: bool = False,
        strength: float | Relative | Target | None = None,
        every: int = 20,
    ) -> None:
        super().__init__()
        self._acted = False
        self._added, self._similarity, self._losses = torch.zeros(()), torch.zeros(()), 0
        require_boolean("training_only", training_only)
        self.across, self.training_only = across, training_only
        require_heads(heads)
        self._parts = list_parts(term)
        for _, similarity in self._parts:
            require_choice(f"what {similarity} reads", similarity.reads, READABLE)
            _require_several(similarity, heads)
        if weights is not None and not isinstance(weights, Mapping):
            raise SettingError(f"weights is {weights!r}; expected a mapping such as {{'cross': 0.5}}.")
        kinds = sorted({site.kind for site in heads.sites})
        for kind, weight in (weights or {}).items():
            require_choice("kind of attention", kind, kinds)
            require_range(f"weight of {kind}", weight)
        self.heads, self.term = heads, term
        self.weights = {kind: float((weights or {}).get(kind, 1.0)) for kind in kinds}
        if isinstance(strength, int | float):
            require_range("strength", strength)
        elif strength is not None and not isinstance(strength, Relative | Target):
            raise SettingError(
                f"strength is {strength!r}; expected a number, hw.Relative(0.1), hw.Target(...) or None."
            )
        require_integer("every", every, low=1)
        self.strength, self.every = strength, every
        self.relative = self._make_relative(strength) if isinstance(strength, Relative | Target) else None
        needed = {similarity.reads for _, similarity in self._parts}
        if isinstance(strength, Target):
            needed.add("outputs")
        # parameters need no forward pass, but the layout must say where they are
        for _, similarity in self._parts:
            for site in heads if similarity.reads == PARAMETERS else ():
                _measure_parameters(similarity, site)
        self.taps: Taps | None = None
        if needed - {PARAMETERS}:
            self.taps = Taps(heads, training_only=training_only, **dict.fromkeys(needed - {PARAMETERS}, True))
            self._removers.append(self.taps.remove)
        self.last: Tensor | None = None

    def __call__(self, keep: Tensor | None = None) -> Tensor:
        """Return the penalty of the forward passes since the last call, a scalar in the graph.

        Args:
            keep: True where a token is real, [B, L]; overrides the padding mask that each attention received. Use it
                if the attention received none.

        Raises:
            NotFired: An attention was not called, or did not compute what is read (values from a cache); the captures
                carry no gradient while the model trains; or the penalty is no longer attached.
            ShapeError: `keep` does not fit what an attention computed.
        """
        if isinstance(self.strength, Relative | Target):
            raise SettingError(
                f"{self.strength} is a strength relative to a loss; write loss = penalty.loss(loss), or leave "
                "strength out."
            )
        return self._add_up(self._measure_sites(self._read(), keep))

    def loss(self, loss: Tensor, keep: Tensor | None = None, *, share: float = 1.0) -> Tensor:
        """Return the loss with the penalty added at its `strength`; call it in place of the penalty.

        With `Relative(r)`, and r = 0.1 where no strength was given, the total is L + sum_site w_site s_site, with
        w_site such that the gradient of w_site s_site on the attention's parameters (query, key, value and W_O) is r
        times the gradient of L. Both are measured at the first and every `every`-th step, by one more backward pass; w
        is averaged over measurements in its logarithm, and a constant of the step. Give the loss before a gradient
        scaler multiplies it. r is a share of gradients, not of updates. With `Target(E)` its controller gives the
        ratio. Either is multiplied by the weight of the attention's kind; a factor on the whole term cancels. Under
        DistributedDataParallel(static_graph=True) nothing is added in the first step. With a number lambda the total is
        L + lambda sum_site s_site; with 0 the similarity is measured, and not added. In evaluation the loss is returned
        as it is.

        Args:
            loss: The loss of the task, a scalar in the graph.
            keep: As for a call.
            share: As for `Handle.loss`.

        Raises:
            NotFired: As for a call; the loss carries no gradient, or no parameter of an attention is trained any more.
            ShapeError: As for a call, or the loss is not a scalar.
        """
        term = self.compute_term(loss, share, keep)
        return loss if term is None else loss + term

    def compute_term(self, loss: Tensor, share: float, keep: Tensor | None = None) -> Tensor | None:
        """Return the penalty at its strength, measured anew where it is time to; nothing in evaluation."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ShapeError(f"loss is a {given}; expected a tensor of one number.")
        if not self._is_training():
            if self.taps is not None and not self.training_only:
                self.taps.read()
            self._acted = self._acted or not self.training_only
            return None
        if isinstance(self.strength, int | float):
            value = self(keep)
            term = share * self.strength * value.to(loss.device) if self.strength else None
        else:
            term = self._weigh(loss, keep)
        assert self.last is not None  # it was read
        self._losses += 1
        self._added = self._added.to(loss.device) + (0.0 if term is None else term.detach() / share)
        self._similarity = self._similarity.to(loss.device) + self.last.to(loss.device)
        return term

    def _weigh(self, loss: Tensor, keep: Tensor | None) -> Tensor:
        """Return the penalty at a strength that is relative to a loss."""
        if not loss.requires_grad:
            raise NotFired(
                "the loss carries no gradient, of which the penalty's would be a share; compute it from what the model "
                "put out, without detach() or item()."
            )
        if self.relative is None:
            self.relative = self._make_relative(DEFAULT)
        captures = self._read()
        values = self._measure_sites(captures, keep)
        self._add_up(values)
        return self.relative.weigh(loss, _separate(values), self.across, captures, keep)

    def stats(self) -> dict[str, Tensor]:
        """Return "penalty", what was added to the loss, and "similarity", the same without its strength.

        Both are means over the losses since the last call; nothing where there was none.
        """
        if not self._losses:
            return {}
        found = {"penalty": self._added / self._losses, "similarity": self._similarity / self._losses}
        self._added, self._similarity, self._losses = torch.zeros(()), torch.zeros(()), 0
        return found

    def paused(self) -> AbstractContextManager[None]:
        """Return a context inside which nothing is read."""
        return nullcontext() if self.taps is None else self.taps.paused()

    def check(self) -> None:
        """Raise `NotFired` unless the penalty was computed, by a call or `loss`."""
        if self.taps is not None and (self.heads.model.training or not self.training_only):
            self.taps.check()
        if not self._acted:
            raise NotFired(
                f"the penalty {self.term} was never added to a loss; write loss = penalty.loss(loss) after the "
                "forward pass" + (", in training mode and with gradients." if self.training_only else ".")
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs for the same weights, as plain numbers; empty before the first `loss`."""
        return {} if self.relative is None else self.relative.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            SettingError: It is no such state, or of other attentions or another strength. Nothing is changed then.
        """
        relative = self.strength if isinstance(self.strength, Relative | Target) else DEFAULT
        if state == {} and relative is not self.strength:
            self.relative = None
            return
        weights = self._make_relative(relative)
        weights.load_state_dict(state)
        self.relative = weights

    def _make_relative(self, strength: Relative | Target) -> RelativeWeights:
        return RelativeWeights(self.heads, strength, self.every, self.weights)

    def _read(self) -> list[Capture]:
        return [] if self.taps is None or self._is_off() else self.taps.read()

    def _is_off(self) -> bool:
        return self.training_only and not self._is_training()

    def _is_training(self) -> bool:
        return self.heads.model.training and torch.is_grad_enabled()

    def _measure_sites(self, captures: list[Capture], keep: Tensor | None) -> list[Measured]:
        """Return the shares of the attentions in the penalty, in the order of kinds, terms and sites."""
        if self._is_off():
            return []
        training = self._is_training()
        if training:
            _require_gradient(captures)
        calls = {id(site): [call for call in captures if call.site is site] for site in self.heads}
        owners: list[tuple[Site, ...]] = []
        weights, sums, counts = [], [], []
        for kind, weight in self.weights.items():
            sites = tuple(site for site in self.heads.sites if site.kind == kind)
            for scale, similarity in self._parts:
                for members, own, number in _measure_kind(similarity, sites, calls, keep):
                    owners.append(members)
                    weights.append(weight * scale / len(sites))
                    sums.append(own)
                    counts.append(number)
        if self.across is not None:
            counts = average_over(self.across, counts)
        values = [
            (members, own / number.clamp_min(1 if self.across is None else torch.finfo(own.dtype).tiny) * weight)
            for members, weight, own, number in zip(owners, weights, sums, counts, strict=True)
        ]
        if training and not any(value.requires_grad for _, value in values):
            raise NotFired(
                f"no parameter that {self.term} compares is trained, so the penalty would change nothing; unfreeze "
                "them (under LoRA: name their layers in target_modules) or use a term on outputs, hw.similarity.CKA()."
            )
        return values

    def _add_up(self, values: list[Measured]) -> Tensor:
        if not values:
            return torch.zeros(())
        total, *others = (value.sum() if value.dim() else value for _, value in values)
        for own in others:
            total = total + own.to(total.device)
        self.last, self._acted = total.detach(), True
        return total

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {weight:g}" for kind, weight in self.weights.items())
        pairs = [(similarity, site) for _, similarity in self._parts for site in self.heads]
        alone = list(dict.fromkeys(site.shown for similarity, site in pairs if _count_heads(similarity, site) == 1))
        names = f"; with one head: {', '.join(alone[:4])}{', ...' if len(alone) > 4 else ''}" if alone else ""
        return f"{self.term} on {len(self.heads)} sites ({kinds}){names}"

    __repr__ = __str__


def _measure_kind(
    similarity: Similarity | SiteSimilarity,
    sites: tuple[Site, ...],
    calls: Mapping[int, list[Capture]],
    keep: Tensor | None,
) -> Iterator[tuple[tuple[Site, ...], Tensor, Tensor]]:
    """Yield sums and numbers of attentions of one kind: of all at once, [S], where they are pooled, or of each."""
    if similarity.reads == PARAMETERS:
        for site in sites:
            yield (site,), *_measure_parameters(similarity, site)
        return
    if all(len(calls[id(site)]) == 1 for site in sites):
        read = [_read(similarity, calls[id(site)][0], keep) for site in sites]
        together = measure_together(similarity, [tensor for tensor, _ in read], [own for _, own in read])
        if together is not None:
            yield sites, *together
            return
    for site in sites:
        measured = [sum_and_count(similarity, site, *_read(similarity, call, keep)) for call in calls[id(site)]]
        own, number = (torch.stack(parts).sum() for parts in zip(*measured, strict=True))
        yield (site,), own, number


def _separate(values: list[Measured]) -> list[tuple[Site, Tensor]]:
    """Return the share of each attention, in the order in which they come first."""
    found: dict[int, tuple[Site, Tensor]] = {}
    for members, value in values:
        for site, own in zip(members, value.unbind() if value.dim() else (value,), strict=True):
            before = found.get(id(site))
            found[id(site)] = (site, own if before is None else before[1] + own.to(before[1].device))
    return list(found.values())


def _count_heads(similarity: Similarity | SiteSimilarity, site: Site) -> int:
    """Return how many of what a term compares an attention has; a term that compares others than heads says so."""
    count = getattr(similarity, "count_heads", None)
    if count is not None:
        return int(count(site))
    return site.key_value_heads if similarity.reads == "values" else site.num_heads


def _require_several(similarity: Similarity | SiteSimilarity, heads: Heads) -> None:
    if all(_count_heads(similarity, site) == 1 for site in heads):
        several = any(site.num_heads > 1 for site in heads)
        what = "key/value head" if several else "head"
        reason = f"one {what}, which has nothing to disagree with"
        if hasattr(similarity, "count_heads"):
            reason = "only one head or group that it compares"
        remedy = (
            "use a term on all heads, such as hw.similarity.Output()" if several else "select sites with more heads"
        )
        raise LayoutError(
            f"{similarity} compares the {similarity.reads} of heads, and each of the {len(heads)} sites has {reason}; "
            f"{remedy}."
        )


def _read(
    similarity: Similarity | SiteSimilarity, capture: Capture, keep: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return what a term reads of a call, and which tokens of it are real."""
    name = capture.site.label
    tensor: Tensor | None = getattr(capture, similarity.reads)
    assert tensor is not None  # taps refuse a call that did not compute it
    if keep is None:
        keep = capture.key_keep if similarity.reads == "values" else capture.query_keep
    expected = (tensor.shape[0], tensor.shape[2 if similarity.reads == "weights" else 1])
    if keep is None:
        return tensor, None
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool or tuple(keep.shape) != expected:
        given = f"{keep.dtype} of shape {tuple(keep.shape)}" if isinstance(keep, Tensor) else f"a {type(keep).__name__}"
        raise ShapeError(
            f"{name}: keep is {given}; expected a torch.bool tensor of shape {expected}. "
            "One keep cannot serve calls of different lengths: leave it out if the attention receives a padding "
            "mask."
        )
    return tensor, keep


def _measure_parameters(similarity: Similarity | SiteSimilarity, site: Site) -> tuple[Tensor, Tensor]:
    if not isinstance(similarity, SiteSimilarity):
        raise SettingError(f"{similarity} reads parameters; expected a method sum_and_count_at(site, tensor, keep).")
    return similarity.sum_and_count_at(site, None, None)


def _require_gradient(captures: list[Capture]) -> None:
    for capture in captures:
        read = [tensor for tensor in capture.read if tensor is not None]
        if read and not any(tensor.requires_grad for tensor in read):
            raise NotFired(
                f"{capture.site.label}: what its heads computed carries no gradient although the model "
                "is training; reentrant activation checkpointing does that (use use_reentrant=False), and so do a "
                "frozen model, a cached loss (GradCache) that runs the model again in the backward pass, and a forward "
                "without gradients before the penalty was read."
            )
