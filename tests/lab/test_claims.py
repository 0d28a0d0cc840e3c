"""Claims are judged by the contrasts they are made of, on the bins they speak of."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.lab.claims import Claim, Contrast, judge
from headwise.lab.evidence import Evidence
from headwise.lab.results import read_results
from lab.synthetic_comparison import Drawn, write_comparison

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
    assert str(judged.found[0].contrast) == "output over plain"


def test_a_lead_beyond_another_range_is_the_difference_of_the_two_leads(tmp_path):
    results = comparison(tmp_path, Drawn("em", effect=-0.2, slope=0.09))
    (judged,) = judge([Claim("", (Contrast("em", "plain", (7, 12), beyond=(1, 6)),))], {"": Evidence(results)})
    expected = mean_difference(results, "em", "plain", 7, 12) - mean_difference(results, "em", "plain", 1, 6)
    assert judged.found[0].estimate.value == pytest.approx(expected, abs=1e-12)


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


def test_holm_covers_the_contrasts_of_all_claims(tmp_path):
    results = comparison(tmp_path, Drawn("good", effect=0.6), Drawn("other", effect=0.3))
    one = Claim("", (Contrast("good", "plain", (1, 12)),))
    (alone,) = judge([one], {"": Evidence(results)})
    together = judge([one, Claim("", (Contrast("other", "plain", (1, 12)),))], {"": Evidence(results)})
    assert together[0].found[0].estimate == alone.found[0].estimate
    raw = sorted(judged.found[0].estimate.p for judged in together)
    adjusted = sorted(judged.found[0].adjusted for judged in together)
    assert adjusted == pytest.approx([2 * raw[0], max(raw[1], 2 * raw[0])])
