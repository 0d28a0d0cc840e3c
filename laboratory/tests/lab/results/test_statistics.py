"""The laboratory's statistics against slow forms, sacreBLEU's own command and simulated runs."""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headwise.errors import DataError, SettingError
from headwise_lab.results import statistics
from headwise_lab.results.statistics import (
    BORNE_OUT,
    CONTRADICTED,
    EQUIVALENT,
    LESS,
    NOT_FOUND,
    NOT_SHOWN,
    UNCLEAR,
    Estimate,
    Judgement,
    Pair,
    PairedTests,
    SystemTest,
    compute_p_values,
    describe,
    describe_undecided,
    difference,
    estimate,
    estimate_over_starts,
    holm,
    judge_family,
    read_paired_tests,
    run_paired_tests,
    score,
)

# A mean of 0.02 with a 95 % interval of 0.0104 to 0.0296.
CLEAR = Estimate((0.01, 0.02, 0.03, 0.015, 0.025))
NOTHING = Estimate((-0.01, 0.01, 0.004, -0.006, 0.002))


def loops(values: np.ndarray) -> tuple[float, float, float, float]:
    """Mean and mean squares of seeds, items and the rest, by plain sums."""
    rows = [list(map(float, row)) for row in values]
    count_s, count_n = len(rows), len(rows[0])
    mean = sum(map(sum, rows)) / (count_s * count_n)
    by_seed = [sum(row) / count_n for row in rows]
    by_item = [sum(row[n] for row in rows) / count_s for n in range(count_n)]
    ms_seeds = count_n * sum((one - mean) ** 2 for one in by_seed) / (count_s - 1)
    ms_items = count_s * sum((one - mean) ** 2 for one in by_item) / (count_n - 1)
    squares = sum(value**2 for row in rows for value in row) - count_s * count_n * mean**2
    rest = squares - (count_s - 1) * ms_seeds - (count_n - 1) * ms_items
    return mean, ms_seeds, ms_items, max(0.0, rest / ((count_s - 1) * (count_n - 1)))


def by_loops(values: np.ndarray, level: float) -> tuple[float, float, float, float]:
    """Mean, half width, p-value and smallest detectable effect, equation by equation."""
    seeds, items = values.shape
    mean, ms_seeds, ms_items, rest = loops(values)
    pairs = [((ms_seeds / (seeds * items)) ** 0.5, seeds - 1.0)]
    excess = max(0.0, ms_items - rest)
    if excess > 0:
        total = ms_seeds + excess
        freedom = total**2 / (
            ms_seeds**2 / (seeds - 1) + ms_items**2 / (items - 1) + rest**2 / ((seeds - 1) * (items - 1))
        )
        pairs.append(((total / (seeds * items)) ** 0.5, max(freedom, seeds - 1.0)))
    halves = [stats.t.ppf((1 + level) / 2, freedom) * error for error, freedom in pairs]
    p = max(2 * stats.t.sf(abs(mean) / error, freedom) for error, freedom in pairs)
    error, freedom = pairs[int(np.argmax(halves))]
    return mean, max(halves), p, max(halves) + stats.t.ppf(0.8, freedom) * error


def answers(generator: np.random.Generator, seeds: int, items: int, *, effect: float = 0.0, moved: float = 0.0):
    """Answers of an arm and its control that share their items; `moved` is how far items are moved by the arm."""
    ease = 1.0 + generator.normal(0, 1.5, (1, items))
    odds = [ease + generator.normal(0, 0.3, (seeds, 1)) for _ in range(2)]
    odds[0] = odds[0] + effect + generator.normal(0, moved, (1, items))
    return tuple(generator.random((seeds, items)) < 1 / (1 + np.exp(-one)) for one in odds)


