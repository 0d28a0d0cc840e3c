from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwise.errors import DataError, NotFired
from headwise_lab.experiment.run_folder import write_result
from headwise_lab.results.comparison_page import write_headline
from headwise_lab.results.grids import list_notes
from headwise_lab.results.runs import read_results
from headwise_lab.results.statistics import difference, holm, judge_family, score
from headwise_lab.results.table import Row, Table, make_record
from headwise_lab.results.tabulate import make_table, read_table
from lab.results.synthetic_comparison import PAPER, Drawn, change, read_arrays, write_comparison, write_run
from lab.sealing import seal_again

SMALL = {"items": 40, "seeds": (0, 1, 2, 3, 4)}


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    return read_table(write_comparison(tmp_path_factory.mktemp("comparison"), **SMALL))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "out", [PAPER[0], *PAPER[2:5]], items=20, seeds=(0, 1))


def known(row: Row | None) -> Row:
    assert row is not None
    return row


def test_baselines_come_first_then_plain_then_arms_as_asked_for(table):
    assert [row.arm for row in table.rows] == ["counts", "majority", *(arm.name for arm in PAPER[2:])]
    assert [row.baseline for row in table.rows] == [True, True, *[False] * 9]
    assert (table.bins, table.items, table.seeds) == ((1, 2, 3), (40, 40, 40), (0, 1, 2, 3, 4))


def test_accuracies_and_differences_are_those_of_the_answers_on_disk(table, tmp_path):
    results = read_results(write_comparison(tmp_path, **SMALL))
    correct = {
        arm: np.stack([run.statistics for run in results.runs if run.arm == arm]) for arm in ("plain", "smooth", "svgd")
    }
    row = known(table.row("svgd"))
    assert row.score == score(correct["svgd"])
    assert row.bins[1].value == pytest.approx(correct["svgd"][:, 40:80].mean())
    assert row.to_plain is not None
    assert row.to_control is not None
    assert row.to_plain.estimate == difference(correct["svgd"], correct["plain"])
    expected = difference(correct["svgd"], correct["smooth"])
    assert row.to_control.estimate == expected
    below = correct["svgd"][:, 80:].mean() - correct["plain"][:, 80:].mean()
    assert row.bins_to_plain[2].value == pytest.approx(below)


def test_each_arm_is_judged_once_against_its_control_and_holm_covers_those_tests_alone(table):
    judged = [row for row in table.rows if row.to_control is not None]
    assert [row.arm for row in judged] == [arm.name for arm in PAPER[4:]]
    adjusted = holm([row.to_control.estimate.p for row in judged])
    assert [row.to_control.judgement.adjusted for row in judged] == adjusted
    assert all(row.verdict == row.to_control.verdict != "" for row in judged)
    others = [row for row in table.rows if row.to_plain is not None and row.control not in (None, "plain")]
    assert len(others) == 6
    assert {(row.to_plain.judgement.adjusted, row.to_plain.verdict) for row in others} == {(None, "")}


def test_an_arm_that_has_no_run_yet_counts_among_the_tests(table, tmp_path):
    write_comparison(tmp_path, **SMALL)
    record = json.loads((tmp_path / "comparison.json").read_text())
    change(tmp_path / "comparison.json", arms=[*record["arms"], "drophead"])
    one, more = (known(found.row("svgd")).to_control.judgement for found in (table, read_table(tmp_path)))
    assert (one.family, more.family) == (7, 8)
    assert one.estimate == more.estimate
    assert more.detectable_in_family > one.detectable_in_family


def test_a_plain_that_learned_nothing_with_any_seed_gives_no_verdict_either(tmp_path):
    arms = (Drawn("counts", None, 0.4, baseline=True), Drawn("plain", None), Drawn("svgd", "plain", 1.0))
    results = read_results(write_comparison(tmp_path, arms, items=200))
    half = np.arange(len(results.runs[0].statistics)) % 2 == 0
    runs = [replace(run, statistics=half) if run.arm == "plain" else run for run in results.runs]
    assert make_table(replace(results, runs=runs)).doubt == "plain is not shown to beat counts"


