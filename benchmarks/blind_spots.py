"""Which measures of diversity are fooled by which trick: `python benchmarks/blind_spots.py` prints the table.

Eight heads that are different, and heads that a trick makes look more or less different than they are. A measure is
fooled when it moves by more than a tenth of the way from different heads to copies although what the heads say has not
changed, or stays away from its value at copies although they are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from headwise import metrics
from headwise.functional.alignment import cross_correlation, effective_number, log_determinant, multiply_features
from headwise.functional.cosine import squared_cosine_sum
from headwise.functional.subspaces import map_cosine, span_similarity
from headwise.similarity.terms import position_similarity

TOKENS, HEADS, SIZE, WIDTH, CLASSES = 512, 8, 16, 160, 10
TOLERANCE = 0.1


@dataclass(frozen=True)
class Layer:
    """What eight heads compute, and with which weights.

    Attributes:
        outputs: X, [N, H, e].
        values: W_V, [H, d, e].
        out: W_O, [H, e, d].
        classes: A reading of the residual stream, [d, C].
    """

    outputs: Tensor
    values: Tensor
    out: Tensor
    classes: Tensor

    def scaled(self, factors: list[float]) -> Layer:
        """Return the layer with the outputs and value weights of each head times a factor."""
        by = torch.tensor(factors, dtype=torch.float64)
        return replace(self, outputs=self.outputs * by[:, None], values=self.values * by[:, None, None])

    def mixed(self, matrices: Tensor) -> Layer:
        """Return the layer with another basis inside each head, [H, e, e], between W_V and W_O."""
        return replace(
            self,
            outputs=torch.einsum("nhe,hef->nhf", self.outputs, matrices),
            values=self.values @ matrices,
            out=torch.linalg.inv(matrices) @ self.out,
        )

    def copied(self) -> Layer:
        """Return the layer with eight copies of its first head."""
        first = [0] * HEADS
        return replace(self, outputs=self.outputs[:, first], values=self.values[first], out=self.out[first])


def _pairs(matrix: Tensor) -> float:
    return metrics.mean_over_pairs(matrix)


def _aligned(layer: Layer) -> Tensor:
    return multiply_features(layer.outputs).debiased_cka()


def _contributions(layer: Layer) -> metrics.EffectiveHeads:
    return metrics.effective_heads(layer.outputs, output_weights=layer.out.mT)


def _cosines(layer: Layer, power: int) -> Tensor:
    units = torch.nn.functional.normalize(layer.outputs, dim=-1)
    return (units @ units.mT).pow(power).mean(0)


def _disagreement(layer: Layer) -> float:
    contributions = torch.einsum("nhe,hed->nhd", layer.outputs, layer.out)
    return float(metrics.prediction_disagreement(contributions @ layer.classes))


def _mean_squared_cosine(outputs: Tensor) -> float:
    total, count = squared_cosine_sum(outputs)
    return float(total / count)


MEASURES: dict[str, Callable[[Layer], float]] = {
    "Dist": lambda layer: float(metrics.head_distance(layer.outputs)),
    "cosine": lambda layer: float(metrics.output_cosine(layer.outputs)),
    "squared cosine": lambda layer: _mean_squared_cosine(layer.outputs),
    "linear CKA": lambda layer: float(metrics.linear_cka(layer.outputs)),
    "debiased CKA": lambda layer: float(metrics.debiased_cka(layer.outputs)),
    "debiased CKA of contributions": lambda layer: float(
        metrics.debiased_cka(layer.outputs, output_weights=layer.out.mT)
    ),
    "unbiased HSIC": lambda layer: _pairs(multiply_features(layer.outputs).unbiased_hsic()),
    "HSIC with RBF kernels, x 1,000": lambda layer: 1e3 * float(metrics.rbf_hsic(layer.outputs)),
    "cross-correlation": lambda layer: _pairs(cross_correlation(layer.outputs)),
    "cross-correlation, matched": lambda layer: _pairs(cross_correlation(layer.outputs, matched=True)),
    "span of W_V": lambda layer: _pairs(span_similarity(layer.values)),
    "span of W_O": lambda layer: _pairs(span_similarity(layer.out.mT)),
    "squared cosine of W_V W_O": lambda layer: _pairs(map_cosine(layer.values, layer.out).square()),
    "log determinant of CKA": lambda layer: float(log_determinant(multiply_features(layer.outputs).linear_cka())),
    "disagreement of predictions": _disagreement,
    "effective heads, cosine": lambda layer: float(effective_number(_cosines(layer, 1))),
    "effective heads, squared cosine": lambda layer: float(effective_number(_cosines(layer, 2))),
    "effective heads, debiased CKA": lambda layer: float(effective_number(_aligned(layer))),
    "effective heads of contributions": lambda layer: _contributions(layer).number,
    "the same, weighted by variance": lambda layer: _contributions(layer).weighted,
}

# What the heads are in truth: as different as before, all copies, or four heads with a copy of opposite sign each.
DIFFERENT, COPIES, FOUR = 0.0, 1.0, -1.0
TRICKS = {
    "one head times 3": DIFFERENT,
    "rotated": DIFFERENT,
    "permuted": DIFFERENT,
    "another basis": DIFFERENT,
    "common vector": DIFFERENT,
    "noisy copies": COPIES,
    "scaled copies": COPIES,
    "copies of either sign": COPIES,
    "pairs of opposite sign": FOUR,
    "rotated copies": COPIES,
    "permuted copies": COPIES,
    "copies in other bases": COPIES,
    "common vector and copies of either sign": COPIES,
}


def make_layers() -> dict[str, Layer]:
    """Return "different" heads, "copies", and what each trick makes of one of the two."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape))

    decay = 0.8 ** torch.arange(SIZE, dtype=torch.float64)
    tokens = normal(TOKENS, HEADS, SIZE)
    outputs = torch.einsum("nhe,hef->nhf", tokens * decay, _rotations(rng))
    layer = Layer(
        outputs,
        normal(HEADS, WIDTH, SIZE) / WIDTH**0.5,
        normal(HEADS, SIZE, WIDTH) / SIZE**0.5,
        normal(WIDTH, CLASSES),
    )
    rotations = _rotations(rng)
    permutations = torch.stack([torch.eye(SIZE, dtype=torch.float64)[rng.permutation(SIZE)] for _ in range(HEADS)])
    stretch = torch.diag(torch.from_numpy(np.geomspace(1, 10, SIZE)))
    bases = torch.stack([_rotation(rng) @ stretch @ _rotation(rng) for _ in range(HEADS)])
    size = float(decay.square().mean().sqrt())
    common = 3 * normal(SIZE) * size
    copies = layer.copied()
    noisy = replace(
        copies,
        outputs=copies.outputs + 0.05 * normal(TOKENS, HEADS, SIZE) * size,
        values=copies.values + 0.05 * normal(HEADS, WIDTH, SIZE) / WIDTH**0.5,
        out=copies.out + 0.05 * normal(HEADS, SIZE, WIDTH) / SIZE**0.5,
    )
    signs = [1.0, -1.0] * (HEADS // 2)
    signed = copies.scaled(signs)
    even = [head - head % 2 for head in range(HEADS)]
    pairs = replace(layer, outputs=layer.outputs[:, even], values=layer.values[even], out=layer.out[even]).scaled(signs)
    return {
        "different": layer,
        "copies": copies,
        "one head times 3": layer.scaled([3.0] + [1.0] * (HEADS - 1)),
        "rotated": layer.mixed(rotations),
        "permuted": layer.mixed(permutations),
        "another basis": layer.mixed(bases),
        "common vector": replace(layer, outputs=layer.outputs + common),
        "noisy copies": noisy,
        "scaled copies": copies.scaled([1.0 + head for head in range(HEADS)]),
        "copies of either sign": signed,
        "pairs of opposite sign": pairs,
        "rotated copies": copies.mixed(rotations),
        "permuted copies": copies.mixed(permutations),
        "copies in other bases": copies.mixed(bases),
        "common vector and copies of either sign": replace(signed, outputs=signed.outputs + common),
    }


def _rotations(rng: Generator) -> Tensor:
    return torch.stack([_rotation(rng) for _ in range(HEADS)])


def _rotation(rng: Generator) -> Tensor:
    return torch.from_numpy(np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0])


