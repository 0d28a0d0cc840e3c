"""Data of another task is refused before anything is run: by each task, and by a dry run as by the run itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.errors import DataError
from headwise_lab.experiment.registry import TASKS, named_task
from lab.command import call, refused
from lab.sentences import write_sentences
from lab.tasks.classification.probing_toy import write_probing
from lab.tasks.glue.glue_toy import write_glue
from lab.tasks.graph2text.graph_sets import write_triples
from lab.tasks.pretraining.pretraining_toy import write_jsonl
from lab.tasks.translation.translation_text import write_corpus

pytest.importorskip("nltk")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data of each task that needs some."""
    place = tmp_path_factory.mktemp("places")
    sentences = write_sentences(place / "mine.tsv", 40)
    write_glue(place / "glue")
    own = write_corpus(place / "own")
    return {
        "translation": Path(f"{own}:de-en"),
        "classification": sentences,
        "sentence": sentences,
        "probing": write_probing(place / "past_present.txt", {"va": 40, "te": 20}),
        "graph2text": write_triples(place / "triples.tsv", 40),
        "pretraining": write_jsonl(place / "text" / "docs.jsonl.gz", 40),
        "glue": place / "glue" / "RTE",
    }


@pytest.mark.parametrize("name", TASKS)
def test_a_task_finds_its_data_and_says_of_another_place_what_a_run_would(name, places, tmp_path):
    task = named_task(name)
    scale = task.scales["demo"]
    if name in places:
        task.find(places[name], scale)
    wrong = tmp_path / "wrong"
    (wrong / "classes").mkdir(parents=True)
    for place in (wrong, tmp_path / "none"):
        with pytest.raises(DataError) as found:
            task.find(place, scale)
        with pytest.raises(DataError) as loaded:
            task.load(place, scale, tmp_path / "cache")
        assert str(found.value) == str(loaded.value)
        assert str(place) in str(found.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("identifier", "task"),
    [("guided/table-2", "translation"), ("repulsive/table-4", "graph2text"), ("repulsive/pretraining", "pretraining")],
)
def test_a_dry_run_refuses_the_data_of_another_task_as_the_run_does(identifier, task, places, tmp_path, capsys):
    out = str(tmp_path / "out")
    command = ("reproduce", identifier, "--scale", "demo", "--out", out, "--data")
    wrong = places["glue"]
    said = refused(capsys, *command, str(wrong), "--dry-run")
    assert str(wrong) in said
    assert "runs to do" not in capsys.readouterr().out
    assert refused(capsys, *command, str(wrong)) == said
    assert call(*command, str(places[task]), "--dry-run") == 0
    assert "runs to do" in capsys.readouterr().out
    # what there is to do can be looked at before there is data
    assert call(*command[:-1], "--dry-run") == 0


def test_a_dry_run_looks_at_the_text_of_the_pre_training_before_a_table_too(places, tmp_path, capsys):
    (tmp_path / "glue").symlink_to(places["glue"].parent)
    command = ("reproduce", "repulsive/table-3", "--scale", "demo", "--data", str(tmp_path), "--dry-run")
    (tmp_path / "prepared").mkdir()
    assert f"{tmp_path / 'prepared'} holds no text" in refused(capsys, *command)
    (tmp_path / "prepared").rmdir()
    (tmp_path / "corpora").symlink_to(places["pretraining"].parent)
    assert call(*command) == 0


def test_a_part_that_begins_with_another_is_not_run_without_it(places, tmp_path, capsys):
    (tmp_path / "glue").symlink_to(places["glue"].parent)
    command = ("reproduce", "repulsive/table-3", "--scale", "demo", "--data", str(tmp_path), "--dry-run")
    said = refused(capsys, *command, "--part", "RTE after MNLI")
    assert "RTE after MNLI (begins with MNLI, which --part leaves out)" in said
