"""Arms: which methods are on in a run, with which settings; the named arms of the papers and their controls.

Owns the values (`Arm`) and the names (`named_arms`). How an arm is written as text is `arm_text`'s business, and
putting it on a model is `methods`'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from headwise.disagreement.penalty import Frobenius, Output, Position, Similarity, Subspace, Sum
from headwise.errors import SettingError, require_choice, require_integer, require_positive, require_range
from headwise.heads.site import PROJECTIONS
from headwise.lab.experiment.guided import PARSED, ROLES, Guided
from headwise.repulsion.function_space import FunctionSVGD
from headwise.repulsion.kernels import NormalizedRBF
from headwise.repulsion.mixing import Relative
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion, Rule
from headwise.routing.settings import EMRouting, SimpleRouting, Trunk

Aggregation = SimpleRouting | EMRouting | Trunk
KINDS = ("self", "decoder", "cross")


@dataclass(frozen=True)
class Arm:
    """One row of a comparison: what is done to the heads while a model trains; printing it is its record.

    Attributes:
        name: Its name in tables and folders, and what `--arms` takes.
        rule: Repulsion between the parameters of heads, or None.
        layers: Layers that rule and term act on, from 0, in each kind of attention; None for all.
        kinds: Kinds of attention that rule and term act on, of self, decoder and cross; None for all.
        projections: Projections that the rule acts on, of query, key and value; None for all.
        term: Similarity of heads that is added to the loss, or None.
        penalty_weight: Its weight, lambda of Li et al. 2021 (1 there).
        kind_weights: Weights of the term on self, decoder and cross attention; None for 1 each. The released code of
            Li et al. 2021 has 1, 0.5 and 0.5.
        aggregation: What stands in the place of the output projection, or None.
        aggregation_layers: Layers it stands in; None for all.
        aggregation_kinds: Kinds of attention it stands in; None for all.
        drophead: Probability of zeroing a head while training, in [0, 1).
        guided: The roles of heads, or None.
        model: Name of a model without attention that is trained in the place of the task's, or None.
        learning_rate: Peak learning rate; None for that of the scale.
        control: Name of the arm it is judged against; None for plain itself.

    Example:
        >>> print(named_arms()["svgd"] + named_arms()["em"])
        svgd+em
    """

    name: str
    rule: Rule | None = None
    layers: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    projections: tuple[str, ...] | None = None
    term: Similarity | Sum | None = None
    penalty_weight: float = 1.0
    kind_weights: tuple[float, ...] | None = None
    aggregation: Aggregation | None = None
    aggregation_layers: tuple[int, ...] | None = None
    aggregation_kinds: tuple[str, ...] | None = None
    drophead: float = 0.0
    guided: Guided | None = None
    model: str | None = None
    learning_rate: float | None = None
    control: str | None = "plain"

    def __post_init__(self) -> None:
        require_range("penalty_weight", self.penalty_weight)
        require_range("drophead", self.drophead, low=0.0, high=0.99)
        if self.learning_rate is not None:
            require_positive("learning_rate", self.learning_rate)
        for name in ("layers", "aggregation_layers"):
            for layer in getattr(self, name) or ():
                require_integer(name, layer)
        for name, known in (("kinds", KINDS), ("aggregation_kinds", KINDS), ("projections", PROJECTIONS)):
            for value in getattr(self, name) or ():
                require_choice(name, value, known)
        if self.kind_weights is not None and len(self.kind_weights) != len(KINDS):
            raise SettingError(f"kind_weights is {self.kind_weights}; expected one number for each of {KINDS}.")
        for weight in self.kind_weights or ():
            require_range("kind_weights", weight)

    @property
    def folder(self) -> str:
        """The arm's name as a folder's; see `folder_of`."""
        return folder_of(self.name)

    def __add__(self, other: Arm) -> Arm:
        return combine((self, other))

    def __str__(self) -> str:
        return self.name


def folder_of(name: str) -> str:
    """Return the name of an arm as a folder's: no character that a file system could refuse or read as a path.

    >>> folder_of("em:layers=0/1,kinds=self")
    'em@layers=0_1,kinds=self'
    """
    return name.replace(":", "@").replace("/", "_")


@cache
def named_arms() -> Mapping[str, Arm]:
    """Return the arms that have a name, in the order of a table.

    Settings are the papers': alpha 0.01 and step size 0.1 (An et al. 2020, appendix B), lambda 1, three iterations
    and as many capsules as the model is wide (Li et al. 2021, section 4.1). The papers have no setting of repulsion
    for the logic task: it acts on all encoder layers. SPOS and SGLD have no published temperature; the one here
    makes the noise about as large as the drive at the start of training.
    """
    arms = (
        Arm("plain", control=None),
        Arm("scaled", rule=SVGD(alpha=0.0, smoothing=False)),
        Arm("smooth", rule=SVGD(alpha=0.0)),
        Arm("svgd", rule=SVGD(alpha=0.01)),
        Arm("svgd-relative", rule=SVGD(alpha=Relative(0.1))),
        Arm("svgd-normalised", rule=SVGD(alpha=0.01, kernel=NormalizedRBF())),
        Arm("svgd-function", rule=FunctionSVGD(alpha=Relative(0.1))),
        Arm("spos", rule=SPOS(inverse_temperature=1e9)),
        Arm("sgld", rule=SGLD(inverse_temperature=1e9, step_size=0.1)),
        Arm("drophead", drophead=0.1),
        Arm("subspace", term=Subspace()),
        Arm("position", term=Position()),
        Arm("output", term=Output()),
        Arm("frobenius", term=Frobenius()),
        Arm("cosine-penalty", rule=CosinePenalty()),
        Arm("cosine-repulsion", rule=CosineRepulsion()),
        Arm("trunk", aggregation=Trunk()),
        Arm("simple", aggregation=SimpleRouting()),
        Arm("em", aggregation=EMRouting()),
        Arm("guided", guided=Guided()),
        Arm("random-mask", guided=Guided(random=ROLES)),
        Arm("shuffled-parse", guided=Guided(shuffled=PARSED)),
        Arm("bilstm", model="bilstm"),
        Arm("cnn", model="cnn"),
        Arm("no-graph", model="no-graph"),
    )
    return MappingProxyType({arm.name: dataclasses.replace(arm, control=control_of(arm)) for arm in arms})


def combine(arms: Iterable[Arm]) -> Arm:
    """Return the arm that does what all of `arms` do; penalties are added with their weights.

    Raises:
        SettingError: Two arms set the same thing differently, or there is none.
    """
    parts = [arm for arm in arms if arm.name != "plain"]
    if not parts:
        return Arm("plain", control=None)
    if len(parts) == 1:
        return parts[0]
    headless = next((arm for arm in parts if arm.model is not None), None)
    if headless is not None:
        raise SettingError(f"{headless.name} has no heads, so nothing combines with it; name it alone.")
    controls = [arm.control for arm in parts if arm.control not in (None, "plain")]
    terms = [arm for arm in parts if arm.term is not None]
    term, weight = (terms[0].term, terms[0].penalty_weight) if terms else (None, 1.0)
    if len(terms) > 1:
        term, weight = Sum(tuple(part for arm in terms for part in _weighted(arm))), 1.0
    return Arm(
        "+".join(arm.name for arm in parts),
        rule=_the_one(parts, "rule", None),
        layers=_the_one([arm for arm in parts if arm.rule or arm.term], "layers", None),
        kinds=_the_one([arm for arm in parts if arm.rule or arm.term], "kinds", None),
        projections=_the_one(parts, "projections", None),
        term=term,
        penalty_weight=weight,
        kind_weights=_the_one(parts, "kind_weights", None),
        aggregation=_the_one(parts, "aggregation", None),
        aggregation_layers=_the_one(parts, "aggregation_layers", None),
        aggregation_kinds=_the_one(parts, "aggregation_kinds", None),
        drophead=_the_one(parts, "drophead", 0.0),
        guided=_the_one(parts, "guided", None),
        learning_rate=_the_one(parts, "learning_rate", None),
        control="+".join(dict.fromkeys(str(name) for name in controls)) or "plain",
    )


def control_of(arm: Arm) -> str | None:
    """Return the name of the arm that differs from `arm` in the one thing `arm` is about.

    Repulsion is judged against the same smoothing without it, smoothing against the same scaling, routing against
    the same votes with uniform weights, roles against random masks as sparse, roles of which some are replaced or have
    another parse against the roles as they are, everything else against plain.
    """
    if isinstance(arm.rule, SGLD | FunctionSVGD):
        return "scaled"
    if isinstance(arm.rule, SVGD | SPOS):
        # alpha may be a Relative, which is never zero
        if arm.rule.alpha != 0.0 or isinstance(arm.rule, SPOS):
            return "smooth" if arm.rule.smoothing else "scaled"
        return "scaled" if arm.rule.smoothing else "plain"
    if arm.aggregation is not None and not isinstance(arm.aggregation, Trunk):
        return "trunk"
    if arm.guided is not None and arm.guided.random != ROLES:
        return "guided" if arm.guided.drop or arm.guided.random or arm.guided.shuffled else "random-mask"
    return None if arm.name == "plain" else "plain"


def _weighted(arm: Arm) -> tuple[tuple[float, Similarity], ...]:
    if arm.term is None:
        return ()
    parts = arm.term.parts if isinstance(arm.term, Sum) else ((1.0, arm.term),)
    return tuple((weight * arm.penalty_weight, similarity) for weight, similarity in parts)


def _the_one(parts: list[Arm], field: str, absent: Any) -> Any:
    values = [(arm.name, getattr(arm, field)) for arm in parts if getattr(arm, field) != absent]
    if not values:
        return absent
    (first, value), *rest = values
    for name, other in rest:
        if field in ("rule", "aggregation", "guided") or other != value:
            raise SettingError(f"{first}+{name}: both set {field.replace('_', ' ')}; an arm has one.")
    return value