@settings(max_examples=60)
@given(st.integers(2, 9), st.integers(2, 40), st.floats(0, 3), st.sampled_from([0.8, 0.9, 0.95]), st.integers(0, 10**6))
def test_the_fast_form_is_the_equations_by_plain_sums(seeds, items, moved, level, draw):
    drawn = np.random.default_rng(draw)
    values = 0.3 + drawn.normal(size=(seeds, 1)) + moved * drawn.normal(size=items) + drawn.normal(size=(seeds, items))
    found = estimate(values)
    mean, half, p, detectable = by_loops(values, level)
    assert found.value == pytest.approx(mean, rel=1e-10, abs=1e-12)
    assert found.interval(level) == pytest.approx((mean - half, mean + half), rel=1e-9)
    assert found.p == pytest.approx(p, rel=1e-9)
    assert found.detectable(1 - level) == pytest.approx(detectable, rel=1e-9)
    assert (found.p <= 1 - level) == (abs(mean) >= half)
    shuffled = estimate(values[:, drawn.permutation(items)])
    assert shuffled.interval() == pytest.approx(found.interval())


def test_the_wider_interval_is_items_at_one_level_and_seeds_at_another():
    found = Estimate((-1.0, -0.5, 0.0, 0.5, 1.0), items=2000, between_items=1300.0, rest=50.0)
    (error, freedom), (wider, more) = found.standard_errors
    assert (error, freedom) == (pytest.approx(0.125**0.5), 4)
    assert (wider, more) == (pytest.approx(0.5), pytest.approx(16, rel=0.01))
    assert found.interval()[1] == pytest.approx(stats.t.ppf(0.975, more) * wider)
    assert found.interval(0.995)[1] == pytest.approx(stats.t.ppf(0.9975, 4) * error)
    # items that scatter no more than the rest say nothing
    assert replace(found, rest=1300.0).standard_errors == ((error, freedom),)
    # degrees of freedom are never fewer than those of seeds
    few = Estimate((-1.0, -0.5, 0.0, 0.5, 1.0), items=2, between_items=9.0, rest=1.0)
    assert few.standard_errors[1][1] == 4


@settings(max_examples=30)
@given(st.integers(2, 7), st.integers(2, 12), st.integers(3, 9), st.integers(0, 10**6))
def test_items_of_fixed_sets_are_compared_within_each(seeds, first, second, draw):
    drawn = np.random.default_rng(draw)
    values = drawn.normal(size=(seeds, first + second)) + 0.7 * drawn.normal(size=first + second)
    sets = [4] * first + [9] * second
    found = estimate(values, sets=sets)
    squares, rest = 0.0, 0.0
    for part in (values[:, :first], values[:, first:]):
        for n in range(part.shape[1]):
            lead = part[:, n].mean() - part.mean()
            squares += seeds * lead**2
            rest += sum((part[s, n] - part[s].mean() - lead) ** 2 for s in range(seeds))
    assert found.between_items == pytest.approx(squares / (first + second - 2))
    assert found.rest == pytest.approx(rest / ((seeds - 1) * (first + second - 2)))
    # how far the sets lie apart is no sampling of items
    apart = values + np.where(np.array(sets) == 4, 3.0 / first, -3.0 / second)
    assert estimate(apart, sets=sets).interval() == pytest.approx(found.interval())


def test_of_sets_of_one_item_each_only_seeds_count():
    found = estimate(np.array([[1.0, 5.0], [2.0, 4.0], [3.0, 7.0]]), sets=(0, 1))
    assert found.standard_errors == estimate(np.array([[3.0], [3.0], [5.0]])).standard_errors


