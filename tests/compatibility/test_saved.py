"""What revision 1e8b0fb saved still opens: models, states, reports, finished runs and a stopped one.

The folder `saved` was made by `make_saved.py`. Tolerances allow for the rounding of other processors.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from headwise.moved import MOVED
from safetensors.torch import load_file
from torch import nn
from transformers import BertModel

import headwise as hw
from headwise.cli.main import main
from headwise_lab.data.arrays import read_arrays
from headwise_lab.training.train import HeadTrainer
from lab.inline import do_inline

SAVED = Path(__file__).parent / "saved"
COMMANDS = json.loads((SAVED / "commands.json").read_text())
RUNS = {
    "logic": "logic/svgd+em@capsules=4/seed-0",
    "classification": "classification/guided@roles=rare_window/seed-0",
    "translation": "translation/output@kinds=cross/seed-0",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what was saved, which is the working directory."""
    monkeypatch.chdir(shutil.copytree(SAVED, tmp_path / "saved"))
    # wide enough that no table is wrapped
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path / "saved"


def headwise(*words: str) -> None:
    """Run a command as `python -m headwise` does; it must succeed."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


def read(path: str | Path) -> Any:
    """The content of a JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def lines_of(path: str | Path) -> list[Any]:
    """The content of a file with JSON in each line."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def assert_same(old: Any, new: Any, where: str = "", *, within: float = 1e-3) -> None:
    """Compare saved JSON data with new data, which may have more keys."""
    if isinstance(old, Mapping):
        assert old.keys() <= new.keys(), where
        for name in old:
            assert_same(old[name], new[name], f"{where}.{name}", within=within)
    elif isinstance(old, list):
        assert len(old) == len(new), where
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            assert_same(one, other, f"{where}.{number}", within=within)
    elif isinstance(old, float):
        assert new == pytest.approx(old, rel=within, abs=within, nan_ok=True), where
    else:
        assert new == old, where


def files_of(folder: str | Path) -> dict[Path, tuple[int, bytes]]:
    """The modification time and content of each file below a folder."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in Path(folder).rglob("*") if path.is_file()}


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=5, enable_nested_tensor=False)


def test_a_saved_encoder_with_an_aggregator_of_each_kind_answers_as_it_did():
    kept = torch.load("encoder.pt", weights_only=True)
    with torch.no_grad():
        output = hw.load("encoder", encoder())(kept["input"], src_key_padding_mask=kept["padding"])
    torch.testing.assert_close(output, kept["output"], rtol=1e-4, atol=1e-5)


def test_a_saved_encoder_that_is_saved_again_has_the_same_record_and_answers():
    kept = torch.load("encoder.pt", weights_only=True)
    hw.save(hw.load("encoder", encoder()), "again")
    old, new = read("encoder/headwise.json"), read("again/headwise.json")
    assert {name: new[name] for name in old if name != "files"} == {
        name: value for name, value in old.items() if name != "files"
    }
    with torch.no_grad():
        output = hw.load("again", encoder())(kept["input"], src_key_padding_mask=kept["padding"])
    torch.testing.assert_close(output, kept["output"], rtol=1e-4, atol=1e-5)


def test_a_pickled_model_with_hooks_of_taps_opens_and_answers_as_it_did(monkeypatch):
    # the pickle names modules by their paths in that revision; each warns at its first import
    for path in MOVED:
        monkeypatch.delitem(sys.modules, path, raising=False)
    with pytest.warns(DeprecationWarning, match=r"^headwise\.\w+ is now headwise\."):
        kept = torch.load("pickle.pt", weights_only=False)
    model = kept["model"]
    with torch.no_grad(), hw.Taps(hw.find_heads(model), outputs=True, weights=True) as taps:
        torch.testing.assert_close(model(kept["input"]), kept["output"], rtol=1e-4, atol=1e-5)
        assert [tuple(capture.weights.shape) for capture in taps.read()] == [(3, 2, 5, 5)] * 3


def test_a_saved_model_of_transformers_is_rebuilt_and_answers_as_it_did():
    kept = torch.load("bert.pt", weights_only=True)
    expected = kept.pop("output")
    bert = hw.load("bert")
    assert type(bert) is BertModel
    with torch.no_grad():
        torch.testing.assert_close(bert(**kept).last_hidden_state, expected, rtol=1e-4, atol=1e-5)


def assert_same_report(before, after):
    """Assert that two reports differ only in the wording of their notes."""
    assert len(before["notes"]) == len(after["notes"])
    assert_same(before | {"notes": after["notes"]}, after)


def test_a_saved_report_says_what_measuring_says():
    before = hw.load_report("report.json")
    roles = hw.Roles(hw.Separator(), hw.Window(3))
    mask = roles([hw.WordTable.split("a , b c .")] * 3, num_heads=2)
    model = hw.load("encoder", encoder())
    after = hw.measure(
        model,
        hw.find_heads(model),
        [torch.load("encoder.pt", weights_only=True)["input"]],
        score=lambda output, batch: -(output - batch).square().mean((1, 2)),
        score_name="likeness",
        roles=lambda _: mask,
    )
    assert after.compare(before).rows[1]
    after.save("again.json")
    assert_same_report(read("report.json"), read("again.json"))
    before.save("kept.json")
    assert_same(read("report.json"), read("kept.json"), within=0.0)


