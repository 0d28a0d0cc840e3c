"""The figure of a pre-training has a panel a number, and refuses a damaged record by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.errors import DataError
from headwise_lab.papers.repulsive import figures as module
from headwise_lab.papers.repulsive.figures import draw_training_curves
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.runs import read_results
from headwise_lab.results.table import read_table
from lab.results.synthetic_comparison import Drawn, write_comparison

ARMS = (Drawn("plain", None), Drawn("svgd"))


def pretrained(out: Path, rounds: int = 4) -> Path:
    write_comparison(out, ARMS, seeds=(0, 1), items=20)
    for arm in ("plain", "svgd"):
        for seed in (0, 1):
            lines = [
                {
                    "dev": {
                        "pooled": 0.5 + 0.1 * seed,
                        "generator_loss": 6.0 - n,
                        "discriminator_loss": 0.4 - 0.01 * n,
                    },
                    "force_ratio": None if arm == "plain" else 2.0 + seed + n,
                }
                for n in range(rounds)
            ]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (out / arm / f"seed-{seed}" / "epochs.jsonl").write_text(text)
    return out


def drawn(out: Path):
    return draw_training_curves("", out, Evidence(read_results(out)), read_table(out))


def test_each_number_has_a_curve_of_each_arm_that_has_it(tmp_path, monkeypatch):
    curves, draw = [], module.draw_range

    def watched(axes, places, low, middle, high, style):
        curves.append((list(low), list(middle), list(high)))
        draw(axes, places, low, middle, high, style)

    monkeypatch.setattr(module, "draw_range", watched)
    (picture,) = drawn(pretrained(tmp_path / "runs"))
    assert picture.png.startswith(b"\x89PNG")
    assert len(curves) == 7  # plain has no force
    assert curves[0] == ([6.0, 5.0, 4.0, 3.0],) * 3
    assert [ends[0] for ends in curves[4]] == pytest.approx([50.0, 55.0, 60.0])
    assert curves[6] == ([2.0, 3.0, 4.0, 5.0], [2.5, 3.5, 4.5, 5.5], [3.0, 4.0, 5.0, 6.0])
    assert "force ratio: repulsion over drive of svgd 2.5 to 5.5" in picture.alt


def test_two_rounds_are_no_curve(tmp_path):
    assert drawn(pretrained(tmp_path / "runs", rounds=2)) == ()


def test_a_line_without_a_number_is_named(tmp_path):
    out = pretrained(tmp_path / "runs")
    path = out / "svgd" / "seed-1" / "epochs.jsonl"
    path.write_text(path.read_text().replace('"generator_loss": 5.0, ', "", 1))
    with pytest.raises(DataError, match=r"epochs\.jsonl, line 2 has no dev\.generator_loss"):
        drawn(out)