def test_with_one_item_it_is_students_t_over_seeds_and_with_one_seed_over_items():
    means = np.array([0.2, 0.4, 0.3, 0.8, 0.1])
    found, student = estimate(means[:, None]), stats.ttest_1samp(means, 0.0)
    assert found.interval() == pytest.approx(tuple(student.confidence_interval(0.95)))
    assert found.p == pytest.approx(student.pvalue)
    for bound in (-0.1, 0.15, 0.9):
        assert found.p_above(bound) == pytest.approx(stats.ttest_1samp(means, bound, alternative="greater").pvalue)
    below = stats.ttest_1samp(means, 0.9, alternative="less").pvalue
    above = stats.ttest_1samp(means, -0.9, alternative="greater").pvalue
    assert found.p_within(0.9) == pytest.approx(max(below, above))
    row = np.random.default_rng(2).random(300) < 0.7
    found, student = score(row[None]), stats.ttest_1samp(row.astype(float), 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(tuple(student))


def test_a_mean_lies_within_a_bound_when_its_90_percent_interval_does():
    drawn = np.random.default_rng(5)
    for _ in range(30):
        found = estimate(0.4 * drawn.normal(size=(6, 1)) + drawn.normal(size=50) + drawn.normal(size=(6, 50)))
        low, high = found.interval(0.9)
        edge = max(-low, high)
        assert found.p_within(0.99 * edge) > 0.05 > found.p_within(1.01 * edge)


def test_seeds_that_do_not_differ_tell_nothing_of_seeds_and_equal_answers_are_no_difference():
    # 0.1 has no exact form: its means differ by 1e-17
    for values in (np.full((5, 11), 0.1), np.ones((5, 40)), np.repeat(np.random.default_rng(0).random(40)[None], 5, 0)):
        found = estimate(values)
        assert found.has_equal_seeds
        assert (found.p, found.p_above(-1.0)) == (1.0, 1.0)
    assert found.high - found.low > 0.1
    assert not estimate(np.array([[0.1], [0.2]])).has_equal_seeds
    assert Estimate((0.1 + 0.2, 0.3, 0.3)).has_equal_seeds
    same = np.random.default_rng(0).random((5, 40)) < 0.6
    found = difference(same, same)
    assert (found.value, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


def test_single_seeds_and_items_give_finite_numbers_and_one_number_no_interval_and_no_finding():
    for shape in ((1, 1), (1, 5), (5, 1), (2, 2)):
        found = score(np.random.default_rng(1).random(shape) < 0.5)
        assert np.isfinite([found.value, found.low, found.high, found.p, found.detectable()]).all()
    found = estimate(np.array([[0.3]]))
    assert (found.value, found.low, found.high, found.p, found.is_one_number) == (0.3, 0.3, 0.3, 1.0, True)
    assert not estimate(np.array([[0.3], [0.2]])).is_one_number


def test_printed_intervals_stay_in_range_and_tests_ignore_it():
    correct = np.ones((2, 20), dtype=bool)
    correct[0, :9] = False
    found = score(correct)
    assert found.interval()[0] < 0.0 == found.low < found.value < found.high == 1.0 < found.interval()[1]
    lead = difference(correct, ~correct)
    assert (lead.least, lead.most, lead.high) == (-1.0, 1.0, 1.0)
    assert lead.p == replace(lead, least=-9.0, most=9.0).p
    assert difference(correct - 3.0, correct + 3.0, least=-1.0).low == -6.0
    of_correlations = difference(correct, ~correct, least=-1.0)
    assert (of_correlations.least, of_correlations.most) == (-2.0, 2.0)


def test_twenty_four_thousand_items_and_five_seeds_take_no_time():
    arm, control = answers(np.random.default_rng(0), 5, 24_000)
    began = time.process_time()
    _ = difference(arm, control).p
    assert time.process_time() - began < 0.5


def test_scores_that_are_no_finite_table_and_unpaired_answers_and_a_wrong_p_are_refused():
    for scores in (np.ones(3), np.ones((0, 4)), np.array([[1.0, np.nan]])):
        with pytest.raises(SettingError, match="expected finite numbers, one row per seed"):
            estimate(scores)
    one = np.ones((2, 5), dtype=bool)
    with pytest.raises(SettingError, match=r"\(2, 5\) and \(2, 4\)"):
        difference(one, one[:, :4])
    with pytest.raises(SettingError, match=r"p is 1\.5"):
        holm([1.5])


def test_holm_is_the_smallest_p_of_every_closed_family_of_bonferroni_tests():
    generator = np.random.default_rng(3)
    for size in range(1, 6):
        p_values = generator.random(size).tolist()
        # closed testing: a hypothesis is rejected where each intersection that holds it is, by Bonferroni
        expected = [
            max(
                min(1.0, sum(subset) * min(p for p, member in zip(p_values, subset, strict=True) if member))
                for subset in np.ndindex(*(2,) * size)
                if subset[index]
            )
            for index in range(size)
        ]
        assert holm(p_values) == pytest.approx(expected)
    # a planned test that was not done counts as one that found nothing
    assert holm([0.02, 0.3], planned=4) == holm([0.02, 0.3, 1.0, 1.0])[:2]
    assert holm([]) == []


def test_runs_that_share_a_start_are_averaged_first_and_of_one_start_are_its_fine_tunings():
    leads = np.random.default_rng(3).normal(0.3, 1.0, (6, 40)) + np.repeat([[0.0], [2.0], [1.0]], 2, axis=0)
    found = estimate_over_starts(leads, (0, 1, 2, 0, 1, 2))
    means = estimate(np.stack([leads[[0, 3]].mean(axis=0), leads[[1, 4]].mean(axis=0), leads[[2, 5]].mean(axis=0)]))
    assert (found.interval(), found.p, found.seeds, found.drawn) == (means.interval(), means.p, 3, "pre-training")
    assert difference(leads, np.zeros((6, 40)), starts=None).seeds == 6
    # with one start the interval is that of its fine-tunings
    leads = np.random.default_rng(3).normal(0.3, 0.1, (5, 400)) + np.array([[0.0], [2.0], [1.0], [-1.0], [0.5]])
    found = estimate_over_starts(leads, (0,) * 5)
    assert found.interval() == estimate(leads).interval()
    alone = estimate(leads.mean(axis=0, keepdims=True))
    assert found.high - found.low > 20 * (alone.high - alone.low)
    assert (found.seeds, found.drawn) == (1, "pre-training")


def test_flipped_signs_are_counted_and_drawn_at_random_beyond_twelve_seeds():
    drawn = np.random.default_rng(1).normal(0.4, 1.0, 9)
    expected = np.mean(
        [
            abs(sum(s * one for s, one in zip(signs, drawn, strict=True))) >= abs(drawn.sum()) - 1e-12
            for signs in np.array(np.meshgrid(*[[-1, 1]] * 9)).reshape(9, -1).T
        ]
    )
    assert Estimate(tuple(drawn.tolist())).flip_signs() == pytest.approx(float(expected))
    many = np.random.default_rng(2).normal(0.5, 1.0, 16)
    found = Estimate(tuple(many.tolist()))
    assert found.flip_signs() == pytest.approx(found.p, abs=0.03)
    assert Estimate(tuple(np.full(16, 0.2).tolist())).flip_signs() == pytest.approx(1e-4, abs=2e-4)


def test_a_seed_that_stands_apart_is_noticed_and_said_beside_the_verdict():
    assert Estimate((0.01, 0.02, 0.015, 0.012, -0.3)).stands_apart
    assert not Estimate((0.01, 0.02, 0.015, 0.012, 0.0)).stands_apart
    assert not Estimate((0.01, 0.01, 0.01, 0.01, 0.01)).stands_apart
    apart = Judgement(Estimate((0.01, 0.02, 0.015, 0.012, -0.3)), 1, 0.9)
    assert apart.note == "one seed stands apart: p of flipped signs 1.000"
    assert Judgement(CLEAR, 1, 0.01).note == ""
    assert Judgement(Estimate((0.01, 0.02, 0.01, -0.3)), 1).note == ""


def test_differences_in_words_and_why_there_is_no_verdict():
    worse = replace(CLEAR, by_seed=tuple(-one for one in CLEAR.by_seed))
    for found, adjusted, words in (
        (CLEAR, 0.0499, "better (p = 0.050)"),
        (worse, 0.0123, "worse (p = 0.012)"),
        (CLEAR, 0.0004, "better (p < 0.001)"),
        (CLEAR, 0.0501, "no difference shown (p = 0.050)"),
        (CLEAR, 0.413, "no difference shown (p = 0.41)"),
        (CLEAR, None, "not tested"),
    ):
        assert describe(found, adjusted) == words
    for by_seed, words in (
        ((0.1,), "no verdict (1 seed)"),
        ((0.1, 0.2, 0.3, 0.4), "no verdict (4 seeds)"),
        ((0.1,) * 5, "no verdict (seeds do not differ)"),
        ((0.0,) * 5, ""),
        ((0.1, 0.2, 0.3, 0.4, 0.5), ""),
    ):
        assert describe_undecided(Estimate(by_seed)) == words


def test_a_claim_is_judged_beside_what_was_published():
    for found, adjusted, published, words in (
        (CLEAR, 0.01, None, BORNE_OUT),
        (CLEAR, 0.01, 0.025, BORNE_OUT),
        (CLEAR, 0.01, 0.005, BORNE_OUT),
        (CLEAR, 0.01, 0.04, LESS),
        # a paper in which the other side was ahead published no gain
        (CLEAR, 0.01, -0.04, BORNE_OUT),
        (CLEAR, 0.06, None, NOT_SHOWN),
        (CLEAR, 0.06, 0.025, UNCLEAR),
        (CLEAR, 0.06, 0.005, UNCLEAR),
        (CLEAR, 0.06, 0.04, NOT_FOUND),
        (NOTHING, 1.0, 0.012, NOT_FOUND),
        (NOTHING, 1.0, 0.03, EQUIVALENT),
        (NOTHING, 1.0, 0.008, UNCLEAR),
        (Estimate((-0.1, -0.2, -0.1, -0.15, -0.1)), 0.01, 0.03, CONTRADICTED),
        # arms that answer alike in every run show nothing, of no size
        (Estimate((0.0,) * 5), 1.0, 0.02, NOT_SHOWN),
        (Estimate((0.1, 0.2)), None, 0.03, "no verdict (2 seeds)"),
    ):
        assert Judgement(found, 3, adjusted, published).claim_words == words, (found, adjusted, published)
    gains = {0.005: False, 0.025: True, 0.04: False, None: None, -1.0: None}
    assert {gain: Judgement(CLEAR, 1, 0.01, gain).holds_gain for gain in gains} == gains
    assert Judgement(NOTHING, 1, 1.0, 0.03).equivalence == NOTHING.p_within(0.015) < 0.05
    assert Judgement(NOTHING, 1, 1.0).equivalence is None


def test_a_family_counts_what_has_no_verdict_as_a_test_that_found_nothing():
    few = Estimate((0.1, 0.2, 0.1))
    judged = judge_family([CLEAR, few, NOTHING], [0.01, None, 0.02], planned=5)
    assert [one.adjusted for one in judged] == [
        *(pytest.approx(p) for p in holm([CLEAR.p, 1.0, NOTHING.p, 1.0, 1.0])[:1]),
        None,
        pytest.approx(1.0),
    ]
    assert {one.family for one in judged} == {5}
    assert [one.published for one in judged] == [0.01, None, 0.02]
    assert judged[0].detectable_in_family == CLEAR.detectable(0.01) > judged[0].detectable == CLEAR.detectable()
    assert (judged[1].detectable, judged[1].detectable_in_family) == (None, None)
    assert judge_family([]) == []


def test_what_is_doubted_has_no_verdict_and_counts_in_its_family():
    sure, doubted = judge_family([CLEAR, CLEAR], planned=3, doubts=["", "plain is not shown to beat counts"])
    assert (sure.adjusted, sure.undecided) == (pytest.approx(3 * CLEAR.p), "")
    assert doubted.adjusted is None
    assert doubted.words == doubted.claim_words == "no verdict (plain is not shown to beat counts)"
    assert doubted.detectable == sure.detectable
    assert doubted.reversed.undecided == doubted.undecided
    # with too few seeds nothing is known of the task either
    (few,) = judge_family([Estimate((0.1, 0.2))], doubts=["plain is not shown to beat counts"])
    assert few.words == "no verdict (2 seeds)"


def test_a_judgement_can_be_read_from_the_other_side():
    found = Judgement(replace(CLEAR, least=-0.5, most=1.0), 4, 0.02, 0.03)
    turned = found.reversed
    assert (turned.estimate.value, turned.estimate.low) == (-CLEAR.value, -CLEAR.high)
    assert (turned.estimate.least, turned.estimate.most, turned.published) == (-1.0, 0.5, -0.03)
    assert (found.words, turned.words) == ("better (p = 0.020)", "worse (p = 0.020)")
    assert turned.reversed == found


WORDS = ["der", "die", "das", "hund", "katze", "läuft", "über", "unter", "großen", "garten", "wiese", "und"]


def text(seed: int, wrong: float, items: int = 40) -> list[str]:
    """Lines of which a share of the words is another than in the references, which have none wrong."""
    reference, draw = random.Random(3), random.Random(seed)
    lines = [reference.choices(WORDS, k=reference.randint(5, 14)) for _ in range(items)]
    return [" ".join(w if draw.random() >= wrong else draw.choice(WORDS) for w in line) for line in lines]


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, list[Pair]]:
    """References, and the runs of two arms against one control under two seeds."""
    pairs = []
    for seed in (0, 1):
        baseline = write(tmp_path / "plain" / f"seed-{seed}" / "predictions.txt", text(10 + seed, 0.4))
        for arm, wrong in (("better", 0.1), ("same", 0.4)):
            system = write(tmp_path / arm / f"seed-{seed}" / "predictions.txt", text(20 + seed, wrong))
            pairs.append(Pair(arm, "plain", seed, system, baseline))
    return write(tmp_path / "references.txt", text(0, 0.0)), pairs


def by_command(kind: str, references: Path, *systems: Path) -> list[list[str]]:
    """The p-values of BLEU and chrF of each system but the first, as the command prints them."""
    command = [sys.executable, "-m", "sacrebleu", str(references), "-i", *map(str, systems)]
    command += [f"--paired-{kind}", "-m", "bleu", "chrf", "--format", "text"]
    environment = {name: value for name, value in os.environ.items() if name != "SACREBLEU_SEED"}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = [re.findall(r"p = ([\d.]+)", line) for line in answer.stdout.splitlines()]
    return [values for values in found if values]


@pytest.mark.full
def test_the_p_values_are_those_of_sacrebleus_own_command(files, monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "99")
    references, pairs = files
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in (pairs[0].baseline, pairs[0].system)}
    second = pairs[1].system.read_text(encoding="utf-8").splitlines()
    tests, signatures = compute_p_values(
        lines[pairs[0].baseline],
        {"better": lines[pairs[0].system], "same": second},
        references.read_text(encoding="utf-8").splitlines(),
    )
    assert os.environ["SACREBLEU_SEED"] == "99"
    for kind, name, title in (
        ("bs", "bootstrap", "paired bootstrap"),
        ("ar", "randomisation", "approximate randomisation"),
    ):
        shown = by_command(kind, references, pairs[0].baseline, pairs[0].system, pairs[1].system)
        ours = [[f"{getattr(test, name):.4f}" for test in tests[system]] for system in ("better", "same")]
        assert shown == ours
        assert all("seed:12345" in signatures[f"{metric}, {title}"] for metric in ("BLEU", "chrF"))
    assert [test.metric for test in tests["better"]] == ["BLEU", "chrF"]
    expected = sacrebleu.corpus_chrf(lines[pairs[0].system], [references.read_text(encoding="utf-8").splitlines()])
    assert tests["better"][1].score == pytest.approx(expected.score)
    assert tests["better"][0].bootstrap < 0.05 < tests["same"][0].bootstrap


