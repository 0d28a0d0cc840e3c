"""Time pruned and merged models against the whole one: MiniLM, and a decoder that reads a prompt and generates.

Half of the heads of a pretrained MiniLM are removed; of a Llama with random weights half and three quarters of the
heads are removed, or of its key/value heads merged. Models take turns in one process, and the result is the median
over rounds of the ratio within a round, of CPU time (on a GPU of the time between two events); the whole model runs
twice, so that the A/A ratio shows the noise of the machine. The bytes of the cache are counted. Run by
`make bench NAME=shrinking`.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import headwise as hw
from minilm import pretrained
from timing import console, default_device, interleaved, new_record, ratio, write

WHOLE, AGAIN = "whole", "whole, again"
# Milliseconds at half of MiniLM's heads, relative to the whole.
TARGET = 0.85
HEADS = 16
DECODER = {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1024}


def remove(model: nn.Module, keep: float) -> nn.Module:
    """Return a copy without heads; which ones makes no difference to its speed."""
    pruned = copy.deepcopy(model)
    heads = hw.find_heads(pruned)
    hw.prune(heads, keep=keep, importance={site.name: torch.arange(site.num_heads) for site in heads})
    return pruned


def merged(model: nn.Module, groups: int, batch: Tensor) -> nn.Module:
    copied = copy.deepcopy(model)
    hw.merge(hw.find_heads(copied), groups, batches=[batch], grouping="order", refit=False)
    return copied


def time_runs(device: torch.device, runs: Mapping[str, Callable[[], object]], rounds: int, what: str) -> dict[str, Any]:
    # of the process: on a machine that others use too, the time on the wall is not its own
    seconds = interleaved(device, runs, rounds, what, time.process_time)
    ratios = {name: ratio(seconds, name, WHOLE) for name in runs if name != WHOLE}
    console.print(f"{what}: time relative to the whole model")
    for name, value in ratios.items():
        console.print(f"  {name:<34} {value:8.4f}")
    return {"ratio": ratios, "seconds": seconds}


@torch.no_grad()
def read(model: Any, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
    """Return the logits and the cache; it is given by its place, as its name depends on the version."""
    return model(ids, None, None, cache, use_cache=True, return_dict=False)


def generate(model: Any, logits: Tensor, filled: Any, tokens: int) -> None:
    """Generate tokens after a prompt whose cache is given and stays as it is."""
    cache = copy.deepcopy(filled)
    for _ in range(tokens):
        logits, cache = read(model, logits[:, -1:].argmax(-1), cache)


def count_cache(filled: Any) -> int:
    return sum(one.nbytes for layer in filled.layers for one in (layer.keys, layer.values))


def time_minilm(device: torch.device, rounds: int, batch: int, length: int) -> dict[str, Any]:
    model = pretrained().eval().to(device)
    torch.manual_seed(0)
    given = {"input_ids": torch.randint(1000, 20_000, (batch, length), device=device)}
    models = {WHOLE: model, AGAIN: model, "half of the heads removed": remove(model, 0.5)}

    def run(one: nn.Module) -> object:
        with torch.no_grad():
            return one(**given)

    found = time_runs(device, {name: lambda one=one: run(one) for name, one in models.items()}, rounds, "MiniLM")
    passed = found["ratio"]["half of the heads removed"] <= TARGET
    console.print(f"  at most {TARGET}: {passed}")
    return {"batch": batch, "length": length, **found}


def time_decoder(device: torch.device, rounds: int, batch: int, length: int, tokens: int) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        **DECODER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 4096,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    model.to(device)
    ids = torch.randint(DECODER["vocab_size"], (batch, length), device=device)
    short = ids[:, :16]
    models = {WHOLE: model, AGAIN: model}
    for share in (0.5, 0.25):
        models[f"{share:.0%} of the heads kept"] = remove(model, share)
    for groups in (HEADS // 2, HEADS // 4, 1):
        models[f"{groups} of {HEADS} key/value heads"] = merged(model, groups, short)
    filled = {name: read(one, ids) for name, one in models.items()}
    reading = {name: lambda one=one: read(one, ids) for name, one in models.items()}
    generating = {name: lambda name=name, one=one: generate(one, *filled[name], tokens) for name, one in models.items()}
    cache = {name: count_cache(each) for name, (_, each) in filled.items()}
    console.print("bytes of the cache: " + ", ".join(f"{name} {size:,}" for name, size in cache.items()))
    return {
        "batch": batch,
        "length": length,
        "generated": tokens,
        "sizes": sizes,
        "cache": cache,
        "prefill": time_runs(device, reading, rounds, "Llama, reading a prompt"),
        "decode": time_runs(device, generating, rounds, "Llama, generating with a cache"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=16, help="sequences of MiniLM")
    parser.add_argument("--length", type=int, default=128, help="their tokens")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt of the decoder")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that it generates")
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    device = default_device()
    record = new_record("shrinking", device)
    record["rounds"] = arguments.rounds
    record["minilm"] = time_minilm(device, arguments.rounds, arguments.batch, arguments.length)
    record["decoder"] = time_decoder(device, arguments.rounds, arguments.prompts, arguments.prompt, arguments.tokens)
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