def test_saved_counts_of_words_rate_them_as_they_did():
    rarity = hw.IDF.load("idf.json")
    found = [rarity(word) for word in ("a", "film", "Plot", "unheard")]
    assert found == pytest.approx([math.log(5 / (1 + documents)) + 1 for documents in (3, 2, 1, 0)])


def test_a_repulsion_goes_on_from_its_saved_state():
    kept = torch.load("repulsion.pt", weights_only=True)
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rule = hw.SPOS(alpha=0.5, inverse_temperature=1e4)
    repulsion = hw.repel(optimizer, hw.find_heads(model), rule, seed=7)
    for name, owner in {"model": model, "optimizer": optimizer, "repulsion": repulsion}.items():
        owner.load_state_dict(kept[name])
    assert (repulsion.steps, repulsion.strength) == (2, 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (model(kept["batch"]) - kept["batch"].flip(1)).square().mean().backward()
        optimizer.step()
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(parameter, kept["after"][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["logic", "classification", "folds", "translation"])
def test_the_same_command_finds_saved_runs_finished_and_makes_the_same_table(name, capsys):
    before = {path: kept for path, kept in files_of(name).items() if path.parent != Path(name)}
    Path(name, "results.json").unlink()
    headwise(*COMMANDS[name])
    after = files_of(name)
    # a cache of that revision does not list its arrays, so it is made again
    caches = {path for path in before if path.suffix == ".npz" and path.parent.name == "data"}
    assert {path: after[path] for path in before.keys() - caches} == {
        path: kept for path, kept in before.items() if path not in caches
    }
    for path in caches:
        old, new = read_arrays(SAVED / path), read_arrays(path, listed=True)
        assert {key: array.tolist() for key, array in old.items()} == {
            key: array.tolist() for key, array in new.items()
        }
    drawn = {path for path in after.keys() - before.keys() if path.parent != Path(name)}
    assert {path.parent.name for path in drawn} <= {"figures"}
    results = read(Path(name, "results.json"))
    assert_same(read(SAVED / name / "results.json"), results)
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert {row["arm"] for row in results["rows"]} <= set(shown)


@pytest.mark.parametrize("name", RUNS)
def test_inspect_opens_a_saved_run_and_finds_what_it_found(name):
    headwise("inspect", RUNS[name], "--text", f"{name}.txt", "--out", "out")
    old, new = read(f"inspected/{name}/report.json"), read("out/report.json")
    # the class of a laboratory model may be renamed
    assert_same_report(old | {"model": new["model"]}, new)


def test_probe_opens_a_saved_run_and_finds_what_it_found():
    words = ("probe", RUNS["classification"], "--data", "past_present.txt", "--cache", "cache", "--workers", "1")
    kept = files_of("probed")[Path("probed/past_present.json")]
    headwise(*words, "--out", "probed")
    assert files_of("probed")[Path("probed/past_present.json")] == kept
    assert not Path("cache").exists()
    headwise(*words, "--out", "out")
    # one test sentence of twenty may change sides
    assert_same(read("probed/past_present.json"), read("out/past_present.json"), within=0.1)


def test_a_saved_run_translates_its_test_set_as_it_did(monkeypatch):
    given, answered = Path("corpus/test.de").read_bytes(), io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        patched.setattr(sys, "stdout", io.TextIOWrapper(answered))
        headwise("translate", RUNS["translation"])
        expected = Path(RUNS["translation"], "predictions.txt").read_bytes()
        assert answered.getvalue() == expected
    assert len(set(expected.splitlines())) > 4


def test_a_stopped_run_goes_on_from_its_checkpoint_and_ends_as_it_did(monkeypatch):
    do_inline(monkeypatch)
    # that revision summed accumulated losses and did not average them; here too, so that all else is compared
    summed = property(lambda _: 1, lambda _, __: None)
    monkeypatch.setattr(HeadTrainer, "current_gradient_accumulation_steps", summed, raising=False)
    run = next(Path("stopped").glob("*/*/checkpoint-*")).parent
    clock = torch.load(next(run.glob("checkpoint-*/run.pt")), weights_only=True)["run"]["train_seconds"]
    headwise(*COMMANDS["stopped"])
    result, old = read(run / "result.json"), read("ended/result.json")
    # the run was suspended for 100 seconds before it was interrupted; one started over would not know
    assert clock > 100
    assert clock < result["train_seconds"] < 2 * clock
    assert not list(run.glob("checkpoint-*"))
    assert_same(lines_of("ended/epochs.jsonl"), lines_of(run / "epochs.jsonl"))
    assert_same(old["answers"]["NLL"], result["answers"]["NLL"])
    for name in ("settings", "score", "dev_score", "parameters", "force_ratio", "output_cosine", "particle_norm"):
        assert_same(old[name], result[name], name)
    weights, expected = load_file(run / "model.safetensors"), load_file("ended/model.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        # the loss does not depend on the bias of keys: rounding alone moves it, and Adam amplifies that
        within = 0.1 if name.endswith("in_proj_bias") else 1e-3
        torch.testing.assert_close(weights[name], tensor, rtol=0.0, atol=within)
