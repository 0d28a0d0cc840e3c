"""The benchmark of overhead, tiny: what it measures on a GPU, run on a CPU, and that it writes what it measured."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import headwise as hw

pytestmark = pytest.mark.full
FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # the folder has the module that all benchmarks share
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as it runs on CUDA, of a model that takes no time and without a compiler."""
    module = load("overhead", monkeypatch)
    tiny = {"VOCABULARY": 20, "WIDTH": 16, "HEADS": 4, "LAYERS": 6, "INNER": 8, "MODULE_TOKENS": 6}
    others = {"COMPILE": False, "HALF": True, "WHOLE_STEPS": True}
    for name, value in (tiny | others).items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*nested_tensor.*:UserWarning")
def test_a_step_whose_gradients_are_subnormal_is_refused_and_the_model_of_the_benchmark_has_none(monkeypatch):
    module = load("overhead", monkeypatch)
    for name, value in {"VOCABULARY": 500, "LAYERS": 1, "INNER": 32}.items():
        monkeypatch.setattr(module, name, value)
    source, target = torch.randint(500, (2, 8, 64), generator=torch.Generator().manual_seed(0))
    share = module.measure_subnormal(module.Translation(), source, target)
    assert share < 1e-4
    module.require_normal(share)
    # wide embeddings, tied to the output layer, are certain of the token they are given from the first step on
    monkeypatch.setattr(module, "DEVIATION", 0.3)
    with pytest.raises(SystemExit, match="subnormal"):
        module.model_table(torch.device("cpu"), 8, 64, 1, False, [])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*nested_tensor.*:UserWarning")
def test_a_tiny_run_measures_every_method_and_writes_a_record(benchmark, tmp_path):
    out = tmp_path / "record.json"
    benchmark.main(["--device", "cpu", "--rounds", "2", "--shapes", "2x5", "--out", str(out)])
    record = json.loads(out.read_text())
    (table,) = record["models"]
    ratios = table["ratio to plain"]
    wanted = ("plain again", "svgd, all layers", "output", "position", "position, recomputed", "em in 2 encoder layers")
    assert set(wanted) <= set(ratios)
    assert all(math.isfinite(value) and value > 0 for value in ratios.values())


def test_a_tiny_run_of_floors_counts_bytes_operators_and_time(benchmark, monkeypatch, tmp_path):
    # the tiny model is that of the fixture
    monkeypatch.setitem(sys.modules, "overhead", benchmark)
    module = load("floors", monkeypatch)
    tiny = {"COPIED": {"cpu": 64}, "TOKENS": (2, 5), "WIDE": 16, "WIDE_HEADS": (2, 4), "NARROW": 8, "DEEP": 2}
    for name, value in (tiny | {"ATTACHED": 3, "SCALING": [(2, 3, 4)]}).items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    out = tmp_path / "record.json"
    module.main(["--device", "cpu", "--rounds", "2", "--out", str(out)])
    record = json.loads(out.read_text())
    rows = record["bytes"]["rows"]
    # 3 projections of 18 attentions; read, read and written in float32
    assert rows["svgd, 54 groups"]["bytes"] == 54 * 16 * 16 * 4 * 3
    assert rows["output penalty, 18 attentions"]["bytes"] == 18 * 2 * 5 * 16 * 4 * 3
    speed = record["bytes"]["bytes a second of copying"]
    for row in rows.values():
        assert row["floor milliseconds"] == pytest.approx(1e3 * row["bytes"] / speed)
        assert row["times the floor"] == pytest.approx(row["milliseconds"] / row["floor milliseconds"])
    operators = record["python"]["operators"]
    assert operators["plain"] == operators["plain again"]
    assert operators["output"] < operators["three terms"]


def test_a_step_with_repulsion_differs_and_one_in_bf16_too(benchmark):
    source, target = torch.randint(20, (2, 2, 5), generator=torch.Generator().manual_seed(0))
    device, weights = torch.device("cpu"), []
    for rule, half in ((None, False), (benchmark.RULE, False), (None, True)):
        benchmark.HALF = half
        variant = benchmark.Variant("one", device, benchmark.no_penalty, rule)
        for _ in range(2):
            variant.step(source, target)
        weights.append(variant.model.transformer.encoder.layers[0].self_attn.in_proj_weight.detach().clone())
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_gpu_that_is_not_there_is_said_so(benchmark, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "record.json"
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cuda", "--out", str(out)])
    assert "torch sees no GPU; use --device cpu" in capsys.readouterr().err
    record = json.loads(out.read_text())
    assert record["not run on CUDA"] == "torch sees no GPU"
    assert set(record["wanted on CUDA, of a plain step"]) == {"svgd, all layers", "output", "em in 2 encoder layers"}
    assert "models" not in record


@pytest.mark.full
def test_a_tiny_run_measures_every_term_rule_and_rival_which_all_change_what_is_trained(monkeypatch, tmp_path):
    module = load("penalties", monkeypatch)
    for name, value in {"WIDTH": 16, "INNER": 8, "BATCH": 2, "LENGTH": 6}.items():
        monkeypatch.setattr(module, name, value)
    trained, step = {}, module.Variant.step

    def recorded(self, x):
        torch.manual_seed(0)
        step(self, x)
        trained[id(self)] = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    monkeypatch.setattr(module.Variant, "step", recorded)
    out = tmp_path / "record.json"
    torch.manual_seed(0)
    module.main(["--device", "cpu", "--rounds", "1", "--out", str(out)])
    ratios = json.loads(out.read_text())["ratio to plain"]
    wanted = {"SigmoidGate", "MixtureOfHeads", "differential attention", "Muon per head", "DropHead", *module.TERMS}
    assert wanted <= set(ratios)
    invariant = {
        name
        for name in hw.similarity.__all__
        if getattr(getattr(hw.similarity, name), "__module__", "") == "headwise.similarity.invariant"
    }
    assert "CKA" in invariant
    assert invariant <= {type(term).__name__ for term in module.TERMS.values()}
    plain, again, *others = trained.values()
    assert len(others) == len(ratios) - 1
    assert torch.equal(plain, again)
    assert not any(len(other) == len(plain) and torch.equal(other, plain) for other in others)


def test_each_round_begins_with_another_run_and_both_clocks_keep_runs_apart(monkeypatch: pytest.MonkeyPatch):
    timing = load("timing", monkeypatch)
    order: list[str] = []
    ticks = iter(range(100))
    monkeypatch.setattr(timing.time, "process_time", lambda: float(next(ticks)))

    def spend(name: str, readings: int) -> None:
        order.append(name)
        for _ in range(readings):
            next(ticks)

    runs = {"a": lambda: spend("a", 0), "b": lambda: spend("b", 1), "c": lambda: spend("c", 2)}
    wall, cpu = timing.interleaved_clocks(torch.device("cpu"), runs, 3, "toy")
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert cpu == {"a": [1.0] * 3, "b": [2.0] * 3, "c": [3.0] * 3}
    assert {name: len(seconds) for name, seconds in wall.items()} == dict.fromkeys("abc", 3)
