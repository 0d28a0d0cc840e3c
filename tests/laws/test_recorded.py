"""Numbers that every public call gives on twelve families, recorded: a change of structure must leave them as they are.

`PYTHONPATH=src:tests python tests/laws/test_recorded.py` writes the record anew, after a change that is meant.
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from cases import thin, tiers
from heads.families import BY_NAME
from heads.family import Family
from laws.attaching import first, tensors

RECORD = Path(__file__).with_name("recorded.json")
FAMILIES = (
    "BERT",
    "GPT-2",
    "GPT-NeoX",
    "Llama",
    "Qwen3",
    "Phi-3",
    "DeepSeek-V3",
    "GPT-OSS",
    "T5",
    "ViT",
    "torch.nn.Transformer",
    "Falcon, 40B and 180B",
)
# builds are of float32, whose draws may differ in the last digit between processors
TOLERANCE = 1e-5
RULES = {
    "SVGD": hw.SVGD(),
    "SVGD, relative, IMQ": hw.SVGD(kernel=hw.kernels.IMQ(), alpha=hw.Relative(0.3)),
    "SPOS": hw.SPOS(inverse_temperature=100.0),
    "SGLD": hw.SGLD(inverse_temperature=100.0),
    "CosineRepulsion": hw.repulsion.CosineRepulsion(),
    "CosinePenalty": hw.repulsion.CosinePenalty(),
    "SpanSVGD": hw.repulsion.SpanSVGD(),
    "FunctionSVGD": hw.repulsion.FunctionSVGD(),
}
TERMS = {
    "Output": hw.similarity.Output(),
    "Subspace": hw.similarity.Subspace(),
    "Position": hw.similarity.Position(),
    "Position, recomputed": hw.similarity.Position(recompute=True),
    "PositionSquaredDifference": hw.similarity.PositionSquaredDifference(),
    "Frobenius": hw.similarity.Frobenius(),
    "SquaredCosine": hw.similarity.SquaredCosine(),
    "CKA": hw.similarity.CKA(),
    "HSIC": hw.similarity.HSIC(),
    "CrossCorrelation": hw.similarity.CrossCorrelation(),
    "LogDeterminant": hw.similarity.LogDeterminant(),
    "SpanOverlap": hw.similarity.SpanOverlap(),
    "MapCosine": hw.similarity.MapCosine(),
    "GroupedQueries": hw.similarity.GroupedQueries(hw.similarity.CKA()),
}
AGGREGATORS = {
    "EMRouting": hw.routing.EMRouting(iterations=3),
    "EMRouting, per head": hw.routing.EMRouting(votes=hw.routing.PerHead()),
    "SimpleRouting": hw.routing.SimpleRouting(),
    "Trunk": hw.routing.Trunk(),
    "Residual": hw.routing.Residual(hw.routing.SimpleRouting()),
}


def sign(values: list[Tensor]) -> list[float]:
    """The norm of some tensors and their product with a wave, to ten digits."""
    flat = torch.cat([value.detach().double().nan_to_num().flatten() for value in values] or [torch.zeros(1)])
    wave = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) * 0.7)
    return [float(f"{float(number):.10g}") for number in (flat.norm(), flat @ wave)]


def to_double(model: Any) -> Any:
    if hasattr(model, "set_experts_implementation"):
        # the fused product of experts takes no float64
        model.set_experts_implementation("eager")
    return model.double()


class Sandbox:
    """A new copy of the same model and its heads for each call."""

    def __init__(self, family: Family) -> None:
        model = to_double(family.build())
        self._made = model, hw.find_heads(model)
        inputs = family.inputs(padded=family.maskable)
        self.inputs = {name: one.double() if one.is_floating_point() else one for name, one in inputs.items()}

    def open(self) -> tuple[Any, hw.Heads]:
        torch.manual_seed(5)
        # to find the heads anew takes several times as long
        return copy.deepcopy(self._made)

    def run(self, model: Any) -> list[Tensor]:
        return tensors(model(**self.inputs))

    def losses(self, model: Any) -> Tensor:
        """A loss of each item, [B], which no symmetry makes flat."""
        out = first(model(**self.inputs)).nan_to_num().flatten(1)
        return (out * torch.linspace(-1.0, 2.0, out.shape[1], dtype=out.dtype)).mean(1)

    def loss(self, model: Any) -> Tensor:
        return self.losses(model).mean()

    def attached(self, attach: Callable[[hw.Heads], Any]) -> list[Any]:
        """Outputs with something attached, and what it is printed as."""
        model, heads = self.open()
        handle = attach(heads)
        for name, parameter in model.named_parameters():
            if "mixer" in name or "gate" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        with torch.no_grad():
            return [repr(handle), *sign(self.run(model))]

    def stepped(self, rule: Any) -> list[Any]:
        """Parameters after two steps of an optimizer under repulsion."""
        model, heads = self.open()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with hw.repel(heads, rule, optimizer):
            for _ in range(2):
                optimizer.zero_grad()
                self.loss(model).backward()
                optimizer.step()
        return sign(list(model.parameters()))

    def penalized(self, term: Any) -> list[Any]:
        model, heads = self.open()
        with hw.Disagreement(heads, term) as penalty:
            self.loss(model)
            value = penalty()
        if value.requires_grad:
            value.backward()
        slopes = [one.grad for one in model.parameters() if one.grad is not None]
        return [*sign([value]), *sign(slopes)]

    def aggregated(self, setting: Any) -> list[Any]:
        model, heads = self.open()
        hw.aggregate(heads, setting)
        self.loss(model).backward()
        slopes = [one.grad for one in model.parameters() if one.grad is not None]
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            hw.save(model, Path(folder) / "saved")
            loaded = to_double(hw.load(Path(folder) / "saved"))
            return [*sign(self.run(model)), *sign(slopes), *sign(self.run(loaded.eval()))]

    def tapped(self, name: str) -> list[Any]:
        model, heads = self.open()
        with torch.no_grad(), hw.Taps(heads, **{name: True}) as taps:
            self.run(model)
            return sign([getattr(capture, name) for capture in taps.read()])

    def pruned(self) -> list[Any]:
        model, heads = self.open()
        hw.prune(heads, keep=0.5, importance=self.ranked(heads), inputs=self.inputs)
        with torch.no_grad():
            return sign(self.run(model))

    def merged(self) -> list[Any]:
        model, heads = self.open()
        hw.merge(heads, 1, batches=[self.inputs])
        with torch.no_grad():
            return sign(self.run(model))

    def ranked(self, heads: hw.Heads) -> hw.heads.Importance:
        return hw.importance(heads, lambda: self.losses(heads.model), method="first_order")

    def blocks(self) -> list[Any]:
        heads = self.open()[1]
        return [repr(hw.heads.head_blocks(heads))]

    def jittered(self) -> list[Any]:
        model, heads = self.open()
        hw.repulsion.jitter(heads, 0.1)
        return sign(list(model.parameters()))


def bias_of(_site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
    shape = (call.heads, call.queries, call.keys)
    count = shape[0] * shape[1] * shape[2]
    return torch.sin(torch.arange(count, dtype=torch.float64)).view(1, *shape)


def list_calls(sandbox: Sandbox) -> Iterator[tuple[str, Callable[[], Any]]]:
    _, heads = sandbox.open()
    yield "find_heads", lambda: str(heads)
    yield "verify", lambda: str(hw.verify(heads, sandbox.inputs))
    yield "importance", lambda: sign([*sandbox.ranked(heads).drops.values()])
    yield "measure", lambda: hw.measure(heads, [0], forward=lambda one, _: one(**sandbox.inputs)).summary
    for name in ("outputs", "values", "weights", "mean_weights"):
        yield f"Taps, {name}", lambda name=name: sandbox.tapped(name)
    yield "ablate", lambda: sandbox.attached(lambda heads: hw.ablate(heads, 1))
    yield "bias_heads", lambda: sandbox.attached(lambda heads: hw.bias_heads(heads, bias_of))
    yield "drop_heads", lambda: sandbox.attached(lambda heads: hw.drop_heads(heads, 0.5, seed=3))
    yield "mix_heads", lambda: sandbox.attached(hw.mix_heads)
    yield "gate_heads", lambda: sandbox.attached(lambda heads: hw.gate_heads(heads, hw.gating.SigmoidGate()))
    yield (
        "gate_heads, mixture",
        lambda: sandbox.attached(lambda heads: hw.gate_heads(heads, hw.gating.MixtureOfHeads(shared=1, active=2))),
    )
    for name, rule in RULES.items():
        yield f"repel, {name}", lambda rule=rule: sandbox.stepped(rule)
    for name, term in TERMS.items():
        yield f"Disagreement, {name}", lambda term=term: sandbox.penalized(term)
    for name, setting in AGGREGATORS.items():
        yield f"aggregate, {name}", lambda setting=setting: sandbox.aggregated(setting)
    yield "prune", sandbox.pruned
    yield "merge", sandbox.merged
    yield "head_blocks", sandbox.blocks
    yield "jitter", sandbox.jittered


def compute(name: str) -> dict[str, Any]:
    """What every public call gives on one family: numbers, printed text, or the kind of its refusal."""
    sandbox, found = Sandbox(BY_NAME[name]), {}
    for call, run in list_calls(sandbox):
        try:
            found[call] = run()
        except hw.errors.HeadwiseError as error:
            found[call] = type(error).__name__
    return found


def list_differences(found: Any, recorded: Any) -> Iterator[str]:
    """Yield a line for each call whose numbers are other ones."""
    for call in sorted(found.keys() | recorded.keys()):
        one, other = found.get(call), recorded.get(call)
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            pairs = zip(one, other, strict=True)
            if all(a == b if isinstance(a, str) else abs(a - b) <= TOLERANCE * (1 + abs(b)) for a, b in pairs):
                continue
        elif one == other:
            continue
        yield f"{call}: {one}, recorded {other}"


@pytest.mark.filterwarnings("ignore")
@tiers("name", *thin(FAMILIES, 3))
def test_public_calls_give_the_recorded_numbers(name: str):
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))[name]
    assert list(list_differences(compute(name), recorded)) == []


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    everything = {name: compute(name) for name in FAMILIES}
    families = [
        f"{json.dumps(name)}: {{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in calls.items()) + "\n}"
        for name, calls in everything.items()
    ]
    # a call a line, so that a change of one shows as one
    RECORD.write_text("{\n" + ",\n".join(families) + "\n}\n", encoding="utf-8")