@pytest.mark.parametrize(("effect", "beaten"), [(-0.3, True), (-0.05, False), (0.4, False)])
def test_a_task_whose_baseline_plain_does_not_beat_gives_no_verdict_on_scores(effect, beaten, tmp_path):
    doubt = "" if beaten else "plain is not shown to beat counts"
    arms = (Drawn("counts", None, effect, baseline=True), Drawn("plain", None), Drawn("svgd", "plain", 1.0))
    table = read_table(write_comparison(tmp_path, arms, items=1500))
    assert table.doubt == make_record(table)["doubt"] == doubt
    lead = known(table.row("counts")).to_plain.estimate
    assert (lead.value < 0.0) is (effect < 0.0), "a lead of plain that may be chance is none"
    svgd = known(table.row("svgd"))
    assert svgd.verdict == (f"no verdict ({doubt})" if doubt else "better (p = 0.001)")
    headline = write_headline(table)
    assert ("No verdict is given (plain is not shown to beat counts)" in headline) is bool(doubt)
    assert headline.endswith("of both, and a plain model that beats every baseline.") is bool(doubt)
    assert any("get no verdict" in note for note in list_notes(table)) is bool(doubt)


def test_without_plain_or_a_baseline_or_with_few_seeds_nothing_is_doubted(tmp_path):
    few = (Drawn("counts", None, 0.4, baseline=True), Drawn("plain", None), Drawn("svgd"))
    assert read_table(write_comparison(tmp_path / "few", few, seeds=(0, 1, 2, 3))).doubt == ""
    arms = (Drawn("counts", None, 3.0, baseline=True), Drawn("smooth", None), Drawn("svgd", "smooth"))
    assert read_table(write_comparison(tmp_path / "without plain", arms)).doubt == ""
    assert read_table(write_comparison(tmp_path / "alone", (Drawn("plain", None), Drawn("svgd")))).doubt == ""


def test_where_verdicts_are_given_elsewhere_no_others_are(tmp_path):
    results = read_results(write_comparison(tmp_path, **SMALL))
    (judgement,) = judge_family([difference(np.eye(5), np.zeros((5, 5)) + 0.01)], planned=3)
    table = make_table(results, {("svgd", "plain"): judgement})
    found = known(table.row("svgd"))
    assert found.to_plain.judgement is judgement
    assert found.to_plain.verdict == judgement.words != ""
    assert {row.verdict for row in table.arms if row.control} == {"", "no verdict (scaled not run)"}
    said = "No claim is about a difference to a control here"
    silent = replace(table, rows=tuple(row for row in table.rows if row.arm != "smooth"))
    assert said in write_headline(silent)
    assert said not in write_headline(table)


def test_a_difference_to_a_control_that_is_plain_is_one_and_the_same(table):
    row = known(table.row("output"))
    assert row.to_control is row.to_plain


def test_plain_and_baselines_get_no_verdict_but_baselines_a_difference(table):
    assert known(table.row("plain")).to_plain is None
    counts = known(table.row("counts"))
    assert counts.verdict == ""
    assert counts.to_control is None
    assert counts.to_plain is not None
    assert counts.to_plain.judgement.adjusted is None
    # one answer to each item, beside each of plain's five
    assert counts.to_plain.estimate.seeds == 5
    assert counts.to_plain.estimate.value < 0


def test_an_arm_whose_control_was_not_run_gets_no_verdict_that_says_so(table):
    assert known(table.row("smooth")).verdict == "no verdict (scaled not run)"


def test_few_seeds_give_no_verdict(out):
    assert known(read_table(out).row("svgd")).verdict == "no verdict (2 seeds)"


def test_measures_are_means_over_seeds_and_step_times_ratios_to_plain(out):
    change(out / "svgd" / "seed-0" / "result.json", output_cosine=0.25, step_seconds=0.02)
    change(out / "svgd" / "seed-1" / "result.json", output_cosine=0.75, step_seconds=0.03)
    for seed in (0, 1):
        change(out / "plain" / f"seed-{seed}" / "result.json", step_seconds=0.01, output_cka=None)
    table = read_table(out)
    row = known(table.row("svgd"))
    assert row.measures["output_cosine"] == 0.5
    assert row.step_ratio == pytest.approx(2.5)
    assert [point.output_cosine for point in row.points] == [0.25, 0.75]
    plain = known(table.row("plain"))
    assert plain.step_ratio == 1.0
    assert plain.measures["output_cka"] is None


