"""Records keep the numbers of their runs: everything shown is computed again from them, and no words are kept."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from headwise.errors import DataError
from headwise_lab.papers.data import ARCHIVE, pack_runs, unpack_runs
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.recomputed import find_record, recompute
from headwise_lab.papers.records import record, write_records
from headwise_lab.papers.run import make_plans, report
from lab.command import call
from lab.results.synthetic_comparison import PAPER, write_comparison

NAME, NUMBERS = "diversify/figure-4", {"numbers": {"different_words": 7.5}}
PAPERS = Path(__file__).parents[4] / "laboratory" / "papers"


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notes of a paper with one record, whose runs are gone."""
    place = tmp_path_factory.mktemp("paper")
    plans = make_plans(REPRODUCTIONS[NAME], "demo", seeds=5, data=None, out=place / "runs", workers=1)
    folder = write_comparison(plans[0].comparison.out, PAPER, bins=range(1, 13), items=20)
    maps = {**NUMBERS, "maps": [{"words": ["good", "food"], "weights": [[0.2, 0.8]]}]}
    (folder / "svgd" / "seed-0" / "analysis-attention.json").write_text(json.dumps(maps))
    console = Console(file=io.StringIO())
    report(REPRODUCTIONS[NAME], "demo", plans, place / "runs", place / "paper", console, "command")
    (place / "runs").rename(place / "gone")
    return place / "paper"


def test_a_record_is_made_again_from_the_runs_kept_with_it(paper: Path, tmp_path: Path):
    path = find_record(paper, NAME, "demo")
    again, kept = record(recompute(path, tmp_path), "command"), json.loads(path.read_text())
    assert json.loads(json.dumps(again)) == kept
    assert kept["claims"][0]["contrasts"][0]["by_seed"]


def test_the_command_shows_it_without_training_and_writes_its_page(paper: Path, tmp_path: Path, capsys):
    assert call("reproduce", NAME, "--scale", "demo", "--from", str(paper), "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "em over trunk on 1 to 12 operators" in " ".join(shown.split())
    assert (tmp_path / "diversify-figure-4-demo" / "report.html").exists()


@pytest.mark.parametrize(
    "more", [["--part", "base"], ["--record", "notes"], ["--dry-run"], ["--seeds", "2"], ["--workers", "0"]]
)
def test_an_option_that_would_do_nothing_with_kept_runs_is_refused(more: list[str], paper: Path, capsys):
    assert call("reproduce", NAME, "--scale", "demo", "--from", str(paper), *more) == 2
    assert f"--from trains nothing; leave out {more[0]}" in " ".join(capsys.readouterr().err.split())


def test_the_same_runs_give_the_same_bytes_again(paper: Path, tmp_path: Path):
    path = find_record(paper, NAME, "demo")
    found = recompute(path, tmp_path / "runs")
    write_records(found, tmp_path / "paper", "command")
    again = tmp_path / "paper" / "results" / path.name
    assert again.with_suffix(ARCHIVE).read_bytes() == path.with_suffix(ARCHIVE).read_bytes()


def test_words_of_texts_and_weights_are_left_out(paper: Path):
    with zipfile.ZipFile(find_record(paper, NAME, "demo").with_suffix(ARCHIVE)) as archive:
        names = archive.namelist()
        kept = json.loads(archive.read("0/svgd/seed-0/analysis-attention.json"))
    assert kept == {**NUMBERS, "maps": [{"words": ["1", "2"], "weights": [[0.2, 0.8]]}]}
    assert {Path(name).suffix for name in names} <= {".json", ".jsonl", ".npz"}


def test_a_changed_answer_is_noticed(paper: Path, tmp_path: Path):
    path = find_record(paper, NAME, "demo")
    places = unpack_runs(path.with_suffix(ARCHIVE), tmp_path / "runs")
    result = places[0] / "svgd" / "seed-0" / "result.json"
    result.write_text(result.read_text().replace('"seed": 0', '"seed": 1'))
    runs = [(places[0], [result.parent])]
    with pytest.raises(DataError, match=r"result\.json was changed since it was written"):
        pack_runs(runs)


@pytest.mark.parametrize("name", ["0/../../a.json", "0/plain/seed-0/a.py", "{place}/a.json", "0/../seed-0/result.json"])
def test_what_is_no_archive_of_runs_is_refused_and_writes_nothing(name: str, tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(name.format(place=tmp_path), "{}")
    with pytest.raises(DataError, match="is no archive of runs"):
        unpack_runs(tmp_path / "x.zip", tmp_path / "runs")
    assert [path.name for path in tmp_path.iterdir()] == ["x.zip"]


def test_a_damaged_archive_and_a_missing_record_are_named(paper: Path, tmp_path: Path):
    (tmp_path / "x.zip").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"x\.zip cannot be read as an archive of runs"):
        unpack_runs(tmp_path / "x.zip", tmp_path / "runs")
    there = rf"holds no record of diversify/table-5 at scale demo; expected one of {NAME} at demo\.$"
    with pytest.raises(DataError, match=there):
        find_record(paper, "diversify/table-5", "demo")
    with pytest.raises(DataError, match=r"figure-4-cpu\.json of .*; none has its runs beside it"):
        find_record(PAPERS / "diversify", "diversify/figure-4", "cpu")


@pytest.mark.parametrize("path", sorted(PAPERS.glob(f"*/results/*{ARCHIVE}")), ids=lambda path: path.stem)
def test_every_record_of_the_papers_is_what_its_runs_say(path: Path, tmp_path: Path):
    kept = json.loads(path.with_suffix(".json").read_text())
    again = json.loads(json.dumps(record(recompute(path.with_suffix(".json"), tmp_path), kept["command"])))
    for name in ("claims", "tables", "grids"):
        _assert_same(again[name], kept[name], name)


def _assert_same(again: object, kept: object, where: str):
    """Hold numbers to nine digits, as another processor adds in another order, and everything else to the letter."""
    if isinstance(again, dict) and isinstance(kept, dict):
        assert list(again) == list(kept), where
        for key, value in kept.items():
            _assert_same(again[key], value, f"{where}.{key}")
    elif isinstance(again, list) and isinstance(kept, list):
        assert len(again) == len(kept), where
        for index, (one, other) in enumerate(zip(again, kept, strict=True)):
            _assert_same(one, other, f"{where}[{index}]")
    elif isinstance(again, float) and isinstance(kept, float):
        assert again == pytest.approx(kept, rel=1e-9, abs=1e-12), where
    else:
        assert again == kept, where
