# %% [markdown]
# # Fine-tune with a penalty
#
# Two lines add a penalty on alike heads to Hugging Face's Trainer. The data here are random, so that the page needs
# nothing else; with your own, replace the model and the rows.

# %%
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.utils import logging

import headwise as hw
from headwise.integrations import huggingface

logging.disable_progress_bar()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
rows = [{"input_ids": torch.randint(1, 50, (8,)).tolist(), "labels": index % 2} for index in range(128)]
before = hw.measure(hw.find_heads(model), [{"input_ids": torch.tensor([row["input_ids"] for row in rows])}])

# %% [markdown]
# `CKA()` is a similarity that heads cannot lower by shrinking, by canceling or by turning in their own space. Its
# strength is a tenth of the loss's gradient on the heads. `hw.Target(effective_heads=3.5)` would push until an
# attention has 3.5 effective heads, and then stop.

# %%
arguments = TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=2, logging_steps=8, report_to="none", disable_tqdm=True, use_cpu=True
)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
attached = huggingface.attach(trainer, hw.Penalize(hw.similarity.CKA(), weight=hw.Relative(0.1))).attached
_ = trainer.train()

# %% [markdown]
# The log has what was added to the loss, and the similarity by itself. The loss of an evaluation is that of the task.

# %%
for entry in trainer.state.log_history:
    if "similarity" in entry:
        print({name: round(entry[name], 4) for name in ("loss", "penalty", "similarity")})
print("evaluation:", round(trainer.evaluate()["eval_loss"], 3))

# %%
model.eval()
after = hw.measure(hw.find_heads(model), [{"input_ids": torch.tensor([row["input_ids"] for row in rows])}])
for name, report in (("before", before), ("after", after)):
    print(name, [round(layer.effective_heads, 2) for layer in report.layers])
