"""What a smaller language model costs: whole, pruned, merged and shrunk, as it is and after a recovery.

The loss is that of WikiText-2's test set, in rows of 512 tokens. Heads are weighed, states calibrated and models
trained on its validation set; the test set chooses nothing. Recovery trains all parameters, towards the whole model
(`mixed`: its logits and states) or on the text alone; the whole model gets the same steps on text. `--choices` names a
folder with five sets of short questions, answered by the likeliest of the words given (as many items of each class).
Run by `make bench NAME=language_model ARGS="--model FOLDER --data FOLDER"`; the model is a folder of `save_pretrained`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import headwise as hw
from cache import read_tokens
from headwise.input_files import parse_json
from timing import console, interleaved_clocks, new_record, ratio, write

CPU = torch.device("cpu")
LENGTH, ROWS = 512, 4
# Five times the default is better than the default after 50 steps, on rows of the validation set that were left out.
RATE = 3e-4
# Weights of logits, hidden states and text.
SOURCES = {"mixed": (1.0, 1.0, 0.0), "text": (0.0, 0.0, 1.0)}
# A file, whether it has a header, the columns of the label and of texts, the question, and the word of each label.
Choice = tuple[str, bool, int, tuple[int, ...], str, dict[str, str]]
CHOICES: dict[str, Choice] = {
    "SST-2": ("classification/sst2/dev.tsv", False, 0, (1,), "Review: {}\nThe review is", {"0": "bad", "1": "good"}),
    "SUBJ": ("classification/subj/all.tsv", False, 0, (1,), "{}\nThis is a", {"0": "fact", "1": "review"}),
    "TREC": (
        "classification/trec/test.tsv",
        False,
        0,
        (1,),
        "Question: {}\nThe answer is a",
        {"0": "description", "1": "thing", "3": "person", "4": "place", "5": "number"},
    ),
    "RTE": (
        "glue/RTE/dev.tsv",
        True,
        3,
        (1, 2),
        "{}\nQuestion: {} Yes or no?\nAnswer:",
        {"entailment": "Yes", "not_entailment": "No"},
    ),
    "MRPC": (
        "glue/MRPC/dev.tsv",
        True,
        0,
        (3, 4),
        "{}\n{}\nDo both say the same? Yes or no?\nAnswer:",
        {"0": "No", "1": "Yes"},
    ),
}


def losses(model: Any, rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the loss of each row of batches, in nats per token."""
    for row in rows:
        logits = model(input_ids=row, use_cache=False).logits[:, :-1]
        yield F.cross_entropy(logits.transpose(1, 2), row[:, 1:], reduction="none").mean(1)


def score(model: Any, rows: Sequence[Tensor]) -> float:
    """Return the mean loss."""
    model.eval()
    with torch.inference_mode():
        return statistics.fmean(torch.cat(list(losses(model, rows))).tolist())


def answer(model: Any, tokenizer: Any, folder: Path, choice: Choice, count: int) -> float:
    """Return the accuracy on as many items, the same of each class."""
    file, header, place, columns, question, words = choice
    lines = (folder / file).read_text(encoding="utf-8-sig").splitlines()[int(header) :]
    found: dict[str, list[list[str]]] = {label: [] for label in words}
    for parts in (line.split("\t") for line in lines):
        if parts[place] in found and len(found[parts[place]]) < count // len(words):
            found[parts[place]].append(parts)
    options = [tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in words.values()]
    right = 0
    for place_of_label, items in enumerate(found.values()):
        for parts in items:
            asked = question.format(*(parts[column] for column in columns))
            with torch.inference_mode():
                logits = model(**tokenizer(asked, return_tensors="pt")).logits[0, -1]
            right += int(logits[options].argmax()) == place_of_label
    return right / sum(map(len, found.values()))


def count_cache(model: Any) -> int:
    """Return the bytes that a token takes in the cache."""
    return sum(2 * site.key_value_heads * site.head_size * 4 for site in hw.find_heads(model))


