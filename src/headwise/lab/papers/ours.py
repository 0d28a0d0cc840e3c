"""Our own question: which methods raise the effective number of heads, and at what score."""

from headwise.lab.papers.claims import Claim, Contrast
from headwise.lab.papers.reproduction import Part, Reproduction
from headwise.lab.papers.sizes import logic

# Every penalty and every repulsion at a tenth of the gradient of the loss on the heads.
PENALTIES = (
    *("subspace-relative", "position-relative", "output-relative"),
    *("squared-cosine", "cka", "hsic", "correlation", "determinant", "span", "map"),
)
SMOOTHING, TURNING = ("svgd-relative",), ("svgd-function", "svgd-span")
CONTROLS = {
    **dict.fromkeys((*PENALTIES, "cka-target", "drophead"), "plain"),
    **dict.fromkeys((*SMOOTHING, "svgd-target"), "smooth"),
    **dict.fromkeys(TURNING, "scaled"),
}
EFFECTIVE = "effective_heads"


def _compare(arms: tuple[str, ...], measure: str | None = None) -> tuple[Contrast, ...]:
    return tuple(Contrast(arm, CONTROLS[arm], measure=measure) for arm in arms)


def _study(name: str, title: str, arms: tuple[str, ...], *claims: Claim) -> Reproduction:
    controls = tuple(dict.fromkeys(CONTROLS[arm] for arm in arms))
    return Reproduction(
        id=f"diversity/{name}",
        title=title,
        source="ours",
        task="logic",
        parts=(Part(tuple(dict.fromkeys(("plain", *controls, *arms))), logic()),),
        extra="everything: a strength of 0.1 relative to the gradient of the loss on the heads; targets of three heads",
        claims=claims,
    )


PENALIZED = _study(
    "penalties",
    "Penalties at a tenth of the gradient: effective heads and score",
    (*PENALTIES, "cka-target", "drophead"),
    Claim("Penalties raise the effective number of heads (ours).", _compare(PENALTIES, EFFECTIVE)),
    Claim("So does a penalty with a target (ours).", _compare(("cka-target",), EFFECTIVE)),
    Claim("So does dropping heads at random (ours).", _compare(("drophead",), EFFECTIVE)),
    Claim("Heads that a penalty made different score higher (the idea of all of it).", _compare(PENALTIES)),
)
REPELLED = _study(
    "repulsion",
    "Repulsion at a tenth of the gradient: effective heads and score",
    (*SMOOTHING, *TURNING, "svgd-target"),
    Claim("Repulsion raises the effective number of heads (ours).", _compare((*SMOOTHING, *TURNING), EFFECTIVE)),
    Claim("So does repulsion with a target (ours).", _compare(("svgd-target",), EFFECTIVE)),
    Claim("Heads that repel one another score higher (the idea of all of it).", _compare((*SMOOTHING, *TURNING))),
)

OURS = (PENALIZED, REPELLED)
