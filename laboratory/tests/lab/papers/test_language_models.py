"""The study of language models: each arm stands beside the control that the laboratory gives it, at every scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.run import make_plans

STUDY = REPRODUCTIONS["diversity/lm"]
CONTRASTS = [one for claim in STUDY.claims for one in claim.contrasts]
PLAIN = [one for claim in STUDY.claims for one in claim.contrasts if "plain attention" in claim.statement]
EFFECTIVE = [one for one in CONTRASTS if one.measure == "effective_heads"]
SCORE = [one for one in CONTRASTS if one not in EFFECTIVE and one not in PLAIN]


@pytest.mark.parametrize("scale", ["demo", "cpu", "gpu"])
def test_every_arm_runs_with_its_control(scale: str, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("a text\n" * 20)
    (plan,) = make_plans(STUDY, scale, seeds=5, data=text, out=tmp_path, workers=1)
    names = [arm.name for arm in plan.comparison.arms]
    assert len(names) == 13
    assert all(parse_arm(name).control in (None, *names) for name in names)
    sizes = named_task("lm").scales[scale]
    assert sizes.heads % 2 == sizes.key_value_heads % 2 == 0, "heads are paired"
    assert sizes.key_value_heads < sizes.heads


def test_every_contrast_is_with_the_control_or_with_plain():
    for contrasts in (EFFECTIVE, SCORE):
        assert {one.arm: one.against for one in contrasts} == {one.arm: parse_arm(one.arm).control for one in contrasts}
        assert len(contrasts) == 7
    assert {one.measure for one in (*SCORE, *PLAIN)} == {None}
    assert {one.against for one in PLAIN} == {"plain"}
    # of two numbers of heads, effective heads are no comparison
    assert not any(one.arm == "differential" and one.against == "plain" for one in EFFECTIVE)
    # each method has a verdict of its own
    assert all(len(claim.contrasts) == 1 for claim in STUDY.claims)
