"""The graph-to-text task end to end at toy size: arms, stopping and going on, baselines, scores and refusals."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from cases import cases
from headwise.errors import DataError, NotFired, SettingError
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.graph2text.data import collate
from headwise_lab.tasks.graph2text.files import Graph
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES
from headwise_lab.tasks.graph2text.scores import coverage, repeated_clauses, scores
from headwise_lab.tasks.graph2text.task import Graph2TextTask, fill_in, find_nearest_texts
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.optimizer import build_optimizer
from headwise_lab.training.train import train_run
from lab.stopping import assert_goes_on_to_the_same_bits
from lab.tasks.graph2text.graph_sets import write_triples

pytest.importorskip("nltk")

TASK = Graph2TextTask()
TOY = dataclasses.replace(
    GRAPH_SCALES["demo"],
    name="toy",
    width=16,
    epochs=1,
    tokens=128,
    min_count=1,
    longest=16,
    beams=2,
    train_examples=None,
    dev_examples=None,
    test_examples=None,
)
PUBLISHED = Path(os.environ.get("HEADWISE_DATA", ""))


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_triples(tmp_path_factory.mktemp("data") / "mine.tsv", 60)


@pytest.mark.full
@pytest.mark.usefixtures("inline")
def test_every_kind_of_arm_trains_on_a_file_of_ones_own(mine, tmp_path):
    arms = "plain,smooth,svgd,svgd-relative,cosine-penalty:alpha=0.01,step_size=1,output,em:layers=0,no-graph"
    console = Console(record=True, width=200)
    assert compare(Comparison("graph2text", tuple(parse_arms(arms)), (0,), TOY, tmp_path, mine), console) == []
    rows = {row["arm"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert set(rows) == {"nearest", *(arm.name for arm in parse_arms(arms))}
    assert rows["svgd-relative"]["measures"]["force_ratio"] == pytest.approx(0.1, rel=1e-3)
    assert rows["svgd"]["control"] == "smooth"
    assert rows["no-graph"]["measures"]["output_cosine"] is None
    assert rows["nearest"]["answered"]["coverage"] > 90
    assert set(rows["plain"]["answered"]) >= {"BLEU-1", "METEOR", "ROUGE-L", "coverage", "repeated", "NLL"}
    assert len((tmp_path / "plain" / "seed-0" / "predictions.txt").read_text().splitlines()) == 6


@cases("arm", ["differential", "paired", "wider"])
def test_arms_that_rebuild_the_blocks_read_graphs_beside_others_as_alone(arm, mine):
    data = TASK.load(mine, TOY, None)
    model, _ = attach_arm(TASK, parse_arm(arm), data, TOY, seed=1)
    examples = [data.train[number] for number in range(4)]
    with torch.no_grad():
        together = model.eval()(**collate(examples))["losses"]
        alone = torch.cat([model(**collate([one]))["losses"] for one in examples])
    torch.testing.assert_close(together, alone)


def test_wider_blocks_have_the_parameters_of_gates(mine):
    data = TASK.load(mine, TOY, None)
    plain, wider = (attach_arm(TASK, parse_arm(arm), data, TOY, seed=1)[0].encoder for arm in ("plain", "wider"))
    more = sum(one.numel() for one in wider.parameters()) - sum(one.numel() for one in plain.parameters())
    # eight units, each of two rows of 16, a bias and a slope
    assert more == len(plain.blocks) * 8 * (2 * 16 + 2) == len(plain.blocks) * (16 + 1) * 16


def test_a_run_stopped_in_the_middle_goes_on_to_the_same_bits(mine, tmp_path):
    settings = RunSettings("graph2text", TOY, parse_arm("svgd"), seed=3, data=mine, cache=None)
    assert_goes_on_to_the_same_bits(settings, tmp_path, stopped=3)
    first, second = ((tmp_path / name / "predictions.txt").read_text() for name in ("whole", "run"))
    assert first == second


def test_the_regularization_is_the_gradient_of_a_mean_cosine_in_the_six_blocks_and_released_has_none(mine):
    data = TASK.load(mine, TOY, None)
    batch = collate([data.train[number] for number in range(4)])
    scale = dataclasses.replace(TOY, dropout=0.0)

    def gradients(arm: str | None) -> dict[str, torch.Tensor]:
        model, methods = attach_arm(TASK, parse_arm(arm or "plain"), data, scale, seed=1)
        methods.repel(torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(**batch)["loss"]
        if arm is None:
            for block in model.encoder.blocks:
                for matrix in block.attention.in_proj_weight.chunk(3):
                    heads = torch.nn.functional.normalize(matrix.view(scale.heads, -1), dim=1)
                    # each head's mean cosine, all heads together: (1/2M) sum_ij cos has (1/M) sum_j grad_i cos
                    loss = loss + 0.5 * (heads @ heads.T).sum() / (2 * scale.heads)
        loss.backward()
        methods.apply_repulsion()
        return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

    plain, rule, penalty, released = (
        gradients(arm)
        for arm in ("plain", "cosine-penalty:alpha=0.5,step_size=1", None, "cosine-penalty:alpha=0,step_size=1")
    )
    assert all(torch.allclose(rule[name], penalty[name], atol=1e-6) for name in plain)
    changed = {name for name in plain if not torch.allclose(rule[name], plain[name], atol=1e-7)}
    assert changed == {f"encoder.blocks.{block}.attention.in_proj_weight" for block in range(scale.layers)}
    assert all(torch.equal(released[name], plain[name]) for name in plain)


@pytest.mark.full
@pytest.mark.usefixtures("inline")
def test_the_released_regularization_is_plain_and_a_table_refuses_it(mine, tmp_path):
    arms = tuple(parse_arms("plain,cosine-penalty:alpha=0,step_size=1"))
    with pytest.raises(NotFired, match="its method did not act"):
        compare(Comparison("graph2text", arms, (0,), TOY, tmp_path, mine), Console(record=True))


def test_the_nearest_text_is_filled_in_by_type_and_order():
    source = Graph(
        ("parsing",), (("lda",), ("text",), ("em",)), ("method", "data", "method"), (), (2, "on", 1, "or", 0, 2), 1
    )
    other = Graph(("speech",), (("hmms",),), ("method",), (), ("speech",), 2)
    asked = Graph(("parsing",), (("a",), ("b",), ("c",)), ("method", "method", "task"), (), (), 3)
    assert find_nearest_texts([other, source], [asked]) == ["a on a or b a"]
    assert fill_in(source, dataclasses.replace(asked, types=("data", "data", "data"))) == "a on a or b a"


def test_scores_at_both_ends_and_between():
    reference = "we apply beam search to parsing . it works well here ."
    same = scores([reference], [reference], [["beam search", "lda"]])
    assert same["BLEU-4"] == pytest.approx(100)
    assert same["ROUGE-L"] == pytest.approx(100)
    assert (same["coverage"], same["repeated"]) == (50, 0)
    stemmed = scores(["we applies beam searches"], [reference], [["lda"]])
    assert stemmed["METEOR"] > scores(["we xx beam yy"], [reference], [["lda"]])["METEOR"]
    assert stemmed["ROUGE-1"] == pytest.approx(100 * 2 * 2 / (4 + 12))
    assert stemmed["ROUGE-1 recall"] == pytest.approx(100 * 2 / 12)
    assert coverage("a lda b", ["ld", "lda"]) == 0.5
    assert repeated_clauses("it is so , it is") == 0
    assert repeated_clauses("it is so here , it is so here ; it is so here") == pytest.approx(2 / 3)


def test_losses_are_those_of_the_model_and_bins_are_triples(mine):
    data = TASK.load(mine, TOY, None)
    model = TASK.model(data, TOY).eval()
    with torch.no_grad():
        losses = TASK.losses(model, data)
        batch = collate([data.test[number] for number in range(len(data.test))])
        assert losses[:, 0].sum() / losses[:, 1].sum() == pytest.approx(float(model(**batch)["loss"]), rel=1e-5)
        assert TASK.greedy(model, data).shape == (6, 10)
    assert TASK.difficulties(data).tolist() == [2] * 6


def test_the_papers_optimizer_is_sgd_with_momentum_and_the_record_of_old_runs_is_as_it_was():
    recipe = GRAPH_SCALES["paper"].recipe
    made = build_optimizer(torch.nn.Linear(2, 2), 0.1, recipe)
    assert isinstance(made, torch.optim.SGD)
    assert made.defaults["momentum"] == 0.9
    settings = RunSettings("graph2text", GRAPH_SCALES["paper"], parse_arm("plain"), seed=0)
    assert "optimizer" not in settings.record()["recipe"]
    assert settings.record()["scale"]["optimizer"] == "sgd"


def test_missing_data_and_sizes_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="graph2text needs --data"):
        TASK.load(None, TOY, None)
    with pytest.raises(SettingError, match="even multiple"):
        dataclasses.replace(TOY, width=18)
    with pytest.raises(SettingError, match="tokens is 16; expected more than longest"):
        dataclasses.replace(TOY, tokens=16)


@pytest.mark.full
@pytest.mark.skipif(not (PUBLISHED / "agenda").is_dir(), reason="HEADWISE_DATA has no AGENDA")
def test_a_model_learns_from_agenda(tmp_path):
    sizes = {"train_examples": 60, "dev_examples": 2, "test_examples": 8, "epochs": 2, "warmup_steps": 4}
    scale = dataclasses.replace(GRAPH_SCALES["demo"], name="toy", longest=40, tokens=512, width=32, **sizes)
    settings = RunSettings("graph2text", scale, parse_arm("plain"), seed=1, data=PUBLISHED / "agenda")
    train_run(settings, tmp_path)
    epochs = [json.loads(line) for line in (tmp_path / "epochs.jsonl").read_text().splitlines()]
    assert epochs[1]["train_loss"] < epochs[0]["train_loss"] - 0.3
    assert np.load(tmp_path / "predictions.npz")["statistics"].shape == (8, 10)
