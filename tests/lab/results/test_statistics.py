from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headwise.errors import SettingError
from headwise.lab.results.statistics import Estimate, difference, estimate, holm, score, verdict


def loops(scores: np.ndarray, items: list[int], seeds: list[int]) -> tuple[float, float]:
    """Mean and standard error of the rows `seeds` and columns `items` of `scores`, by plain sums."""
    drawn = [[float(scores[s][i]) for i in items] for s in seeds]
    count_s, count_i = len(seeds), len(items)
    mean = sum(map(sum, drawn)) / (count_s * count_i)
    rows = [sum(row) / count_i for row in drawn]
    columns = [sum(row[i] for row in drawn) / count_s for i in range(count_i)]
    rest = sum((drawn[s][i] - rows[s] - columns[i] + mean) ** 2 for s in range(count_s) for i in range(count_i)) / (
        (count_s - 1) * (count_i - 1)
    )
    a = sum((row - mean) ** 2 for row in rows) / (count_s - 1) / count_s
    b = sum((column - mean) ** 2 for column in columns) / (count_i - 1) / count_i
    return mean, max(a, b, a + b - rest / (count_s * count_i)) ** 0.5


def by_loops(scores: np.ndarray, generator: np.random.Generator, resamples: int) -> tuple[float, float, float]:
    """Mean, half width and p-value, one resample after the other."""
    count_s, count_i = scores.shape
    mean, error = loops(scores, list(range(count_i)), list(range(count_s)))
    scaled = []
    for _ in range(resamples):
        items = generator.integers(count_i, size=count_i).tolist()
        seeds = generator.integers(count_s, size=count_s).tolist()
        found, spread = loops(scores, items, seeds)
        scaled.append(abs(found - mean) / spread if spread else (0.0 if abs(found - mean) < 1e-12 else np.inf))
    p = (1 + sum(value >= abs(mean) / error for value in scaled)) / (resamples + 1)
    finite = [value for value in scaled if np.isfinite(value)]
    assert 2 * len(finite) > resamples
    critical = max(float(np.quantile(finite, 0.95, method="higher")), stats.t.ppf(0.975, count_s - 1))
    return mean, critical * error, max(p, 2 * stats.t.sf(abs(mean) / error, count_s - 1))


def answers(generator: np.random.Generator, seeds: int, items: int, *, spread: float, effect: float = 0.0):
    """Answers of an arm and its control that share their items, with chance between seeds of size `spread`."""
    ease = 1.0 + generator.normal(0, 1.5, (1, items))
    odds = [ease + generator.normal(0, spread, (seeds, 1)) for _ in range(2)]
    odds[0] = odds[0] + effect
    return tuple(generator.random((seeds, items)) < 1 / (1 + np.exp(-one)) for one in odds)


@pytest.mark.parametrize("shape", [(2, 9), (3, 30), (5, 60)])
def test_the_fast_form_agrees_with_one_resample_after_the_other(shape):
    generator = np.random.default_rng(11)
    arm, control = answers(generator, *shape, spread=0.6, effect=0.7)
    scores = arm.astype(int) - control.astype(int)
    fast = estimate(scores, seed=5, resamples=4000)
    mean, half, p = by_loops(scores, np.random.default_rng(6), 1500)
    assert fast.value == pytest.approx(mean, abs=1e-12)
    # both draw: 5 % quantiles and shares of a few thousand draws
    assert fast.high - fast.value == pytest.approx(half, rel=0.15)
    assert fast.p == pytest.approx(p, abs=4 * (0.25 / 1500) ** 0.5)


@settings(max_examples=25)
@given(st.integers(2, 6), st.integers(2, 25), st.integers(0, 10**6))
def test_mean_and_interval_agree_with_plain_sums_at_every_shape(seeds, items, draw):
    generator = np.random.default_rng(draw)
    scores = generator.integers(-1, 2, (seeds, items))
    found = estimate(scores, seed=1, resamples=50)
    mean, error = loops(scores, list(range(items)), list(range(seeds)))
    assert found.value == pytest.approx(mean, abs=1e-12)
    assert found.value - found.low >= stats.t.ppf(0.975, seeds - 1) * error - 1e-9
    assert found.high - found.value == pytest.approx(found.value - found.low, abs=1e-12)
    assert 0 < found.p <= 1
    repeated = estimate(scores[:, generator.permutation(items)], seed=1, resamples=50)
    assert (repeated.low, repeated.p) == pytest.approx((found.low, found.p))


def test_where_only_seeds_differ_the_interval_is_that_of_students_t_over_seeds():
    # every item of a seed scores alike, so that a seed is one number: 0.2, 0.4, 0.6, 0.8, 1.0
    scores = np.repeat(np.arange(1, 6)[:, None] / 5, 2000, axis=1)
    found = estimate(scores, seed=0)
    student = stats.ttest_1samp(np.arange(1, 6) / 5, 0.0)
    interval = student.confidence_interval(0.95)
    assert found.value == pytest.approx(0.6)
    assert found.low <= interval.low + 1e-9
    assert found.high >= interval.high - 1e-9
    assert found.p >= student.pvalue - 1e-12
    assert found.high - found.low < 1.6 * (interval.high - interval.low)