def count_words(baseline: list[str], systems: dict[str, list[str]], references: list[str]):
    """Tests that take no time: a score is the share of correct words, and a lead of a tenth is significant."""

    def share(lines: list[str]) -> float:
        words = [
            one == other
            for line, right in zip(lines, references, strict=True)
            for one, other in zip(line.split(), right.split(), strict=False)
        ]
        return sum(words) / len(words)

    against = share(baseline)
    tests = {
        name: tuple(SystemTest(metric, share(lines), against, p, p) for metric in ("BLEU", "chrF"))
        for name, lines in systems.items()
        for p in (0.01 if abs(share(lines) - against) > 0.1 else 0.5,)
    }
    return tests, {f"{metric}, a test": "counted" for metric in ("BLEU", "chrF")}


def test_tests_are_kept_and_only_new_or_changed_texts_are_tested_again(files, tmp_path, monkeypatch):
    references, pairs = files
    kept, asked = tmp_path / "paired.json", []

    def counted(baseline, systems, expected):
        asked.append(list(systems))
        return count_words(baseline, systems, expected)

    monkeypatch.setattr(statistics, "compute_p_values", counted)
    assert list(run_paired_tests(pairs[:2], references, kept)) == [0, 2]
    assert list(run_paired_tests(pairs, references, kept)) == [2, 4]
    assert asked == [["better", "same"], ["better", "same"]]
    first = kept.read_bytes()
    assert list(run_paired_tests(pairs, references, kept)) == [4]
    assert kept.read_bytes() == first

    found, signatures = read_paired_tests(pairs, references, kept)
    assert [(tests.arm, tests.metric, tests.seeds) for tests in found] == [
        (arm, metric, (0, 1)) for metric in ("BLEU", "chrF") for arm in ("better", "same")
    ]
    assert (found[0].ahead, found[0].behind) == (2, 0)
    assert signatures == {"BLEU, a test": "counted", "chrF, a test": "counted"}

    write(pairs[3].system, text(77, 0.9))
    known = [(tests.arm, tests.seeds) for tests in read_paired_tests(pairs, references, kept)[0]]
    assert known[:2] == [("better", (0, 1)), ("same", (0,))]
    assert list(run_paired_tests(pairs, references, kept)) == [3, 4]
    assert asked[2:] == [["same"]]
    assert read_paired_tests(pairs, references, kept)[0][1].behind == 1
    assert len(json.loads(kept.read_text())["tests"]) == 4


