"""Our own question: which methods raise the effective number of heads, and at what score; and which rivals do."""

from __future__ import annotations

from pathlib import Path

from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.papers.claims import Claim, Contrast, compare_arms
from headwise_lab.papers.reproduction import OWN, PAIRS, QUESTIONS, Part, Reproduction, Size, Sizes, logic
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.figures import Picture, draw_effective_heads, label_arm
from headwise_lab.results.table import Table

# Every penalty and every repulsion at a tenth of the gradient of the loss on the heads. Penalties by what they compare:
# directions token by token (three of them the papers'), features over many tokens, and parameters.
DIRECTIONS = ("subspace-relative", "position-relative", "output-relative", "squared-cosine")
FEATURES = ("cka", "hsic", "correlation", "determinant")
PARAMETERS = ("span", "map")
PENALTIES = (*DIRECTIONS, *FEATURES, *PARAMETERS)
SMOOTHING, TURNING = ("svgd-relative",), ("svgd-function", "svgd-span")
# Methods that do not ask heads to differ, each against itself without its point; and the same parameters elsewhere.
RIVALS = ("talking", "gated", "gated-elements", "mixture", "differential", "drophead-scheduled", "muon-heads")
ALL_HEADS, WIDER, LITTLE_WIDER = "mixture-all", "wider", "wider:units=2"
CONTROLS = {
    **dict.fromkeys((*PENALTIES, "cka-target", "drophead", "talking", ALL_HEADS, WIDER, LITTLE_WIDER), "plain"),
    **dict.fromkeys((*SMOOTHING, "svgd-target"), "smooth"),
    **dict.fromkeys(TURNING, "scaled"),
    "gated": "gated-constant",
    "gated-elements": "gated-elements-constant",
    "mixture": "mixture-random",
    "differential": "paired",
    "drophead-scheduled": "drophead",
    "muon-heads": "muon",
    "em": "trunk",
}
STRENGTH = "a strength of 0.1 relative to the gradient of the loss on the heads"
SIZES = (
    "gates that start at 1; a mixture of one shared head and two of the others; DropHead at 0.1, "
    "scheduled from 0.1 over 0 to 0.1; Muon at the rate of the recipe; differential attention and its control with "
    "half the heads, twice as wide; wider layers with the parameters of gates on features, or on heads (two units)"
)
EFFECTIVE = "effective_heads"