def test_where_only_items_differ_the_interval_is_that_of_the_mean_over_items():
    generator = np.random.default_rng(2)
    row = generator.random(3000) < 0.7
    wide = score(np.repeat(row[None], 30, axis=0), seed=0)
    expected = stats.t.ppf(0.975, 29) * np.std(row, ddof=1) / np.sqrt(len(row))
    assert wide.high - wide.value == pytest.approx(expected, rel=0.1)
    one = score(row[None], seed=0)
    assert one.high - one.value == pytest.approx(1.96 * np.std(row) / np.sqrt(len(row)), rel=0.1)


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_intervals_cover_and_null_effects_are_rarely_called_better(spread):
    generator = np.random.default_rng(4)
    p_values = []
    for draw in range(200):
        arm, control = answers(generator, 5, 150, spread=spread)
        found = difference(arm, control, seed=draw, resamples=199)
        assert (found.low > 0 or found.high < 0) <= (found.p <= 0.05 + 1e-9)
        p_values.append(found.p)
    # 5 % of 200 are 10, three standard deviations above are 19
    assert sum(p <= 0.05 for p in p_values) <= 19


def test_coverage_of_a_real_difference():
    generator = np.random.default_rng(8)
    truth = np.mean([_mean_difference(*answers(generator, 200, 400, spread=0.3, effect=0.4)) for _ in range(20)])
    covered = 0
    for draw in range(100):
        found = difference(*answers(generator, 5, 300, spread=0.3, effect=0.4), seed=draw, resamples=199)
        covered += found.low <= truth <= found.high
    assert covered >= 89


def _mean_difference(arm: np.ndarray, control: np.ndarray) -> float:
    return float(arm.mean() - control.mean())


def test_five_seeds_that_agree_in_sign_alone_are_no_finding():
    # the signs agree once in 16 times by chance, and every percentile of the resampled mean is then above zero
    scores = np.repeat(np.array([0.001, 0.002, 0.03, 0.001, 0.002])[:, None], 500, axis=1)
    assert estimate(scores, seed=0).p > 0.2


def test_a_large_effect_reaches_the_smallest_p_value_that_resamples_allow():
    generator = np.random.default_rng(0)
    arm = generator.random((5, 2000)) < 0.9
    control = generator.random((5, 2000)) < 0.5
    assert difference(arm, control, seed=1, resamples=999).p == pytest.approx(1 / 1000)


def test_equal_answers_give_no_difference_and_no_warning():
    same = np.random.default_rng(0).random((5, 40)) < 0.6
    assert difference(same, same, seed=0) == Estimate(0.0, 0.0, 0.0, 1.0, seeds=5, items=40)
    always = np.ones((5, 40), dtype=bool)
    assert difference(always, ~always, seed=0).p < 0.001
    assert score(always, seed=0).low == 1.0


def test_rounding_is_no_spread():
    # 0.1 has no exact form: a resampled mean of it differs by 1e-17, with a standard error of zero
    for seeds, items in [(3, 7), (5, 11), (6, 13)]:
        found = estimate(np.full((seeds, items), 0.1), seed=0, resamples=199)
        assert found.p < 0.05
        assert found.high - found.low < 1e-6


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_single_seeds_and_items_give_finite_numbers(shape):
    found = score(np.random.default_rng(1).random(shape) < 0.5, seed=0)
    assert np.isfinite([found.value, found.low, found.high, found.p]).all()


def test_of_one_number_there_is_no_interval_and_no_finding():
    one, five = np.array([[0.3]]), np.array([[0.3], [0.2], [0.4], [0.3], [0.2]])
    found = estimate(one, seed=0)
    assert (found.value, found.p, found.is_one_number) == (0.3, 1.0, True)
    assert not estimate(five, seed=0).is_one_number
    fine_tunings = difference(five, np.zeros_like(five), seed=0, starts=(2,) * 5)
    assert (fine_tunings.seeds, fine_tunings.p, fine_tunings.is_one_number) == (1, 1.0, False)
    assert fine_tunings.low < 0.28 < fine_tunings.high


def test_intervals_of_accuracies_and_differences_stay_in_range():
    correct = np.ones((2, 20), dtype=bool)
    correct[0, 0] = False
    found = score(correct, seed=0)
    assert 0 <= found.low < found.value < found.high == 1.0
    assert difference(correct, ~correct, seed=0).high == 1.0


def test_the_same_seed_gives_the_same_numbers():
    row = np.random.default_rng(0).random((1, 60)) < 0.5
    found = [score(row, seed=seed, resamples=99) for seed in (1, 1, 2, 3, 4)]
    assert found[0] == found[1]
    assert len(set(found)) > 1


def test_twenty_four_thousand_items_and_five_seeds_take_no_time():
    generator = np.random.default_rng(0)
    arm, control = answers(generator, 5, 24_000, spread=0.2)
    began = time.process_time()
    difference(arm, control, seed=0)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("scores", [np.ones(3), np.ones((0, 4)), np.array([[1.0, np.nan]])])
