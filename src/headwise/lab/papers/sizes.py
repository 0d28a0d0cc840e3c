"""How large the runs of a table are at each scale, and what an arm such as "em:layers={last}" means at that size."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.lab.experiment.arm_text import parse_arm
from headwise.lab.experiment.scale_options import ScaleOptions, with_options

CAPSULES = 64


@dataclass(frozen=True)
class Size:
    """The size of a table's runs at one scale.

    Attributes:
        scale: Name of the task's scale.
        times: Width, hidden units and heads are this many times as large as there.
        heads: Heads a layer; None for those of the scale, times `times`.
        corpus: Name of the corpus that the paper trained on, where the scale is the paper's; None elsewhere. Where a
            table has several sets of data at every scale, the name of the set's folder.
        folds: Parts of a cross-validation; None for the scale's own.
        sets: Other fields of the scale, as "heads=15".
    """

    scale: str
    times: int = 1
    heads: int | None = None
    corpus: str | None = None
    folds: int | None = None
    sets: tuple[str, ...] = ()


Sizes = Mapping[str, Size]
# Our own studies. At `cpu` those of logic and translation have the sizes of `demo` (formulas of at most three
# operators, 10,000 pairs of sentences); that of logic is three times as long, as is one on SICK.
QUESTIONS: Sizes = {name: Size(name, corpus="trec") for name in ("demo", "cpu")}
PAIRS: Sizes = {"demo": Size("demo", corpus="sick"), "cpu": Size("cpu", corpus="sick", sets=("epochs=12",))}
FORMULAS: Sizes = {"demo": Size("demo"), "cpu": Size("demo", sets=("epochs=6",)), "paper": Size("paper")}
SENTENCES: Sizes = {"demo": Size("demo"), "cpu": Size("demo"), "gpu": Size("gpu")}


def logic() -> Sizes:
    """Return the sizes of the logic task: its scales as they are."""
    return {name: Size(name) for name in ("demo", "cpu", "paper")}


def small(heads: int | None = None) -> Sizes:
    """Return the sizes of Transformer-small: the reduced ones, at last fairseq's IWSLT shape on IWSLT14."""
    return {**_reduce(heads=heads), "paper": Size("paper", heads=heads, corpus="iwslt14")}


def base(corpus: str) -> Sizes:
    """Return the sizes of Transformer-base: the reduced ones, at last the base of Vaswani et al. 2017."""
    return {**_reduce(), "paper": Size("paper-base", corpus=corpus)}


def big(corpus: str) -> Sizes:
    """Return the sizes of Transformer-big: the reduced ones twice as wide with twice the heads, at last theirs."""
    return {**_reduce(times=2), "paper": Size("paper-big", corpus=corpus)}


def big_few_heads(corpus: str) -> Sizes:
    """Return the sizes of Transformer-big with as many heads as base: 4, at last 8."""
    return {**_reduce(times=2, heads=4), "paper": Size("paper-big-8-heads", corpus=corpus)}


def base_eight_heads(corpus: str) -> Sizes:
    """Return the sizes of Transformer-base with eight heads at every scale, as theirs has."""
    return {**_reduce(heads=8), "paper": Size("paper-base", corpus=corpus)}


def _reduce(times: int = 1, heads: int | None = None) -> Sizes:
    # at `cpu` the model and the sentences of `demo`, until plain of four heads is not shown to rise on dev
    return {
        "demo": Size("demo", times, heads),
        "cpu": Size("demo", times, heads, sets=("epochs=12",)),
        "gpu": Size("gpu", times, heads),
    }


def resize_scale(size: Size, scales: Mapping[str, Any]) -> Any:
    """Return the scale of a size; the task's own where nothing differs, else one with another name.

    >>> from headwise.lab.tasks.translation.scales import TRANSLATION_SCALES
    >>> sizes = (Size("demo", **more) for more in ({"heads": 4}, {"heads": 2}, {"times": 2}))
    >>> [resize_scale(size, TRANSLATION_SCALES).name for size in sizes]
    ['demo', 'demo-2-heads', 'demo-2-times']
    """
    scale, name = scales[size.scale], size.scale
    changes: dict[str, Any] = {}
    if size.times != 1:
        changes = {field: size.times * getattr(scale, field) for field in ("width", "hidden", "heads")}
        name += f"-{size.times}-times"
    if size.heads is not None and size.heads != changes.get("heads", scale.heads):
        changes["heads"] = size.heads
        name += f"-{size.heads}-heads"
    if size.folds not in (None, getattr(scale, "folds", None)):
        changes["folds"] = size.folds
        name += f"-{size.folds}-folds"
    scale = dataclasses.replace(scale, name=name, **changes) if changes else scale
    return with_options(scale, ScaleOptions(size.scale, sizes=size.sets), "the reproduction's") if size.sets else scale


def arm_names(texts: Sequence[str], scale: Any) -> tuple[str, ...]:
    """Return the canonical names of a table's arms at a scale, each once; see `arm_name`.

    >>> from headwise.lab.tasks.translation.scales import TRANSLATION_SCALES
    >>> arm_names(("plain", "em:layers={lower}", "em:layers={first}", "em:layers={two}"), TRANSLATION_SCALES["demo"])
    ('plain', 'em:layers=0', 'em')
    """
    return tuple(dict.fromkeys(arm_name(text, scale) for text in texts))


def arm_name(text: str, scale: Any) -> str:
    """Return the canonical name of an arm of a table at a scale.

    Words in braces depend on the model: {first} and {last}, the layers at both ends; {lower} and
    {upper}, the halves; {two}, the first two; {heads}, the number of heads; {sixty-four}, 64 or, where the
    model is no wider or 64 does not divide its width, the default. Layers that come out as all are not written, so
    that one arm has one name.
    """
    for word, meaning in _define_words(scale).items():
        text = text.replace(f"{{{word}}}", meaning)
    return parse_arm(text).name


def _define_words(scale: Any) -> dict[str, str]:
    layers = getattr(scale, "encoder_layers", None) or scale.layers
    half = max(1, layers // 2)
    places = {
        "first": range(1),
        "last": range(layers - 1, layers),
        "lower": range(half),
        "upper": range(layers - half, layers),
        "two": range(min(2, layers)),
    }
    words = {word: "all" if len(chosen) == layers else "/".join(map(str, chosen)) for word, chosen in places.items()}
    # a model that was trained before has the sizes of its folder, and its tables name none
    width, heads = getattr(scale, "width", 0), getattr(scale, "heads", 0)
    fits = width > CAPSULES and width % CAPSULES == 0
    return words | {"heads": str(heads), "sixty-four": str(CAPSULES) if fits else "none"}