def test_a_summary_counts_directions_and_pools_no_p_value():
    numbers = ((31.0, 0.02, 0.03), (29.0, 0.05, 0.06), (32.0, 0.051, 0.04), (28.0, 0.01, 0.02))
    each = tuple(SystemTest("BLEU", score, 30.0, *p_values) for score, *p_values in numbers)
    tests = PairedTests("svgd", "plain", "BLEU", (0, 1, 2, 3), each)
    assert tests.difference == pytest.approx(0.0)
    assert (tests.ahead, tests.behind) == (1, 2)


def test_files_that_do_not_fit_are_refused_by_name_and_without_references_nothing_is_tested(files, tmp_path):
    references, pairs = files
    kept = tmp_path / "paired.json"
    write(pairs[0].system, text(1, 0.2, items=39))
    with pytest.raises(DataError, match=r"predictions\.txt has 39 lines, its references 40; delete .*better"):
        list(run_paired_tests(pairs, references, kept))
    pairs[0].system.unlink()
    with pytest.raises(DataError, match=r"predictions\.txt does not exist; delete the folder"):
        list(run_paired_tests(pairs, references, kept))
    unknown = {"metric": "TER", "score": 1.0, "baseline": 1.0, "bootstrap": 1.0, "randomisation": 1.0}
    for spoiled in ({"metric": "BLEU"}, unknown):
        kept.write_text(json.dumps({"signatures": {}, "tests": {"a": [spoiled]}}))
        with pytest.raises(DataError, match=r"paired\.json does not hold paired tests; delete it"):
            list(run_paired_tests(pairs[1:], references, kept))
    assert read_paired_tests(pairs, tmp_path / "missing.txt", tmp_path / "paired.json") == ((), {})


