"""Small sets in the form of GLUE's own files, and a small model to begin with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from transformers import ElectraConfig, ElectraForPreTraining

from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.glue.scales import GLUE_SCALES
from headwise_lab.tasks.glue.task import GlueTask
from headwise_lab.tasks.pretraining.wordpieces import WordPieces, learn_word_pieces
from lab.tasks.pretraining.pretraining_toy import WORDS, document


def sentence(number: int) -> str:
    """A few words and a number of its own."""
    return " ".join(document(number).split()[: 5 + number % 7]) + f' "quoted {number}'


def truth(number: int) -> int:
    """The class of an example: whether its text has one word."""
    return int(WORDS[4] in sentence(number).split())


def write_glue(folder: Path, train: int = 60, judged: int = 24) -> Path:
    """CoLA, STS-B, RTE and MNLI."""
    for name in ("CoLA", "STS-B", "RTE", "MNLI"):
        (folder / name).mkdir(parents=True)
    for split, first, count in (("train", 0, train), ("dev", 200, judged), ("test", 400, 6)):
        numbers = range(first, first + count)
        cola = [f"gj04\t{truth(n)}\t*\t{sentence(n)}" for n in numbers]
        if split == "test":
            cola = ["index\tsentence", *(f"{n - first}\t{sentence(n)}" for n in numbers)]
        _write(folder / "CoLA" / f"{split}.tsv", cola)
        label = "" if split == "test" else "\tlabel"
        word = ("not_entailment", "entailment")
        rows = [
            f"{n - first}\t{sentence(n)}\t{sentence(n + 1)}" + ("" if not label else f"\t{word[truth(n)]}")
            for n in numbers
        ]
        _write(folder / "RTE" / f"{split}.tsv", [f"index\tsentence1\tsentence2{label}", *rows])
        names = ("entailment", "neutral", "contradiction")
        rows = [f"{n - first}\t{sentence(n)}\t{sentence(n + 1)}\t{names[n % 3]}" for n in numbers]
        name = split if split == "train" else f"{split}_matched"
        _write(folder / "MNLI" / f"{name}.tsv", ["index\tsentence1\tsentence2\tgold_label", *rows])
        score = "" if split == "test" else "\tscore"
        rows = [
            f"{n - first}\tg\tf\t2012\t1\tnone\tnone\t{sentence(n)}\t{sentence(n + 1)}"
            + ("" if not score else f"\t{(n * 7) % 26 / 5:.3f}")
            for n in numbers
        ]
        header = f"index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2{score}"
        _write(folder / "STS-B" / f"{split}.tsv", [header, *rows])
    return folder


def toy_words() -> WordPieces:
    """Word pieces of the toy's sentences."""
    return learn_word_pieces(lambda: [sentence(number) for number in range(60)], 120)


def write_model(folder: Path, seed: int = 0, dropout: float = 0.1) -> Path:
    """A folder of Hugging Face with a small ELECTRA and its tokenizer."""
    words = toy_words()
    torch.manual_seed(seed)
    config = ElectraConfig(
        vocab_size=words.vocabulary_size,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=words.padding,
    )
    ElectraForPreTraining(config).save_pretrained(folder)
    for name, text in words.files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


TASK = GlueTask()


def toy(pretrained: Path, **changes):
    sizes = {"name": "toy", "epochs": 2, "batch_size": 16, "warmup_share": 0.1, "length": 32, "train_examples": None}
    return dataclasses.replace(GLUE_SCALES["demo"], **{**sizes, **changes}, pretrained=pretrained)


def settings(arm: str, data: Path, scale, seed: int = 3) -> RunSettings:
    return RunSettings("glue", scale, parse_arm(arm), seed=seed, data=data)
