"""What merging key/value heads costs: small decoders trained on bytes of a text, without training afterwards.

For each family and seed a multi-head model is trained for a minute; then its key/value heads are merged to a half, a
quarter and one, in every way that leads to that of `hw.merge`: averaging as it is (Ainslie et al. 2023), with and
without a refit of W_O, aligning, the closed form, grouping. The loss is nats per byte of held-out text. Run by
`make bench NAME=merging ARGS="--text ... --held-out ..."`.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from scipy.stats import t as student
from torch import Tensor

import headwise as hw
from timing import console, default_device, new_record, write

FAMILIES = ("Llama", "Qwen3", "Gemma")
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "max_position_embeddings": 128}
HEADS, SIZE, LENGTH = 8, 16, 128
AVERAGED, REFITTED = "averaged as they are, neighbors", "averaged as they are, neighbors, W_O refitted"
MERGED = "closed form, groups of similar heads, W_O refitted"
# What the added loss may be of that of averaging, and how sure the gain on averaging with the same refit must be.
SHARE, LEVEL = 0.25, 0.95


def read_bytes(path: Path) -> Tensor:
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def draw(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return sequences [count, LENGTH] from random places of a text."""
    starts = torch.randint(len(text) - LENGTH, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(LENGTH)]


def build(family: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=256, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=SIZE, **SIZES
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def train(model: Any, text: Tensor, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    model.train()
    for _ in range(steps):
        batch = draw(text, 16, generator)
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def measure(model: Any, batches: Sequence[Tensor]) -> float:
    with torch.no_grad():
        return statistics.fmean(float(model(batch, labels=batch).loss) for batch in batches)


def merge_all(model: Any, calibration: Sequence[Tensor], held_out: Sequence[Tensor]) -> dict[str, dict[str, float]]:
    """Return the loss of each way, by the number of key/value heads."""
    losses = {}
    for groups in (HEADS // 2, HEADS // 4, 1):
        merged = copy.deepcopy(model)
        merging = hw.merge(
            hw.find_heads(merged), groups, batches=calibration, score=lambda merged=merged: -measure(merged, held_out)
        )
        losses[str(groups)] = {step.way: -float(step.score or math.nan) for step in merging.steps}
        console.print(f"    {groups} key/value heads; {next(iter(merging.free.values()))}")
        for way, loss in losses[str(groups)].items():
            console.print(f"      {way:<55} {loss:.4f}  {loss - losses[str(groups)]['whole model']:+.4f}")
    return losses


def judge(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return what merging to a half costs of what averaging does, and its gain on averaging with the same refit."""
    half = [run["losses"][str(HEADS // 2)] for run in runs]

    def added(way: str) -> list[float]:
        return [losses[way] - losses["whole model"] for losses in half]

    gains = [refitted - merged for refitted, merged in zip(added(REFITTED), added(MERGED), strict=True)]
    mean = statistics.fmean(gains)
    spread = 0.0 if len(gains) < 2 else statistics.stdev(gains) / math.sqrt(len(gains))
    reach = spread * float(student.ppf((1 + LEVEL) / 2, max(len(gains) - 1, 1)))
    return {
        "added by averaging": statistics.fmean(added(AVERAGED)),
        "added by averaging, W_O refitted": statistics.fmean(added(REFITTED)),
        "added by merging": statistics.fmean(added(MERGED)),
        "share of averaging": statistics.fmean(added(MERGED)) / statistics.fmean(added(AVERAGED)),
        "share of averaging, W_O refitted": statistics.fmean(added(MERGED)) / statistics.fmean(added(REFITTED)),
        "gain on averaging with the refit": mean,
        "gain, low": mean - reach,
        "gain, high": mean + reach,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="training text, plain or .gz")
    parser.add_argument("--held-out", type=Path, required=True, help="text for the losses, plain or .gz")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--calibration", type=int, default=64, help="training sequences of 128 bytes")
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    device = default_device()
    record = new_record("merging", torch.device("cpu"))
    text, other = read_bytes(arguments.text), read_bytes(arguments.held_out)
    held_out = draw(other, 128, torch.Generator().manual_seed(1)).split(32)
    families: dict[str, Any] = {}
    for family in arguments.families:
        runs = []
        for seed in range(arguments.seeds):
            model = build(family, seed)
            train(model, text, arguments.steps, seed)
            calibration = draw(text, arguments.calibration, torch.Generator().manual_seed(1000 + seed)).split(8)
            console.print(f"{family}, seed {seed}")
            runs.append({"seed": seed, "losses": merge_all(model, calibration, held_out)})
        verdict = judge(runs)
        families[family] = {"runs": runs, "at a half": verdict}
        console.print(
            f"{family}, merged to a half: " + ", ".join(f"{key} {value:.4f}" for key, value in verdict.items())
        )
        console.print(
            f"  at most {SHARE} of averaging: {verdict['share of averaging'] <= SHARE}; "
            f"below averaging with the same refit at {LEVEL:.0%}: {verdict['gain, low'] > 0}"
        )
    names = {"text": arguments.text.name, "held out": arguments.held_out.name}
    sizes = {**SIZES, "heads": HEADS, "head size": SIZE, "length": LENGTH}
    record |= {"files": names, "sizes": sizes, "steps": arguments.steps, "calibration": arguments.calibration}
    record["families"] = families
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
