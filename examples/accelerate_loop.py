"""Repulsion and a penalty under Accelerate with gradient accumulation.

    accelerate launch examples/accelerate_loop.py

Repulsion acts once per update, on the accumulated gradient. The penalty, like the loss, belongs to a micro-batch. What
a resumed run needs is in the folder of `accelerator.save_state`.
"""

import torch
import typer
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import headwise as hw
from headwise.integrations import accelerate


def main(epochs: int = 3, rows: int = 2048, seed: int = 0) -> None:
    """Train an encoder layer to predict which of two sums of tokens is larger, and print the loss of each epoch."""
    torch.manual_seed(seed)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    tokens = torch.randn(rows, 6, 16)
    labels = (tokens[:, :3].sum((1, 2)) > tokens[:, 3:].sum((1, 2))).long()
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), nn.Flatten(), nn.Linear(96, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = DataLoader(TensorDataset(tokens, labels), batch_size=32, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    methods = (
        hw.Penalize(hw.similarity.Output() + 0.5 * hw.similarity.Subspace(), weight=0.1),
        hw.Repel(hw.SVGD(alpha=0.01)),
    )
    attached = accelerate.attach(accelerator, model, optimizer, *methods)
    for epoch in range(1, epochs + 1):
        losses = []
        for batch, label in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch), label)
                losses.append(loss.detach())
                accelerator.backward(attached.loss(loss))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        measured = "  ".join(f"{name} {value:.3f}" for name, value in attached.stats().items())
        accelerator.print(f"epoch {epoch}  loss {torch.stack(losses).mean():.3f}  updates {attached.steps}  {measured}")
    attached.check(optimizer)


if __name__ == "__main__":
    typer.run(main)
