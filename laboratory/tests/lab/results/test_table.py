"""The table of a comparison from its runs on disk, what is refused in them, and the runs that a reproduction reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwise.errors import DataError, NotFired
from headwise_lab.experiment.run_folder import analysis_file, write_result
from headwise_lab.results.evidence import read_evidence, read_numbers
from headwise_lab.results.grids import list_notes
from headwise_lab.results.pages import write_headline
from headwise_lab.results.runs import read_results
from headwise_lab.results.statistics import difference, holm, judge_family, score
from headwise_lab.results.table import Table, make_record, make_table, read_table
from lab.results.synthetic_comparison import PAPER, Drawn, change, read_arrays, write_comparison, write_run
from lab.sealing import seal_again


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("comparison"), items=40)


@pytest.fixture(scope="module")
def table(folder) -> Table:
    return read_table(folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "out", [PAPER[0], *PAPER[2:5]], items=20, seeds=(0, 1))


def test_rows_stand_in_order_with_the_numbers_of_the_answers_on_disk(table, folder):
    assert [row.arm for row in table.rows] == ["counts", "majority", *(arm.name for arm in PAPER[2:])]
    assert [row.baseline for row in table.rows] == [True, True, *[False] * 9]
    assert (table.bins, table.items, table.results.seeds) == ((1, 2, 3), (40, 40, 40), (0, 1, 2, 3, 4))
    runs = read_results(folder).runs
    correct = {arm: np.stack([run.statistics for run in runs if run.arm == arm]) for arm in ("plain", "smooth", "svgd")}
    row = table.row("svgd")
    assert row.score == score(correct["svgd"])
    assert row.bins[1].value == pytest.approx(correct["svgd"][:, 40:80].mean())
    assert row.to_plain.estimate == difference(correct["svgd"], correct["plain"])
    assert row.to_control.estimate == difference(correct["svgd"], correct["smooth"])
    below = correct["svgd"][:, 80:].mean() - correct["plain"][:, 80:].mean()
    assert row.bins_to_plain[2].value == pytest.approx(below)


def test_each_arm_is_judged_once_against_its_control_and_holm_covers_those_tests_alone(table, folder):
    judged = [row for row in table.rows if row.to_control is not None]
    assert [row.arm for row in judged] == [arm.name for arm in PAPER[4:]]
    assert [row.to_control.adjusted for row in judged] == holm([row.to_control.estimate.p for row in judged])
    assert all(row.verdict == row.to_control.words != "" for row in judged)
    others = [row for row in table.rows if row.to_plain is not None and row.control not in (None, "plain")]
    assert len(others) == 6
    assert {(row.to_plain.adjusted, row.to_plain.words) for row in others} == {(None, "")}
    # a difference to a control that is plain is judged as one
    output = table.row("output")
    assert output.to_control == output.to_plain
    assert table.row("smooth").verdict == "no verdict (scaled not run)"
    # plain gets no verdict, nor a baseline, whose one answer to each item is beside each of plain's five
    assert table.row("plain").to_plain is None
    counts = table.row("counts")
    assert (counts.verdict, counts.to_control, counts.to_plain.adjusted) == ("", None, None)
    assert counts.to_plain.estimate.seeds == 5
    assert counts.to_plain.estimate.value < 0
    # an arm that has no run yet counts among the tests
    results = read_results(folder)
    one, more = (
        found.row("svgd").to_control
        for found in (table, make_table(replace(results, arms=(*results.arms, "drophead"))))
    )
    assert (one.family, more.family) == (7, 8)
    assert one.estimate == more.estimate
    assert more.detectable_in_family > one.detectable_in_family


def test_where_verdicts_are_given_elsewhere_no_others_are(folder):
    (judgement,) = judge_family([difference(np.eye(5), np.zeros((5, 5)) + 0.01)], planned=3)
    elsewhere = make_table(read_results(folder), {("svgd", "plain"): judgement})
    found = elsewhere.row("svgd")
    assert found.to_plain is judgement
    assert found.to_plain.words != ""
    assert {row.verdict for row in elsewhere.arms if row.control} == {"", "no verdict (scaled not run)"}
    said = "No claim is about a difference to a control here"
    silent = replace(elsewhere, rows=tuple(row for row in elsewhere.rows if row.arm != "smooth"))
    assert said in write_headline(silent)
    assert said not in write_headline(elsewhere)


def test_a_task_whose_baseline_plain_does_not_beat_gives_no_verdict_on_scores(tmp_path):
    for effect, beaten in ((-0.3, True), (-0.05, False), (0.4, False)):
        doubt = "" if beaten else "plain is not shown to beat counts"
        arms = (Drawn("counts", None, effect, baseline=True), Drawn("plain", None), Drawn("svgd", "plain", 1.0))
        table = read_table(write_comparison(tmp_path / str(effect), arms, items=1500))
        assert table.doubt == make_record(table)["doubt"] == doubt
        lead = table.row("counts").to_plain.estimate
        assert (lead.value < 0.0) is (effect < 0.0), "a lead of plain that may be chance is none"
        assert table.row("svgd").verdict == (f"no verdict ({doubt})" if doubt else "better (p = 0.001)")
        headline = write_headline(table)
        assert ("No verdict is given (plain is not shown to beat counts)" in headline) is bool(doubt)
        assert headline.endswith("of both, and a plain model that beats every baseline.") is bool(doubt)
        assert any("get no verdict" in note for note in list_notes(table)) is bool(doubt)
    # nor a plain that learned nothing with any seed
    results = read_results(tmp_path / "-0.3")
    half = np.arange(len(results.runs[0].statistics)) % 2 == 0
    runs = tuple(replace(run, statistics=half) if run.arm == "plain" else run for run in results.runs)
    assert make_table(replace(results, runs=runs)).doubt == "plain is not shown to beat counts"


def test_without_plain_or_a_baseline_or_with_few_seeds_nothing_is_doubted(tmp_path):
    counts, plain, svgd = Drawn("counts", None, 3.0, baseline=True), Drawn("plain", None), Drawn("svgd")
    few = write_comparison(tmp_path / "few", (counts, plain, svgd), items=40, seeds=(0, 1, 2, 3))
    without = write_comparison(tmp_path / "without", (counts, Drawn("smooth", None), Drawn("svgd", "smooth")), items=40)
    alone = write_comparison(tmp_path / "alone", (plain, svgd), items=40)
    assert [read_table(one).doubt for one in (few, without, alone)] == ["", "", ""]


def test_measures_are_means_over_seeds_and_step_times_ratios_to_plain(out):
    change(out / "svgd" / "seed-0" / "result.json", output_cosine=0.25, step_seconds=0.02)
    change(out / "svgd" / "seed-1" / "result.json", output_cosine=0.75, step_seconds=0.03)
    for seed in (0, 1):
        change(out / "plain" / f"seed-{seed}" / "result.json", step_seconds=0.01, output_cka=None)
    table = read_table(out)
    row, plain = table.row("svgd"), table.row("plain")
    assert row.measures["output_cosine"] == 0.5
    assert row.step_ratio == pytest.approx(2.5)
    assert [run.measures["output_cosine"] for run in row.runs] == [0.25, 0.75]
    assert (plain.step_ratio, plain.measures["output_cka"]) == (1.0, None)
    assert row.verdict == "no verdict (2 seeds)"


def test_only_seeds_that_both_have_are_compared_and_without_plain_nothing_is_compared_with_it(out, tmp_path):
    (out / "svgd" / "seed-0" / "result.json").unlink()
    table = read_table(out)
    row = table.row("svgd")
    assert row.seeds == (1,)
    assert row.to_plain.estimate.seeds == 1
    assert table.results.missing == ("svgd seed 0",)
    row = read_table(write_comparison(tmp_path / "b", PAPER[3:5], items=20, seeds=(0, 1))).row("svgd")
    assert (row.to_plain, row.bins_to_plain, row.step_ratio) == (None, (), None)
    assert row.to_control is not None


def test_arms_beyond_those_asked_for_stand_last(out):
    test = read_arrays(out / "test.npz")
    for name in ("zeta", "alpha"):
        write_run(out, replace(PAPER[2], name=name), 0, test["labels"], test["labels"], test["bins"], 0.1)
    assert [row.arm for row in read_table(out).rows][-2:] == ["alpha", "zeta"]


def test_runs_of_one_start_are_judged_as_one_and_own_tests_not_at_all(out, folder):
    results = read_results(out)
    shared = make_table(replace(results, runs=tuple(replace(run, start=run.seed % 2) for run in results.runs)))
    words = {row.arm: row.verdict for row in shared.arms if row.control}
    assert {one for one in words.values() if "not run" not in one} == {"no verdict (2 pre-trainings)"}
    said = "No verdict is given (scaled not run, 2 pre-trainings): one needs the arm's control and 5 pre-trainings of"
    assert said in write_headline(shared)
    results = read_results(folder)
    own = make_table(replace(results, metric=replace(results.metric, own_test=True)))
    judged = [row for row in own.arms if row.to_control is not None]
    assert {row.verdict for row in judged} == {"no verdict (each its own test)"}
    assert {row["to_control"]["verdict"] for row in make_record(own)["rows"] if row["to_control"]} == {
        "no verdict (each its own test)"
    }
    assert all(row.to_control.adjusted is None for row in judged)
    assert "Each model answers a test that it generated itself" in write_headline(own)


def copy_of_plain(out: Path, *, name: str = "inert", **changed: object) -> None:
    test = read_arrays(out / "test.npz")
    for seed in (0, 1):
        plain = out / "plain" / f"seed-{seed}"
        result = json.loads((plain / "result.json").read_text())
        kept = ("distance", "output_cosine", "output_cka", "particle_norm", "parameter_cosine")
        measures = {measure: result[measure] for measure in kept} | changed
        predicted = read_arrays(plain / "predictions.npz")["predicted"]
        write_run(out, Drawn(name, "plain", cosine=0.5), seed, predicted, test["labels"], test["bins"], **measures)


def test_an_arm_that_did_what_plain_did_is_an_error_that_names_it_unless_something_differs(out):
    copy_of_plain(out)
    with pytest.raises(NotFired, match=r"inert: arm inert gave the answers of plain on all 60 .* method did not act"):
        read_table(out)
    # two models that answer one label agree, although a method acted on one of them
    copy_of_plain(out, particle_norm=5.9)
    assert read_table(out).row("inert") is not None
    copy_of_plain(out, parameters=181_320)
    assert read_table(out).row("inert") is not None
    # one seed that differs is enough
    copy_of_plain(out)
    answers, test = read_arrays(out / "inert" / "seed-1" / "predictions.npz"), read_arrays(out / "test.npz")
    answers["predicted"][0] = (answers["predicted"][0] + 1) % 7
    write_run(out, Drawn("inert", "plain"), 1, answers["predicted"], test["labels"], test["bins"])
    # Adam divides a constant factor out again
    copy_of_plain(out, name="scaled:step_size=1.0")
    table = read_table(out)
    assert table.row("inert") is not None
    assert table.row("scaled:step_size=1.0") is not None


def test_an_arm_whose_target_was_met_from_the_start_is_no_error_and_is_said(out):
    copy_of_plain(out, name="cka-target", force_ratio=0.0)
    with pytest.raises(NotFired, match="arm cka-target gave the answers of plain"):
        read_table(out)
    for seed in (0, 1):
        arm = {"kind": "Arm", "name": "cka-target", "methods": [{"kind": "Penalize", "weight": {"kind": "Target"}}]}
        change(out / "cka-target" / f"seed-{seed}" / "result.json", settings={"seed": seed, "arm": arm})
    table = read_table(out)
    assert table.row("cka-target") is not None
    assert "cka-target: the target was met from the start, and nothing pushed the heads." in list_notes(table)
    # where it pushed and nothing came of it, something is wrong
    change(out / "cka-target" / "seed-1" / "result.json", force_ratio=0.2)
    with pytest.raises(NotFired, match="arm cka-target gave the answers of plain"):
        read_table(out)


def with_arrays(path: Path, **arrays: np.ndarray) -> None:
    np.savez(path, **(read_arrays(path) | arrays))


RESULTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_text('{"task": "log'), "is not readable as JSON"),
    (lambda path: path.write_bytes(b"\xff\xfe"), "is not readable as JSON"),
    (lambda path: path.write_text("[1]"), "holds no result of a run"),
    (lambda path: path.write_text("{}"), "holds no result of a run"),
    (lambda path: write_result(path.parent, {"task": "logic"}), "has no 'settings'"),
    (lambda path: change(path, seed="x"), "is not the result of a run"),
    (lambda path: change(path, score=None), "is not the result of a run"),
    (lambda path: change(path, score={"pooled": 0.123}), "has accuracy 0.123000"),
    (lambda path: path.write_text('{"particle_norm": NaN}'), "is not readable as JSON (NaN is no number of JSON)"),
]
PREDICTIONS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_bytes(b""), "is damaged"),
    (lambda path: path.write_bytes(path.read_bytes()[:200]), "is damaged"),
    (lambda path: np.savez(path, statistics=np.ones(3)), "is damaged"),
    (lambda path: with_arrays(path, statistics=np.ones(3)), "different lengths"),
    (lambda path: with_arrays(path, statistics=np.ones(59), predicted=np.zeros(59)), "answers 59 items, not the 60"),
    (lambda path: with_arrays(path, statistics=np.full(60, np.nan)), "holds numbers that are not finite"),
    (lambda path: path.unlink(), "does not exist"),
]


@pytest.mark.parametrize(("name", "cases"), [("result.json", RESULTS), ("predictions.npz", PREDICTIONS)])
def test_a_damaged_run_is_refused_by_its_file_with_what_to_do(out, name, cases):
    path = out / "svgd" / "seed-1" / name
    result, written = path.with_name("result.json").read_bytes(), path.read_bytes()
    for spoil, message in cases:
        path.with_name("result.json").write_bytes(result)
        path.write_bytes(written)
        spoil(path)
        if name != "result.json":
            seal_again(path.parent)
        with pytest.raises(DataError) as caught:
            read_table(out)
        said = str(caught.value)
        assert message in said
        assert str(path) in said
        assert f"delete the folder {path.parent} and run the same command again" in said


def test_a_folder_that_is_no_comparison_or_is_damaged_or_has_nothing_finished_is_refused(tmp_path, out):
    with pytest.raises(DataError, match=r"holds no comparison\.json; expected the --out folder"):
        read_table(tmp_path / "elsewhere")
    # a run that lies there twice
    (out / "copy").mkdir()
    (out / "svgd" / "seed-1").rename(out / "copy" / "seed-1")
    test = read_arrays(out / "test.npz")
    write_run(out, PAPER[4], 1, test["labels"], test["labels"], test["bins"])
    with pytest.raises(DataError, match="two runs of svgd with seed 1"):
        read_table(out)
    for path in out.glob("*/seed-*/result.json"):
        path.unlink()
    with pytest.raises(DataError, match="holds no finished run"):
        read_table(out)
    (out / "test.npz").write_bytes(b"PK")
    change(out / "comparison.json")
    with pytest.raises(DataError, match=r"test\.npz is damaged; delete"):
        read_table(out)
    (out / "comparison.json").write_text('{"task": "logic"}')
    with pytest.raises(DataError, match="is not the record of a comparison"):
        read_table(out)


def test_measures_that_a_run_does_not_have_are_none(out):
    change(out / "svgd" / "seed-0" / "result.json", particle_norm=None)
    results = read_results(out)
    assert next(run for run in results.runs if run.arm == "svgd").measures["particle_norm"] is None
    assert make_table(results).row("svgd") is not None


def test_a_reproduction_reads_the_arms_and_seeds_it_asks_for_with_the_baselines(folder, tmp_path):
    found = read_evidence(folder, ["plain", "em"], [1, 3])
    arms = {(run.arm, run.seed) for run in found.results.runs if not run.baseline}
    assert arms == {("plain", 1), ("plain", 3), ("em", 1), ("em", 3)}
    assert {run.arm for run in found.results.runs if run.baseline} == {"majority", "counts"}
    assert (found.results.arms, found.results.missing) == (("plain", "em"), ())
    assert read_evidence(folder, ["plain", "spos"], [1]).results.missing == ("spos seed 1",)
    assert read_evidence(tmp_path / "nowhere", ["plain"], [0]) is None
    assert read_evidence(folder, ["spos"], [0, 1]) is None


def test_numbers_come_from_the_result_its_answers_and_its_analyses(out):
    run = out / "svgd" / "seed-1"
    result = json.loads((run / "result.json").read_text())
    write_result(run, result | {"answers": {"NLL": 2.5, "text": "no number"}})
    analysis_file(run, "head-vectors").write_text(json.dumps({"numbers": {"head_vector_cosine": 0.25}, "vectors": []}))
    numbers = read_numbers(run)
    assert (numbers["NLL"], numbers["head_vector_cosine"], numbers["parameters"]) == (2.5, 0.25, 181_319)
    assert "text" not in numbers
    assert "force_ratio" not in read_numbers(out / "plain" / "seed-0")
    found = read_evidence(out, ["plain", "svgd"], range(5))
    assert (found.of("svgd", "NLL"), found.mean("svgd", "NLL"), found.mean("plain", "NLL")) == ({1: 2.5}, 2.5, None)
    assert sorted(found.of("plain", "step_seconds")) == [0, 1]
    analysis_file(run, "redundancy").write_text("[]")
    with pytest.raises(DataError, match=r"svgd/seed-1/analysis-redundancy\.json is not the record of an analysis"):
        read_evidence(out, ["svgd"], [1])
