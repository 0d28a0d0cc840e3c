"""A layout row suggested for an attention that no row fits: what its projections do is measured, the row is proved.

Called on random tokens, a module tells which of its projections are which: a feature of a query changes one token of
what W_O gets, a feature of a key changes several and all features of a head there, and one of a value only one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise, permutations, product, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headwise.errors import HeadwiseError
from headwise.heads.experiments.arrangement import TOKENS, drop_hooks, is_known, list_arguments, require_arranged
from headwise.heads.experiments.verify import draw_zeros, verify_site
from headwise.heads.heads import PROJECTIONS
from headwise.heads.layouts.parameters import FusedParameter, SeparateParameters, list_patterns
from headwise.heads.layouts.rows import FusedLinear, HeadList, Layout, SeparateLinears
from headwise.heads.layouts.steps import CONFIGS, HEAD_SIZE, NUM_HEADS, find_letters, read_attribute, read_integer
from headwise.heads.record import Call, clone, record, watching
from headwise.heads.view import Projection, check_head_views, is_sharded, read_projection

# Sequences and tokens of a call, so that whichever axis is the tokens has three or more.
SEQUENCES = 3
# Features of a projection that are moved: few of one that may hold one kind, more of one that may hold several.
FEW, MANY = 2, 13
# Rows that are tried at most.
TRIED = 120
# Projections of an attention at most, and parameters of its own.
MOST, MOST_OWN = 64, 8
# Numbers of an attention that is copied in float64 at most: 1 GiB.
LARGEST = 2**27
# Kinds of attention for which rows are sought at most.
KINDS = 4
Named = tuple[str, nn.Module]
_ORDERS = tuple(permutations(PROJECTIONS))


def suggest_rows(model: nn.Module, modules: Sequence[Named]) -> str:
    """Return sentences about rows for attentions that no row fits, and a call with those that were found.

    One of each kind is tried. Nothing is said of modules of libraries, which take more than tokens.
    """
    kinds = {type(module): (name, module) for name, module in reversed(modules) if not is_known(module)}
    found = [_suggest_row(model, *named) for named in list(kinds.values())[::-1][:KINDS]]
    rows = dict.fromkeys(row for row, _ in found if row is not None)
    if not rows:
        return "\n".join(message for _, message in found)
    messages = [message for row, message in found if row is not None]
    return "\n".join([*messages, f"    hw.find_heads(model, ({', '.join(rows)}, *hw.layouts.LAYOUTS))"])


def _suggest_row(model: nn.Module, name: str, module: nn.Module) -> tuple[str | None, str]:
    """Return a row as it is written, None where none was found, and a sentence: how it was tried, or why there is none.

    It is proved in a copy of the attention that is called with random tokens where it can be.
    """
    label = f"{name or 'the model'} ({type(module).__name__})"
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            trial = _Trial.start(module)
            rows = takewhile(lambda _: len(trial.refusals) < TRIED, trial.list_rows())
            found = next((row for row in rows if trial.accepts(row)), None)
            if isinstance(found, SeparateLinears) and not found.output:
                found = _find_outside(model, name, found) or found
            if found is None:
                return None, f"No row was found for {label}: {trial.explain()}."
            unseen = "" if trial.attends else ", though its heads were not seen to attend"
            return write_row(found), f"This row reads {label}, as it shows when called with tokens{unseen}:"
    except _NotCalled as error:
        untried = f"No row can be tried on {label}: {error}."
        kind, given = _guess(module)
        if kind is None or not _is_taken(model, name, module, kind, given):
            return None, untried
        written = ", ".join(f"{name}={'...' if value is ... else repr(value)}" for name, value in given.items())
        row, fill_in = f"hw.layouts.{kind.__name__}('mine', {written})", ""
        if ... in given.values():
            fill_in = "; put the number of query heads, which no attribute tells, in the place of ..."
        return row, f"{untried} This one goes by names{fill_in}; prove it with hw.verify:"


def write_row(row: Layout) -> str:
    """Return a row as it is written in Python, without what it has by default.

    >>> write_row(SeparateLinears("mine", query=("w1",)))
    "hw.layouts.SeparateLinears('mine', query=('w1',))"
    """
    given: Any = row
    held = {field.name: getattr(given, field.name) for field in fields(given)}
    changed = {field.name: held[field.name] for field in fields(given) if held[field.name] != field.default}
    written = [f"{name}={value!r}".replace("Ellipsis", "...") for name, value in changed.items()]
    return f"hw.layouts.{type(row).__name__}({', '.join(written).removeprefix('name=')})"


def _find_outside(model: nn.Module, name: str, row: SeparateLinears) -> SeparateLinears | None:
    """Return a row with W_O outside of the attention, in the module that holds it; None where it is not there."""
    parent, _, child = name.rpartition(".")
    holder = model.get_submodule(parent)
    if not name or isinstance(holder, nn.ModuleList | nn.ModuleDict):
        return None
    try:
        trial = _Trial.start(holder, child)
    except _NotCalled:
        return None
    outside = [path for path in reversed(trial.projections) if not path.startswith(f"{child}.")]
    rows = (replace(row, output=(f"..{path}",)) for path in outside)
    return next((one for one in rows if trial.accepts(one)), None)


class _NotCalled(Exception):
    """The module cannot be called with tokens alone; the message is a clause that says why."""


@dataclass(eq=False)
class _Trial:
    """A copy in float64 of an attention, or of a module that holds it at `place`, called with random tokens.

    Attributes:
        projections: Modules that may be a projection, by dotted path.
        before: The tensor [tokens, features] that each of them gets, and under "" the one that the module returns.
        refusals: Messages on rows that were disproved.
        attends: Whether the heads of the latest row that was proved were seen to attend.
    """

    module: nn.Module = field(repr=False)
    args: tuple[Any, ...]
    projections: dict[str, Projection]
    before: Mapping[str, Tensor]
    place: str = ""
    refusals: list[str] = field(default_factory=list)
    attends: bool = False

    @staticmethod
    def start(module: nn.Module, place: str = "") -> _Trial:
        """Return a trial of a module; raise `_NotCalled` where it cannot be called."""
        for path, one in module.named_parameters():
            if is_lazy(one) or one.is_meta or is_sharded(one):
                raise _NotCalled(f"its {path} {'is sharded' if is_sharded(one) else 'has no values'}")
        if len(list_projections(module)) > MOST or sum(one.numel() for one in module.parameters()) > LARGEST:
            raise _NotCalled(f"it holds more than {MOST} projections, or {LARGEST:,} numbers")
        try:
            twin = copy.deepcopy(module, drop_hooks(module)).double().eval()
        except Exception as error:
            raise _NotCalled(f"it cannot be copied ({type(error).__name__}: {error})") from error
        draw_zeros(twin)
        projections, failed = list_projections(twin), "its forward takes no tokens"
        widths = [one.columns for one in projections.values()] or [
            size for one in twin.parameters() if one.dim() > 1 for size in one.shape
        ]
        pairs = sorted(product(dict.fromkeys(widths), repeat=2), key=lambda pair: pair[0] != pair[1])
        for pair, shape in product(pairs, ((SEQUENCES, TOKENS), (TOKENS,))):
            for args in list_arguments(twin, pair, shape):
                trial = _Trial(twin, args, projections, {}, place)
                try:
                    trial.before, again = trial.run(), trial.run()
                except Exception as error:
                    told = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
                    failed = f"calling it with tokens raises {told}"
                    continue
                if all(torch.equal(tensor, again[path]) for path, tensor in trial.before.items()):
                    return trial
                failed = "it gives two results for one input"
        raise _NotCalled(failed)

    def run(self, edited: str = "", token: int = 0, feature: int = 0) -> dict[str, Tensor]:
        """Return what each projection gets, and what is returned, when a feature of the output of one is moved."""

        def move(_module: nn.Module, _args: object, _kwargs: object, output: Any) -> Any:
            moved = output.clone()
            rows = self.projections[edited].rows
            flat = moved.view(-1, rows) if moved.is_contiguous() and moved.shape[-1] != rows else moved.flatten(0, -2)
            flat[token, feature] += 1.0
            return flat.view(moved.shape)

        paths = {one.module: path for path, one in self.projections.items()}
        moving = [(self.projections[edited].module, move)] if edited else []
        with record(paths, inputs=clone) as calls, watching(after=moving):
            returned = self.module(*copy.deepcopy(self.args))
        last = clone(returned[0] if isinstance(returned, tuple) and returned else returned)
        given: list[tuple[str, object]] = [*((paths[call.module], call.given) for call in calls), ("", last)]
        seen: dict[str, Tensor] = {}
        for path, value in given:
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
                seen.setdefault(path, value.flatten(0, -2))
        return seen

    def measure(self, path: str, feature: int) -> dict[str, tuple[int, list[int]]]:
        """Return, for each place, the tokens that a feature of one token reaches there, and the features."""
        reached: dict[str, tuple[int, list[int]]] = {}
        for token in (0, -1):
            after = self.run(path, token, feature)
            for place, tensor in self.before.items():
                if place in after and after[place].shape == tensor.shape:
                    changed = (after[place] - tensor).abs() > 1e-9 * tensor.abs().max()
                    count = int(changed.any(1).sum())
                    if count > reached.get(place, (0, []))[0]:
                        reached[place] = count, changed.any(0).nonzero().flatten().tolist()
        return reached

    def find_roles(self) -> dict[str, dict[str, list[tuple[str, list[int]]]]]:
        """Return, for each place that may be W_O, the projections that reach it: the kinds of their features there."""
        widest = max((one.columns for one in self.projections.values()), default=0)
        roles: dict[str, dict[str, list[tuple[str, list[int]]]]] = {}
        for path, one in self.projections.items():
            count = MANY if one.rows > widest else FEW
            for feature in sorted({index * one.rows // count for index in range(count)}):
                try:
                    reached = self.measure(path, feature)
                except Exception:
                    # what it returns is no tensor of its features
                    continue
                for place, (tokens, changed) in reached.items():
                    roles.setdefault(place, {}).setdefault(path, []).append((_name_kind(tokens, changed), changed))
        return roles

    def list_rows(self) -> Iterator[Layout]:
        """Yield rows that what was measured allows, the likeliest first."""
        roles = self.find_roles()
        places = [place for place in reversed(self.projections) if place in roles]
        for place in (*places, *([""] if "" in roles else [])):
            kinds = {path: {kind for kind, _ in found} for path, found in roles[place].items()}
            sizes = {len(changed) for found in roles[place].values() for kind, changed in found if kind == "query"}
            width = self.projections[place].columns if place else self.before[""].shape[-1]
            counts = [width // size for size in sorted(sizes) if size > 1 and width % size == 0]
            for heads in dict.fromkeys(counts):
                yield from self._list_linears(kinds, (place,) if place else (), heads)
        yield from self._list_lists()
        yield from self._list_parameters()

    def _list_linears(self, kinds: Mapping[str, set[str]], output: tuple[str, ...], heads: int) -> Iterator[Layout]:
        alone = {kind: [path for path, own in kinds.items() if own == {kind}] for kind in PROJECTIONS}
        for count in _name_count(self.module, heads):
            for tiled in (False, True):
                more: dict[str, Any] = {"output": output, "tiled": tiled, **count}
                for query, key, value in product(*alone.values()):
                    others = tuple(path for path in kinds if path not in (query, key, value, *output))
                    for beside in ({}, {"beside": others}) if others else ({},):
                        yield SeparateLinears("mine", (query,), (key,), (value,), **beside, **more)
                for path, own in kinds.items():
                    if output and own >= {"key", "value"}:
                        queries = [()] if "query" in own else [(query,) for query in alone["query"]]
                        orders = _ORDERS if "query" in own else tuple(permutations(PROJECTIONS[1:]))
                        for query, order, interleaved in product(queries, orders, (False, True)):
                            layout = {"order": order, "interleaved": interleaved, "query": query}
                            yield FusedLinear("mine", (path,), **layout, **more)

    def _list_lists(self) -> Iterator[Layout]:
        """Yield rows of lists of heads, or of three lists."""
        for path, part in self.module.named_modules():
            if not isinstance(part, nn.ModuleList) or len(part) < 2 or not path:
                continue
            held = [sorted(list_projections(head)) for head in part]
            if len(held[0]) == 3 and all(one == held[0] for one in held):
                joined = len(part) * next(iter(list_projections(part[0]).values())).rows
                outputs = [place for place, one in self.projections.items() if one.columns == joined]
                for places in [(place,) for place in reversed(outputs)] or [()]:
                    for query, key, value in permutations(held[0]):
                        yield HeadList("mine", (path,), (query,), (key,), (value,), places)

    def _list_parameters(self) -> Iterator[Layout]:
        """Yield rows of weights that are parameters of the module's own."""
        held = list_parameters(self.module)
        if len(held) > MOST_OWN:
            return

        def fits(path: str, letters: str) -> bool:
            return find_letters(path.replace(".", "_")) in (set(), {*letters})

        triples = [chosen for chosen in permutations(held, 3) if len({held[path].dim() for path in chosen}) == 1]
        separate = [chosen for chosen in triples if all(map(fits, chosen, "qkv"))]
        for weights in (*separate, *((path,) for path in held if fits(path, "qkv"))):
            for output in (path for path in (*reversed(held), *reversed(self.projections)) if path not in weights):
                inner = ("", *list_patterns(held[weights[0]].dim(), packed=len(weights) == 1))
                outer = ("", *list_patterns(held[output].dim(), packed=False)) if output in held else ("",)
                for axes, output_axes in product(inner, outer):
                    yield from self._list_axes(weights, {"output": (output,), "axes": axes, "output_axes": output_axes})

    def _list_axes(self, weights: Sequence[str], layout: Mapping[str, Any]) -> Iterator[Layout]:
        held = _list_integers(self.module)
        # of attributes that are named so first
        numbers = dict.fromkeys([*(number for name, number in held.items() if _COUNTS.search(name)), *held.values()])
        counts = [count for heads in numbers if 1 < heads <= 256 for count in _name_count(self.module, heads)]
        for count, tiled in product([{}, *(count for count in counts if count)], (False, True)):
            more: dict[str, Any] = {**layout, **count, "tiled": tiled}
            if len(weights) == 1:
                yield from (FusedParameter("mine", (weights[0],), order=order, **more) for order in _ORDERS)
            else:
                query, key, value = ((path,) for path in weights)
                yield SeparateParameters("mine", query, key, value, **more)

    def accepts(self, row: Layout) -> bool:
        """Return whether a row reads the module and the experiments of `verify` prove it."""
        try:
            site = row.site(self.module, self.place, self.module.get_submodule(self.place))
            # tiled keys and values without groups are those that are not tiled
            if site is None or site.num_heads < 2 or (site.tiled and site.key_value_heads in (1, site.num_heads)):
                return False
            check_head_views(site.slices)
        except HeadwiseError:
            return False
        held = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        try:
            self.attends = verify_site(site, Call(self.module, self.args))
        except HeadwiseError as error:
            self.refusals.append(str(error).partition(". Pass a layout row")[0])
            return False
        finally:
            self.module.double().load_state_dict(held)
        if self.attends or not _is_named_otherwise(row):
            return True
        self.refusals.append(f"the heads of {write_row(row)} are not seen to attend, and its names say otherwise")
        return False

    def explain(self) -> str:
        """Return a clause that says why no row reads the module."""
        roles = self.find_roles()
        for place in reversed(self.projections):
            found = roles.get(place, {})
            query = next((changed for own in found.values() for kind, changed in own if kind == "query"), [])
            apart = {second - first for first, second in pairwise(query)}
            if len(apart) == 1 and apart != {1}:
                return (
                    f"its heads alternate feature by feature, '(d h)': a query changes features {query[:3]} ... of "
                    f"what {place} gets, and rows read heads that are stored one after another, '(h d)'"
                )
        if self.refusals:
            return f"of {len(self.refusals)} that it allows none is right, the likeliest of them: {self.refusals[0]}"
        if not any(roles.values()):
            return "no projection of it acts on what another one gets, or on what it returns, as queries do"
        return "its projections do not act as queries, keys and values of heads on any that may be W_O"