@pytest.fixture
def calibration(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # the folder has the module that all benchmarks share
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "benchmarks")
    return importlib.import_module("calibration")


def test_tests_of_normal_runs_err_about_as_often_as_they_should(calibration):
    found = calibration.simulate_normal(10, 1.0, 1500)
    # three errors of a share of 5 %, or of 80 %, in 1,500
    assert abs(found["sizes"][0] - 0.05) < 3 * math.sqrt(0.05 * 0.95 / 1500)
    assert found["cover"] == 1 - found["sizes"][0]
    assert abs(found["equivalence"] - 0.05) < 3 * math.sqrt(0.05 * 0.95 / 1500)
    assert abs(found["power_at_detectable"] - 0.8) < 3 * math.sqrt(0.8 * 0.2 / 1500)


def test_tests_over_seeds_alone_err_where_items_are_moved_and_the_laboratorys_do_not(calibration):
    null = calibration.Null("items", 300, 0.0, 2.0)
    found = calibration.simulate_logistic(null, 10, 400)
    assert found["student"] > 0.3
    assert found["joint"] < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert found["cover"] == pytest.approx(1 - found["joint"])


def test_the_simulated_accuracies_are_those_that_are_meant(calibration):
    np = calibration.np
    null = calibration.Null("failing", 4000, 2.0, 1.0, failing=0.2)
    gamma = calibration.choose_gamma(null)
    shift = calibration.find_shift(null, gamma, calibration.compute_accuracy(null, gamma, 0.0) + 0.03)
    drawn = np.random.default_rng(0)
    gains = []
    for _ in range(60):
        control, (arm,) = calibration.draw_logistic(drawn, null, 20, gamma, np.array([shift]))
        gains.append(arm.mean() - control.mean())
    assert np.mean(gains) == pytest.approx(0.03, abs=4 * np.std(gains) / 60**0.5)
    healthy = calibration.Null("healthy", 4000, 2.0, 0.0)
    control, (arm,) = calibration.draw_logistic(drawn, healthy, 400, calibration.choose_gamma(healthy), np.zeros(1))
    # beside seeds a difference has the noise of its items, some 0.6 points
    assert 100 * (arm.mean(axis=1) - control.mean(axis=1)).std() == pytest.approx(2.1, abs=0.25)