def measure_all() -> dict[str, dict[str, float]]:
    """Return the value of every measure at every trick."""
    layers = make_layers()
    return {name: {trick: measure(layer) for trick, layer in layers.items()} for name, measure in MEASURES.items()}


def is_fooled(name: str, values: dict[str, float], trick: str) -> bool:
    """Whether a trick moves a measure more than a tenth of the way from the truth, different heads to copies."""
    truth = TRICKS[trick]
    if truth == FOUR:
        # four pairs of copies among 28 pairs; 4 heads of 8 on the way to 1
        counts = name.startswith(("effective", "the same", "log"))
        truth = (HEADS - HEADS / 2) / (HEADS - 1) if counts else (HEADS / 2) / (HEADS * (HEADS - 1) / 2)
    base, copies = values["different"], values["copies"]
    return abs((values[trick] - base) / (copies - base) - truth) > TOLERANCE


# What heads attend to, and what they read there: "own" values or the "same" ones.
ATTENTION = ("random, own", "same, own", "same, same", "random, same", "uniform, own", "uniform, same", "apart, own")
ATTENTION_MEASURES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "position term": lambda weights, _: float(position_similarity(weights)),
    "Jensen-Shannon": lambda weights, _: float(metrics.attention_jensen_shannon(weights)),
    "squared cosine": lambda _, outputs: _mean_squared_cosine(outputs),
    "debiased CKA": lambda _, outputs: float(metrics.debiased_cka(outputs)),
    "effective heads": lambda _, outputs: metrics.effective_heads(outputs).number,
}


