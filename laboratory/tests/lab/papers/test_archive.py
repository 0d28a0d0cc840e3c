"""Records keep the numbers of their runs: everything shown is computed again from them, and no words are kept."""

from __future__ import annotations

import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headwise.errors import DataError
from headwise.repulsion.repel import Repel
from headwise_lab.experiment.run_folder import as_record
from headwise_lab.papers.data import find_archive, pack_files, pack_runs, unpack_runs
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.pages import render
from headwise_lab.papers.recomputed import find_record, has_runs, recompute
from headwise_lab.papers.records import record, write_records
from headwise_lab.papers.run import make_plans, report
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from lab.command import call, refused
from lab.results.synthetic_comparison import PAPER, write_comparison

FIGURE = REPRODUCTIONS["diversify/figure-4"]
NUMBERS = {"numbers": {"different_words": 7.5}}
PAPERS = Path(__file__).parents[4] / "laboratory" / "papers"
KEPT = [path for path in PAPERS.glob("*/results/*.json") if has_runs(path)]
RECORDS = sorted(KEPT, key=lambda path: find_archive(path).stat().st_size)
# Whose records are computed again in a second.
QUICK = 2


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notes of a paper with one record, whose runs are gone, and the screen of its report."""
    place = tmp_path_factory.mktemp("paper")
    plans = make_plans(FIGURE, "demo", seeds=5, data=None, out=place / "runs", workers=1)
    folder = write_comparison(plans[0].comparison.out, PAPER, bins=range(1, 13), items=20)
    maps = {**NUMBERS, "maps": [{"words": ["good", "food"], "weights": [[0.2, 0.8]]}]}
    (folder / "svgd" / "seed-0" / "analysis-attention.json").write_text(json.dumps(maps))
    console = Console(record=True, width=160)
    report(FIGURE, "demo", plans, place / "runs", place / "paper", console, f"headwise reproduce {FIGURE.id}")
    assert "Aggregation performs better on long" in console.export_text()
    assert (place / "runs" / "diversify-figure-4-demo" / "report.html").exists()
    (place / "runs").rename(place / "gone")
    return place / "paper"


def test_the_record_and_the_pages_have_every_claim_and_what_is_missing(paper: Path):
    kept, pages = json.loads(find_record(paper, FIGURE.id, "demo").read_text()), render(paper)
    assert all(path.read_text() == text for path, text in pages.items())
    page = "\n".join(pages.values())
    assert all(claim["statement"] in page and claim["verdict"] in page for claim in kept["claims"])
    assert "headwise reproduce diversify/figure-4" in page
    assert "**Not finished: 5 runs** (svgd-relative seed 0, " in page
    # the folder's other arms belong to other comparisons
    assert "svgd:alpha=3" not in page


def test_a_record_is_made_again_from_the_runs_kept_with_it_to_the_byte(paper: Path, tmp_path: Path):
    path = find_record(paper, FIGURE.id, "demo")
    found, kept = recompute(path, tmp_path / "runs"), json.loads(path.read_text())
    assert json.loads(json.dumps(record(found, kept["command"]))) == kept
    assert kept["claims"][0]["contrasts"][0]["by_seed"]
    write_records(found, tmp_path / "paper", kept["command"])
    again = tmp_path / "paper" / "results" / path.name
    for at in (find_archive, lambda of: of, lambda of: of.with_suffix(".md")):
        assert at(again).read_bytes() == at(path).read_bytes()
    # runs that were asked for of a part without any stay named
    asked = [*kept["missing"], *(f"em seed {seed} in another" for seed in range(5))]
    again.write_text(json.dumps(kept | {"missing": asked}))
    assert record(recompute(again, tmp_path / "more"), "")["missing"] == asked
    assert ", em seed 2 in another, and 2 more)." in "\n".join(render(tmp_path / "paper").values())


@pytest.mark.full
def test_the_command_shows_it_without_training_and_refuses_options_that_would_do_nothing(
    paper: Path, tmp_path: Path, capsys
):
    words = ("reproduce", FIGURE.id, "--scale", "demo", "--from", str(paper))
    assert call(*words, "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).index("Of 7 claims: ") < " ".join(shown.split()).index("What EM routing adds is the")
    assert len(shown.splitlines()) <= 60
    assert (tmp_path / "diversify-figure-4-demo" / "report.html").exists()
    for more in (["--part", "base"], ["--record", "notes"], ["--dry-run"], ["--seeds", "2"], ["--workers", "0"]):
        assert f"--from trains nothing; leave out {more[0]}" in refused(capsys, *words, *more)


def test_words_of_texts_and_weights_are_left_out_and_a_changed_answer_is_noticed(paper: Path, tmp_path: Path):
    path = find_archive(find_record(paper, FIGURE.id, "demo"))
    (place,) = unpack_runs(path, tmp_path / "runs")
    names = [one.relative_to(place.parent).as_posix() for one in place.rglob("*.*")]
    kept = json.loads((place / "svgd" / "seed-0" / "analysis-attention.json").read_text())
    assert kept == {**NUMBERS, "maps": [{"words": ["1", "2"], "weights": [[0.2, 0.8]]}]}
    assert {Path(name).suffix for name in names} <= {".json", ".jsonl", ".npz"}
    result = place / "svgd" / "seed-0" / "result.json"
    result.write_text(result.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(DataError, match=r"result\.json was changed since it was written"):
        pack_runs([(place, [result.parent])])


def test_what_is_no_archive_of_runs_is_refused_and_writes_nothing(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, known = tmp_path / "x.tar.xz", "0/plain/seed-0/result.json"
    outside = ("0/../../a.json", f"{tmp_path}/a.json", "0/../seed-0/result.json")
    for name in (*outside, "0/plain/seed-0/a.py", "0/é\0/seed-0/result.json"):
        path.write_bytes(pack_files({"0/comparison.json": b"{}", name: b"{}"}))
        with pytest.raises(DataError, match=f"is no archive of runs: it holds {name}"):
            unpack_runs(path, tmp_path / "runs")
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, "sparse"):
        member = tarfile.TarInfo(known)
        if kind == "sparse":
            member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}
        else:
            member.type, member.linkname = kind, "/etc/passwd"
        with tarfile.open(path, "w:xz") as archive:
            archive.addfile(member)
        with pytest.raises(DataError, match=f"is no archive of runs: it holds {known}"):
            unpack_runs(path, tmp_path / "runs")
    whole = pack_files({known: bytes(range(256))})
    damaged = whole[:90] + bytes([whole[90] ^ 1]) + whole[91:]
    for content in (b"", b"PK nothing", whole[:-40], damaged, lzma.compress(b"nothing"), lzma.compress(whole)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.tar\.xz cannot be read as an archive of runs"):
            unpack_runs(path, tmp_path / "runs")
    monkeypatch.setattr("headwise_lab.papers.data._MOST_BYTES", 5000)
    path.write_bytes(pack_files({known: bytes(5000)}))
    with pytest.raises(DataError, match="is no archive of runs: it holds more than 1 GiB"):
        unpack_runs(path, tmp_path / "runs")
    assert [one.name for one in tmp_path.iterdir()] == ["x.tar.xz"]
    there = rf"holds no record of diversify/table-5 at scale demo; expected one of {FIGURE.id} at demo\.$"
    with pytest.raises(DataError, match=there):
        find_record(paper, "diversify/table-5", "demo")
    with pytest.raises(DataError, match=r"figure-4-cpu\.json of .*; none has its runs in "):
        find_record(PAPERS / "diversify", "diversify/figure-4", "cpu")


def recompute_all(paths: list[Path], place: Path) -> list[str]:
    """Compute records again; return where they differ from those kept."""
    wrong = []
    for path in paths:
        kept = json.loads(path.read_text())
        folder = place / path.parents[1].name / path.stem
        again = json.loads(json.dumps(record(recompute(path, folder), kept["command"])))
        wrong += [line for name in ("claims", "tables", "grids") for line in _compare(again[name], kept[name], name)]
    return wrong


def _compare(again: Any, kept: Any, where: str) -> list[str]:
    """Hold numbers to nine digits, as another processor adds in another order, and everything else to the letter."""
    if isinstance(kept, dict) and isinstance(again, dict) and list(kept) == list(again):
        return [line for name in kept for line in _compare(again[name], kept[name], f"{where}.{name}")]
    if isinstance(kept, list) and isinstance(again, list) and len(kept) == len(again):
        return [line for number, one in enumerate(kept) for line in _compare(again[number], one, f"{where}[{number}]")]
    same = again == pytest.approx(kept, rel=1e-9, abs=1e-12) if isinstance(kept, float) else again == kept
    return [] if same else [f"{where}: {again!r:.80} is not {kept!r:.80}"]


def test_records_of_the_papers_are_what_their_runs_say(tmp_path: Path):
    assert len(RECORDS) > 40
    assert not recompute_all(RECORDS[:QUICK], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("quarter", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in range(1, 4))])
def test_every_record_of_the_papers_is_what_its_runs_say(quarter: int, tmp_path: Path):
    assert not recompute_all(RECORDS[QUICK + quarter :: 4], tmp_path)


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A folder as `headwise tune` leaves it."""
    folder = tmp_path / "tuned"
    folder.mkdir()
    sizes = as_record(LOGIC_SCALES["demo"])
    (folder / "tuning.json").write_text(json.dumps({"task": "logic", "sizes": sizes, "draws": 4, "seed": 9}))
    for arm in FIGURE.parts[0].arms:
        best = f"{arm}:learning_rate=0.004,dropout=0.2" if "+" not in arm else arm
        best = best.replace("svgd:", "svgd:alpha=0.7,step_size=0.3,")
        (folder / arm).mkdir()
        tried = [{"arm": arm, "dev_score": 0.612}, {"arm": best, "dev_score": 0.644}, {"arm": arm, "dev_score": 0.631}]
        (folder / arm / "tuned.json").write_text(json.dumps({"arm": best, "tried": tried, "seeds": 3}))
    return folder


