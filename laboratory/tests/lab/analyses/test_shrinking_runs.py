"""Runs whose heads are removed or merged afterwards: against heads ablated by hand; weighed on dev, scored on test."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.errors import DataError, LayoutError, SettingError
from headwise_lab.analyses import shrinking
from headwise_lab.analyses.registry import AnalysisSettings, analyze
from headwise_lab.analyses.shrinking import measure_shrinking
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.evaluation import METRICS
from headwise_lab.experiment.run_folder import analysis_file, read_json, write_json
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.results.grids import describe_halving
from headwise_lab.results.runs import STAGES
from headwise_lab.results.table import read_table
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from headwise_lab.tasks.pretraining.task import PretrainingTask
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import Trained, load_trained
from lab.command import call
from lab.inline import do_inline
from lab.results.synthetic_comparison import Drawn, write_comparison
from lab.tasks.lm.lm_toy import TOY, prepare_toy
from lab.tasks.logic import logic_toy
from lab.tasks.translation.translation_toy import SMALLEST, write_toy_corpus
from lab.trained_runs import LOGIC_SIZES
from lab.trained_runs import compare as compare_words

SMALL = dataclasses.replace(logic_toy.TOY, width=16, heads=4, train_examples=96)
SCALES = {"logic": SMALL, "lm": dataclasses.replace(TOY, key_value_heads=4), "translation": SMALLEST}


TASKS = [task if task == "logic" else pytest.param(task, marks=pytest.mark.full) for task in SCALES]


class Runs(dict[str, tuple[RunSettings, Path]]):
    """A toy run of each task, made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, task: str) -> tuple[RunSettings, Path]:
        makers = {"lm": prepare_toy, "translation": write_toy_corpus}
        data = makers[task](self.root / f"data-{task}") if task in makers else None
        settings = RunSettings(task, SCALES[task], parse_arm("plain"), seed=3, data=data, cache=self.root / "cache")
        train_run(settings, self.root / task)
        self[task] = settings, self.root / task
        return self[task]

    def record(self, task: str) -> dict[str, Any]:
        """What was measured of a run."""
        settings, folder = self[task]
        analyze(AnalysisSettings("shrinking", settings), folder)
        return read_json(analysis_file(folder, "shrinking"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def lose(trained: Trained, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed losses and the number of predictions of each item of a split, one at a time."""
    task, data, found = trained.task, trained.data, []
    for number in range(len(getattr(data, split))):
        batch = task.collate([getattr(data, split)[number]])
        if task.name == "logic":
            found.append((trained.model(**batch)["loss"], 1))
            continue
        labels = batch.pop("labels")
        logits = trained.model(**batch, **({"labels": labels} if task.name == "translation" else {}))["logits"]
        if task.name == "lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        found.append((loss, int((labels != -100).sum())))
    return torch.stack([loss for loss, _ in found]), torch.tensor([number for _, number in found])


@pytest.mark.parametrize("task", TASKS)
def test_heads_are_weighed_by_the_losses_of_dev(task: str, runs):
    trained = load_trained(*runs[task])
    found = torch.cat(list(trained.task.dev_losses(trained.model, trained.data))).double()
    assert found.requires_grad
    sums, counts = lose(trained, "dev")
    # in batches of one length
    torch.testing.assert_close(found.sort().values, (sums.double() / counts).sort().values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_is_that_of_the_test_set_with_the_least_important_heads_ablated(task: str, runs):
    trained = load_trained(*runs[task])
    heads = trained.heads
    worth = hw.importance(
        heads, lambda: trained.task.dev_losses(trained.model, trained.data), method="first_order"
    ).drops
    ablations = [hw.ablate(dataclasses.replace(heads, sites=(site,)), int(worth[site.name].argmin())) for site in heads]
    with torch.no_grad():
        sums, counts = lose(trained, "test")
        scores = METRICS[trained.task.metric].values(trained.task.greedy(trained.model, trained.data))
    for ablation in ablations:
        ablation.remove()
    numbers = runs.record(task)["numbers"]
    expected = float(sums.sum() / counts.sum())
    assert numbers["loss_heads_75"] == pytest.approx(expected, rel=1e-5)
    assert numbers["score_heads_75"] == pytest.approx(float(scores.mean()), rel=1e-5, abs=1e-9)
    with torch.no_grad():
        whole, counts = lose(trained, "test")
    assert numbers["loss_heads_100"] == pytest.approx(float(whole.sum() / counts.sum()), rel=1e-5)
    assert numbers["loss_heads_100"] != pytest.approx(expected, rel=1e-5)
    for share in (75, 50, 25):
        added = numbers[f"loss_heads_{share}"] - numbers["loss_heads_100"]
        assert numbers[f"loss_added_heads_{share}"] == added


def test_attentions_keep_their_shares_of_the_heads(runs, tmp_path, monkeypatch):
    left, score = [], shrinking._score

    def counted(trained: Trained, model: Any) -> dict[str, float]:
        left.append([site.num_heads for site in hw.find_heads(trained.heads.model)])
        return score(trained, model)

    monkeypatch.setattr(shrinking, "_score", counted)
    settings = dataclasses.replace(runs["logic"][0], scale=dataclasses.replace(SMALL, heads=8))
    train_run(settings, tmp_path / "run")
    measure_shrinking(settings, tmp_path / "run")
    assert left == [[8, 8], [6, 6], [4, 4], [2, 2]]


@pytest.mark.full
def test_key_value_heads_are_merged_where_attentions_can_have_fewer(runs):
    trained = load_trained(*runs["lm"])
    network: Any = trained.model.network
    calls = []
    with torch.no_grad():
        hook = network.register_forward_pre_hook(lambda _module, _args, given: calls.append(given), with_kwargs=True)
        list(trained.task.probe(trained.model, trained.data))
        hook.remove()
        hw.merge(hw.find_heads(network), 1, batches=calls)
        sums, counts = lose(trained, "test")
    record = runs.record("lm")
    numbers = record["numbers"]
    assert record["unmerged"] is None
    assert numbers["loss_kv_heads_25"] == pytest.approx(float(sums.sum() / counts.sum()), rel=1e-5)
    assert numbers["loss_added_kv_heads_25"] == numbers["loss_kv_heads_25"] - numbers["loss_heads_100"]
    assert {"loss_kv_heads_50", "score_kv_heads_50"} <= numbers.keys()
    for task in ("logic", "translation"):
        record = runs.record(task)
        assert "has a key/value head for each query head" in record["unmerged"]
        assert not [name for name in record["numbers"] if "kv" in name]


@pytest.mark.full
def test_two_key_value_heads_have_no_quarter(runs, tmp_path):
    settings = dataclasses.replace(runs["lm"][0], scale=TOY)
    train_run(settings, tmp_path / "run")
    record = measure_shrinking(settings, tmp_path / "run")
    assert record["unmerged"] == "attentions have 2 key/value heads, no multiple of 4"
    # whole groups go: none of two, then one, and of a single one a query head
    losses = [record["numbers"][f"loss_heads_{share}"] for share in (100, 75, 50, 25)]
    assert losses[0] == pytest.approx(losses[1])
    assert len(set(losses[1:])) == 3


def test_heads_under_an_aggregator_are_refused(runs, tmp_path):
    settings = dataclasses.replace(runs["logic"][0], arm=parse_arm("em:layers=0,capsules=4"))
    train_run(settings, tmp_path / "run")
    with pytest.raises(LayoutError, match="has EMAggregator as its output, built for all heads"):
        measure_shrinking(settings, tmp_path / "run")


def test_a_task_without_losses_of_dev_is_refused():
    with pytest.raises(SettingError, match="task pretraining has no losses of dev items to weigh heads by"):
        PretrainingTask().dev_losses(None, None)


def test_the_arm_that_makes_heads_alike_pulls_where_its_opposite_pushes(runs):
    trained = load_trained(*runs["logic"])
    batch = trained.task.collate([trained.data.train[number] for number in range(8)])
    gradients = []
    for arm in ("cka", "cka-together"):
        attached, methods = attach_arm(trained.task, parse_arm(arm), trained.data, SMALL, seed=3)
        model: Any = attached.train()
        torch.manual_seed(0)
        loss = model(**batch)["loss"]
        added = methods.loss(loss) - loss
        weights = [model.encoder.layers[0].attention.in_proj_weight]
        gradients.append(torch.autograd.grad(added, weights)[0])
    assert float(gradients[0].norm()) > 0
    torch.testing.assert_close(gradients[1], -gradients[0])


@pytest.mark.full
def test_a_comparison_ends_with_half_of_the_heads_and_the_same_numbers_when_it_is_given_again(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    done, words = do_inline(monkeypatch), compare_words("logic", "plain,cka", {**LOGIC_SIZES, "heads": 4}, "--halve")
    assert call(*words) == 0
    printed, out = capsys.readouterr().out, tmp_path / "logic"
    halves = ["halve of plain seed 0", "halve of cka seed 0"]
    assert done[-2:] == halves
    ending = printed[printed.index("with half of the heads: accuracy, %") :]
    assert re.search(r"half, recovered .*\n *\nWith half of its heads plain changes by [^.]", ending)
    assert ending.splitlines()[-2] == f"picture: {Path('logic', 'figures', 'half-of-the-heads.png')}"
    table = read_json(out / "results.json")
    for arm, found in table["halved"].items():
        assert found["heads"] == {"whole": 4, "half": 2, "recovered": 2}
        assert found["parameters"]["whole"] > found["parameters"]["half"] == found["parameters"]["recovered"]
        # the whole model is that of the run, and half of it is what is left without its least important heads
        row = next(row for row in table["rows"] if row["arm"] == arm)
        assert found["scores"]["whole"]["value"] == row["score"]["value"]
        record = read_json(analysis_file(out / arm / "seed-0", "halve"))
        settings = RunSettings("logic", SCALES["logic"], parse_arm(arm), seed=0)
        scale = dataclasses.replace(LOGIC_SCALES["demo"], **{**LOGIC_SIZES, "heads": 4}, name=table["scale"])
        trained = load_trained(dataclasses.replace(settings, scale=scale), out / arm / "seed-0")
        heads = trained.heads
        worth = hw.importance(
            heads, lambda trained=trained: trained.task.dev_losses(trained.model, trained.data), method="first_order"
        ).drops
        (site,) = heads
        with torch.no_grad(), hw.ablate(heads, worth[site.name].argsort()[:2].tolist()):
            right = trained.task.greedy(trained.model, trained.data)
        assert record["statistics"]["half"] == right.tolist()
        before = [parameter.clone() for parameter in trained.model.parameters()]
        assert shrinking._recover(trained, dataclasses.replace(settings, scale=scale)) == record["steps"] == 1
        assert not trained.model.training
        assert any(not torch.equal(*pair) for pair in zip(before, trained.model.parameters(), strict=True))
    page = (out / "report.html").read_text()
    assert "With half of the heads" in page
    assert "--halve" in page
    assert (out / "figures" / "half-of-the-heads.png").stat().st_size > 0
    before = [(out / arm / "seed-0" / "analysis-halve.json").read_bytes() for arm in ("plain", "cka")]
    (out / "cka" / "seed-0" / "analysis-halve.json").unlink()
    assert call(*words) == 0
    assert done[-1] == halves[-1]
    assert done.count(halves[0]) == 1
    assert [(out / arm / "seed-0" / "analysis-halve.json").read_bytes() for arm in ("plain", "cka")] == before


def test_what_half_of_the_heads_costs_is_judged_over_seeds_and_said_in_words(tmp_path):
    write_comparison(tmp_path, [Drawn("plain", None), Drawn("cka")])
    draws = np.random.default_rng(0)
    for arm, lost in (("plain", 0.2), ("cka", 0.0)):
        for seed in range(5):
            folder = tmp_path / arm / f"seed-{seed}"
            whole = np.load(folder / "predictions.npz")["statistics"].astype(float)
            half = whole * (draws.random(len(whole)) >= lost + 0.002)
            statistics = {"whole": whole.tolist(), "half": half.tolist(), "recovered": whole.tolist()}
            sizes = {name: dict.fromkeys(STAGES, 1) for name in ("heads", "parameters")}
            write_json(analysis_file(folder, "halve"), {"statistics": statistics, **sizes, "steps": 7})
    table = read_table(tmp_path)
    plain, cka = table.halved["plain"], table.halved["cka"]
    values = {stage: plain.scores[stage].value for stage in STAGES}
    assert plain.changes["half"].estimate.value == pytest.approx(values["half"] - values["whole"])
    costs = [one.changes["half"].estimate.value for one in (cka, plain)]
    assert cka.beside.estimate.value == pytest.approx(costs[0] - costs[1])
    assert cka.beside.family == 5
    said = describe_halving(table)
    assert re.match(
        r"With half of its heads plain changes by .\d\d\.\d \(.* to .*\) points: worse .p < 0\.001., and after 7 steps",
        said,
    )
    assert (
        "of recovery, which the whole model did not have, by 0.0 (0.0) points: no difference that could be detected (p"
        in said
    )
    path = analysis_file(tmp_path / "plain" / "seed-0", "halve")
    for damage in (
        {"statistics": {}},
        {"steps": None},
        {"heads": 3},
        {"statistics": {stage: [1.0] for stage in STAGES}},
    ):
        kept = read_json(path)
        write_json(path, kept | damage)
        with pytest.raises(DataError, match="is not the record of an analysis; delete it"):
            read_table(tmp_path)
        write_json(path, kept)
