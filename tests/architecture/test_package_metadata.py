"""The files that describe the package tell the truth: one version, targets that exist, types without errors of ours."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest

import headwise
from architecture.source import ROOT

SNIPPET = """
import torch
from torch import nn

import headwise as hw

model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), num_layers=2)
heads: hw.Heads = hw.find_heads(model)
optimizer = torch.optim.AdamW(model.parameters())
repulsion: hw.repulsion.Repulsion = hw.repel(heads, hw.SVGD(alpha=hw.Relative(0.5)), optimizer)
penalty = hw.Disagreement(heads.layer(0), hw.similarity.Output())
tokens = torch.randn(2, 5, 32)
loss: torch.Tensor = model(tokens).square().mean() + 0.1 * penalty()
loss.backward()
report: hw.report.Report = hw.measure(heads, [tokens])
effective: list[float | None] = [layer.effective_heads for layer in report.layers]
with hw.Taps(heads, weights=True) as taps:
    model(tokens)
    shapes = [capture.weights.shape for capture in taps.read() if capture.weights is not None]
print(hw.verify(heads, [tokens]), report.compare(report), effective, shapes)
print(hw.importance(heads, lambda: float(model(tokens).mean())))
methods = (hw.Penalize(hw.similarity.CKA()), hw.Repel(hw.SVGD(), layers=(0,)))
hw.plots.overview(report).savefig("heads.png")
"""


def test_both_packages_have_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/headwise/__init__.py"
    laboratory = tomllib.loads((ROOT / "laboratory" / "pyproject.toml").read_text())["project"]
    assert laboratory["version"] == headwise.__version__
    assert f"headwise[cli]=={headwise.__version__}" in laboratory["dependencies"]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == headwise.__version__


def test_the_workflow_runs_targets_that_exist():
    text = (ROOT / ".github/workflows/tests.yml").read_text()
    asked = {target for targets in re.findall(r"make ([a-z -]+)", text) for target in targets.split()}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"lint", "test-all", "wheel", "docs", "docs-check"} <= asked <= targets


@pytest.mark.full
def test_a_users_code_has_no_error_of_ours_under_strict_types(tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET)
    settings = {"typeCheckingMode": "strict", "include": ["snippet.py"], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    pytest.importorskip("pyright")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    said = [f"{one['range']['start']['line']}: {one['message']}" for one in found["generalDiagnostics"]]
    # torch and matplotlib leave parts of these open
    theirs = ('Type of "backward"', 'Type of "savefig"')
    assert not [line for line in said if not any(name in line for name in theirs)], "\n".join(said)
