"""Arms: the methods of a run; the named arms of the papers and their controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from headwise.errors import DataError, SettingError, require_choice, require_range
from headwise.gating.attach import GateHeads
from headwise.gating.gates import MixtureOfHeads, SigmoidGate
from headwise.heads.ablation import DropHeads
from headwise.heads.scores.mixing import MixHeads
from headwise.kernels import NormalizedRBF
from headwise.repulsion.function_space import FunctionSVGD, SpanSVGD
from headwise.repulsion.repel import Repel
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion
from headwise.routing.aggregate import Aggregate
from headwise.routing.modules import EMRouting, SimpleRouting, Trunk
from headwise.settings import Count, Dropout, Positive, check_fields
from headwise.similarity.invariant import (
    CKA,
    HSIC,
    CrossCorrelation,
    LogDeterminant,
    MapCosine,
    SpanOverlap,
    SquaredCosine,
)
from headwise.similarity.penalty import Penalize
from headwise.similarity.terms import Frobenius, Output, Position, Subspace, Sum
from headwise.strength import Relative, Target

# In the paper's order, which is that of the heads.
ROLES = ("rare", "separator", "dependency", "major", "window")
# The roles that need a parse.
PARSED = ("dependency", "major")


@dataclass(frozen=True)
class Guided:
    """Heads 0 to N - 1 of every layer get roles (Wang et al. 2021), the others stay free.

    Attributes:
        roles: The roles, one a head.
        drop: Roles replaced by the padding mask; the head stays (figure 2 of the paper).
        random: Roles replaced by a random mask with as many allowed keys in each row, drawn once a sentence and run.
        shuffled: Roles made from another parse: that of another training sentence of as many words.
        released: Whether the roles are those of the paper's released code.

    Raises:
        SettingError: A role is unknown or named twice, a replaced role is none of `roles`, or nothing is left to guide.

    Example:
        >>> Guided(drop=("window",)).parsed
        ('dependency', 'major')
    """

    roles: tuple[str, ...] = ROLES
    drop: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    shuffled: tuple[str, ...] = ()
    released: bool = False

    def __post_init__(self) -> None:
        for name, known in (("roles", ROLES), ("drop", self.roles), ("random", ROLES), ("shuffled", PARSED)):
            given = getattr(self, name)
            for role in given:
                require_choice(name, role, known)
            if len(set(given)) != len(given):
                raise SettingError(f"{name} is {'/'.join(given)}; name each role once.")
            # all roles, or all of a parse: those of them that there are
            if given and given != known and not set(given) <= set(self.roles):
                raise SettingError(f"{name} is {'/'.join(given)}; expected some of the roles {'/'.join(self.roles)}.")
        replaced = [*self.drop, *self.random, *self.shuffled]
        double = next((role for role in replaced if replaced.count(role) > 1), None)
        if double is not None:
            raise SettingError(f"role {double} is replaced in two ways; choose one of drop, random, shuffled.")
        if not self.roles or set(self.drop) == set(self.roles):
            raise SettingError("no role is left; name at least one, or take the arm plain.")
        if self.shuffled and not set(self.shuffled) & set(self.roles):
            raise SettingError(f"no role of {'/'.join(self.roles)} needs a parse, so none can have another one.")

    @property
    def parsed(self) -> tuple[str, ...]:
        """The roles that need a parse, their own or another sentence's; a random mask needs the role's own."""
        return tuple(role for role in self.roles if role in PARSED and role not in self.drop)


def require_parses(guided: Guided, there: bool) -> None:
    """Raise `DataError` where a role needs a parse and there is none."""
    if guided.parsed and not there:
        raise DataError(
            f"the roles {', '.join(guided.parsed)} need parses; name a spaCy pipeline with a parser, its folder or an "
            "installed package (--pipeline DIR)."
        )


@dataclass(frozen=True)
class PairHeads:
    """Half as many heads, twice as wide, whose second map is subtracted from the first: `hw.nn.pair_heads`.

    Attributes:
        second: Whether there is a second map; without it the heads are as wide, and are normalized likewise.
    """

    second: bool
    __post_init__ = check_fields


@dataclass(frozen=True)
class Widen:
    """More hidden units in the feed-forward layers beside the attentions: as many parameters as a rival has.

    A unit has 2d + 1 parameters, 2d + 2 with a slope of its own, or 3d in the gated layers of Llama. Gates on features
    have (d + 1) d for each attention, those on heads (d + 1) H.

    Attributes:
        units: Number of further units of each layer; None for about as many parameters as gates on features have, half
            the width or a third.
    """

    units: Count | None = None
    __post_init__ = check_fields


@dataclass(frozen=True)
class Orthogonalize:
    """Muon on W_Q, W_K, W_V and W_O of every attention (Jordan et al. 2024), the optimizer of the recipe on the rest.

    The root mean square of every update is that of AdamW at the same rate (`adjust_lr_fn="match_rms_adamw"`), so that
    the rate and the weight decay of the recipe hold for both.

    Attributes:
        per_head: Whether the matrix of each head is orthogonalized alone (`hw.heads.head_blocks`), or all as one.
        momentum: Muon's momentum, in [0, 1).
    """

    per_head: bool
    momentum: Annotated[float, partial(require_range, low=0.0, high=0.9999)] = 0.95
    __post_init__ = check_fields


@dataclass(frozen=True)
class LengthenQueries:
    """Longer queries without repulsion: attention that is sharper from the start, or sharpens sooner.

    Repulsion lengthens heads beside turning them; this control lengthens them alone.

    Attributes:
        drawn: Factor on the query parameters that a run begins with, above 0.
        rate: Factor on their learning rate, above 0.
    """

    drawn: Positive = 1.0
    rate: Positive = 1.0
    __post_init__ = check_fields


@dataclass(frozen=True)
class OtherModel:
    """A model without attention instead of the task's; it combines with no other method.

    Attributes:
        model: Its name in the task.
    """

    model: str


# A `hw.Method`, or one of the classes above.
Method = Any
M = TypeVar("M")
# Where a rule and a term act, which is one place.
PLACE = ("layers", "kinds")

# The methods of named arms as messages call them, in the order in which an arm holds them; others come after these.
METHODS: Mapping[type, str] = {
    Repel: "rule",
    Penalize: "penalty",
    Aggregate: "aggregation",
    MixHeads: "talking",
    GateHeads: "gates",
    PairHeads: "pairs of heads",
    Widen: "wider",
    DropHeads: "drophead",
    Orthogonalize: "muon",
    LengthenQueries: "longer queries",
    Guided: "guided",
    OtherModel: "model",
}


@dataclass(frozen=True)
class Arm:
    """One row of a comparison: what is done to the heads while a model trains.

    Attributes:
        name: Its name in tables and folders, and what `--arms` takes.
        methods: Its methods, at most one of each type.
        learning_rate: Peak learning rate; None for that of the scale.
        dropout: The model's dropout, in [0, 1); None for that of the scale.
        control: Name of the arm it is compared with; None for plain itself.

    Example:
        >>> print(named_arms()["svgd"] + named_arms()["em"])
        svgd+em
    """

    name: str
    methods: tuple[Method, ...] = ()
    learning_rate: Positive | None = None
    dropout: Dropout | None = None
    control: str | None = "plain"

    def __post_init__(self) -> None:
        check_fields(self)
        types = [type(method) for method in self.methods]
        if len(set(types)) != len(types):
            raise SettingError(f"methods has {[kind.__name__ for kind in types]}; expected at most one of each type.")
        rule, term = self.find(Repel), self.find(Penalize)
        if rule and term and (rule.layers, rule.kinds) != (term.layers, term.kinds):
            raise SettingError(
                f"rule and term act on layers {rule.layers} and {term.layers}, kinds {rule.kinds} and {term.kinds}; "
                "give both the same."
            )

    @property
    def folder(self) -> str:
        """The arm's name as a folder's; see `escape_arm_name`."""
        return escape_arm_name(self.name)

    def find(self, kind: type[M]) -> M | None:
        """Return the arm's method of a type, or None.

        >>> named_arms()["drophead"].find(DropHeads).rate
        0.1
        """
        return next((method for method in self.methods if isinstance(method, kind)), None)

    def __add__(self, other: Arm) -> Arm:
        return combine((self, other))

    def __str__(self) -> str:
        return self.name


def escape_arm_name(name: str) -> str:
    """Return the name of an arm as a folder's: no character that a file system could refuse or read as a path.

    >>> escape_arm_name("em:layers=0/1,kinds=self")
    'em@layers=0_1,kinds=self'
    """
    return name.replace(":", "@").replace("/", "_")


@cache
def named_arms() -> Mapping[str, Arm]:
    """Return the arms that have a name, in the order of a table.

    Settings are the papers': alpha 0.01 and step size 0.1 (An et al. 2020, appendix B), lambda 1, three iterations
    and as many capsules as the model is wide (Li et al. 2021, section 4.1). The papers have no setting of repulsion
    for the logic task: it acts on all encoder layers. Our own penalties, and the relative forms of the papers', are a
    tenth of the loss's gradient on the heads; targets are three effective heads, and "cka-together" has weights below
    zero, which make heads alike. A mixture has one shared head, and two of the others for each token; scheduled
    DropHead begins and ends at the rate of the constant one. SPOS and SGLD have no published temperature; the one here
    makes the noise about as large as the driving term at the start of training.
    """
    arms = {name: Arm(name, (method,), control=find_control((method,))) for name, (method, _) in _list_named().items()}
    return MappingProxyType({"plain": Arm("plain", control=None)} | arms)


def describe_arms() -> Mapping[str, str]:
    """Return what each named arm does, in words.

    >>> describe_arms()["em"]
    'EM routing instead of W_O'
    """
    return {"plain": "the model as it is", **{name: about for name, (_, about) in _list_named().items()}}


@cache
def _list_named() -> dict[str, tuple[Method, str]]:
    return {
        "scaled": (
            Repel(SVGD(alpha=0.0, smoothing=False)),
            "the heads' gradients times eps/M, nothing else of SVGD",
        ),
        "smooth": (Repel(SVGD(alpha=0.0)), "SVGD without repulsion: heads share their gradients"),
        "svgd": (Repel(SVGD(alpha=0.01)), "SVGD: smoothing and repulsion"),
        "svgd-relative": (
            Repel(SVGD(alpha=Relative(0.1))),
            "SVGD, repulsion a tenth as long as the driving term",
        ),
        "svgd-target": (Repel(SVGD(alpha=Target(3.0))), "SVGD until there are three effective heads"),
        "svgd-normalized": (Repel(SVGD(alpha=0.01, kernel=NormalizedRBF())), "SVGD with the kernel on directions"),
        "svgd-function": (Repel(FunctionSVGD()), "SVGD on what heads compute"),
        "svgd-span": (Repel(SpanSVGD()), "SVGD on the subspaces of heads, which it only turns"),
        "spos": (Repel(SPOS(alpha=0.01, inverse_temperature=1e9)), "SVGD with Langevin noise"),
        "sgld": (Repel(SGLD(inverse_temperature=1e9, step_size=0.1)), "Langevin noise without a kernel"),
        "drophead": (DropHeads(0.1), "whole heads dropped at random while training"),
        "drophead-scheduled": (DropHeads(0.1, start=0.1), "whole heads dropped at a rate that falls and rises"),
        "subspace": (Penalize(Subspace(), weight=1.0), "penalty on the cosine between heads' values"),
        "position": (Penalize(Position(), weight=1.0), "penalty on heads that attend to the same positions"),
        "output": (Penalize(Output(), weight=1.0), "penalty on the cosine between heads' outputs"),
        "frobenius": (Penalize(Frobenius(), weight=1.0), "penalty on attention rows that overlap"),
        "subspace-relative": (Penalize(Subspace()), "subspace at a tenth of the loss's gradient on heads"),
        "position-relative": (Penalize(Position()), "position at a tenth of the loss's gradient on heads"),
        "output-relative": (Penalize(Output()), "output at a tenth of the loss's gradient on heads"),
        "squared-cosine": (Penalize(SquaredCosine()), "penalty on the squared cosine between outputs"),
        "cka": (Penalize(CKA()), "penalty on CKA between outputs"),
        "hsic": (Penalize(HSIC()), "penalty on the dependence between outputs (HSIC)"),
        "correlation": (Penalize(CrossCorrelation()), "penalty on the cross-correlation of outputs"),
        "determinant": (Penalize(LogDeterminant()), "penalty on outputs that span little (log determinant)"),
        "span": (Penalize(SpanOverlap()), "penalty on overlap of heads' subspaces of parameters"),
        "map": (Penalize(MapCosine()), "penalty on the cosine between heads' maps"),
        "cka-target": (Penalize(CKA(), weight=Target(3.0)), "CKA until there are three effective heads"),
        "cka-together": (
            Penalize(CKA(), kind_weights=(-1.0, -1.0, -1.0)),
            "CKA with its sign turned: heads are made alike",
        ),
        "cosine-penalty": (Repel(CosinePenalty(alpha=0.01)), "the cosine between heads' parameters as a penalty"),
        "cosine-repulsion": (Repel(CosineRepulsion(alpha=0.01)), "cosine-penalty as a repulsion without smoothing"),
        "trunk": (Aggregate(Trunk()), "the votes of routing, averaged without agreement"),
        "simple": (Aggregate(SimpleRouting()), "simple routing instead of W_O"),
        "em": (Aggregate(EMRouting()), "EM routing instead of W_O"),
        "talking": (MixHeads(), "matrices that mix heads before and after the softmax"),
        "gated": (GateHeads(SigmoidGate()), "a gate on each head that each token chooses"),
        "gated-constant": (GateHeads(SigmoidGate(token=False)), "gates on heads that no token changes"),
        "gated-elements": (
            GateHeads(SigmoidGate("element")),
            "a gate on each feature that each token chooses",
        ),
        "gated-elements-constant": (
            GateHeads(SigmoidGate("element", token=False)),
            "gates on features that no token changes",
        ),
        "mixture": (GateHeads(MixtureOfHeads(1, 2)), "one shared head, two others that each token chooses"),
        "mixture-random": (
            GateHeads(MixtureOfHeads(1, 2, routing="random")),
            "one shared head, and two others at random",
        ),
        "mixture-all": (GateHeads(MixtureOfHeads(1, None)), "the gates of a mixture on all heads"),
        "differential": (PairHeads(second=True), "half the heads, each with a second map subtracted"),
        "paired": (PairHeads(second=False), "half the heads, twice as wide, with one map"),
        "wider": (Widen(), "feed-forward layers wider by the gates' parameters"),
        "muon": (Orthogonalize(per_head=False), "Muon on whole projections of heads"),
        "muon-heads": (Orthogonalize(per_head=True), "Muon on the matrix of each head"),
        "queries-longer": (LengthenQueries(drawn=4.0), "queries that start four times as long"),
        "queries-faster": (LengthenQueries(rate=10.0), "queries trained at ten times the rate"),
        "guided": (Guided(), "heads with the five roles"),
        "random-mask": (Guided(random=ROLES), "random masks as sparse as those of the roles"),
        "shuffled-parse": (Guided(shuffled=PARSED), "roles from the parse of another sentence"),
        "bilstm": (OtherModel("bilstm"), "a BiLSTM instead of the task's model"),
        "cnn": (OtherModel("cnn"), "a multi-scale CNN instead of the task's model"),
        "no-graph": (OtherModel("no-graph"), "the task's model with every node of the graph zeroed"),
    }


def combine(arms: Iterable[Arm]) -> Arm:
    """Return the arm that does what all of `arms` do; penalties are added with their weights."""
    parts = [arm for arm in arms if arm.name != "plain"]
    if not parts:
        return Arm("plain", control=None)
    if len(parts) == 1:
        return parts[0]
    headless = next((arm for arm in parts if arm.find(OtherModel) is not None), None)
    if headless is not None:
        raise SettingError(f"{headless.name} has no heads, so nothing combines with it; name it alone.")
    controls = [arm.control for arm in parts if arm.control not in (None, "plain")]
    return Arm(
        "+".join(arm.name for arm in parts),
        _combine_methods(parts),
        learning_rate=_agree("learning rate", [(arm.name, arm.learning_rate) for arm in parts]),
        dropout=_agree("dropout", [(arm.name, arm.dropout) for arm in parts]),
        control="+".join(dict.fromkeys(str(name) for name in controls)) or "plain",
    )


def find_control(methods: Sequence[Method]) -> str | None:
    """Return the name of the arm that differs from one with (at most) one method in what the method is about.

    Repulsion is compared with the same smoothing without it, smoothing with the same scaling, routing with the same
    votes and uniform weights, roles with random masks as sparse, roles of which some are replaced or have another
    parse with the roles as they are. Muon per head is compared with Muon, scheduled DropHead with a constant rate,
    gates with gates that no token changes, a mixture with heads chosen at random and these with all heads, differential
    attention with heads as wide of one map. Every other method is compared with plain.
    """
    for method in methods:
        match method:
            case Repel(SGLD() | FunctionSVGD() | SpanSVGD()):
                return "scaled"
            case Repel(SPOS() as rule):
                return "smooth" if rule.smoothing else "scaled"
            case Repel(SVGD() as rule):
                # alpha may be a Relative, which is never zero
                if rule.alpha != 0.0:
                    return "smooth" if rule.smoothing else "scaled"
                return "scaled" if rule.smoothing else "plain"
            case Aggregate(SimpleRouting() | EMRouting()):
                return "trunk"
            case Guided(random=random) if random != ROLES:
                return "guided" if method.drop or random or method.shuffled else "random-mask"
            case _:
                return _find_rivals_control(method)
    return None


def _find_rivals_control(method: Method) -> str:
    match method:
        case Orthogonalize(per_head=True):
            return "muon"
        case DropHeads(start=start) if start is not None:
            return "drophead"
        case GateHeads(SigmoidGate(per=per, token=True)):
            return "gated-constant" if per == "head" else "gated-elements-constant"
        case GateHeads(MixtureOfHeads(active=active, routing=routing)) if active is not None:
            return "mixture-random" if routing == "learned" else "mixture-all"
        case PairHeads(second=True):
            return "paired"
        case _:
            return "plain"


def _combine_methods(arms: Sequence[Arm]) -> tuple[Method, ...]:
    found = [(arm.name, method) for arm in arms for method in arm.methods]
    by_type: dict[type, list[tuple[str, Any]]] = {}
    for name, method in found:
        by_type.setdefault(type(method), []).append((name, method))
    penalties = by_type.pop(Penalize, [])
    for kind, same in by_type.items():
        # the same rate twice is no contradiction
        if len(same) > 1 and not (kind is DropHeads and len({method for _, method in same}) == 1):
            raise _set_twice(same[0][0], same[1][0], METHODS.get(kind, kind.__name__))
    methods = [same[0][1] for same in by_type.values()]
    if len(penalties) > 1:
        term = Sum(tuple(part for _, penalty in penalties for part in penalty.weighted))
        weights = _agree("kind weights", [(name, penalty.kind_weights) for name, penalty in penalties])
        given = [(name, penalty.weight) for name, penalty in penalties]
        strengths = {weight if isinstance(weight, Relative | Target) else None: name for name, weight in given}
        if len(strengths) > 1:
            first, second, *_ = strengths.values()
            raise _set_twice(first, second, "the strength of the penalty")
        methods.append(Penalize(term, weight=next(iter(strengths)) or 1.0, kind_weights=weights))
    methods += [method for _, method in penalties if len(penalties) == 1]
    # rule and term act in the same place, also where one of them alone names it
    placed = [(name, method) for name, method in found if isinstance(method, Repel | Penalize)]
    place = {field: _agree(field, [(name, getattr(method, field)) for name, method in placed]) for field in PLACE}
    return sort_methods(
        dataclasses.replace(method, **place) if isinstance(method, Repel | Penalize) else method for method in methods
    )


def _agree(name: str, values: Sequence[tuple[str, Any]]) -> Any:
    """Return the value that the arms which set one have in common."""
    given = [(arm, value) for arm, value in values if value is not None]
    for arm, value in given:
        if value != given[0][1]:
            raise _set_twice(given[0][0], arm, name)
    return given[0][1] if given else None


def _set_twice(first: str, second: str, name: str) -> SettingError:
    return SettingError(f"{first}+{second}: both set {name}; an arm has one.")


def sort_methods(methods: Iterable[Method]) -> tuple[Method, ...]:
    """Return methods in the order in which an arm holds them."""
    order = {kind: place for place, kind in enumerate(METHODS)}
    return tuple(sorted(methods, key=lambda method: order.get(type(method), len(order))))


def lasts(method: Method) -> bool:
    """Return whether a trained model still has a method; others act on gradients, or during training only.

    >>> [lasts(method) for name in ("svgd", "em", "guided") for method in named_arms()[name].methods]
    [False, True, True]
    """
    return isinstance(method, Guided | OtherModel | PairHeads | Widen) or getattr(method, "stage", "") == "build"
