# %% [markdown]
# # Prune or merge
#
# Two ways to a smaller model: remove the heads that matter least, or merge key/value heads so that the cache shrinks.
# The model here is a small Llama that learns in seconds to copy: each sequence repeats its first half.

# %%
import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw

torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 96}
model = LlamaForCausalLM(LlamaConfig(vocab_size=24, num_key_value_heads=8, **sizes))


def draw(count: int) -> torch.Tensor:
    """Return sequences whose second half is the first."""
    half = torch.randint(24, (count, 8))
    return torch.cat([half, half], 1)


def losses(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of the second half of each sequence, which can be known."""
    logits = model(batch).logits[:, 7:-1]
    return torch.nn.functional.cross_entropy(logits.mT, batch[:, 8:], reduction="none").mean(1)


def train(model: torch.nn.Module, steps: int, rate: float) -> None:
    """Train on new sequences."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        losses(model, draw(32)).mean().backward()
        optimizer.step()


train(model, 400, 3e-3)
model.eval()
text, held_out = draw(64), draw(256)


def score(model: torch.nn.Module) -> float:
    """Return minus the loss: the larger the better."""
    with torch.no_grad():
        return -float(losses(model, held_out).mean())


print(f"loss of the whole model: {-score(model):.4f}")

# %% [markdown]
# ## Prune
#
# `importance` says what each head is worth; one backward pass is enough for a first estimate. `prune` keeps the same
# share in every layer, so that the configuration can say it and transformers loads the result.

# %%
pruned = copy.deepcopy(model)
heads = hw.find_heads(pruned)
worth = hw.importance(heads, lambda: losses(pruned, text), method="first_order")
print(hw.prune(heads, keep=0.5, importance=worth))
print(f"loss with half of the heads: {-score(pruned):.4f}")

# %% [markdown]
# A few steps of training bring back what was lost.

# %%
train(pruned, 50, 1e-3)
print(f"after 50 steps: {-score(pruned):.4f}")

# %% [markdown]
# ## Merge
#
# Here every query head stays, and two of them share a key/value head. With a `score`, each step is tried by itself, and
# so is the refit of W_O after plain averaging: what alignment saves is told apart from what the refit saves.

# %%
merged = copy.deepcopy(model)
merging = hw.merge(hw.find_heads(merged), 4, batches=[text], score=lambda: score(merged))
print(merging)

# %% [markdown]
# The cache takes half of its bytes, and so it does in any model of transformers that is loaded from the folder.

# %%
for name, one in (("whole", model), ("pruned", pruned), ("merged", merged)):
    with torch.no_grad():
        _, cache = one(text, use_cache=True, return_dict=False)
    size = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    print(f"{name}: {sum(p.numel() for p in one.parameters()):,} parameters, {size:,} bytes of cache")

# %% [markdown]
# On the command line, `headwise prune` and `headwise merge` do this for a folder, and write a page; see
# [smaller models](../shrinking.md).
