"""Repulsion and a penalty in a plain training loop: torch's own `nn.Transformer` learns to reverse a sequence.

    python examples/plain_loop.py --steps 500

Only the lines marked `headwise` are added. The loop prints the loss of the task, the similarity of the heads' outputs,
which the penalty lowers, and the ratio of the repulsion to the driving term.
"""

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import headwise as hw

SYMBOLS, START, LENGTH, WIDTH = 20, 20, 8, 32


class Reverser(nn.Module):
    """An encoder-decoder that reads a sequence of symbols and outputs it reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS + 1, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.output = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits of each symbol of the target given those before it, [B, L, SYMBOLS]."""
        before = F.pad(target[:, :-1], (1, 0), value=START)
        future = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        embedded = (self.symbols(sequence) + self.places for sequence in (source, before))
        return self.output(self.transformer(*embedded, tgt_mask=future, tgt_is_causal=True))


def main(steps: int = 500, batch_size: int = 64, seed: int = 0, penalty_weight: float = 0.05) -> None:
    """Train, and print ten times along the way."""
    torch.manual_seed(seed)
    model = Reverser()
    heads = hw.find_heads(model)  # headwise
    penalty = hw.Disagreement(heads, hw.similarity.Output())  # headwise
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    # an encoder-decoder has three attention modules numbered 0; this one is in the encoder
    repulsion = hw.repel(heads.kind("self").layer(0), hw.SVGD(alpha=hw.Relative(0.1)), optimizer)  # headwise
    for step in range(1, steps + 1):
        source = torch.randint(SYMBOLS, (batch_size, LENGTH))
        target = source.flip(1)
        task = F.cross_entropy(model(source, target).flatten(0, 1), target.flatten())
        similarity = penalty()  # headwise
        loss = task + penalty_weight * similarity
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 10) == 0:
            ratio = repulsion.last.force_ratio.mean()
            print(f"step {step:4d}  task {task:.3f}  similarity {similarity:.3f}  repulsion / driving term {ratio:.2f}")
    repulsion.check(optimizer)


if __name__ == "__main__":
    typer.run(main)