def test_scores_that_are_not_a_finite_table_are_refused(scores):
    with pytest.raises(SettingError, match="expected finite numbers, one row per seed"):
        estimate(scores, seed=0)


def test_unpaired_answers_and_wrong_settings_are_refused():
    one = np.ones((2, 5), dtype=bool)
    with pytest.raises(SettingError, match=r"\(2, 5\) and \(2, 4\)"):
        difference(one, one[:, :4], seed=0)
    with pytest.raises(SettingError, match="resamples is 0"):
        estimate(one, seed=0, resamples=0)
    with pytest.raises(SettingError, match="level is 0"):
        estimate(one, seed=0, level=0.0)


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


def test_holm_of_nothing_is_nothing_and_a_wrong_p_is_refused():
    assert holm([]) == []
    with pytest.raises(SettingError, match=r"p is 1\.5"):
        holm([1.5])


@pytest.mark.parametrize(
    ("value", "seeds", "adjusted", "words"),
    [
        (0.02, 4, 0.0001, "no verdict (4 seeds)"),
        (0.02, 1, 0.0001, "no verdict (1 seed)"),
        (0.02, 5, 0.0499, "better (p = 0.050)"),
        (-0.02, 5, 0.0123, "worse (p = 0.012)"),
        (-0.02, 5, 0.0004, "worse (p < 0.001)"),
        (0.02, 5, 0.0501, "no difference shown (p = 0.050)"),
        (0.02, 9, 0.413, "no difference shown (p = 0.41)"),
    ],
)
def test_verdicts_in_words(value, seeds, adjusted, words):
    assert verdict(Estimate(value, value - 1, value + 1, 0.01, seeds, 100), adjusted) == words


def test_answers_that_are_nearly_all_right_have_a_narrow_interval():
    correct = np.ones((3, 286), dtype=bool)
    correct[0, 5] = correct[1, 9] = False
    found = score(correct, seed=0, resamples=500)
    assert 0.95 < found.low < found.value < found.high == 1.0


def test_runs_that_share_a_start_count_as_one():
    leads = np.random.default_rng(3).normal(0.3, 1.0, (6, 40)) + np.repeat([[0.0], [2.0], [1.0]], 2, axis=0)
    starts = (0, 1, 2, 0, 1, 2)
    found = difference(leads, np.zeros((6, 40)), seed=4, starts=starts, least=-50.0)
    means = np.stack([leads[[0, 3]].mean(axis=0), leads[[1, 4]].mean(axis=0), leads[[2, 5]].mean(axis=0)])
    over_starts, over_rows = estimate(means, seed=4), estimate(leads, seed=4)
    assert (found.value, found.p, found.seeds) == (over_starts.value, over_starts.p, 3)
    assert found.high - found.value == pytest.approx(over_starts.high - over_starts.value)
    assert over_starts.high - over_starts.value > over_rows.high - over_rows.value
    assert found.drawn == "pre-training"
    assert verdict(found, 0.001) == "no verdict (3 pre-trainings)"
    assert difference(leads, np.zeros((6, 40)), seed=4).seeds == 6


def test_with_one_start_the_interval_is_still_that_of_its_fine_tunings():
    leads = np.random.default_rng(3).normal(0.3, 0.1, (5, 400)) + np.array([[0.0], [2.0], [1.0], [-1.0], [0.5]])
    found = difference(leads, np.zeros_like(leads), seed=4, starts=(0,) * 5, least=-50.0)
    rows = estimate(leads, seed=4)
    assert (found.low, found.high, found.p) == pytest.approx((rows.low, rows.high, rows.p))
    alone = estimate(leads.mean(axis=0, keepdims=True), seed=4)
    assert found.high - found.low > 20 * (alone.high - alone.low)


def test_five_fine_tunings_of_two_pre_trainings_that_merely_differ_are_no_finding():
    drawn = np.random.default_rng(0)
    found = []
    for _ in range(60):
        lead = drawn.normal(0, 0.05)
        values = (drawn.random((5, 400)) < 0.7 + lead) * 1.0 - (drawn.random((5, 400)) < 0.7)
        shared = difference(values, np.zeros_like(values), seed=1, resamples=200, starts=(0,) * 5, least=-1.0)
        found.append(verdict(shared, shared.p))
        alone = difference(values, np.zeros_like(values), seed=1, resamples=200, least=-1.0)
        found.append(verdict(alone, alone.p))
    assert set(found[::2]) == {"no verdict (1 pre-training)"}
    assert sum(words.startswith(("better", "worse")) for words in found[1::2]) > 10


def test_a_correlation_may_be_below_zero_and_its_interval_with_it():
    values = np.full((5, 30), -0.253) + np.random.default_rng(0).normal(0, 0.1, (5, 30))
    found = score(values, seed=0, least=-1.0)
    assert -1.0 <= found.low < found.value < found.high < 0.0
    assert score(values - 5, seed=0, least=-1.0).low == -1.0
    assert difference(values + 9, values - 9, seed=0, least=-1.0).high == 2.0
