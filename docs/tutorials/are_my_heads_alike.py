# %% [markdown]
# # Are my heads alike?
#
# Find the heads of a model, check that they were read correctly, and measure how different they are. The model here
# is a small BERT of Hugging Face with random weights; give your own instead.

# %%
import torch
from transformers import BertConfig, BertModel

import headwise as hw

torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
model = BertModel(BertConfig(vocab_size=200, **sizes)).eval()
heads = hw.find_heads(model)
print(heads)

# %% [markdown]
# `verify` proves the reading by experiments on a copy: it changes one head at a time and looks at what follows.

# %%
tokens = torch.randint(200, (16, 12))
print(hw.verify(heads, (tokens,)))

# %% [markdown]
# `measure` runs the model on your batches and removes every head once. The first number to read is the *effective
# number of heads*: 1 where all heads compute the same, H where no two are alike. Copy one head over another, and it
# falls.

# %%
before = hw.measure(heads, [{"input_ids": tokens}])
with torch.no_grad():
    attention = model.encoder.layer[0].attention
    for projection in (attention.self.query, attention.self.key, attention.self.value):
        projection.weight[16:32] = projection.weight[:16]  # head 1 becomes a copy of head 0
        projection.bias[16:32] = projection.bias[:16]
    attention.output.dense.weight[:, 16:32] = attention.output.dense.weight[:, :16]
after = hw.measure(heads, [{"input_ids": tokens}])
for name, report in (("before", before), ("after", after)):
    print(name, [round(layer.effective_heads, 2) for layer in report.layers])

# %% [markdown]
# The picture has one dot per head and one line per measure.

# %%
hw.plots.overview(after, before=before, labels=("before", "with a copy"))

# %% [markdown]
# On the command line, `headwise inspect FOLDER` does the same for a folder of Hugging Face and writes a page. What
# each measure is fooled by is [a page of its own](../diversity.md).
