"""Repulsion and a penalty in a user's own GPT and loop: characters of a text, attention written by hand.

    python examples/nanogpt.py --text my.txt --steps 1000

The model knows nothing of headwise, which finds its heads by their structure. Only the lines marked `headwise` are
added to the loop. It prints the loss, the similarity of the heads' outputs and the force ratio; at the end the
effective number of heads of each layer, and a text that the model wrote.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import headwise as hw

WIDTH, HEADS, LAYERS, CONTEXT = 64, 4, 2, 64


class CausalSelfAttention(nn.Module):
    """Attention to what came before, with one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states of each position, [B, T, WIDTH]."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalSelfAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the states of each position, [B, T, WIDTH]."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A decoder of characters."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next character, [B, T, characters]."""
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def main(text: Path = Path(__file__), steps: int = 400, batch_size: int = 32, seed: int = 0) -> None:
    """Train on a text (by default this file), and print ten times along the way."""
    torch.manual_seed(seed)
    whole = text.read_text(encoding="utf-8")
    if len(whole) <= CONTEXT:
        raise typer.BadParameter(f"{text} has {len(whole)} characters; give more than {CONTEXT}.")
    letters = sorted(set(whole))
    ids = torch.tensor([letters.index(letter) for letter in whole])
    model = GPT(len(letters))
    heads = hw.find_heads(model)  # headwise
    penalty = hw.Disagreement(heads, hw.similarity.CKA(), strength=hw.Relative(0.1))  # headwise
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    repulsion = hw.repel(heads, hw.repulsion.SpanSVGD(), optimizer)  # headwise
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - CONTEXT, (batch_size, 1))
        rows = ids[starts + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        whole_loss = penalty.loss(loss)  # headwise
        optimizer.zero_grad()
        whole_loss.backward()
        optimizer.step()
        if step % max(1, steps // 10) == 0:
            ratio = repulsion.last.force_ratio.mean()
            print(f"step {step:4d}  loss {loss:.3f}  repulsion / driving term {ratio:.2f}")
    repulsion.check(optimizer)
    penalty.remove()
    beginning = ids[None, :CONTEXT]
    report = hw.measure(heads, [beginning])
    for layer in report.layers:
        print(f"{layer.site}: {layer.effective_heads:.2f} of {HEADS} heads effective")
    model.eval()
    written = beginning[:, :1]
    with torch.no_grad():
        for _ in range(100):
            chances = model(written[:, -CONTEXT:])[:, -1].softmax(dim=-1)
            written = torch.cat([written, torch.multinomial(chances, 1)], dim=1)
    print("".join(letters[one] for one in written[0].tolist()))


if __name__ == "__main__":
    typer.run(main)
