from __future__ import annotations

import pytest
import torch

from headwise.errors import HeadwiseError, SettingError, ShapeError
from headwise.shrinking.merge import refit_output
from shrinking.drawn_heads import draw


@pytest.mark.parametrize("ridge", [1e-3, 0.7])
def test_the_refit_is_least_squares_with_rows_that_hold_to_the_given_weight(ridge: float):
    x, y, start = draw(11, 5), draw(11, 3, seed=1), draw(3, 5, seed=2)
    strength = (ridge * float((x.T @ x).diagonal().mean())) ** 0.5
    rows, wanted = torch.cat([x, strength * torch.eye(5).double()]), torch.cat([y, strength * start.T])
    expected = torch.linalg.lstsq(rows, wanted).solution.T
    found = refit_output(x.T @ x, x.T @ y, start, ridge)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_a_weight_that_gives_the_outputs_stays_and_so_does_what_no_token_shows():
    x, start = draw(4, 6), draw(3, 6, seed=1)
    torch.testing.assert_close(refit_output(x.T @ x, x.T @ x @ start.T, start), start, atol=1e-12, rtol=0)
    x[:, 5] = 0
    found = refit_output(x.T @ x, x.T @ draw(4, 3, seed=2), start)
    assert torch.equal(found[:, 5], start[:, 5])
    assert not torch.allclose(found[:, :5], start[:, :5])


def test_features_that_are_zero_or_not_finite_are_refused():
    for moments in (torch.zeros(2, 2), torch.full((2, 2), float("nan")), torch.full((2, 2), float("inf"))):
        with pytest.raises(HeadwiseError, match="W_O cannot be refitted: the mean square of its inputs is"):
            refit_output(moments.double(), torch.zeros(2, 3).double(), torch.zeros(3, 2))
    with pytest.raises(ShapeError, match="moments has shape"):
        refit_output(torch.eye(3), torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(SettingError, match="ridge is 0"):
        refit_output(torch.eye(2), torch.zeros(2, 3), torch.zeros(3, 2), 0)