def measure_attention() -> dict[str, dict[str, float]]:
    """Return the measures of attention weights and of the outputs they give, for what heads attend to and read."""
    rng = np.random.default_rng(2)
    batch, heads, length, size = 8, HEADS, 32, SIZE
    random = torch.from_numpy(2 * rng.normal(size=(batch, heads, length, length))).softmax(-1)
    own = torch.from_numpy(rng.normal(size=(batch, length, heads, size)))
    keys = (4 * torch.arange(heads)[:, None] + torch.arange(length)) % length
    apart = torch.nn.functional.one_hot(keys, length).double().expand(batch, -1, -1, -1)
    same = [0] * heads
    weights = {
        "random": random,
        "same": random[:, same],
        "uniform": torch.full_like(random, 1 / length),
        "apart": apart,
    }
    values = {"own": own, "same": own[:, :, same]}
    found = {}
    for case in ATTENTION:
        attended, read = case.split(", ")
        outputs = torch.einsum("bhqk,bkhe->bqhe", weights[attended], values[read])
        found[case] = {name: measure(weights[attended], outputs) for name, measure in ATTENTION_MEASURES.items()}
    return found


def render() -> str:
    """Return the table in Markdown; values of a fooled measure are bold."""
    table = measure_all()
    columns = ["different", "copies", *TRICKS]
    lines = ["| measure | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, values in table.items():
        cells = [f"{values['different']:z.3f}", f"{values['copies']:z.3f}"]
        for trick in TRICKS:
            cell = f"{values[trick]:z.3f}"
            cells.append(f"**{cell}**" if is_fooled(name, values, trick) else cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def render_attention() -> str:
    """Return the table of what heads attend to and read, in Markdown."""
    lines = [
        "| attention, values | " + " | ".join(ATTENTION_MEASURES) + " |",
        "|---" * (len(ATTENTION_MEASURES) + 1) + "|",
    ]
    for case, values in measure_attention().items():
        lines.append(f"| {case} | " + " | ".join(f"{values[name]:z.3f}" for name in ATTENTION_MEASURES) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{render()}\n\n{render_attention()}")