def test_only_seeds_that_both_have_are_compared_and_the_rest_is_named(out):
    (out / "svgd" / "seed-0" / "result.json").unlink()
    table = read_table(out)
    row = known(table.row("svgd"))
    assert row.seeds == (1,)
    assert row.to_plain is not None
    assert row.to_plain.estimate.seeds == 1
    assert table.missing == ("svgd seed 0",)


def test_without_plain_there_are_no_differences_to_it(tmp_path):
    table = read_table(write_comparison(tmp_path, PAPER[3:5], items=20, seeds=(0, 1)))
    row = known(table.row("svgd"))
    assert row.to_plain is None
    assert row.bins_to_plain == ()
    assert row.step_ratio is None
    assert row.to_control is not None


def copy_of_plain(out: Path, *, seeds: tuple[int, ...], name: str = "inert", **changed: object) -> None:
    test = read_arrays(out / "test.npz")
    for seed in seeds:
        plain = out / "plain" / f"seed-{seed}"
        result = json.loads((plain / "result.json").read_text())
        kept = ("distance", "output_cosine", "output_cka", "particle_norm")
        measures = {measure: result[measure] for measure in kept}
        predicted = read_arrays(plain / "predictions.npz")["predicted"]
        arm = Drawn(name, "plain", cosine=0.5)
        measures |= {"parameter_cosine": result["parameter_cosine"], **changed}
        write_run(out, arm, seed, predicted, test["labels"], test["bins"], **measures)


def test_an_arm_that_did_what_plain_did_is_an_error_that_names_it(out):
    copy_of_plain(out, seeds=(0, 1))
    with pytest.raises(NotFired, match=r"inert: arm inert gave the answers of plain on all 60 .* method did not act"):
        read_table(out)


def test_an_arm_whose_target_was_met_from_the_start_is_no_error_and_is_said(out):
    copy_of_plain(out, seeds=(0, 1), name="cka-target", force_ratio=0.0)
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


def test_a_constant_factor_that_adam_divides_out_again_is_no_error(out):
    copy_of_plain(out, seeds=(0, 1), name="scaled:step_size=1.0")
    assert read_table(out).row("scaled:step_size=1.0") is not None


def test_equal_answers_with_other_heads_are_no_error(out):
    # two models that answer one label agree, although a method acted on one of them
    copy_of_plain(out, seeds=(0, 1), particle_norm=5.9)
    assert read_table(out).row("inert") is not None


def test_one_seed_that_differs_is_enough(out):
    copy_of_plain(out, seeds=(0, 1))
    predictions = out / "inert" / "seed-1" / "predictions.npz"
    answers = read_arrays(predictions)
    test = read_arrays(out / "test.npz")
    answers["predicted"][0] = (answers["predicted"][0] + 1) % 7
    arm = Drawn("inert", "plain")
    write_run(out, arm, 1, answers["predicted"], test["labels"], test["bins"])
    assert read_table(out).row("inert") is not None


def with_arrays(path: Path, **arrays: np.ndarray) -> None:
    np.savez(path, **(read_arrays(path) | arrays))


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("result.json", lambda path: path.write_text('{"task": "log'), "is not readable as JSON"),
        ("result.json", lambda path: path.write_bytes(b"\xff\xfe"), "is not readable as JSON"),
        ("result.json", lambda path: path.write_text("[1]"), "holds no result of a run"),
        ("result.json", lambda path: path.write_text("{}"), "holds no result of a run"),
        ("result.json", lambda path: write_result(path.parent, {"task": "logic"}), "has no 'settings'"),
        ("result.json", lambda path: change(path, seed="x"), "is not the result of a run"),
        ("result.json", lambda path: change(path, score=None), "is not the result of a run"),
        ("result.json", lambda path: change(path, score={"pooled": 0.123}), "has accuracy 0.123000"),
        ("predictions.npz", lambda path: path.unlink(), "does not exist"),
        ("predictions.npz", lambda path: path.write_bytes(b""), "is damaged"),
        ("predictions.npz", lambda path: path.write_bytes(path.read_bytes()[:200]), "is damaged"),
        ("predictions.npz", lambda path: np.savez(path, statistics=np.ones(3)), "is damaged"),
        ("predictions.npz", lambda path: with_arrays(path, statistics=np.ones(3)), "different lengths"),
        (
            "predictions.npz",
            lambda path: with_arrays(path, statistics=np.ones(59), predicted=np.zeros(59)),
            "answers 59 items, not the 60",
        ),
    ],
)
def test_a_damaged_run_is_refused_by_its_file_with_what_to_do(out, name, spoil, message):
    path = out / "svgd" / "seed-1" / name
    spoil(path)
    if name != "result.json":
        seal_again(path.parent)
    with pytest.raises(DataError, match=message) as caught:
        read_table(out)
    assert str(path) in str(caught.value)
    assert f"delete the folder {path.parent} and run the same command again" in str(caught.value)


