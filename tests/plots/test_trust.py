from __future__ import annotations

import math

import matplotlib as mpl
import pytest
import torch

from headwise.errors import SettingError
from headwise.metrics.calibration import Reliability, reliability
from headwise.plots import entropy_cdf, reliability_diagram, to_png


def run(seed: int, shift: float) -> Reliability:
    generator = torch.Generator().manual_seed(seed)
    confidence = 0.3 + 0.7 * torch.rand(300, generator=generator)
    return reliability(confidence, torch.rand(300, generator=generator) < confidence - shift)


def entropies(seed: int, end: float) -> torch.Tensor:
    return end * torch.rand(80, generator=torch.Generator().manual_seed(seed))


def test_a_reliability_diagram_shows_the_bins_of_all_runs_and_the_errors_of_each():
    runs = [run(0, 0.2), run(1, 0.2)]
    left, right = reliability_diagram({"MA": runs, "RMA": [run(2, 0.0)]}, reference="MA").axes
    dots = left.collections[0].get_offsets().tolist()
    assert dots == [[pytest.approx(x), pytest.approx(y)] for x, y, _ in (runs[0] + runs[1]).bins]
    heights = sorted(bar.get_height() for bar in right.patches)
    expected = [sum(one.ece for one in runs) / 2, sum(one.oe for one in runs) / 2, run(2, 0.0).ece, run(2, 0.0).oe]
    assert heights == pytest.approx(sorted(expected))
    seeds = [dot[1] for dots in right.collections for dot in dots.get_offsets().tolist()]
    assert sorted(seeds) == pytest.approx(sorted([one.ece for one in runs] + [one.oe for one in runs]))


def test_the_curve_of_entropies_is_their_cumulative_share_to_the_uniform_end():
    runs = [entropies(0, 1.0), entropies(1, 0.5)]
    axes = entropy_cdf({"MA": runs}, classes=5, text="Age").axes[0]
    (line, _end) = axes.lines
    places, shares = line.get_xdata(), line.get_ydata()
    middle = len(places) // 3
    expected = sum(float((one <= places[middle]).double().mean()) for one in runs) / 2
    assert shares[middle] == pytest.approx(expected, abs=0.02)
    assert 0 < shares[middle] < 1
    assert places[-1] == pytest.approx(math.log(5))
    assert shares[-1] == 1.0
    assert "Age" in axes.get_xlabel()


def test_figures_leave_the_users_settings_and_are_the_same_each_time():
    before = dict(mpl.rcParams)
    made = [to_png(entropy_cdf({"MA": [entropies(0, 1.0)]}, classes=5)) for _ in range(2)]
    assert made[0] == made[1]
    assert made[0].startswith(b"\x89PNG")
    assert dict(mpl.rcParams) == before


def test_nothing_to_draw_is_refused():
    with pytest.raises(SettingError, match="models has nothing; expected"):
        reliability_diagram({})
    with pytest.raises(SettingError, match="nothing for MA"):
        entropy_cdf({"MA": []}, classes=5)
    with pytest.raises(SettingError, match=r"entropies of MA .* in \[0, log 2\]"):
        entropy_cdf({"MA": [torch.tensor([1.5])]}, classes=2)
    with pytest.raises(SettingError, match="15 and 3 bins"):
        reliability_diagram({"MA": [run(0, 0.1), reliability(torch.ones(1), torch.ones(1).bool(), bins=3)]})
