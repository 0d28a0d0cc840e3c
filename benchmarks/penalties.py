"""Cost of each diversity term, rule and rival in a training step of encoder layers of base shape, against plain torch.

All variants run interleaved in one process, and the median over rounds of the ratio within a round is the result. The
plain model runs twice per round, so that the A/A ratio shows the noise of the machine. Ratios are of CPU time on a CPU,
with those of wall time beside. A strength by share or by target measures every 20 steps: "measured" is the step in
which it does, "between" one in which it does not. Run by `make bench`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.heads.heads import Heads
from headwise.nn.difference import pair_heads
from headwise.nn.multihead import adopt
from headwise.repulsion.rules import Rule
from timing import console, default_device, interleaved_clocks, new_record, ratio, write

WIDTH, HEADS, INNER, LAYERS = 512, 8, 2048, 2
BATCH, LENGTH = 16, 64
PLAIN, AGAIN = "plain", "plain again"
TERMS = {
    "Output": hw.similarity.Output(),
    "SquaredCosine": hw.similarity.SquaredCosine(),
    "CKA": hw.similarity.CKA(),
    "CKA of contributions": hw.similarity.CKA(of="contributions"),
    "CKA, 8 random directions": hw.similarity.CKA(sketch=8),
    "HSIC": hw.similarity.HSIC(),
    "HSIC of contributions": hw.similarity.HSIC(of="contributions"),
    "CrossCorrelation": hw.similarity.CrossCorrelation(),
    "CrossCorrelation, matched": hw.similarity.CrossCorrelation(matched=True),
    "LogDeterminant": hw.similarity.LogDeterminant(),
    "SpanOverlap": hw.similarity.SpanOverlap(),
    "MapCosine": hw.similarity.MapCosine(),
}
GATES = {
    "SigmoidGate": hw.gating.SigmoidGate(),
    "SigmoidGate per element": hw.gating.SigmoidGate("element"),
    "MixtureOfHeads": hw.gating.MixtureOfHeads(shared=2, active=4),
}
MIXED = (("logits",), ("weights",), ("logits", "weights"))
PAIRED = {"differential attention": True, "differential attention, one map": False}
MUON = {"Muon": False, "Muon per head": True}
RULES: dict[str, Rule] = {
    "SVGD": hw.SVGD(),
    "SVGD on directions": hw.SVGD(kernel=hw.kernels.NormalizedRBF()),
    "FunctionSVGD": hw.repulsion.FunctionSVGD(),
    "FunctionSVGD on directions": hw.repulsion.FunctionSVGD(kernel=hw.kernels.NormalizedRBF()),
    "SpanSVGD": hw.repulsion.SpanSVGD(),
}
TARGET = hw.Target(effective_heads=HEADS)
STRENGTHS = {"relative": hw.Relative(0.1), "target": TARGET}
# the first step of a run measures, and no other of so few
EVERY = {"between": 10_000, "measured": 1}


class Variant:
    """One way to train the layers.

    Args:
        device: Where.
        term: What a penalty lowers; None for no penalty.
        strength: A strength that is measured against the loss; None adds the penalty as it is.
        every: Steps from one measurement to the next.
        rule: What repels the heads; None for no repulsion.
        gates: What gates the heads; None for no gates.
        mixed: Which matrices of talking heads there are: "logits", "weights".
        second: Whether paired heads have a second map; None for heads as they are.
        dropped: Rate of DropHead.
        per_head: Whether Muon acts on each head alone, or on whole projections; None for AdamW.
    """

    def __init__(
        self,
        device: torch.device,
        term: hw.similarity.Output | hw.similarity.CKA | None = None,
        *,
        strength: hw.Relative | hw.Target | None = None,
        every: int = 20,
        rule: Rule | None = None,
        gates: hw.gating.SigmoidGate | hw.gating.MixtureOfHeads | None = None,
        mixed: Sequence[str] = (),
        second: bool | None = None,
        dropped: float = 0.0,
        per_head: bool | None = None,
    ) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.1, batch_first=True)
        self.model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(device)
        if second is not None:
            for index, site in enumerate(hw.find_heads(self.model), start=1):
                adopt(self.model, site.module)
                pair_heads(site.module, index, second=second)
            self.model.to(device)
        heads = hw.find_heads(self.model)
        if dropped:
            hw.drop_heads(heads, dropped, seed=0)
        self.gating = None if gates is None else hw.gate_heads(heads, gates)
        if mixed:
            hw.mix_heads(heads, logits="logits" in mixed, weights="weights" in mixed)
        self.balanced = isinstance(gates, hw.gating.MixtureOfHeads)
        self.optimizer = make_optimizer(self.model, heads, per_head)
        self.penalty = None if term is None else hw.Disagreement(heads, term, strength=strength, every=every)
        if rule is not None:
            hw.repel(heads, rule, self.optimizer, every=every)

    def step(self, x: Tensor) -> None:
        """Train one step on a batch [B, L, d]."""
        loss = (self.model(x) - x).square().mean()
        if self.penalty is not None:
            loss = loss + self.penalty() if self.penalty.strength is None else self.penalty.loss(loss)
        if self.gating is not None and self.balanced:
            loss = self.gating.loss(loss)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def make_optimizer(model: nn.Module, heads: Heads, per_head: bool | None) -> torch.optim.Optimizer:
    """Return AdamW, or Muon on the projections of heads and AdamW on the rest, as the laboratory's."""
    groups = [{"params": list(model.parameters()), "lr": 1e-4, "weight_decay": 0.01}]
    if per_head is None:
        return torch.optim.AdamW(groups, fused=True)
    blocks = hw.optim.split_heads(heads, per_head=per_head)
    own, rest = ([p for p in model.parameters() if (p in blocks) == split] for split in (True, False))
    adamw = torch.optim.AdamW([{**groups[0], "params": rest}], fused=True)
    return hw.optim.PerHeadMuon([{**groups[0], "params": own}], blocks, adamw, names={})