class Texts:
    """Rows of tokens: those that are scored, those that weigh heads and calibrate, and those of the steps."""

    def __init__(self, data: Path, tokenizer: Any, rows: int, length: int) -> None:
        test, valid = (read_tokens(data / f"{name}.raw.gz", tokenizer) for name in ("test", "valid"))
        self.test = list(test[: rows * LENGTH].view(-1, 1, LENGTH))
        self.weighed = list(valid[: rows * LENGTH].view(-1, 1, LENGTH))
        rest, size = valid[rows * LENGTH :], ROWS * length
        self.steps = list(rest[: len(rest) // size * size].view(-1, ROWS, length))


def list_ways(texts: Texts, params: float) -> dict[str, Callable[[Any], object]]:
    """Return the ways to make a model smaller."""

    def first_order(model: Any) -> Any:
        return hw.importance(hw.find_heads(model), partial(losses, model, texts.weighed), method="first_order")

    def at_random(model: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        return {site.name: torch.rand(site.num_heads, generator=generator) for site in hw.find_heads(model)}

    def prune(weigh: Callable[[Any], Any], model: Any) -> None:
        hw.prune(hw.find_heads(model), keep=2 / 3, importance=weigh(model))

    def merge(settings: dict[str, Any], model: Any) -> None:
        hw.merge(hw.find_heads(model), 1, batches=texts.weighed, **settings)

    def shrink(model: Any) -> None:
        plan = hw.shrink(hw.find_heads(model), partial(losses, model, texts.weighed), params=params)
        console.print(str(plan), soft_wrap=True)
        plan.apply()

    return {
        "whole": lambda _model: None,
        "two thirds of the heads, first order": partial(prune, first_order),
        "two thirds of the heads, at random": partial(prune, at_random),
        "one key/value head, merged": partial(merge, {}),
        "one key/value head, averaged": partial(merge, {"alignment": "none", "grouping": "order", "refit": False}),
        f"{params:.0%} of the layers, heads and neurons": shrink,
    }


def recover(model: Any, whole: Any, texts: Texts, source: str, steps: int, seed: int) -> float:
    """Return the loss after a recovery."""
    trained = deepcopy(model)
    logits, hidden, text = SOURCES[source]
    teacher = hw.Distill(whole, logits=logits, hidden=hidden, text=text)
    hw.distill(trained, teacher, texts.steps, steps=steps, seed=seed, learning_rate=RATE)
    return score(trained, texts.test)


def begin(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the record that is gone on with, or a new one."""
    settings = {key: getattr(arguments, key) for key in ("rows", "params", "length", "items")} | {"rate": RATE}
    if arguments.out is None or not arguments.out.exists():
        return new_record("language-model", CPU) | settings | {"ways": {}}
    record = parse_json(arguments.out.read_text(encoding="utf-8"))
    # a record without a recovery may have no rate
    found = {key: record.get(key, settings[key]) for key in settings}
    if found != settings:
        raise SystemExit(f"{arguments.out} has {found}; this call has {settings}: name another file.")
    return record | settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal model and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder with valid.raw.gz and test.raw.gz")
    parser.add_argument("--choices", type=Path, help="folder with classification/ and glue/")
    parser.add_argument("--items", type=int, default=60, help="items of each of these sets")
    parser.add_argument("--rows", type=int, default=8, help="rows of 512 tokens that are scored, and that weigh heads")
    parser.add_argument("--params", type=float, default=0.8, help="share of the layers' parameters")
    parser.add_argument("--steps", type=int, nargs="*", default=[100, 500], help="steps of recovery")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row of a step, of which it has four")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of timing")
    parser.add_argument("--only", default="", help="ways whose name holds this text")
    parser.add_argument("--sources", nargs="*", default=[*SOURCES], choices=SOURCES, help="what recovery learns from")
    parser.add_argument("--out", type=Path, help="the JSON record, gone on with if it exists (default: a new file)")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    record = begin(arguments)
    whole: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = Texts(arguments.data, tokenizer, arguments.rows, arguments.length)
    rows: dict[str, dict[str, Any]] = record["ways"]
    works: dict[str, Callable[[], object]] = {}
    for name, way in list_ways(texts, arguments.params).items():
        wanted = arguments.only in name
        if not wanted and name != "whole":
            continue
        model = deepcopy(whole)
        way(model)
        works[name] = partial(score, model, texts.test[:1])
        row = rows.setdefault(name, {"recovered": {}})
        if "loss" not in row:
            row |= {
                "parameters": sum(one.numel() for one in model.parameters()),
                "cache": count_cache(model),
                "loss": score(model, texts.test),
            }
        if arguments.choices is not None and "answers" not in row:
            numbered = track(CHOICES.items(), f"{name}: questions", console=console, transient=True)
            row["answers"] = {
                which: answer(model, tokenizer, arguments.choices, choice, arguments.items)
                for which, choice in numbered
            }
        console.print(f"{name}: {row['loss']:.3f} nats; {row.get('answers', '')}", soft_wrap=True)
        sources = [one for one in arguments.sources if wanted and (one == "text" or name != "whole")]
        for steps, source in product(arguments.steps, sources):
            found = row["recovered"].setdefault(f"{source}, {steps} steps", [])
            for seed in range(len(found), arguments.seeds):
                found.append(recover(model, whole, texts, source, steps, seed))
                console.print(f"  {source}, {steps} steps, seed {seed}: {found[-1]:.3f} nats")
                if arguments.out is not None:
                    write(record, CPU, arguments.out)
    _, seconds = interleaved_clocks(CPU, works, arguments.rounds, "timing")
    for name in works:
        rows[name]["time"] = ratio(seconds, name, "whole")
    write(record, CPU, arguments.out)


if __name__ == "__main__":
    main()
