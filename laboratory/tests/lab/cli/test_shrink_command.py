"""`headwise shrink`: heads and neurons go until a share of the layers is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import headwise as hw
from lab.cli.tiny_models import write_models
from lab.command import call, refused


@pytest.mark.full
def test_a_decoder_loses_heads_and_neurons_and_is_loaded_by_transformers(tmp_path: Path, capsys):
    folders, out = write_models(tmp_path / "models"), tmp_path / "small"
    options = ["--text", str(folders / "text.txt"), "--out", str(out), "--params", "0.7", "--lines", "20"]
    assert call("shrink", str(folders / "llama"), *options, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((out / "shrinking.json").read_text())
    *mixes, drawn = record["mixes"]
    assert drawn["what"] == "random"
    assert all(mix["parameters"] <= 0.7 for mix in mixes)
    (plan,) = [mix for mix in mixes if "(the plan)" in mix["what"]]
    after = record["states"]["after"]
    assert plan["score"] == pytest.approx(after["score"], abs=1e-5)
    assert plan["what"].startswith(f"{after['query heads']:.0f} heads, {after['hidden neurons']:.0f} neurons")
    assert {"heads and neurons", "neurons alone", "random"} <= {*record["curves"]}
    model = AutoModelForCausalLM.from_pretrained(out)
    assert sum(site.num_heads for site in hw.find_heads(model)) == after["query heads"]
    assert 2 * model.config.intermediate_size == after["hidden neurons"]
    assert "data:image/png" in (out / "shrinking.html").read_text()


def test_one_size_is_asked_for(tmp_path: Path, capsys):
    (tmp_path / "text.txt").write_text("a b\nc d\n")
    given = [str(tmp_path), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    assert "expected either --params or --time" in refused(capsys, "shrink", *given)
    assert "expected either --params or --time" in refused(capsys, "shrink", *given, "--params", "0.8", "--time", "0.8")
