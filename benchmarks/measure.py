"""Compare the cost of `measure`, which removes every head of a model, with separate evaluations without each head.

The model is MiniLM, or one of its shape with other layers and drawn weights (`--layers 12`). A pass without a head of
a layer need not run what comes before it: with L layers, starting at that layer takes (L + 1) / (2L) of the time.

Both run alternately on the same sentences; the result is the median over rounds of the ratio within a round, on a CPU
of CPU time. The separate evaluations only run the model and the score once per removed head and read nothing from the
heads. Run by `make bench NAME=measure`, which makes the allocator keep its memory in both cases.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

import headwise as hw
from minilm import pretrained
from timing import console, default_device, new_record, ratio, timed, write

MEASURE, SEPARATE = "measure", "separate evaluations"
LENGTH = 40


def make_model(layers: int) -> nn.Module:
    """Return MiniLM, or a model of its shape with other layers."""
    model: Any = pretrained()
    if layers == model.config.num_hidden_layers:
        return model
    model.config.num_hidden_layers = layers
    torch.manual_seed(0)
    return AutoModel.from_config(model.config)


def fidelity(whole: dict[int, Tensor]):
    def score(output, batch: dict[str, Tensor]) -> Tensor:
        states = output.last_hidden_state[:, 0]
        return nn.functional.cosine_similarity(states, whole.setdefault(id(batch), states), dim=-1)

    return score


def separate(model: nn.Module, heads: hw.Heads, batches: list[dict[str, Tensor]]) -> None:
    """Evaluate the model once without each head."""
    score = fidelity({})
    with torch.no_grad():
        for site in heads:
            for head in range(site.num_heads):
                with hw.ablate(replace(heads, sites=(site,)), head):
                    for batch in batches:
                        score(model(**batch), batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    device = default_device()
    model = make_model(arguments.layers).to(device).eval()
    heads = hw.find_heads(model)
    torch.manual_seed(0)
    batches = [
        {
            "input_ids": torch.randint(1000, 20_000, (min(arguments.batch, arguments.sentences - start), LENGTH)).to(
                device
            ),
            "attention_mask": torch.ones(min(arguments.batch, arguments.sentences - start), LENGTH).long().to(device),
        }
        for start in range(0, arguments.sentences, arguments.batch)
    ]
    report = hw.measure(heads, batches[:1], score=fidelity({}))
    if not report.replayed:
        raise SystemExit(f"measure reused no computation: {report.notes}")
    sides = {
        MEASURE: lambda: hw.measure(heads, batches, score=fidelity({})),
        SEPARATE: lambda: separate(model, heads, batches),
    }
    record = new_record("measure", device)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.rounds):
        # the two sides take turns going first
        for name in list(sides)[:: 1 if number % 2 else -1]:
            seconds[name].append(timed(device, sides[name], time.process_time))
        console.print(f"round {number + 1}: {seconds[MEASURE][-1]:.1f} s against {seconds[SEPARATE][-1]:.1f} s")
    found = ratio(seconds, MEASURE, SEPARATE)
    heads_removed = sum(site.num_heads for site in heads)
    record |= {"sentences": arguments.sentences, "batch": arguments.batch, "length": LENGTH, "rounds": arguments.rounds}
    record |= {"memory": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}}
    expected = (arguments.layers + 1) / (2 * arguments.layers)
    record |= {
        "layers": arguments.layers,
        "heads": heads_removed,
        "ratio": found,
        "expected": expected,
        "seconds": seconds,
    }
    console.print(
        f"measure with {heads_removed} heads removed, over {heads_removed} evaluations: {found:.3f} (by layers "
        f"alone: {expected:.3f})"
    )
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
