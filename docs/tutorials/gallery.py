# %% [markdown]
# # Gallery
#
# The pictures of `headwise.plots`, each with the code that makes it.

# %%
import torch
from torch import nn

import headwise as hw

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 8, 64, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False).eval()
heads = hw.find_heads(model)
tokens = torch.randn(32, 12, 32)
report = hw.measure(heads, [tokens])

# %% [markdown]
# ## Every layer at a glance

# %%
hw.plots.overview(report)

# %% [markdown]
# ## Which heads are alike

# %%
matrices = {layer.site: torch.tensor(layer.pairs["contribution_cka"]) for layer in report.layers}
hw.plots.head_similarity(matrices, measure="debiased CKA of contributions")

# %% [markdown]
# ## Attention over a sentence

# %%
words = ["The", "old", "man", "bought", "a", "red", "car", "."]
with hw.Taps(heads.layer(0), weights=True) as taps:
    model(tokens[:1, : len(words)])
    weights = taps.read()[0].weights[0].mean(1)
hw.plots.sentence_heatmap(words, {f"head {head}": weights[head].tolist() for head in range(3)})

# %% [markdown]
# ## A score over a setting
#
# One dot per run, a line through the means and a band for their range. The numbers here are drawn at random.

# %%
drawn = torch.Generator().manual_seed(0)


def runs(mean: float) -> list[float]:
    """Three runs around a mean."""
    return (mean + torch.randn(3, generator=drawn)).tolist()


curves = {name: {count: runs(60 + offset) for count in (1, 2, 4, 8, 16)} for name, offset in (("one", 0), ("two", 3))}
hw.plots.sweep(curves, setting="number of heads", measure="score", scale="log")

# %% [markdown]
# ## How sure a model may be

# %%
confidences, right = torch.rand(400, generator=drawn), torch.rand(400, generator=drawn)
models = {"calibrated": right < confidences, "overconfident": right < confidences.square()}
hw.plots.reliability_diagram({name: [hw.metrics.reliability(confidences, hit)] for name, hit in models.items()})
