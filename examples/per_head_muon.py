"""Muon on each head, and AdamW in its place for comparison: a small Llama learns to continue a repeated sequence.

python examples/per_head_muon.py --steps 200
python examples/per_head_muon.py --steps 200 --adamw
"""

from typing import Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw


def main(steps: int = 200, lr: float = 3e-3, adamw: bool = False, seed: int = 0) -> None:
    """Train, and print the loss ten times along the way."""
    torch.manual_seed(seed)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=4, num_key_value_heads=2, **sizes))
    if adamw:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    else:
        optimizer = hw.optim.per_head_muon(model, lr=lr)
        print(optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    for step in range(1, steps + 1):
        ids = torch.randint(32, (16, 12)).repeat(1, 2)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 10) == 0:
            print(f"step {step:4d}  loss {loss:.3f}")


if __name__ == "__main__":
    typer.run(main)
