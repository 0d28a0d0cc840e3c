"""What a step of Muon on each head costs: batched over heads, in a loop over blocks, and on whole matrices.

The optimizers step on the same gradients of a small Llama, interleaved in one process. Run by `make bench NAME=muon`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw
from timing import console, default_device, interleaved_clocks, new_record, ratio, write

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
BATCHED, LOOP, WHOLE, ADAMW = "per_head_muon", "a loop over blocks", "torch.optim.Muon", "AdamW"


def make_steps(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the step of each optimizer, on a model of its own; all but AdamW have AdamW on the rest too."""
    steps: dict[str, Callable[[], object]] = {}
    for name in (BATCHED, LOOP, WHOLE, ADAMW):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=4, **SIZES))
        model = model.to(device)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        if name == ADAMW:
            steps[name] = torch.optim.AdamW(model.parameters()).step
            continue
        both = hw.optim.per_head_muon(model)
        if name == BATCHED:
            steps[name] = both.step
            continue
        by_head, whole, *rest = [group["params"] for group in both.param_groups]
        views = hw.optim.split_heads(hw.find_heads(model)) if name == LOOP else {}
        leaves = [*whole, *(() if views else by_head)]
        for parameter, blocks in views.items():
            # what a user writes: a leaf for each block, with its part of the gradient
            whole_gradient: Any = parameter.grad
            for own, gradient in ((block.read(parameter.detach()), block.read(whole_gradient)) for block in blocks):
                for leaf, part in zip(own, gradient, strict=True):
                    leaves.append(nn.Parameter(leaf))
                    leaves[-1].grad = part
        muon = torch.optim.Muon(leaves, adjust_lr_fn="match_rms_adamw")
        others = torch.optim.AdamW([parameter for group in rest for parameter in group])
        steps[name] = lambda muon=muon, others=others: (muon.step(), others.step())
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default=default_device().type)
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    record = new_record("muon", device)
    wall, cpu = interleaved_clocks(device, make_steps(device), arguments.rounds, "steps of optimizers")
    seconds = cpu if device.type == "cpu" else wall
    ratios = {name: ratio(seconds, name, WHOLE) for name in seconds}
    for name, value in ratios.items():
        console.print(f"  {name:<20} {statistics.median(seconds[name]) * 1e3:8.2f} ms  {value:6.3f} of {WHOLE}")
    sizes = {**SIZES, "rounds": arguments.rounds}
    record |= sizes | {f"ratio to {WHOLE}": ratios, "seconds": wall, "CPU seconds": cpu}
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