@pytest.mark.full
def test_tuned_arms_are_run_recorded_and_shown_under_their_names(tuned: Path, tmp_path: Path):
    def plan():
        return make_plans(FIGURE, "demo", seeds=5, data=None, out=tmp_path / "runs", workers=1, tuned=tuned)

    plans = plan()
    assert plans[0].comparison.out.name == "logic-demo-tuned"
    arms = {arm.name: arm for arm in plans[0].comparison.arms}
    assert (arms["plain"].dropout, arms["svgd"].learning_rate, arms["svgd"].control) == (0.2, 0.004, "smooth")
    method: Any = arms["svgd"].find(Repel)
    assert method.rule.alpha == 0.7
    write_comparison(plans[0].comparison.out, PAPER, bins=range(1, 13), items=20)
    console = Console(record=True, width=200)
    report(FIGURE, "demo", plans, tmp_path / "runs", tmp_path / "paper", console, "command")
    best = "svgd:alpha=0.7,step_size=0.3,learning_rate=0.004,dropout=0.2"
    assert best in console.export_text()
    path = find_record(tmp_path / "paper", FIGURE.id, "demo")
    assert path.name == "figure-4-demo-tuned.json"
    assert find_record(tmp_path / "paper", FIGURE.id, "demo", tuned=True) == path
    with pytest.raises(DataError, match="holds no record of diversify/figure-4 at scale demo"):
        find_record(tmp_path / "paper", FIGURE.id, "demo", tuned=False)
    kept, details = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    assert kept["tuned"]["svgd"]["arm"] == best
    assert kept["tuned"]["svgd"]["tried"][1] == {"arm": best, "dev_score": 0.644}
    assert "| 64.4 | 3 | 3 | 63.1, 61.2 |" in details
    assert "svgd:alpha=0.7" in details
    assert "at scale demo, tuned: " in (tmp_path / "paper" / "RESULTS.md").read_text()
    assert json.loads(json.dumps(record(recompute(path, tmp_path / "again"), "command"))) == kept
    # an arm that was not tuned is refused before anything runs
    (tuned / "em" / "tuned.json").unlink()
    with pytest.raises(DataError, match="no best draw of em; every arm and every control needs the same draws"):
        plan()
