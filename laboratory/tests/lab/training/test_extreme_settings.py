"""A setting of any arm that is far too large is refused, ends the run in a sentence, or leaves finite numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from headwise.errors import HeadwiseError
from headwise.input_files import parse_json
from headwise_lab.experiment.arm import named_arms
from headwise_lab.experiment.arm_text import list_settings, parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.training.train import train_run
from lab.training.test_killed import TOY

pytestmark = pytest.mark.full

SCALE = dataclasses.replace(TOY, heads=4, epochs=1, train_examples=64, dev_examples=30, generated_draws=1000)
HUGE = [
    f"{name}:{setting}=1e30"
    for name, arm in named_arms().items()
    for setting, place in list_settings(arm).items()
    if isinstance(place[-1], str)
]


@pytest.mark.slow
def test_no_setting_of_any_arm_leaves_a_number_that_is_not_finite(tmp_path: Path):
    refused, finished, raw = {}, [], []
    for number, text in enumerate(HUGE):
        folder = tmp_path / str(number)
        try:
            settings = RunSettings("logic", SCALE, parse_arm(text), seed=3, cache=tmp_path / "cache")
            train_run(settings, folder)
        except HeadwiseError as error:
            refused[text] = str(error)
        except Exception as error:
            raw.append(f"{text}: {error!r}")
        else:
            lines = (folder / "epochs.jsonl").read_text().splitlines()
            for record in (*lines, (folder / "result.json").read_text()):
                assert parse_json(record) == json.loads(record)
            finished.append(text)
    assert not raw, "\n".join(raw)
    assert max(map(len, refused.values())) < 800
    assert {"svgd:alpha=1e30", "spos:step_size=1e30", "output:weight=1e30", "gated:scale=1e30"} <= refused.keys()
    assert "svgd:bandwidth=1e30" in finished