def draw_heads(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:  # noqa: ARG001  as all are called
    """Return the effective heads of each arm."""
    drawn = draw_effective_heads(table)
    return () if drawn is None else (drawn,)


def _compare(arms: tuple[str, ...], measure: str | None = None) -> tuple[Contrast, ...]:
    return tuple(Contrast(arm, _choose_control(arm), measure=measure) for arm in arms)


def _compare_with_plain(arms: tuple[str, ...]) -> tuple[Contrast, ...]:
    """Return the contrasts with plain of arms that have another control."""
    return tuple(Contrast(arm, "plain") for arm in arms if _choose_control(arm) != "plain")


def _claim_each(methods: tuple[str, ...], *openings: str) -> tuple[Claim, ...]:
    """Return claims of each method: its score against its control and against plain, and its effective heads.

    `openings` are what the statements of the three kinds begin with.
    """
    control, plain, heads = openings or ("", "", "")
    return (
        *(
            Claim(
                f"{control}{label_arm(method)} scores higher than {_describe_control(method)} (the idea of it).",
                _compare((method,)),
            )
            for method in methods
        ),
        *(
            Claim(f"{plain}{label_arm(method)} scores higher than plain attention.", against_plain)
            for method in methods
            if (against_plain := _compare_with_plain((method,)))
        ),
        *(
            Claim(
                f"{heads}{label_arm(method)} has more effective heads than {_describe_control(method)} (ours).",
                _compare((method,), EFFECTIVE),
            )
            for method in methods
        ),
    )


def _choose_control(arm: str) -> str:
    return CONTROLS[arm if arm in CONTROLS else arm.partition(":")[0]]


def _describe_control(arm: str) -> str:
    """Return "its control", or the name of that of the arm it is a variant of, where its own is another."""
    control = _choose_control(arm)
    return "its control" if parse_arm(arm).control == control else f"{label_arm(control)}, which has another kernel"


def _study(
    name: str, title: str, arms: tuple[str, ...], *claims: Claim, task: str, sizes: Sizes, extra: str
) -> Reproduction:
    controls = tuple(dict.fromkeys(_choose_control(arm) for arm in arms))
    return Reproduction(
        id=f"diversity/{name}",
        title=title,
        source=OWN,
        task=task,
        parts=(Part(tuple(dict.fromkeys(("plain", *controls, *arms))), sizes),),
        extra=extra,
        claims=claims,
        drawn=draw_heads,
    )


def _ask(task: str, sizes: Sizes, *, ending: str, target: float, words: str) -> tuple[Reproduction, ...]:
    """Return the studies of penalties, of repulsion and of rivals on a task, with targets of so many heads."""
    penalty_target, repulsion_target = (f"{arm}-target:effective_heads={target:g}" for arm in ("cka", "svgd"))
    strength = f"{STRENGTH}; targets of {target:g} heads"
    penalized = _study(
        f"penalties{ending}",
        f"Penalties at a tenth of the gradient{words}: effective heads and score",
        (*PENALTIES, penalty_target, "drophead"),
        Claim(
            "Penalties on the directions of outputs or attention, token by token, raise the effective number of heads "
            "(the papers', and the square of one).",
            _compare(DIRECTIONS, EFFECTIVE),
        ),
        Claim("Penalties on what heads compute over many tokens raise it (ours).", _compare(FEATURES, EFFECTIVE)),
        Claim("Penalties on heads' parameters raise it (ours).", _compare(PARAMETERS, EFFECTIVE)),
        Claim("So does a penalty with a target (ours).", _compare((penalty_target,), EFFECTIVE)),
        Claim("So does dropping heads at random (ours).", _compare(("drophead",), EFFECTIVE)),
        Claim("Heads that a penalty made different score higher (the idea of all of it).", _compare(PENALTIES)),
        task=task,
        sizes=sizes,
        extra=strength,
    )
    repelling = (*SMOOTHING, *TURNING)
    repelled = _study(
        f"repulsion{ending}",
        f"Repulsion at a tenth of the gradient{words}: effective heads and score",
        (*repelling, repulsion_target),
        Claim("Repulsion raises the effective number of heads (ours).", _compare(repelling, EFFECTIVE)),
        Claim("So does repulsion with a target (ours).", _compare((repulsion_target,), EFFECTIVE)),
        Claim("Heads that repel one another score higher (the idea of all of it).", _compare(repelling)),
        task=task,
        sizes=sizes,
        extra=strength,
    )
    compared = _study(
        f"rivals{ending}",
        f"Methods that do not ask heads to differ{words}: effective heads and score",
        (*RIVALS, ALL_HEADS, WIDER, LITTLE_WIDER),
        Claim("Rivals raise the effective number of heads (ours).", _compare(RIVALS, EFFECTIVE)),
        Claim("Rivals score higher than their controls.", _compare(RIVALS)),
        Claim(
            "A token needs some heads only: the best ones score higher than all of them (the idea of mixtures).",
            (Contrast("mixture", ALL_HEADS),),
        ),
        Claim(
            "Gates score higher than as many parameters in wider layers (our control of equal parameters).",
            (Contrast("gated-elements", WIDER), Contrast("gated", LITTLE_WIDER)),
        ),
        task=task,
        sizes=sizes,
        extra=SIZES,
    )
    return penalized, repelled, compared


# Plain heads of logic are nearly as different as can be; those of questions are not, and there is room to push them.
ON_LOGIC = _ask("logic", logic(), ending="", target=3, words="")
ON_QUESTIONS = _ask("classification", QUESTIONS, ending="-questions", target=5.5, words=" on questions (TREC)")


def _tune(
    name: str, title: str, methods: tuple[str, ...], *further: Claim, task: str, sizes: Sizes, words: str = ""
) -> Reproduction:
    """Return the study of methods that are tuned with as many draws as plain and their controls."""
    return _study(
        f"tuned-{name}",
        f"Tuned against tuned on {title}",
        methods,
        *_claim_each(methods, "Tuned with as many draws, ", "Tuned, ", "Tuned for score, "),
        *further,
        task=task,
        sizes=sizes,
        extra=f"with `--tuned`, each arm has the settings of its best draw on dev{words}",
    )


# Heads that grow attend more sharply: what of SVGD turns them, and what lengthens them.
TURNED, LENGTHENED = "svgd-relative:kernel=normalized-rbf", "svgd-relative:kernel=radial-rbf"
# One arm of each kind.
TUNED_STUDIES = (
    _tune(
        "questions",
        "classification of questions (TREC)",
        ("output-relative", "cka", "svgd-relative", "svgd-span", "drophead", "em"),
        task="classification",
        sizes=QUESTIONS,
    ),
    # svgd-span is left out: up to 3 of the gradient it gave no more effective heads
    _tune(
        "pairs",
        "pairs of sentences (SICK)",
        ("output-relative", "cka", "svgd-relative", TURNED, LENGTHENED, "drophead"),
        Claim(
            "Tuned with as many draws, SVGD scores higher than the part of it that only lengthens heads (our control).",
            (Contrast("svgd-relative", LENGTHENED),),
        ),
        task="sentence",
        sizes=PAIRS,
        words="; at cpu for twelve epochs, after which no further rise of plain's score on dev is shown",
    ),
)

# One arm of each kind on a decoder as people train them today. `differential` and `paired` have half as many heads, so
# their effective heads are compared with one another alone.
DECODED = ("svgd-span", "output-relative", "cka", "gated", "differential", "em", "muon-heads")
DECODER_STUDY = _study(
    "lm",
    "Language models with grouped queries: effective heads and score",
    DECODED,
    *_claim_each(DECODED),
    task="lm",
    sizes={name: Size(name) for name in ("demo", "cpu", "gpu")},
    extra=f"{STRENGTH}; gates that start at 1; Muon at the rate of the recipe; differential attention and its control "
    "with half the heads, twice as wide",
)

# What SVGD does on SICK beside making heads differ is to lengthen them, which sharpens attention. Each arm has the rate
# and the dropout of its best draw in `diversity/tuned-pairs`; those that lengthen queries alone have plain's.
_PLAIN, _SVGD = "learning_rate=0.0036,dropout=0.159", "ratio=0.855,learning_rate=0.00524,dropout=0.127"
TUNED_PLAIN, TUNED_SVGD = f"plain:{_PLAIN}", f"svgd-relative:{_SVGD}"
TUNED_RADIAL = f"{LENGTHENED},{_SVGD}"
DRAWN = tuple(f"queries-longer:drawn={factor},{_PLAIN}" for factor in (4.0, 12.0))
SHARPER = (*DRAWN, f"queries-faster:{_PLAIN}")
STRONG = "cka:ratio=3.0,learning_rate=0.0039,dropout=0.183"
GROWN = (TUNED_SVGD, TUNED_RADIAL, *SHARPER, STRONG)
GROWTH_STUDY = Reproduction(
    id="diversity/growth-pairs",
    title="Growth, initialization or diversity on pairs of sentences (SICK)",
    source=OWN,
    task="sentence",
    parts=(Part((TUNED_PLAIN, *GROWN), PAIRS),),
    extra="queries drawn 4 and 12 times as long, or trained at ten times the rate, without repulsion; expected "
    "beforehand: initialization has at least four fifths of what SVGD adds to plain",
    claims=(
        *(
            Claim(f"{label_arm(arm)} scores higher than plain, tuned (ours).", compare_arms(arm, TUNED_PLAIN))
            for arm in GROWN
        ),
        Claim(
            "SVGD scores higher than queries that are longer from the start: heads that differ help beyond heads that "
            "attend sharply (ours).",
            compare_arms(TUNED_SVGD, SHARPER),
        ),
        Claim(
            "SVGD scores higher than the part of it that only lengthens heads (ours).",
            compare_arms(TUNED_SVGD, TUNED_RADIAL),
        ),
        Claim("Each has more effective heads than plain (ours).", compare_arms(GROWN, TUNED_PLAIN, measure=EFFECTIVE)),
    ),
    drawn=draw_heads,
)

OURS = (*ON_LOGIC, *ON_QUESTIONS, *TUNED_STUDIES, GROWTH_STUDY, DECODER_STUDY)
