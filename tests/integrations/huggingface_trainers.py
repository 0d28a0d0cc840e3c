"""Trainers of Hugging Face over the tiny models and rows of the loops."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from transformers import Trainer

from integrations.loops import arguments, build_bert, collate, make_rows


def new_bert():
    """A `model_init`, which the Trainer gives a trial where it has a parameter."""
    return build_bert()


class InOrder(Trainer):
    """The Trainer, with rows in the order they are given so that a loop by hand sees the same batches."""

    def _get_train_sampler(self, *_args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def build_trainer(folder, model=None, kind=InOrder, model_init=None, optimizers=(None, None), **changes) -> Trainer:
    held = {"model_init": model_init} if model_init else {"model": build_bert() if model is None else model}
    loss = {"compute_loss_func": changes.pop("compute_loss_func", None)}
    rows = {"train_dataset": make_rows(), "eval_dataset": make_rows(7), "data_collator": collate}
    return kind(args=arguments(folder, **changes), optimizers=optimizers, **held, **loss, **rows)


def custom_loss(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


class CountsItems(nn.Module):
    """A model that takes the number of items and normalizes its own loss, as causal language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = build_bert(dropout=0.0)

    def forward(self, input_ids, attention_mask, labels=None, num_items_in_batch=None, **_other):
        logits = self.network(input_ids, attention_mask).logits
        if num_items_in_batch is None:
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        return {"loss": custom_loss(SimpleNamespace(logits=logits), labels, num_items_in_batch), "logits": logits}
