"""A reproduction with tuned arms: the settings that were tuned are run, recorded and shown, under the arms' names."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from headwise.errors import DataError
from headwise.repulsion.repel import Repel
from headwise_lab.experiment.run_folder import as_record
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.recomputed import find_record, recompute
from headwise_lab.papers.records import record
from headwise_lab.papers.run import make_plans, report
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from lab.results.synthetic_comparison import PAPER, write_comparison

FIGURE = REPRODUCTIONS["diversify/figure-4"]


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


def test_tuned_arms_are_run_recorded_and_shown_under_their_names(tuned: Path, tmp_path: Path):
    plans = make_plans(FIGURE, "demo", seeds=5, data=None, out=tmp_path / "runs", workers=1, tuned=tuned)
    assert plans[0].comparison.out.name == "logic-demo-tuned"
    arms = {arm.name: arm for arm in plans[0].comparison.arms}
    assert (arms["plain"].dropout, arms["svgd"].learning_rate, arms["svgd"].control) == (0.2, 0.004, "smooth")
    assert arms["svgd"].find(Repel).rule.alpha == 0.7
    write_comparison(plans[0].comparison.out, PAPER, bins=range(1, 13), items=20)
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    report(FIGURE, "demo", plans, tmp_path / "runs", tmp_path / "paper", console, "command")
    assert "svgd:alpha=0.7,step_size=0.3,learning_rate=0.004,dropout=0.2" in shown.getvalue()
    path = find_record(tmp_path / "paper", FIGURE.id, "demo")
    assert path.name == "figure-4-demo-tuned.json"
    assert find_record(tmp_path / "paper", FIGURE.id, "demo", tuned=True) == path
    with pytest.raises(DataError, match="holds no record of diversify/figure-4 at scale demo"):
        find_record(tmp_path / "paper", FIGURE.id, "demo", tuned=False)
    kept = json.loads(path.read_text())
    best = "svgd:alpha=0.7,step_size=0.3,learning_rate=0.004,dropout=0.2"
    assert kept["tuned"]["svgd"]["arm"] == best
    assert kept["tuned"]["svgd"]["tried"][1] == {"arm": best, "dev_score": 0.644}
    assert "| 64.4 | 3 | 3 | 63.1, 61.2 |" in path.with_suffix(".md").read_text()
    assert "at scale demo, tuned: " in (tmp_path / "paper" / "RESULTS.md").read_text()
    assert "svgd:alpha=0.7" in path.with_suffix(".md").read_text()
    assert json.loads(json.dumps(record(recompute(path, tmp_path / "again"), "command"))) == kept


def test_an_arm_that_was_not_tuned_is_refused_before_anything_runs(tuned: Path, tmp_path: Path):
    (tuned / "em" / "tuned.json").unlink()
    with pytest.raises(DataError, match="no best draw of em; every arm and every control needs the same draws"):
        make_plans(FIGURE, "demo", seeds=5, data=None, out=tmp_path / "runs", workers=1, tuned=tuned)
    assert not (tmp_path / "runs").exists()