def test_a_tiny_run_writes_its_record(calibration, monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "NULLS", calibration.NULLS[:1])
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["x", "--repetitions", "3", "--normal-repetitions", "3", "--out", str(out)])
    calibration.main()
    record = json.loads(out.read_text())
    assert len(record["normal"]) == len(calibration.RATIOS) * len(calibration.SEEDS)
    assert [row["seeds"] for row in record["logistic"]] == list(calibration.SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("seeds", [5, 10, 20])
def test_sizes_of_normal_runs_are_4_to_6_percent_and_intervals_cover_94_to_96(calibration, seeds, ratio):
    found = calibration.simulate_normal(seeds, ratio, 40_000)
    assert 0.04 <= found["sizes"][0] <= 0.06
    assert 0.94 <= found["cover"] <= 0.96
    # Holm's adjustment asks for small levels
    assert found["sizes"][1] <= 0.014
    assert found["sizes"][2] <= 0.008
    assert 0.045 <= found["equivalence"] <= 0.057
    assert 0.77 <= found["power_at_detectable"] <= 0.83


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 4, 6])
@pytest.mark.parametrize("seeds", [5, 10])
def test_sizes_and_coverage_of_answers_right_or_wrong(calibration, place, seeds):
    found = calibration.simulate_logistic(calibration.NULLS[place], seeds, 4_000)
    error = 2 * math.sqrt(0.05 * 0.95 / 4_000)
    assert 0.04 - error <= found["joint"] <= 0.06 + error
    for cover in (found["cover"], found["gain_cover"]):
        assert 0.94 - error <= cover <= 0.96 + error
