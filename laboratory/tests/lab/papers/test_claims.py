"""Claims are judged by the contrasts they are made of, on the bins they speak of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headwise.errors import DataError
from headwise_lab.papers.claims import MEASURED, NO_VERDICT, Claim, Contrast, Least, Numbers, StepTimes, judge
from headwise_lab.papers.pages import build_claims_grids, record_claims
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.runs import read_results
from lab.results.synthetic_comparison import Drawn, write_comparison

BINS = tuple(range(1, 13))


def comparison(tmp_path, *arms, seeds=(0, 1, 2, 3, 4)):
    drawn = (Drawn("plain", None), *arms)
    return read_results(write_comparison(tmp_path / "runs", drawn, bins=BINS, items=150, seeds=seeds))


def mean_difference(results, arm, against, first, last):
    inside = (results.bins >= first) & (results.bins <= last)
    by_seed = {name: {r.seed: r.statistics[inside] for r in results.runs if r.arm == name} for name in (arm, against)}
    return float(np.mean([by_seed[arm][s].mean() - by_seed[against][s].mean() for s in by_seed[arm]]))


def test_a_contrast_is_the_difference_of_mean_accuracies_on_its_bins(tmp_path):
    results = comparison(tmp_path, Drawn("output", effect=0.4, slope=-0.05))
    (judged,) = judge([Claim("", (Contrast("output", "plain", (2, 5)),))], {"": Evidence(results)})
    expected = mean_difference(results, "output", "plain", 2, 5)
    assert judged.found[0].estimate.value == pytest.approx(expected, abs=1e-12)


def test_a_contrast_without_bins_is_over_all_items(tmp_path):
    results = comparison(tmp_path, Drawn("output", effect=0.4, slope=-0.05))
    (judged,) = judge([Claim("", (Contrast("output", "plain"),))], {"": Evidence(results)})
    expected = mean_difference(results, "output", "plain", 1, 12)
    assert judged.found[0].estimate.value == pytest.approx(expected, abs=1e-12)
    assert judged.found[0].estimate.sets == 1
    assert str(judged.found[0].contrast) == "output over plain"


def test_a_lead_beyond_another_range_is_the_difference_of_the_two_leads(tmp_path):
    results = comparison(tmp_path, Drawn("em", effect=-0.2, slope=0.09))
    (judged,) = judge([Claim("", (Contrast("em", "plain", (7, 12), beyond=(1, 6)),))], {"": Evidence(results)})
    expected = mean_difference(results, "em", "plain", 7, 12) - mean_difference(results, "em", "plain", 1, 6)
    assert judged.found[0].estimate.value == pytest.approx(expected, abs=1e-12)
    assert judged.found[0].estimate.sets == 2


def test_a_mean_over_parts_counts_each_part_alike_whatever_its_number_of_items(tmp_path):
    drawn = (Drawn("plain", None), Drawn("guided", effect=0.6))
    small, large = (
        read_results(write_comparison(tmp_path / str(items), drawn, items=items, seed=items, seeds=range(seeds)))
        for items, seeds in ((40, 5), (300, 6))
    )
    contrast = Contrast("guided", "plain", over=("small", "large"))
    (judged,) = judge([Claim("", (contrast,))], {"small": Evidence(small), "large": Evidence(large)})
    # the seed that one part alone has is left out of both
    shared = replace(large, runs=tuple(run for run in large.runs if run.seed < 5))
    expected = [mean_difference(results, "guided", "plain", 1, 3) for results in (small, shared)]
    assert judged.found[0].estimate.value == pytest.approx(np.mean(expected), abs=1e-12)
    assert abs(expected[0] - expected[1]) > 1e-3
    assert judged.found[0].estimate.sets == 2
    assert str(contrast) == "guided over plain, mean of small, large"
    assert contrast.named(lambda part, arm: f"{arm} in {part}").arm == "guided in small"
    (judged,) = judge([Claim("", (contrast,))], {"small": Evidence(small)})
    assert "was not run" in judged.verdict


def test_one_mean_over_parts_is_taken_off_another(tmp_path):
    drawn = (Drawn("plain", None), Drawn("guided", effect=0.6))
    found = {
        name: read_results(write_comparison(tmp_path / name, drawn, items=items, seed=items, seeds=range(5)))
        for name, items in (("one", 40), ("two", 90), ("three", 200))
    }
    contrast = Contrast("guided", "plain", over=("one", "two"), less=Contrast("guided", "plain", over=("three",)))
    assert contrast.parts == ("one", "two", "three")
    (judged,) = judge([Claim("", (contrast,))], {name: Evidence(results) for name, results in found.items()})
    leads = {name: mean_difference(results, "guided", "plain", 1, 3) for name, results in found.items()}
    expected = (leads["one"] + leads["two"]) / 2 - leads["three"]
    assert judged.found[0].estimate.value == pytest.approx(expected, abs=1e-12)
    assert str(contrast) == "guided over plain, mean of one, two, less that of three"
    assert str(contrast.within({"two", "three"})) == "guided over plain, mean of two, less that of three"


def test_claims_are_borne_out_contradicted_or_not_shown(tmp_path):
    results = comparison(tmp_path, Drawn("good", effect=1.2), Drawn("bad", effect=-1.2), Drawn("same", spread=0.05))
    whole = (1, 12)
    claims = [
        Claim("", (Contrast("good", "plain", whole), Contrast("good", "bad", whole))),
        Claim("", (Contrast("bad", "plain", whole),)),
        Claim("", (Contrast("good", "plain", whole), Contrast("same", "plain", whole))),
        Claim("", (Contrast("good", "plain", whole), Contrast("bad", "plain", whole))),
        Claim("", (Contrast("absent", "plain", whole),)),
    ]
    verdicts = [judged.verdict for judged in judge(claims, {"": Evidence(results)})]
    assert verdicts[:4] == ["borne out", "contradicted", "not shown", "contradicted"]
    assert verdicts[4] == "no verdict (absent over plain on 1 to 12 operators was not run)"


def test_fewer_than_five_seeds_give_no_verdict(tmp_path):
    results = comparison(tmp_path, Drawn("good", effect=1.2), seeds=(0, 1, 2, 3))
    (judged,) = judge([Claim("", (Contrast("good", "plain", (1, 12)),))], {"": Evidence(results)})
    assert judged.verdict == "no verdict (4 seeds)"


def test_scores_of_a_task_whose_baseline_plain_does_not_beat_get_no_verdict(tmp_path):
    drawn = (Drawn("plain", None), Drawn("svgd", effect=0.8, force=0.1))
    weak = read_results(write_comparison(tmp_path / "weak", (Drawn("counts", None, 0.3, baseline=True), *drawn)))
    sound = read_results(write_comparison(tmp_path / "sound", (Drawn("counts", None, -2.0, baseline=True), *drawn)))
    cosine = {("svgd", seed): {"output_cosine": 0.2 - 0.01 * seed} for seed in range(5)}
    plain = {("plain", seed): {"output_cosine": 0.3 + 0.02 * seed} for seed in range(5)}
    parts = {"TREC": Evidence(weak, cosine | plain), "SUBJ": Evidence(sound, cosine | plain)}
    contrasts = (
        Contrast("svgd", "plain", part="TREC"),
        Contrast("svgd", "plain", part="SUBJ"),
        Contrast("plain", "svgd", part="TREC", measure="output_cosine"),
        Contrast("plain", "counts", part="TREC"),
        Contrast("plain", "counts", part="SUBJ"),
    )
    (judged,) = judge([Claim("", contrasts)], parts)
    doubt = "no verdict (plain is not shown to beat counts in TREC)"
    assert [one.verdict for one in judged.found] == [doubt, "borne out", "borne out", "contradicted", "borne out"]
    left_out = " (1 of 5 contrasts left out: plain is not shown to beat counts in TREC)"
    assert judged.verdict == f"contradicted{left_out}"
    assert judged.found[0].judgement.family == 4, "it counts among the tests of scores"
    assert record_claims([judged])[0]["contrasts"][0]["p_holm"] is None

    alone, both = judge([Claim("", contrasts[:1]), Claim("", contrasts[:2])], parts)
    assert (alone.verdict, both.verdict) == (doubt, f"borne out{left_out.replace('5', '2')}")
    few = Evidence(read_results(write_comparison(tmp_path / "few", drawn, seeds=(0, 1))))
    assert judge([Claim("", contrasts[:2])], {**parts, "SUBJ": few})[0].verdict == "no verdict (2 seeds)"


def test_holm_covers_the_contrasts_of_all_claims(tmp_path):
    results = comparison(tmp_path, Drawn("good", effect=0.6), Drawn("other", effect=0.3))
    one = Claim("", (Contrast("good", "plain", (1, 12)),))
    (alone,) = judge([one], {"": Evidence(results)})
    together = judge([one, Claim("", (Contrast("other", "plain", (1, 12)),))], {"": Evidence(results)})
    assert together[0].found[0].estimate == alone.found[0].estimate
    raw = sorted(judged.found[0].estimate.p for judged in together)
    adjusted = sorted(judged.found[0].judgement.adjusted for judged in together)
    assert adjusted == pytest.approx([2 * raw[0], max(raw[1], 2 * raw[0])])


def numbered(tmp_path, name, **numbers):
    """Evidence whose arms have a number each, one value a seed."""
    results = read_results(write_comparison(tmp_path / name, (Drawn("plain", None), Drawn("svgd")), items=20))
    found = {
        (arm, seed): {"NLL": value, "step_seconds": 0.1 + 0.1 * (arm == "svgd"), "parameters": 1_000.0}
        for arm, values in numbers.items()
        for seed, value in enumerate(values)
    }
    return Evidence(results, found)


def test_a_contrast_of_a_number_is_tested_over_seeds_alone(tmp_path):
    evidence = numbered(tmp_path, "a", plain=[2.0, 2.1, 2.2, 2.1, 2.0], svgd=[1.5, 1.7, 1.6, 1.6, 1.5])
    falls = Contrast("plain", "svgd", measure="NLL")
    (judged,) = judge([Claim("", (falls,))], {"": evidence})
    assert judged.found[0].estimate.value == pytest.approx(0.5)
    assert (judged.found[0].estimate.seeds, judged.found[0].estimate.items) == (5, 1)
    assert judged.verdict == "borne out"
    assert str(falls) == "NLL of plain over svgd"
    (other,) = judge([Claim("", (Contrast("svgd", "plain", measure="NLL"),))], {"": evidence})
    assert other.verdict == "contradicted"


def test_a_number_of_one_run_is_shown_without_interval_and_p(tmp_path):
    falls = Claim("Losses fall.", (Contrast("plain", "svgd", measure="NLL"),))

    def claims(name, plain, svgd):
        evidence = {"": numbered(tmp_path, name, plain=plain, svgd=svgd)}
        return build_claims_grids(record_claims(judge([falls], evidence)))[0].rows[0]

    assert claims("a", [2.0], [1.5]) == (
        "Losses fall.",
        "NLL of plain over svgd: +0.500 (one run)",
        "no verdict (1 seed)",
    )
    assert "+0.450 (−0.185 to +1.085)" in claims("b", [2.0, 2.1], [1.5, 1.7])[1]  # noqa: RUF001
    assert ", p < 0.001" in claims("c", [2.0, 2.1, 2.0, 2.1, 2.0], [1.5, 1.7, 1.6, 1.5, 1.5])[1]
    assert ", p = 0.0" in claims("d", [2.0, 2.1, 2.0, 2.1, 2.0], [1.7, 2.1, 1.9, 1.7, 1.9])[1]


def test_contrasts_reach_across_parts_and_take_one_lead_off_another(tmp_path):
    parts = {
        "2 heads": numbered(tmp_path, "a", plain=[2.0, 2.1, 2.2, 2.1, 2.0], svgd=[1.5, 1.7, 1.6, 1.6, 1.5]),
        "16 heads": numbered(tmp_path, "b", plain=[3.0, 3.2, 3.2, 3.1, 3.0], svgd=[1.6, 1.8, 1.7, 1.7, 1.7]),
    }
    rise = Contrast("svgd", "svgd", part="16 heads", against_part="2 heads", measure="NLL")
    steeper = Contrast("plain", "plain", part="16 heads", against_part="2 heads", measure="NLL", less=rise)
    one, other = judge([Claim("", (rise,)), Claim("", (steeper,))], parts)
    assert one.found[0].estimate.value == pytest.approx(0.12)
    assert other.found[0].estimate.value == pytest.approx(1.02 - 0.12)
    assert str(rise) == "NLL of svgd in 16 heads over svgd in 2 heads"
    assert str(steeper).endswith(", less that of svgd in 16 heads over svgd in 2 heads")
    assert not rise.is_empty
    least = str(Least("NLL", "svgd", ("2 heads", "16 heads")).line(parts))
    assert least == "least NLL of svgd: 2 heads 1.580, 16 heads 1.700; least in 2 heads, as 5 of 5 seeds agree"
    assert str(Least("NLL", "svgd", ("2 heads", "8 heads")).line(parts)).endswith(": 2 heads, 8 heads not run")


def test_scores_across_parts_are_paired_on_the_same_items_and_refused_on_others(tmp_path):
    arms = Drawn("plain", None), Drawn("good", effect=0.9)
    folders = [
        write_comparison(tmp_path / name, arms, bins=BINS, items=150, seed=7 + place) for place, name in enumerate("ab")
    ]
    parts = dict(zip("ab", (Evidence(read_results(folder)) for folder in folders), strict=True))
    contrast = Contrast("good", "plain", part="a", against_part="b")
    (judged,) = judge([Claim("", (contrast,))], parts)
    means = [
        np.mean([run.statistics.mean() for run in parts[part].results.runs if run.arm == arm])
        for part, arm in (("a", "good"), ("b", "plain"))
    ]
    assert judged.found[0].estimate.value == pytest.approx(means[0] - means[1])
    elsewhere = read_results(write_comparison(tmp_path / "c", arms, bins=BINS[:3], items=150))
    (refused,) = judge([Claim("", (contrast,))], {"a": parts["a"], "b": Evidence(elsewhere)})
    assert refused.verdict == "no verdict (good in a over plain in b is on different test sets)"


def test_bins_without_test_items_give_no_verdict(tmp_path):
    results = comparison(tmp_path, Drawn("good", effect=1.2))
    for contrast in (Contrast("good", "plain", (13, 20)), Contrast("good", "plain", (13, 20), beyond=(1, 6))):
        (judged,) = judge([Claim("", (contrast,))], {"": Evidence(results)})
        assert judged.verdict.endswith("has no test items)")


def test_what_no_test_decides_is_shown_without_one_and_leaves_the_others_p_values_alone(tmp_path):
    evidence = numbered(tmp_path, "a", plain=[2.0, 2.1, 2.2, 2.1, 2.0], svgd=[1.9, 2.1, 2.1, 2.1, 1.9])
    falls = Claim("", (Contrast("plain", "svgd", measure="NLL"),))
    equal = Claim(
        "",
        falls.contrasts,
        (StepTimes(("svgd", "spos")), Numbers("parameters", "size", ("plain",), digits=0)),
        tested=False,
    )
    (alone,) = judge([falls], {"": evidence})
    together = judge([falls, equal, equal], {"": evidence})
    assert together[0] == alone
    # a contrast has one verdict wherever it is printed
    assert (together[1].verdict, together[1].found) == (MEASURED, alone.found)
    assert alone.found[0].judgement.family == 1
    (untested,) = judge([equal], {"": evidence})
    assert (untested.verdict, untested.found[0].verdict, untested.found[0].judgement.adjusted) == (MEASURED, "", None)
    assert tuple(map(str, together[1].shown)) == ("step time over plain: svgd 2.00, spos not run", "size: plain 1,000")
    (nothing,) = judge([Claim("", shown=(StepTimes(("svgd",), "big"),))], {"": evidence})
    assert (nothing.verdict, str(nothing.shown[0])) == (NO_VERDICT, "step time over plain in big: svgd not run")
    asked = (Numbers("structure_win", "win, %", ("svgd", "spos")), Least("NLL", "svgd", ("", "big")))
    (nobody,) = judge([Claim("", shown=asked)], {"": evidence})
    shown = ("win, %: svgd not measured, spos not run", "least NLL of svgd: , big not run")
    assert (nobody.verdict, tuple(map(str, nobody.shown))) == (NO_VERDICT, shown)
    (some,) = judge([Claim("", shown=(*asked, Least("NLL", "svgd", ("",))))], {"": evidence})
    assert some.verdict == MEASURED


def test_one_arm_on_both_sides_is_no_contrast(tmp_path):
    results = comparison(tmp_path, Drawn("good", effect=1.2))
    (judged,) = judge([Claim("", (Contrast("good", "good"),))], {"": Evidence(results)})
    assert judged.verdict == "no verdict (good over good is one arm at this scale)"


def begun(results, starts):
    return replace(results, runs=tuple(replace(run, start=starts[run.seed]) for run in results.runs))


def test_fine_tunings_of_one_pre_training_give_no_verdict(tmp_path):
    results = comparison(tmp_path, Drawn("good", effect=1.2))
    numbers = {(run.arm, run.seed): {"NLL": 1.0 + (run.arm == "good") * (1.0 + 0.1 * run.seed)} for run in results.runs}
    claims = [
        Claim("", (Contrast("good", "plain"),)),
        Claim("", (Contrast("good", "plain", over=("",)),)),
        Claim("", (Contrast("good", "plain", measure="NLL"),)),
    ]
    alone = judge(claims, {"": Evidence(results, numbers)})
    assert {judged.verdict for judged in alone} == {"borne out"}
    shared = judge(claims, {"": Evidence(begun(results, (0, 1, 2, 0, 1)), numbers)})
    assert {judged.verdict for judged in shared} == {"no verdict (3 pre-trainings)"}
    assert {judged.found[0].estimate.seeds for judged in shared} == {3}
    own = judge(claims, {"": Evidence(begun(results, (0, 1, 2, 3, 4)), numbers)})
    assert {judged.verdict for judged in own} == {"borne out"}
    assert own[0].found[0].estimate.value == pytest.approx(alone[0].found[0].estimate.value, abs=1e-12)


def test_models_with_tests_of_their_own_are_not_compared(tmp_path):
    results = comparison(tmp_path, Drawn("good", effect=1.2))
    own = replace(results, metric=replace(results.metric, own_test=True))
    (judged,) = judge([Claim("", (Contrast("good", "plain"),))], {"": Evidence(own)})
    assert judged.verdict == "no verdict (good over plain compares models that were scored on different test items)"


def test_runs_of_which_some_do_not_say_their_start_are_refused(tmp_path):
    results = comparison(tmp_path, Drawn("good", effect=1.2))
    mixed = begun(results, (0, None, 2, 0, 1))
    with pytest.raises(DataError, match=r"seed-1 does not record the run it started from; delete the folder"):
        judge([Claim("", (Contrast("good", "plain"),))], {"": Evidence(mixed)})
    # a baseline begins with nothing, and says nothing of the others
    runs = tuple(replace(run, start=None, baseline=True) if run.arm == "plain" else run for run in results.runs)
    shared = replace(results, runs=tuple(run if run.baseline else replace(run, start=run.seed % 2) for run in runs))
    (judged,) = judge([Claim("", (Contrast("plain", "good"),))], {"": Evidence(shared)})
    assert judged.verdict == "no verdict (2 pre-trainings)"
