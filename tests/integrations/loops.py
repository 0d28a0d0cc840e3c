"""Tiny models and data for the loops of trainers, and the same training written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import headwise as hw

RATE, CLIP, ACCUMULATED, UPDATES = 0.05, 0.2, 2, 4
ROUTED = hw.Aggregate(hw.routing.SimpleRouting(capsules=4), layers=(1,))
PENALTY = hw.Penalize(hw.similarity.Output() + 0.5 * hw.similarity.Position(), weight=0.3)
NOISY = hw.Repel(hw.SPOS(alpha=0.4, inverse_temperature=9.0, step_size=0.6), layers=(0,))
FIXED = hw.Repel(hw.SVGD(alpha=hw.Relative(0.3)), layers=(0,))


def build_bert(dropout: float = 0.1) -> BertForSequenceClassification:
    """A BERT of two layers with three heads, the same at each call."""
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16}
    config = BertConfig(vocab_size=20, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return BertForSequenceClassification(config)


def make_rows(count: int = 2 * ACCUMULATED * UPDATES) -> list[dict[str, Tensor]]:
    """Sentences of six words and a label, the first four words real in every third."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(count):
        words = torch.randint(1, 20, (6,), generator=generator)
        real = torch.ones(6, dtype=torch.long)
        real[4:] = int(index % 3 > 0)
        rows.append({"input_ids": words, "attention_mask": real, "labels": words[0] % 2})
    return rows


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def arguments(folder: Path, **changes) -> TrainingArguments:
    """Settings of a Trainer that writes nothing and takes plain SGD steps of a constant rate."""
    settings = {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "learning_rate": RATE,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP,
        "gradient_accumulation_steps": ACCUMULATED,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "seed": 11,
    }
    return TrainingArguments(**(settings | changes))


def train_by_hand(
    model: nn.Module,
    penalty: hw.Penalize | None = None,
    repulsion: hw.Repel | None = None,
    *,
    loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor] = lambda model, batch: model(**batch).loss,
    clip: float = CLIP,
    seed: int = 11,
) -> None:
    """The training that every loop of these tests equals: rows in order, accumulation, clipping, SGD."""
    optimizer, heads, rows = SGD(model.parameters(), lr=RATE), hw.find_heads(model), make_rows()
    similarity = None if penalty is None else penalty.attach(heads)
    if repulsion is not None:
        repulsion.attach(heads, optimizer, seed=seed)
    model.train()
    for first in range(0, len(rows), 2):
        loss = loss_of(model, collate(rows[first : first + 2]))
        if similarity is not None:
            loss = loss + penalty.weight * similarity()
        (loss / ACCUMULATED).backward()
        if (first // 2) % ACCUMULATED == ACCUMULATED - 1:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def assert_same(model: nn.Module, other: nn.Module, *, exactly: bool = True) -> None:
    for (name, parameter), (_, expected) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if exactly:
            assert torch.equal(parameter, expected), name
        else:
            torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6, msg=name)


def differ(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return any(not torch.allclose(one, two, atol=1e-4) for one, two in pairs)
