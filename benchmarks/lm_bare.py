"""The task lm against a bare script with Hugging Face's Trainer: the same configuration, rows and recipe, no headwise.

Both begin with the same parameters and read the rows in the same order, as seeds alone make losses differ by a percent;
the losses on the test rows should agree within half a percent. For tokens per second both then train a few steps in
turns. Exits with 1 where the loss or the speed differs by more than it should. Run by
`make bench NAME=lm_bare ARGS="--data FILE"`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler, Subset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from headwise_lab.experiment.arm import named_arms
from headwise_lab.experiment.run_folder import RESULT, read_json
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.lm.scales import LM_SCALES, LmScale
from headwise_lab.tasks.lm.task import LmTask
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.train import train_run
from timing import console, default_device, new_record, write

MOST_APART, LEAST_SPEED = 0.005, 0.9


class PackedRows(Dataset):
    """Rows of a prepared folder, whose documents begin at position 0."""

    def __init__(self, files: list[Path], start: int, most: int | None = None) -> None:
        rows = np.concatenate([np.load(file) for file in files])[:most].astype(np.int64)
        positions = np.zeros_like(rows)
        for column in range(1, rows.shape[1]):
            positions[:, column] = np.where(rows[:, column] == start, 0, positions[:, column - 1] + 1)
        labels = np.where(rows == start, -100, rows)
        named = {"input_ids": rows, "position_ids": positions, "labels": labels}
        self.tensors = {name: torch.from_numpy(array) for name, array in named.items()}

    def __len__(self) -> int:
        return len(self.tensors["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}


class InOrder(Trainer):
    """A Trainer that reads its rows in the order they have."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        rows: Any = train_dataset or self.train_dataset
        return SequentialSampler(rows)


def begin(scale: LmScale, prepared: Path, seed: int) -> tuple[dict[str, Tensor], list[int]]:
    """Return the parameters that a plain run begins with, and the rows that it reads, in their order."""
    task, plain = LmTask(), named_arms()["plain"]
    data: Any = task.load(prepared, scale, None)
    model: Any = attach_arm(task, plain, data, scale, seed=seed)[0]
    batches = task.batches(data, scale, derive_key(seed, "order"))
    read: list[int] = []
    for number in range(scale.rounds):
        batches.set_epoch(number)
        read += [index % len(data.train) for index in itertools.chain.from_iterable(batches)]
    return model.network.state_dict(), read


def train_bare(scale: LmScale, prepared: Path, seed: int, folder: Path) -> tuple[float, float]:
    """Return the loss on the test rows and the seconds of training of a model that knows nothing of headwise."""
    record = read_json(prepared / "record.json")
    config = LlamaConfig(
        vocab_size=record["vocabulary_size"],
        hidden_size=scale.width,
        intermediate_size=scale.hidden,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.key_value_heads,
        max_position_embeddings=scale.length,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    network = LlamaForCausalLM(config)
    parameters, order = begin(scale, prepared, seed)
    network.load_state_dict(parameters)
    trainer = InOrder(
        network,
        TrainingArguments(
            output_dir=str(folder),
            max_steps=scale.steps,
            per_device_train_batch_size=scale.batch_size,
            gradient_accumulation_steps=scale.accumulation,
            learning_rate=scale.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=scale.warmup_steps,
            weight_decay=scale.weight_decay,
            adam_beta2=0.95,
            max_grad_norm=scale.clip_norm,
            bf16=torch.cuda.is_available(),
            seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Subset(PackedRows(sorted(prepared.glob("train-*.npy")), start=1), order),
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    model: Any = trainer.model
    sums = np.zeros(2)
    with torch.no_grad():
        rows = PackedRows([prepared / "test.npy"], 1, scale.test_rows)
        for row in (rows[number] for number in range(len(rows))):
            batch = {name: tensor[None].to(model.device) for name, tensor in row.items()}
            count = int((row["labels"][1:] != -100).sum())
            sums += float(model.eval()(**batch).loss) * count, count
    return float(sums[0] / sums[1]), seconds


def train_ours(scale: LmScale, prepared: Path, seed: int, folder: Path) -> tuple[float, float]:
    """Return the loss on the test rows and the seconds of training of a plain run, evaluation on dev included."""
    train_run(RunSettings("lm", scale, named_arms()["plain"], seed, data=prepared), folder)
    result = read_json(folder / RESULT)
    return result["answers"]["loss"], result["train_seconds"]


def compare_losses(scale: LmScale, prepared: Path, seeds: int, place: Path) -> dict[str, Any]:
    """Return the losses of both for each seed, and how far apart they are at the most."""
    losses: dict[str, list[float]] = {"headwise": [], "bare": []}
    for seed in range(seeds):
        for name, train in (("headwise", train_ours), ("bare", train_bare)):
            losses[name].append(train(scale, prepared, seed, place / f"{name}-{seed}")[0])
            console.print(f"seed {seed}, {name}: loss {losses[name][-1]:.4f}")
    apart = [one / other - 1 for one, other in zip(losses["headwise"], losses["bare"], strict=True)]
    return {"losses": losses, "apart": max(apart, key=abs)}


def compare_speeds(scale: LmScale, prepared: Path, rounds: int, steps: int, place: Path) -> dict[str, Any]:
    """Return tokens per second of both in turns of a few steps with one evaluation, and the median ratio of a turn."""
    # one dev row: the bare script evaluates nothing while it trains
    short = dataclasses.replace(scale, steps=steps, rounds=1, warmup_steps=1, dev_rows=1, test_rows=1)
    tokens = steps * scale.accumulation * scale.batch_size * scale.length
    speeds: dict[str, list[float]] = {"headwise": [], "bare": []}
    for turn in range(rounds + 1):
        for name, train in (("headwise", train_ours), ("bare", train_bare)):
            seconds = train(short, prepared, 0, place / f"{name}-turn-{turn}")[1]
            # the first turn warms up
            speeds[name] += [tokens / seconds] if turn else []
    ratio = statistics.median(one / other for one, other in zip(speeds["headwise"], speeds["bare"], strict=True))
    return {"tokens_per_second": speeds, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="text, as headwise compare lm --data takes it")
    parser.add_argument("--scale", default="demo", choices=LM_SCALES)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="turns of training for the speed")
    parser.add_argument("--turn-steps", type=int, default=40, help="steps of a turn")
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    scale = LM_SCALES[arguments.scale]
    device = default_device()
    record = new_record("lm-bare", device)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        LmTask().prepare(arguments.data, scale, place / "prepared", tokenizer=None)
        record |= {"scale": arguments.scale, "steps": scale.steps}
        record |= compare_losses(scale, place / "prepared", arguments.seeds, place)
        record |= compare_speeds(scale, place / "prepared", arguments.rounds, arguments.turn_steps, place)
    console.print(f"loss apart {100 * record['apart']:+.2f} % (at most {100 * MOST_APART} %)")
    console.print(f"tokens per second over those of the bare script: {record['ratio']:.2f} (at least {LEAST_SPEED})")
    write(record, device, arguments.out)
    if abs(record["apart"]) > MOST_APART or record["ratio"] < LEAST_SPEED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