def make_variants(device: torch.device) -> dict[str, Variant]:
    variants = {PLAIN: Variant(device), AGAIN: Variant(device)}
    variants |= {name: Variant(device, term) for name, term in TERMS.items()}
    variants |= {
        f"CKA, {kind}, {when}": Variant(device, hw.similarity.CKA(), strength=strength, every=every)
        for kind, strength in STRENGTHS.items()
        for when, every in EVERY.items()
    }
    variants |= {name: Variant(device, rule=rule) for name, rule in RULES.items()}
    variants |= {
        f"SVGD, target, {when}": Variant(device, rule=hw.SVGD(alpha=TARGET), every=every)
        for when, every in EVERY.items()
    }
    variants |= {name: Variant(device, gates=gates) for name, gates in GATES.items()}
    variants |= {name: Variant(device, second=second) for name, second in PAIRED.items()}
    variants |= {name: Variant(device, per_head=per_head) for name, per_head in MUON.items()}
    variants["DropHead"] = Variant(device, dropped=0.1)
    return variants | {f"talking heads, {' and '.join(mixed)}": Variant(device, mixed=mixed) for mixed in MIXED}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default=default_device().type)
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    record = new_record("penalties", device)
    x = torch.randn(BATCH, LENGTH, WIDTH, device=device)
    runs: dict[str, Callable[[], object]] = {
        name: (lambda variant=variant: variant.step(x)) for name, variant in make_variants(device).items()
    }
    wall, cpu = interleaved_clocks(device, runs, arguments.rounds, f"{LAYERS} layers, batch {BATCH} x {LENGTH}")
    seconds = cpu if device.type == "cpu" else wall
    ratios = {name: ratio(seconds, name, PLAIN) for name in runs if name != PLAIN}
    record |= {
        "layers": LAYERS,
        "width": WIDTH,
        "heads": HEADS,
        "batch": BATCH,
        "length": LENGTH,
        "rounds": arguments.rounds,
        "plain step seconds": statistics.median(wall[PLAIN]),
        "plain step CPU seconds": statistics.median(cpu[PLAIN]),
        "ratio to plain": ratios,
        "ratio of wall time": {name: ratio(wall, name, PLAIN) for name in ratios},
        "seconds": wall,
        "CPU seconds": cpu,
    }
    console.print(f"{LAYERS} layers of width {WIDTH}, batch {BATCH} x {LENGTH}; step time relative to plain")
    for name, value in ratios.items():
        console.print(f"  {name:<28} {value:8.4f}")
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
