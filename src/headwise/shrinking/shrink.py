"""Heads and neurons of MLPs removed together: one first-order pass ranks both, and a plan says how many of each go.

How many heads go and how many neurons is tried out: the score of each mix of the wanted size is measured with what it
removes zeroed, and the best one is the plan.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from headwise.errors import LayoutError, NotFired, SettingError, require_range
from headwise.heads.ablation import differentiate
from headwise.heads.heads import LINES, Heads, Site, align, list_sharing, require_heads, shorten
from headwise.heads.record import clone, record
from headwise.nn.hooks import uncompiled, without_wrappers
from headwise.shrinking.cuts import collect_cuts, list_gone, require_optimizer
from headwise.shrinking.neurons import Mlp, find_mlps, name_block, require_mlps, zeroed
from headwise.shrinking.proof import run
from headwise.shrinking.prune import Pruning, choose_heads, find_table_owner, remove

# Mixes of heads and neurons that are tried, at most, and rounds in which models take turns where they are timed.
MIXES, ROUNDS = 8, 5
# Neurons go in so many at once where there are many, which matrix products are made for.
STEP, MANY = 8, 256
# The smallest share of an MLP that stays.
LEAST = 0.125

Removed = Mapping[Site, tuple[int, ...]]
Neurons = Mapping[Mlp, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Mix:
    """Heads and neurons that go together, and what was measured without them.

    Attributes:
        heads, neurons: Query heads and hidden neurons that are left, of all layers.
        parameters: The share of the parameters of the layers that is left.
        score: The score with them zeroed; the larger the better.
        milliseconds: The median time of a call without them, where models were timed; None otherwise.
        even: Whether every layer has the same counts.
        removed: The heads that go, by attention.
        gone: The neurons that go, by MLP.
    """

    heads: int
    neurons: int
    parameters: float
    score: float = math.nan
    milliseconds: float | None = None
    even: bool = True
    removed: Removed = field(default_factory=dict, repr=False)
    gone: Neurons = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class ShrinkPlan:
    """Which heads and neurons go: prints, draws (`headwise.plots.shrink_plan`) and applies.

    Attributes:
        whole: The model as it is.
        mixes: What was tried, from the most heads to the fewest.
        chosen: The mix of the best score.
        removed: The query heads that go, by name of the attention.
        neurons: The hidden neurons that go, by name of the MLP.
        importance: E |dL/dxi| of each head, by name of the attention, and of each neuron, by name of the MLP.
        heads: The heads that the plan was made for.
        inputs: The inputs on which the result is compared with the model in which they are zeroed.
        layers: What mixes of other sizes are made of.
    """

    whole: Mix
    mixes: tuple[Mix, ...]
    chosen: Mix
    importance: dict[str, Tensor] = field(repr=False)
    heads: Heads = field(repr=False)
    inputs: Any = field(repr=False)
    layers: _Layers = field(repr=False)

    @property
    def removed(self) -> dict[str, tuple[int, ...]]:
        """The query heads that go, by name of the attention."""
        return {site.shown: gone for site, gone in self.chosen.removed.items()}

    @property
    def neurons(self) -> dict[str, tuple[int, ...]]:
        """The hidden neurons that go, by name of the MLP."""
        return {mlp.name: gone for mlp, gone in self.chosen.gone.items() if gone}

    def list_mixes(self, params: float) -> list[Mix]:
        """Return the mixes of another size, by the same ranking, with the same counts in every layer; not measured.

        Args:
            params: The share of the layers' parameters that stays.
        """
        return _mix_evenly(self.layers, params, None)

    def apply(self, optimizer: Any = None) -> Pruning:
        """Remove them from the weights, in place; the result is compared with the model in which they are zeroed.

        Args:
            optimizer: The optimizer that trains the model, whose state is cut too.

        Raises:
            LayoutError: They cannot be removed, or the model was changed since. It is then as it was.
            SettingError: The optimizer trains something else.
        """
        require_heads(self.heads)
        require_optimizer(optimizer, self.heads.model)
        for mlp in self.chosen.gone:
            if mlp.down.weight.shape[1 - mlp.down.read.axis] != mlp.neurons:
                raise LayoutError(f"{mlp.name} has other neurons than when the plan was made; call hw.shrink again.")
        with without_wrappers(self.heads.model), ExitStack() as exposed:
            removed = {site: gone for site, gone in self.chosen.removed.items() if gone}
            return remove(self.heads, removed, self.inputs, optimizer, exposed, neurons=self.chosen.gone)

    def __str__(self) -> str:
        whole, chosen = self.whole, self.chosen
        timed = chosen.milliseconds is not None
        rows = [("", "heads", "neurons", "parameters", *(["ms"] if timed else []), "score", "")]
        for mix in (whole, *self.mixes):
            notes = ["<- the plan"] * (mix is chosen) + ["other counts in each layer"] * (not mix.even)
            timing = [f"{mix.milliseconds or math.nan:.1f}"] if timed else []
            counts = [f"{mix.heads:,}", f"{mix.neurons:,}", f"{mix.parameters:.1%}"]
            rows += [("whole" if mix is whole else "mix", *counts, *timing, f"{mix.score:.4f}", ", ".join(notes))]
        title = (
            f"{whole.heads - chosen.heads} of {whole.heads} heads and {whole.neurons - chosen.neurons:,} of "
            f"{whole.neurons:,} neurons go; {chosen.parameters:.1%} of the layers' parameters stay"
        )
        layers = [f"  {name}: heads {', '.join(map(str, gone))} go" for name, gone in self.removed.items()]
        layers += [f"  {name}: {len(gone):,} neurons go" for name, gone in self.neurons.items()]
        first, left_out, last = shorten(layers, max(3, LINES - len(rows) - 1))
        middle = [f"  ... {left_out} more ..."] if left_out else []
        return "\n".join([title, *align(rows), *first, *middle, *last])


@dataclass(frozen=True, eq=False)
class _Layers:
    """What a plan is made of: the sites and MLPs, what each unit of them is worth, and what it has of parameters."""

    heads: Heads
    mlps: tuple[Mlp, ...]
    worth: Mapping[str, Tensor]
    total: int

    def count_heads(self, removed: Removed) -> int:
        """Return the number of parameters that go with heads."""
        if not removed:
            return 0
        cuts = collect_cuts(self.heads, {site: list_gone(site, gone) for site, gone in removed.items()}, proved=True)
        return sum(cut.parameter.numel() // cut.parameter.shape[cut.axis] * len(cut.gone) for cut in cuts)

    def mix(self, removed: Removed, gone: Neurons, *, even: bool) -> Mix:
        """Return what is left without some."""
        lost = self.count_heads(removed) + sum(len(one) * mlp.neuron_size for mlp, one in gone.items())
        return Mix(
            sum(site.num_heads - len(removed.get(site, ())) for site in self.heads),
            sum(mlp.neurons - len(gone.get(mlp, ())) for mlp in self.mlps),
            1 - lost / self.total,
            even=even,
            removed=removed,
            gone={mlp: gone.get(mlp, ()) for mlp in self.mlps},
        )

    def choose_evenly(self, keep: float) -> Neurons:
        """Return the neurons that go when every MLP keeps the same share."""
        return {mlp: self._list_least(mlp, _round_down(keep * mlp.neurons, mlp)) for mlp in self.mlps}

    def _list_least(self, mlp: Mlp, left: int) -> tuple[int, ...]:
        order = self.worth[mlp.down.name].argsort(descending=True, stable=True)
        return tuple(sorted(order[left:].tolist()))

    def choose_freely(self, need: float) -> Neurons | None:
        """Return the neurons of all MLPs that are worth least for their size, of so many parameters together."""
        worth = torch.cat([self.worth[mlp.down.name] / mlp.neuron_size for mlp in self.mlps])
        sizes = torch.cat([torch.full((mlp.neurons,), float(mlp.neuron_size)) for mlp in self.mlps])
        for mlp, part in zip(self.mlps, worth.split([mlp.neurons for mlp in self.mlps]), strict=True):
            # the most important ones of each stay
            part[part.argsort(descending=True, stable=True)[: _least(mlp)]] = math.inf
        order = worth.argsort(stable=True)
        count = int((sizes[order].cumsum(0) < need).sum()) + 1 if need > 0 else 0
        if count > len(order) or (count and math.isinf(float(worth[order[count - 1]]))):
            return None
        chosen = torch.zeros(len(worth), dtype=torch.bool)
        chosen[order[:count]] = True
        parts = chosen.split([mlp.neurons for mlp in self.mlps])
        # whole steps go, so that at least so many
        lefts = [_round_down(int((~part).sum()), mlp) for mlp, part in zip(self.mlps, parts, strict=True)]
        return {mlp: self._list_least(mlp, left) for mlp, left in zip(self.mlps, lefts, strict=True)}

    def remove_freely(self, share: float) -> Removed:
        """Return the heads that go when this share of those of all layers stays, worth least for their size."""
        units: list[tuple[float, list[tuple[Site, tuple[int, ...]]]]] = []
        left: dict[Site, int] = {}
        seen: set[Site] = set()
        for site in self.heads:
            if site in seen:
                continue
            owner = find_table_owner(self.heads, site)
            alike = [one for one in self.heads if owner is not None and find_table_owner(self.heads, one) is owner]
            alike = alike or [one for one in list_sharing(self.heads.sites, site) if one in self.heads.sites] or [site]
            seen |= {*alike}
            for unit in list_units(site):
                worth = sum(float(self.worth[one.shown][list(unit)].sum()) for one in alike)
                size = self.count_heads(dict.fromkeys(alike, unit))
                units.append((worth / max(size, 1), [(one, unit) for one in alike]))
            left |= {one: len(list_units(site)) for one in alike}
        removed: dict[Site, tuple[int, ...]] = {}
        wanted = round((1 - share) * len(units))
        for _, unit in sorted(units, key=lambda unit: unit[0]):
            if wanted > 0 and all(left[site] > 1 for site, _ in unit):
                wanted -= 1
                for site, own in unit:
                    left[site] -= 1
                    removed[site] = tuple(sorted((*removed.get(site, ()), *own)))
        return removed


def list_units(site: Site) -> list[tuple[int, ...]]:
    """Return the query heads of a site that go together."""
    grouped = 1 < site.key_value_heads < site.num_heads
    if grouped:
        return [tuple(site.list_members(group)) for group in range(site.key_value_heads)]
    return [(head,) for head in range(site.num_heads)]


def _least(mlp: Mlp) -> int:
    """Return how many neurons of an MLP stay at least."""
    return max(1, math.ceil(LEAST * mlp.neurons))


def _round_down(left: float, mlp: Mlp) -> int:
    step = STEP if mlp.neurons >= MANY and mlp.neurons % STEP == 0 else 1
    return max(_least(mlp), math.floor(left / step + 1e-9) * step)


def shrink(
    heads: Heads,
    losses: Callable[[], Tensor | Iterable[Tensor]],
    *,
    params: float | None = None,
    time: float | None = None,
    score: Callable[[], float | Tensor] | None = None,
    uniform: bool | None = None,
    inputs: Sequence[Any] | Mapping[str, object] | None = None,
) -> ShrinkPlan:
    """Plan which heads and which hidden neurons of the MLPs go, so that a share of the layers stays.

    One forward and one backward pass rank both: I = E_x |dL(x)/dxi| at xi = 1, where W_O gets xi_h O_h and the map down
    of an MLP xi_j a_j (Michel et al. 2019, section 4.1). How many of each go is tried out and not read off I, since
    what many neurons do together is not the sum of what each does: for each number of heads the neurons that are worth
    least go until the size is met, the score is measured with all of them zeroed, and the best mix is the plan.

    The layers are the attentions and the MLPs beside them, with biases; embeddings, norms and the head of the model
    are not counted. MLPs are plain or gated (also where gate and value are fused), and are found by structure; that no
    hidden neuron depends on another is proved by gradients in a call, and what `apply` cuts is compared with the model
    in which it is zeroed. Grouped queries lose whole groups. At least an eighth of each MLP stays, and where an MLP has
    256 neurons or more they go by eights.

    Args:
        heads: The sites, all or some layers; MLPs of the same layers are taken.
        losses: Runs the model on your data and returns the losses of the items, [items], with their graph, or yields
            them batch by batch: what `hw.importance` takes as its score for "first_order".
        params: The share of the layers' parameters that stays, above 0 and at most 0.99.
        time: Instead of `params`: the share of the milliseconds of a call on `inputs` that stays. Medians of rounds in
            which the whole model and smaller ones take turns on this machine.
        score: What tells which mix is best, the larger the better; None takes the mean of `losses`, with its sign
            turned.
        uniform: Whether every layer keeps the same counts, which configurations of transformers can say. None: where a
            stock configuration can say the smaller model; both ways are tried elsewhere.
        inputs: Inputs of the model, as for `hw.prune`; None takes those of the first call that `losses` makes.

    Returns:
        The plan. Nothing is changed until `plan.apply()`.

    Raises:
        SettingError: Neither or both of `params` and `time` were given, or one is no such share; `losses` is no
            function; or no mix is as small.
        LayoutError: A layer has no MLP that is understood (experts, a norm between the maps), or one whose maps are
            shared, sharded, quantized or under adapters; or its heads cannot be removed.
        NotFired: `losses` does not run the model or has no graph.
        ShapeError: The losses are not one number for each item.
        HeadwiseError: A loss or a gradient is not finite, or the model cannot be run on the inputs.

    Example:
        >>> import headwise as hw
        >>> _ = torch.manual_seed(0)
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2).eval()
        >>> x, y = torch.randn(2, 8, 5, 16)
        >>> plan = hw.shrink(hw.find_heads(model), lambda: (model(x) - y).square().mean((1, 2)), params=0.7)
        >>> plan.chosen.parameters <= 0.7
        True
        >>> pruning = plan.apply()
        >>> [layer.linear1.out_features < 32 or len(pruning.removed) > 0 for layer in model.layers]
        [True, True]
    """
    require_heads(heads)
    share = time if params is None else params
    if share is None or None not in (params, time):
        raise SettingError("expected either params=..., a share of the layers' parameters, or time=..., of the time.")
    require_range("params" if time is None else "time", share, low=0.0, high=0.99, low_open=True)
    if not callable(losses):
        raise SettingError(
            f"losses is a {type(losses).__name__}; expected a function without arguments that runs the model on your "
            "data and returns the losses of the items, [items]."
        )
    given = _capture(heads, losses) if inputs is None else inputs
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
    with without_wrappers(heads.model), uncompiled(), heads.exposed():
        mlps = require_mlps(heads, find_mlps(heads, args, kwargs))
        # torch's attention takes [L, B, d] by default, and so does the MLP beside it
        second = {name_block(site) for site in heads if not getattr(site.module, "batch_first", True)}
        maps = {mlp.down.name: (mlp.down.read.module, mlp.block not in second) for mlp in mlps}
        loss, worth = differentiate(heads, losses, maps)
        layers = _Layers(heads, mlps, worth, _count(heads, mlps))
        measure = (lambda: -_mean(losses)) if score is None else (lambda: float(score()))
        whole = replace(layers.mix({}, {}, even=True), score=-loss if score is None else measure())
        clock = None if time is None else _Clock(layers, given)
        if clock is not None:
            whole = replace(whole, milliseconds=clock.whole)
        mixes = _list_mixes(layers, share, clock, uniform)
        if not mixes:
            raise SettingError(
                f"no mix of heads and neurons leaves {share:.0%}: at least one head of each attention and an eighth of "
                "each MLP stay; give a larger share."
            )
        if clock is not None:
            clocked = _milliseconds(heads, given, [whole, *mixes])
            whole, *mixes = [replace(mix, milliseconds=one) for mix, one in zip([whole, *mixes], clocked, strict=True)]
        with torch.no_grad():
            measured = []
            for mix in mixes:
                with zeroed(mix.removed, mix.gone):
                    measured.append(replace(mix, score=measure()))
    # of those that turned out slower than estimated the fastest, where all did
    fast = [
        mix for mix in measured if clock is None or (mix.milliseconds or 0.0) <= share * (whole.milliseconds or 0.0)
    ]
    fast = fast or [min(measured, key=lambda mix: mix.milliseconds or 0.0)]
    chosen = max(fast, key=lambda mix: -math.inf if math.isnan(mix.score) else mix.score)
    names = {mlp.down.name: mlp.name for mlp in mlps}
    shown = {names.get(name, name): found for name, found in worth.items()}
    return ShrinkPlan(whole, tuple(measured), chosen, shown, heads, given, layers)


def _capture(heads: Heads, losses: Callable[[], Any]) -> Any:
    """Return the inputs of the first call of a model that `losses` makes."""
    with record([heads.model], inputs=clone) as calls, torch.no_grad():
        found = losses()
        if not isinstance(found, Tensor) and isinstance(found, Iterable):
            next(iter(found), None)
    if not calls:
        raise NotFired(
            f"losses did not call the {type(heads.model).__name__} that heads were found in; call it there, or pass "
            "inputs=..., what it is called with."
        )
    args, kwargs = calls[0].args, calls[0].kwargs
    if not kwargs:
        return args
    bound = inspect.signature(heads.model.forward).bind(*args, **kwargs).arguments
    extra = bound.pop("kwargs", {})
    return {**bound, **(extra if isinstance(extra, Mapping) else {})}


def _mean(losses: Callable[[], Any]) -> float:
    """Return the mean loss of all items."""
    found = losses()
    batches = [one.detach().double().cpu() for one in ([found] if isinstance(found, Tensor) else found)]
    return float(torch.cat(batches).mean())


def _count(heads: Heads, mlps: Sequence[Mlp]) -> int:
    """Return the number of parameters of the attentions and MLPs, shared ones once."""
    held: list[Tensor] = [parameter for mlp in mlps for parameter in mlp.parameters]
    for site in heads:
        held += site.module.parameters()
        for part in (*site.parts, *(() if site.output is None else (site.output,))):
            held += part.owner.parameters(recurse=False)
    return sum(one.numel() for one in {id(one): one for one in held}.values())


def _list_mixes(layers: _Layers, share: float, clock: _Clock | None, uniform: bool | None) -> list[Mix]:
    """Return the mixes of the wanted size: evenly where a configuration then says it, and freely where it need not.

    Raises:
        LayoutError: No head can be removed.
    """
    mixes = _mix_evenly(layers, share, clock) if uniform is not False else []
    if uniform is not True:
        mixes += _mix_freely(layers, share, clock)
    stock: dict[Mix, bool] = {}
    refused = None
    for mix in mixes:
        try:
            with _tried(layers.heads, mix) as pruning:
                stock[mix] = pruning.loading is not None and pruning.stock is None
        except LayoutError as error:
            refused = refused or error
    if refused is not None and not any(mix.removed for mix in stock):
        raise refused
    if uniform is None and any(said and mix.removed for mix, said in stock.items()):
        return [mix for mix, said in stock.items() if said and mix.even]
    return [*stock]


@contextmanager
def _tried(heads: Heads, mix: Mix) -> Iterator[Pruning]:
    """Have a model without the heads and neurons of a mix inside the block."""
    with ExitStack() as stack:
        removed = {site: gone for site, gone in mix.removed.items() if gone}
        yield remove(heads, removed, None, None, stack, neurons=mix.gone, undone_by=stack)


def _mix_evenly(layers: _Layers, share: float, clock: _Clock | None) -> list[Mix]:
    most = max(len(list_units(site)) for site in layers.heads)
    worth = {site.name: layers.worth[site.shown] for site in layers.heads}

    def fill(kept: int) -> Mix | None:
        chosen = choose_heads(layers.heads, kept / most, worth) if kept < most else {}
        removed = {site: tuple(chosen[site.name]) for site in layers.heads if site.name in chosen}
        low, high = 0, max(mlp.neurons for mlp in layers.mlps)
        best = None
        # the most neurons with which the size is met
        while low <= high:
            middle = (low + high) // 2
            mix = layers.mix(removed, layers.choose_evenly(middle / max(m.neurons for m in layers.mlps)), even=True)
            if _is_small(mix, share, clock):
                best, low = mix, middle + 1
            else:
                high = middle - 1
        return best

    return _choose(fill, most)


def _mix_freely(layers: _Layers, share: float, clock: _Clock | None) -> list[Mix]:
    most = max(len(list_units(site)) for site in layers.heads)

    def fill(kept: int) -> Mix | None:
        removed = layers.remove_freely(kept / most)
        low, high, best = 0, 64, None
        room = sum(mlp.neurons * mlp.neuron_size for mlp in layers.mlps)
        if clock is None:
            need = (1 - share) * layers.total - layers.count_heads(removed)
            gone = layers.choose_freely(max(need, 0.0))
            return None if gone is None else layers.mix(removed, gone, even=False)
        while low <= high:
            middle = (low + high) // 2
            gone = layers.choose_freely(middle / 64 * room)
            mix = None if gone is None else layers.mix(removed, gone, even=False)
            if mix is None or _is_small(mix, share, clock):
                best, high = mix or best, middle - 1
            else:
                low = middle + 1
        return best

    return _choose(fill, most)


def _choose(fill: Callable[[int], Mix | None], most: int) -> list[Mix]:
    """Return mixes with ever fewer heads, until heads alone are enough."""
    found = []
    for kept in range(most, 0, -max(1, most // MIXES)):
        mix = fill(kept)
        if mix is not None:
            found.append(mix)
            if not any(mix.gone.values()):
                break
    return found[:MIXES]


def _is_small(mix: Mix, share: float, clock: _Clock | None) -> bool:
    return mix.parameters <= share + 1e-12 if clock is None else clock.estimate(mix) <= share * clock.whole


def _milliseconds(heads: Heads, inputs: Any, mixes: Sequence[Mix]) -> list[float]:
    """Return the median time of a call without the heads and neurons of each mix; they take turns."""
    found: list[list[float]] = [[] for _ in mixes]
    for _ in range(ROUNDS):
        for mix, own in zip(mixes, found, strict=True):
            with _tried(heads, mix):
                run(heads.model, inputs)
                _synchronize()
                started = perf_counter()
                run(heads.model, inputs)
                _synchronize()
                own.append(1e3 * (perf_counter() - started))
    return [statistics.median(own) for own in found]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _Clock:
    """How long a call takes without heads and neurons, by a line through what was timed.

    Attributes:
        whole: The milliseconds of the model as it is.
    """

    def __init__(self, layers: _Layers, inputs: Any) -> None:
        units = {site: list_units(site) for site in layers.heads}
        worth = {site.name: layers.worth[site.shown] for site in layers.heads}
        few = choose_heads(layers.heads, 0.5, worth) if any(len(one) > 1 for one in units.values()) else {}
        halved = {site: tuple(few[site.name]) for site in layers.heads if site.name in few}
        self.full = layers.mix({}, {}, even=True)
        self.fewer_heads = layers.mix(halved, {}, even=True)
        self.fewer_neurons = layers.mix({}, layers.choose_evenly(0.5), even=True)
        tried = [self.full, self.fewer_heads, self.fewer_neurons]
        self.whole, *saved = _milliseconds(layers.heads, inputs, tried)
        self.saved = [max(self.whole - one, 0.0) for one in saved]

    def estimate(self, mix: Mix) -> float:
        """Return the milliseconds of a mix that was not timed."""
        heads = (self.full.heads - mix.heads) / max(self.full.heads - self.fewer_heads.heads, 1)
        neurons = (self.full.neurons - mix.neurons) / max(self.full.neurons - self.fewer_neurons.neurons, 1)
        return self.whole - heads * self.saved[0] - neurons * self.saved[1]
