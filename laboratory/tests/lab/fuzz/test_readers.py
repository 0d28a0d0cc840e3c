"""The readers of tasks, roles and commands on broken files: each is read, or refused in a sentence that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.mutate import INPUTS, fuzz
from lab.fuzz import corpus_files, labeled_files, named_files, pair_and_graph_files

# What is done with the texts takes longer than reading them, and so does opening a model.
LOADERS = ("parallel_text", "classified_texts", "probed_sentences", "sentences_as_words")
SLOWER = {"folder": 4, "language model": 2} | dict.fromkeys(LOADERS, 10)
GLUE = [("CoLA", "train"), ("CoLA", "test"), ("STS-B", "train"), ("RTE", "dev"), ("MNLI", "train")]
OF_FOLDERS = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
MAKERS = {
    **{
        name: maker
        for module in (corpus_files, labeled_files, named_files, pair_and_graph_files)
        for name, maker in vars(module).items()
        if getattr(maker, "__module__", "") == module.__name__ and maker.__annotations__.get("return") == "Reader"
    },
    **{f"{name} {split}": labeled_files.glue(name, split) for name, split in GLUE},
    **{f"folder: {file}": named_files.of_hugging_face(file) for file in OF_FOLDERS},
    **{f"language model: {file}": named_files.language_tokens(file) for file in OF_FOLDERS[1:3]},
}

pytestmark = pytest.mark.full


def test_broken_files_of_every_kind_are_read_or_refused_by_name(tmp_path: Path):
    assert len(MAKERS) > 50
    for name in MAKERS:
        refuses_by_name(name, tmp_path, inputs=40)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_a_broken_file_is_read_or_refused_by_name(name: str, tmp_path: Path):
    refuses_by_name(name, tmp_path, inputs=INPUTS // SLOWER.get(name.partition(":")[0], 1))


def refuses_by_name(name: str, root: Path, *, inputs: int) -> None:
    place = root / name.replace(" ", "-")
    place.mkdir()
    path, read, mutate = MAKERS[name](place)
    tally = fuzz(read, path, mutate=mutate, inputs=inputs)
    named = (path.name, str(path.parent))
    unnamed = [one for one in tally.messages.values() if not any(part in one for part in named)]
    assert not unnamed, (name, unnamed[:5])
    long = [message[:500] for message in tally.messages.values() if len(message) > 1_000]
    assert not long, (name, long[:3])
