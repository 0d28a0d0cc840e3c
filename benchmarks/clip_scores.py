"""Cost of hw.clip_scores in a training step: the same model without it, and with each way to measure scores.

All variants run interleaved in one process, and the median over rounds of the ratio within a round is the result. The
plain model runs twice per round, so that the A/A ratio shows the noise of the machine. Ratios are of CPU time on a CPU,
with those of wall time beside. In "clipped" the limit is so low that every head is scaled in every step. Run by `make
bench NAME=clip_scores`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headwise as hw
from timing import console, default_device, interleaved_clocks, new_record, ratio, write

PLAIN, AGAIN, CLIPPED = "plain", "plain again", "bound, clipped"
MEASURES = ("bound", "sample", "exact")
LIMIT, LOW = 1e9, 1e-9
# layers of SmolLM2-135M, with fewer of them and a small vocabulary, which cost less than those of the whole model
DECODER = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
LAYERS, VOCABULARY, BATCH, LENGTH = 3, 2048, 1, 512
ENCODER: dict[str, Any] = {"d_model": 512, "nhead": 8, "dim_feedforward": 2048}
ENCODER_LAYERS, ENCODER_BATCH, ENCODER_LENGTH = 2, 16, 64


def make_decoder(device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a Llama and what computes its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {**DECODER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model = model.to(device)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)
    return model, lambda own: own(input_ids=tokens, labels=tokens, use_cache=False).loss


def make_encoder(device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a torch encoder and what computes its loss."""
    layer = nn.TransformerEncoderLayer(**ENCODER, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, ENCODER_LAYERS, enable_nested_tensor=False).to(device)
    x = torch.randn(ENCODER_BATCH, ENCODER_LENGTH, ENCODER["d_model"], device=device)
    return model, lambda own: (own(x) - x).square().mean()


MODELS = {"Llama layers of SmolLM2-135M": make_decoder, "torch encoder": make_encoder}


def make_step(make: Callable[..., Any], device: torch.device, measure: Any, limit: float) -> Callable[[], None]:
    """Return a training step, with scores clipped where they are measured."""
    torch.manual_seed(0)
    model, loss = make(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if measure is not None:
        hw.attach(hw.find_heads(model), hw.ClipScores(limit=limit, measure=measure), optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model).backward()
        optimizer.step()

    return step


def run(rounds: int, device: torch.device, out: Path | None) -> None:
    record = new_record("clip_scores", device)
    record["rounds"], record["results"] = rounds, {}
    variants = {PLAIN: (None, LIMIT), AGAIN: (None, LIMIT), **{name: (name, LIMIT) for name in MEASURES}}
    variants[CLIPPED] = ("bound", LOW)
    for name, make in MODELS.items():
        steps = {variant: make_step(make, device, *own) for variant, own in variants.items()}
        wall, spent = interleaved_clocks(device, steps, rounds, name)
        seconds = wall if device.type == "cuda" else spent
        found = {
            variant: {"ratio": ratio(seconds, variant, PLAIN), "wall ratio": ratio(wall, variant, PLAIN)}
            for variant in list(variants)[1:]
        }
        record["results"][name] = {"seconds of a plain step": sorted(seconds[PLAIN])[rounds // 2], **found}
        for variant, own in found.items():
            console.print(f"{name}, {variant}: {own['ratio']:.4f} (wall {own['wall ratio']:.4f})")
    write(record, device, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--out", type=Path, default=None)
    run(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
