"""Data that changed under the same name: a second comparison, a resume and a running command say so, losing nothing."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from headwise.errors import DataError, SettingError
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.logic.data import load_logic
from headwise_lab.training.baseline import BaselineSettings, run_baseline
from headwise_lab.training.train import train_run
from lab.stopping import same_bits, stop_after
from lab.tasks.logic.logic_toy import TOY, write_pairs

SCALE = dataclasses.replace(TOY, train_operators=1, test_bins=(1,), train_examples=96, batch_size=8)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "data", 3000)


def change(data: Path) -> bytes:
    """Take away the last line of a training file, and return what the file held."""
    path = data / "train1"
    before = path.read_bytes()
    path.write_bytes(before[: before.rstrip().rindex(b"\n") + 1])
    return before


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def settings(data: Path, cache: Path, **changes: object) -> RunSettings:
    found = load_logic(data, SCALE, cache).fingerprint
    return dataclasses.replace(
        RunSettings("logic", SCALE, parse_arm("plain"), seed=3, data=data, cache=cache, fingerprint=found), **changes
    )


@pytest.mark.full
def test_a_second_comparison_of_changed_data_is_refused_and_nothing_is_overwritten(data, tmp_path, inline):
    comparison = Comparison("logic", tuple(parse_arms("plain")), (0,), SCALE, tmp_path / "out", data=data)
    assert compare(comparison, Console(file=io.StringIO())) == []
    kept = content(tmp_path / "out")
    whole = change(data)
    with pytest.raises(SettingError) as caught:
        compare(comparison, Console(file=io.StringIO()))
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'out' / 'comparison.json'} belongs to data with digest ")
    assert said.endswith("Nothing was overwritten; restore the old data, or choose another --out.")
    # but for the changed data, which is prepared under its own digest
    assert kept.items() <= content(tmp_path / "out").items()
    (data / "train1").write_bytes(whole)
    assert compare(comparison, Console(file=io.StringIO())) == []
    assert inline == ["majority", "counts", "plain seed 0"], "each is done once"


def test_a_run_is_not_resumed_on_changed_data_and_resumes_on_the_old(data, tmp_path):
    own, whole, folder = settings(data, tmp_path / "cache"), tmp_path / "whole", tmp_path / "run"
    train_run(own, whole)
    train_run(own, folder, stop_after(2))
    kept = content(folder)
    assert any(name.startswith("checkpoint-") for name in kept)
    before = change(data)
    with pytest.raises(SettingError, match=r"settings\.json belongs to data with digest \w+, and the data now has \w+"):
        train_run(settings(data, tmp_path / "cache"), folder)
    # the command began before the data changed
    with pytest.raises(DataError, match=r"data changed while the command ran: .*; nothing was trained on the new data"):
        train_run(own, folder)
    assert content(folder) == kept
    (data / "train1").write_bytes(before)
    train_run(own, folder)
    assert same_bits(whole, folder)


def test_a_baseline_is_not_fitted_to_other_data_than_was_asked_for(data, tmp_path):
    own = settings(data, tmp_path / "cache")
    baseline = BaselineSettings("logic", SCALE, "majority", data=data, cache=own.cache, fingerprint=own.fingerprint)
    change(data)
    with pytest.raises(DataError, match="data changed while the command ran"):
        run_baseline(baseline, tmp_path / "majority")
    assert not (tmp_path / "majority" / "result.json").exists()
