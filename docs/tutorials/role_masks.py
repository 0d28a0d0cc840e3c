# %% [markdown]
# # Role masks from a parse
#
# A role says which words a head may attend to: rare words, punctuation, neighbors in the dependency tree, and so on.
# The parse here is written by hand; `headwise.roles.spacy.Parser` makes one from any spaCy pipeline.

# %%
import torch
from torch import nn

import headwise as hw

table = hw.roles.WordTable(
    ["The", "old", "man", "bought", "a", "red", "car", "."],
    heads=[2, 2, 3, 3, 6, 6, 3, 3],  # the head of each word in the tree; its own index at the root
    relations=["det", "amod", "nsubj", "ROOT", "det", "amod", "obj", "punct"],
)
idf = hw.roles.idf([["the", "man", "bought", "a", "car", "."], ["the", "old", "car", "."]])
roles = hw.roles.Roles(
    hw.roles.Rare(), hw.roles.Separator(), hw.roles.Dependency(), hw.roles.Major(), hw.roles.Window(3), idf=idf
)
mask = roles([table], num_heads=8)  # heads 0 to 4 have roles, the others are free
print(mask)

# %% [markdown]
# `guide` gives the masks of a batch to a model; it works for any attention that `find_heads` reads.

# %%
torch.manual_seed(0)
encoder = nn.TransformerEncoderLayer(32, 8, 64, batch_first=True).eval()
heads = hw.find_heads(encoder)
words = torch.randn(1, len(table), 32)
with hw.guide(heads, mask), hw.Taps(heads, weights=True) as taps:
    encoder(words)
    weights = taps.read()[0].weights[0]
for head, name in enumerate(mask.names):
    attended = [table.words[word] for word in (weights[head].sum(0) > 1e-6).nonzero().flatten()]
    print(f"{name}: {' '.join(attended)}")

# %% [markdown]
# A role of your own is a function from the table to pairs (word that attends, word attended to).

# %%


def previous(table: hw.roles.WordTable) -> list[tuple[int, int]]:
    """Let each word attend to the one before it."""
    return [(word, word - 1) for word in range(1, len(table))]


print(hw.roles.Roles(previous, hw.roles.Separator())([table], num_heads=4))
