"""Claims are judged by the contrasts they are made of, on the bins they speak of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headwise.errors import DataError
from headwise_lab.papers.claims import (
    MEASURED,
    NO_VERDICT,
    Claim,
    Contrast,
    Judged,
    Shown,
    follow_doses,
    judge,
    show_step_times,
)
from headwise_lab.papers.pages import build_claims_grids, record_claims
from headwise_lab.results.cells import MINUS
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.runs import Results, read_results
from lab.results.synthetic_comparison import Drawn, write_comparison

BINS = tuple(range(1, 13))
ARMS = (
    Drawn("plain", None),
    Drawn("good", effect=1.2),
    Drawn("bad", effect=-1.2),
    Drawn("same", spread=0.05),
    Drawn("output", effect=0.4, slope=-0.05),
    Drawn("em", effect=-0.2, slope=0.09),
)
# items of a bin, and seeds
PARTS = {"one": (150, 5), "small": (40, 5), "large": (200, 6), "other": (90, 5)}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evidence]:
    """Comparisons of the same arms on items of their own; "again" has the items of "one" and other answers."""
    place = tmp_path_factory.mktemp("runs")
    found = {
        name: write_comparison(
            place / name, ARMS, bins=BINS if name == "one" else (1, 2, 3), items=items, seed=items, seeds=range(seeds)
        )
        for name, (items, seeds) in PARTS.items()
    }
    found["again"] = write_comparison(place / "again", ARMS, bins=BINS, items=150, seed=8)
    return {name: Evidence(read_results(folder)) for name, folder in found.items()}


@pytest.fixture
def results(parts: dict[str, Evidence]) -> Results:
    return parts["one"].results


def judge_one(contrast: Contrast, parts: dict[str, Evidence]) -> Judged:
    (judged,) = judge([Claim("", (contrast,))], parts)
    return judged


def test_a_contrast_is_a_weighted_sum_of_means_over_shared_seeds_and_items(parts):
    def mean(part: str, arm: str, first: int = 1, last: int = 12) -> float:
        results = parts[part].results
        inside = (results.bins >= first) & (results.bins <= last)
        # the seed that one part alone has is left out
        runs = [run for run in results.runs if run.arm == arm and run.seed < 5]
        return float(np.mean([run.statistics[inside].mean() for run in runs]))

    def lead(part: str, arm: str, *ends: int) -> float:
        return mean(part, arm, *ends) - mean(part, "plain", *ends)

    doses = ("bad", "plain", "output", "good")
    slope = np.polyfit(range(4), [mean("one", arm) for arm in doses], 1)[0]
    over = Contrast("good", "plain", over=("small", "large"))
    less = Contrast("good", "plain", over=("other",))
    beyond = Contrast("em", "plain", (7, 12), beyond=(1, 6), part="one")
    pair = (lead("small", "good") + lead("large", "good")) / 2
    expected = {
        Contrast("output", "plain", part="one"): (lead("one", "output"), 1, "output over plain in one"),
        Contrast("output", "plain", (2, 5), part="one"): (
            *(lead("one", "output", 2, 5), 1),
            "output over plain in one on 2 to 5 operators",
        ),
        beyond: (
            *(lead("one", "em", 7, 12) - lead("one", "em", 1, 6), 2),
            "em over plain in one on 7 to 12 operators, less its lead on 1 to 6",
        ),
        follow_doses(doses, "one"): (slope, 1, "slope from bad to good in one"),
        Contrast("good", "plain", part="one", against_part="again"): (
            *(mean("one", "good") - mean("again", "plain"), 1),
            "good in one over plain in again",
        ),
        over: (pair, 2, "good over plain, mean of small, large"),
        replace(over, less=less): (
            *(pair - lead("other", "good"), 3),
            "good over plain, mean of small, large, less that of other",
        ),
    }
    (judged,) = judge([Claim("", tuple(expected))], parts)
    for found in judged.found:
        value, sets, text = expected[found.contrast]
        assert found.estimate is not None
        assert found.estimate.value == pytest.approx(value, abs=1e-12), text
        assert (found.estimate.sets, found.estimate.seeds, str(found.contrast)) == (sets, 5, text)
    assert abs(lead("small", "good") - lead("large", "good")) > 1e-3, "each part counts alike, whatever its items"
    assert over.named(lambda part, arm: f"{arm} in {part}").arm == "good in small"
    assert replace(over, less=less).parts == ("small", "large", "other")
    assert (
        str(replace(over, less=less).within({"large", "other"})) == "good over plain, mean of large, less that of other"
    )


def test_what_cannot_be_measured_says_why(parts, results):
    without = replace(results, runs=tuple(run for run in results.runs if run.arm != "output"))
    places = {
        **parts,
        "own": Evidence(replace(results, metric=replace(results.metric, own_test=True))),
        "lacking": Evidence(without),
    }
    said = {
        Contrast("absent", "plain", part="one"): "absent over plain in one was not run",
        Contrast("good", "plain", part="elsewhere"): "good over plain in elsewhere was not run",
        Contrast("good", "plain", over=("one", "elsewhere")): "good over plain, mean of one, elsewhere was not run",
        follow_doses(("plain", "output", "good"), "lacking"): "slope from plain to good in lacking was not run",
        Contrast("good", "good", part="one"): "good over good in one is one arm at this scale",
        Contrast("good", "plain", part="one", against_part="small"): (
            "good in one over plain in small is on different test sets"
        ),
        Contrast(
            "good", "plain", (13, 20), part="one"
        ): "good over plain in one on 13 to 20 operators has no test items",
        Contrast("good", "plain", (13, 20), beyond=(1, 6), part="one"): (
            "good over plain in one on 13 to 20 operators, less its lead on 1 to 6 has no test items"
        ),
        Contrast("good", "plain", part="own"): (
            "good over plain in own compares models that were scored on different test items"
        ),
        Contrast("good", "plain", measure="NLL", part="one"): "NLL of good over plain in one was not measured",
    }
    for contrast, reason in said.items():
        assert judge_one(contrast, places).verdict == f"no verdict ({reason})"


def test_claims_are_borne_out_contradicted_or_not_shown(parts, results):
    good, bad, same = (Contrast(arm, "plain", (1, 12)) for arm in ("good", "bad", "same"))
    claims = {
        (good, Contrast("good", "bad", (1, 12))): "borne out",
        (bad,): "contradicted",
        (good, same): "not shown",
        (good, bad): "contradicted",
        (Contrast("absent", "plain"), good): "no verdict (absent over plain was not run)",
    }
    judged = judge([Claim("", contrasts) for contrasts in claims], {"": parts["one"]})
    assert [one.verdict for one in judged] == list(claims.values())
    few = replace(results, runs=tuple(run for run in results.runs if run.seed < 4))
    assert judge_one(good, {"": Evidence(few)}).verdict == "no verdict (4 seeds)"


def test_holm_covers_the_contrasts_of_all_claims(parts):
    one, other = (Claim("", (Contrast(arm, "plain", part="small"),)) for arm in ("output", "same"))
    (alone,) = judge([one], parts)
    together = judge([one, other], parts)
    assert together[0].found[0].estimate == alone.found[0].estimate
    estimates: Any = [judged.found[0].estimate for judged in together]
    judgements: Any = [judged.found[0].judgement for judged in together]
    raw = sorted(found.p for found in estimates)
    adjusted = sorted(found.adjusted for found in judgements)
    assert adjusted == pytest.approx([min(2 * raw[0], 1), max(raw[1], min(2 * raw[0], 1))])
    assert raw[0] > 0


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
    assert judged.found[0].judgement is not None
    assert judged.found[0].judgement.family == 4, "it counts among the tests of scores"
    assert record_claims([judged])[0]["contrasts"][0]["p_holm"] is None
    alone, both = judge([Claim("", contrasts[:1]), Claim("", contrasts[:2])], parts)
    assert (alone.verdict, both.verdict) == (doubt, f"borne out{left_out.replace('5', '2')}")
    few = replace(sound, runs=tuple(run for run in sound.runs if run.seed < 2))
    assert judge([Claim("", contrasts[:2])], {**parts, "SUBJ": Evidence(few)})[0].verdict == "no verdict (2 seeds)"


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory):
    """Return evidence whose arms have a number each, one value a seed."""
    arms = (Drawn("plain", None), Drawn("svgd"))
    results = read_results(write_comparison(tmp_path_factory.mktemp("numbers"), arms, items=20))

    def give(**numbers: list[float]) -> Evidence:
        found = {
            (arm, seed): {"NLL": value, "step_seconds": 0.1 + 0.1 * (arm == "svgd"), "parameters": 1_000.0}
            for arm, values in numbers.items()
            for seed, value in enumerate(values)
        }
        return Evidence(results, found)

    return give


FALLS = Contrast("plain", "svgd", measure="NLL")


def test_a_contrast_of_a_number_is_tested_over_seeds_alone_and_reaches_across_parts(numbered):
    parts = {
        "2 heads": numbered(plain=[2.0, 2.1, 2.2, 2.1, 2.0], svgd=[1.5, 1.7, 1.6, 1.6, 1.5]),
        "16 heads": numbered(plain=[3.0, 3.2, 3.2, 3.1, 3.0], svgd=[1.6, 1.8, 1.7, 1.7, 1.7]),
    }
    falls = replace(FALLS, part="2 heads")
    rise = Contrast("svgd", "svgd", part="16 heads", against_part="2 heads", measure="NLL")
    steeper = replace(rise, arm="plain", against="plain", less=rise)
    over = replace(FALLS, over=("2 heads", "16 heads"))
    expected = {
        falls: (0.5, "NLL of plain over svgd in 2 heads"),
        rise: (0.12, "NLL of svgd in 16 heads over svgd in 2 heads"),
        steeper: (
            1.02 - 0.12,
            "NLL of plain in 16 heads over plain in 2 heads, less that of svgd in 16 heads over svgd in 2 heads",
        ),
        over: (0.95, "plain over svgd, mean of 2 heads, 16 heads"),
    }
    (judged,) = judge([Claim("", tuple(expected))], parts)
    for found in judged.found:
        value, text = expected[found.contrast]
        assert found.estimate is not None
        assert found.estimate.value == pytest.approx(value)
        assert (found.estimate.seeds, found.estimate.items, str(found.contrast)) == (5, 1, text)
    assert judge_one(falls, parts).verdict == "borne out"
    assert judge_one(replace(falls, arm="svgd", against="plain"), parts).verdict == "contradicted"
    assert not rise.is_empty
    least = str(Shown("NLL", ("svgd",), ("2 heads", "16 heads"), least=True).line(parts))
    assert least == "least NLL of svgd: 2 heads 1.580, 16 heads 1.700; least in 2 heads, as 5 of 5 seeds agree"


def test_a_number_of_one_run_is_shown_without_interval_and_p(numbered):
    def row(plain: list[float], svgd: list[float]) -> tuple[Any, ...]:
        judged = judge([Claim("Losses fall.", (FALLS,))], {"": numbered(plain=plain, svgd=svgd)})
        return build_claims_grids(record_claims(judged))[0].rows[0]

    alone = ("Losses fall.", "NLL of plain over svgd: +0.500 (one run)", "no verdict (1 seed)")
    assert row([2.0], [1.5]) == alone
    assert f"+0.450 ({MINUS}0.185 to +1.085)" in row([2.0, 2.1], [1.5, 1.7])[1]
    assert ", p < 0.001" in row([2.0, 2.1, 2.0, 2.1, 2.0], [1.5, 1.7, 1.6, 1.5, 1.5])[1]
    assert ", p = 0.0" in row([2.0, 2.1, 2.0, 2.1, 2.0], [1.7, 2.1, 1.9, 1.7, 1.9])[1]


def test_what_no_test_decides_is_shown_without_one_and_leaves_the_others_p_values_alone(numbered):
    parts = {"": numbered(plain=[2.0, 2.1, 2.2, 2.1, 2.0], svgd=[1.9, 2.1, 2.1, 2.1, 1.9])}
    falls = Claim("", (FALLS,))
    size = Shown("parameters", ("plain",), label="size", digits=0)
    equal = Claim("", (FALLS,), (show_step_times(("svgd", "spos")), size), tested=False)
    (alone,) = judge([falls], parts)
    together = judge([falls, equal, equal], parts)
    assert together[0] == alone
    # a contrast has one verdict wherever it is printed
    assert (together[1].verdict, together[1].found) == (MEASURED, alone.found)
    assert alone.found[0].judgement is not None
    assert alone.found[0].judgement.family == 1
    (untested,) = judge([equal], parts)
    assert untested.found[0].judgement is not None
    assert (untested.verdict, untested.found[0].verdict, untested.found[0].judgement.adjusted) == (MEASURED, "", None)
    shown = {
        "step time over plain: svgd 2.00, spos not run": show_step_times(("svgd", "spos")),
        "size: plain 1,000": size,
        "step time over plain in big: svgd not run": show_step_times(("svgd",), "big"),
        "win, %: svgd not measured, spos not run": Shown("structure_win", ("svgd", "spos"), label="win, %"),
        "least NLL of svgd: , big not run": Shown("NLL", ("svgd",), ("", "big"), least=True),
    }
    assert [str(one.line(parts)) for one in shown.values()] == list(shown)
    verdicts = [one.verdict for one in judge([Claim("", shown=(one,)) for one in shown.values()], parts)]
    assert verdicts == [MEASURED, MEASURED, NO_VERDICT, NO_VERDICT, NO_VERDICT]


def begun(results: Results, starts: tuple[int | None, ...]) -> Results:
    return replace(results, runs=tuple(replace(run, start=starts[run.seed]) for run in results.runs))


def test_fine_tunings_of_one_pre_training_give_no_verdict(results):
    numbers = {(run.arm, run.seed): {"NLL": 1.0 + (run.arm == "good") * (1.0 + 0.1 * run.seed)} for run in results.runs}
    contrasts = [
        Contrast("good", "plain"),
        Contrast("good", "plain", over=("",)),
        Contrast("good", "plain", measure="NLL"),
    ]
    claims = [Claim("", (contrast,)) for contrast in contrasts]

    def judged(results: Results) -> tuple[Judged, ...]:
        return judge(claims, {"": Evidence(results, numbers)})

    alone, own = judged(results), judged(begun(results, (0, 1, 2, 3, 4)))
    assert {one.verdict for one in (*alone, *own)} == {"borne out"}
    shared = judged(begun(results, (0, 1, 2, 0, 1)))
    assert {one.verdict for one in shared} == {"no verdict (3 pre-trainings)"}
    assert {one.found[0].estimate and one.found[0].estimate.seeds for one in shared} == {3}
    with pytest.raises(DataError, match=r"seed-1 does not record the run it started from; delete the folder"):
        judged(begun(results, (0, None, 2, 0, 1)))
    # a baseline begins with nothing, and says nothing of the others
    runs = (
        replace(run, start=None, baseline=True) if run.arm == "plain" else replace(run, start=run.seed % 2)
        for run in results.runs
    )
    baseline = {"": Evidence(replace(results, runs=tuple(runs)))}
    assert judge_one(Contrast("plain", "good"), baseline).verdict == "no verdict (2 pre-trainings)"