def _is_named_otherwise(row: Layout) -> bool:
    """Return whether a row calls a projection query, key or value that has the name, or the usual place, of another.

    Between channels a value acts as a query does between tokens.
    """
    order = getattr(row, "order", PROJECTIONS)
    if {"query", "value"} <= {*order} and order.index("value") < order.index("query"):
        return True
    paths = {kind: getattr(row, kind, ()) for kind in PROJECTIONS}
    named = [(kind, find_letters(path.replace(".", "_"))) for kind, own in paths.items() for path in own]
    return any(letters and kind[0] not in letters for kind, letters in named)


def _name_kind(tokens: int, changed: Sequence[int]) -> str:
    """Return the kind of a feature that reaches so many tokens, and these features of them."""
    if tokens == 1:
        return "query" if len(changed) > 1 else "gate"
    together = any(second - first == 1 for first, second in pairwise(changed))
    return "key" if together else "value"


def list_projections(module: nn.Module) -> dict[str, Projection]:
    """Return the projections inside a module by dotted path, a wrapper as one."""
    found: dict[str, Projection] = {}
    for path, part in module.named_modules():
        if path and not any(path.startswith(f"{outer}.") for outer in found):
            projection = read_projection(part)
            if projection is not None:
                found[path] = projection
    return found


def list_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of two axes or more that belong to no layer of torch, by dotted path."""
    held = nn.ParameterList, nn.ParameterDict
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        if isinstance(part, held) or not type(part).__module__.startswith("torch.nn.modules."):
            own = part._parameters.items()
            found |= {f"{path}.{name}".lstrip("."): one for name, one in own if one is not None and one.dim() > 1}
    return found


def _list_integers(module: nn.Module) -> dict[str, int]:
    """Return the integer attributes of a module and of its configuration, by dotted path."""
    found: dict[str, int] = {}
    for holder in ("", *CONFIGS):
        held = read_attribute(module, holder) if holder else module
        names = held if isinstance(held, Mapping) else getattr(held, "__dict__", {})
        for name in names:
            path = f"{holder}.{name}" if holder else str(name)
            number = None if str(name).startswith("_") else read_integer(module, (path,))
            if number is not None:
                found[path] = number
    return found


# Names of attributes that count heads.
_COUNTS = re.compile(r"head|(?:^|[._])n?_?h(?:$|_)", re.IGNORECASE)


def _name_count(module: nn.Module, heads: int) -> Iterator[dict[str, Any]]:
    """Yield the ways in which a row tells a number of heads: by default, by attributes that hold it, as a number."""
    if read_integer(module, NUM_HEADS) == heads:
        yield {}
    equal = [name for name, number in _list_integers(module).items() if number == heads]
    for name in equal if len(equal) == 1 else filter(_COUNTS.search, equal):
        yield {"num_heads": (name,)}
    yield {"num_heads": heads}


def _is_taken(model: nn.Module, name: str, module: nn.Module, kind: type[Layout], given: Mapping[str, Any]) -> bool:
    """Return whether `find_heads` takes a row that was not tried, where no number is to be filled in."""
    if ... in given.values():
        return True
    row: Any = kind
    try:
        site = row("mine", **given).site(model, name, module)
        if site is not None:
            check_head_views(site.slices)
            require_arranged(model, [site], lambda *_: "")
    except HeadwiseError:
        return False
    return site is not None


def _guess(module: nn.Module) -> tuple[type[SeparateLinears | FusedLinear] | None, dict[str, Any]]:
    """Return the kind and settings of a row that goes by the names of projections and by their order."""
    held = list_projections(module)
    letters = {path: find_letters(path.replace(".", "_")) for path in held}
    plain = [path for path, own in letters.items() if not own]
    called_so = [path for path in plain if path in SeparateLinears.output]
    output = next(reversed(called_so or (plain if len(held) != len(PROJECTIONS) else [])), None)
    rest = [path for path in held if path != output]

    def find(*kinds: str) -> str | None:
        return next((path for path in rest if letters[path] == {*kinds}), None)

    alone, fused, pair = [find(kind) for kind in "qkv"], find(*"qkv"), find(*"kv")
    if not any(letters.values()) and len(rest) >= len(PROJECTIONS):
        alone = rest[: len(PROJECTIONS)]
    given: dict[str, Any] = {"output": (output,)} if output is not None else {}
    named = [name for name in _list_integers(module) if _COUNTS.search(name)]
    if read_integer(module, (*NUM_HEADS, *HEAD_SIZE)) is None:
        given["num_heads"] = (named[0],) if len(named) == 1 else ...
    if all(alone):
        return SeparateLinears, {**{kind: (path,) for kind, path in zip(PROJECTIONS, alone, strict=True)}, **given}
    if output is not None and fused is not None:
        return FusedLinear, {"fused": (fused,), **given}
    if output is not None and pair is not None and alone[0] is not None:
        return FusedLinear, {"fused": (pair,), **given, "order": PROJECTIONS[1:], "query": (alone[0],)}
    return None, {}