def test_a_damaged_test_file_is_refused(out):
    (out / "test.npz").write_bytes(b"PK")
    change(out / "comparison.json")
    with pytest.raises(DataError, match=r"test\.npz is damaged; delete"):
        read_table(out)


def test_a_folder_that_is_no_comparison_or_has_nothing_finished_is_refused(tmp_path, out):
    with pytest.raises(DataError, match=r"holds no comparison\.json; expected the --out folder"):
        read_table(tmp_path / "elsewhere")
    for path in out.glob("*/seed-*/result.json"):
        path.unlink()
    with pytest.raises(DataError, match="holds no finished run"):
        read_table(out)
    (out / "comparison.json").write_text('{"task": "logic"}')
    with pytest.raises(DataError, match="is not the record of a comparison"):
        read_table(out)


def test_a_run_that_lies_there_twice_is_refused(out):
    (out / "copy").mkdir()
    (out / "svgd" / "seed-1").rename(out / "copy" / "seed-1")
    test = read_arrays(out / "test.npz")
    write_run(out, PAPER[4], 1, test["labels"], test["labels"], test["bins"])
    with pytest.raises(DataError, match="two runs of svgd with seed 1"):
        read_table(out)


def test_measures_that_a_run_does_not_have_are_none_and_one_that_is_not_finite_is_refused(out):
    path = out / "svgd" / "seed-0" / "result.json"
    written = path.read_text()
    change(path, particle_norm=None)
    results = read_results(out)
    assert next(run for run in results.runs if run.arm == "svgd").measures["particle_norm"] is None
    assert make_table(results).row("svgd") is not None
    path.write_text(written.replace('"particle_norm": ', '"particle_norm": NaN, "was": '))
    with pytest.raises(DataError, match=r"result\.json is not readable as JSON \(NaN is no number of JSON\); delete"):
        read_results(out)


def test_arms_beyond_those_asked_for_stand_last(out):
    test = read_arrays(out / "test.npz")
    for name in ("zeta", "alpha"):
        write_run(out, replace(PAPER[2], name=name), 0, test["labels"], test["labels"], test["bins"], 0.1)
    assert [row.arm for row in read_table(out).rows][-2:] == ["alpha", "zeta"]


def test_runs_of_one_start_are_judged_as_one_and_own_tests_not_at_all(out):
    results = read_results(out)
    shared = replace(results, runs=tuple(replace(run, start=run.seed % 2) for run in results.runs))
    words = {row.arm: row.verdict for row in make_table(shared).arms if row.control}
    assert words
    assert {one for one in words.values() if "not run" not in one} == {"no verdict (2 pre-trainings)"}
    own = make_table(replace(results, metric=replace(results.metric, own_test=True)))
    judged = [row for row in own.arms if row.to_control is not None]
    assert judged
    assert {row.verdict for row in judged} == {"no verdict (each its own test)"}
    assert all(row.to_control is None or row.to_control.judgement.adjusted is None for row in own.arms)
    assert "Each model answers a test that it generated itself" in write_headline(own)
    said = "No verdict is given (scaled not run, 2 pre-trainings): one needs the arm's control and 5 pre-trainings of"
    assert said in write_headline(make_table(shared))
