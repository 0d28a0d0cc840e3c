# %% [markdown]
# # Repel heads
#
# `hw.repel` attaches to your optimizer: before each step the heads push one another apart. The training loop does not
# change. Here a small encoder learns to reverse a sequence, once alone and once with repelled heads.

# %%
import torch
from torch import nn

import headwise as hw

PLACES = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))


def train(rule: object = None, steps: int = 300) -> tuple[hw.report.Report, list[float]]:
    """Train an encoder, and return the report of its heads with the losses."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    heads = hw.find_heads(model)
    repulsion = None if rule is None else hw.repel(heads, rule, optimizer)
    losses = []
    for _ in range(steps):
        tokens = torch.randn(32, 6, 32)
        loss = (model(tokens + PLACES) - tokens.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if repulsion is not None:
        repulsion.check()  # raises where it did not act on all heads
        print(repulsion.last)
    return hw.measure(heads, [tokens + PLACES]), losses


plain, plain_losses = train()

# %% [markdown]
# `SVGD()` repels parameters at a tenth of the driving term, and mixes the gradients of heads that are close.
# `SpanSVGD()` compares the subspaces that heads read, and only turns them. Print the forces: a strength far above 1
# means that the loss no longer has a say.

# %%
repelled, losses = train(hw.repulsion.SpanSVGD(alpha=hw.Relative(0.2)))

# %%
print(f"loss of the last ten steps: plain {sum(plain_losses[-10:]) / 10:.3f}, repelled {sum(losses[-10:]) / 10:.3f}")
for name, report in (("plain", plain), ("repelled", repelled)):
    print(name, "effective heads", [round(layer.effective_heads, 2) for layer in report.layers])
hw.plots.overview(repelled, before=plain, labels=("plain", "repelled"))

# %% [markdown]
# One run says nothing about what helps: compare with the right control, with several seeds. `headwise compare` does
# both ([laboratory](../laboratory.md)), and [strength](../strength.md) says how to choose `alpha`.
