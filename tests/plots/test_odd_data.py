"""Figures of lists, arrays and numbers that cannot be drawn: drawn where they can be, else refused in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from headwise.errors import SettingError
from headwise.plots import ablation_histogram, entropy_cdf, head_embedding, head_similarity, sentence_heatmap, sweep

VECTORS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: sentence_heatmap(["a", "b"], {"head 0": torch.tensor([0.2, 0.8]), "head 1": np.array([0.5, 0.5])}),
        lambda: head_similarity({"layer 0": [[1.0, 0.5], [0.5, 1.0]], "layer 1": np.eye(2)}, measure="CKA"),
        lambda: entropy_cdf({"MA": [[0.1, 0.5], np.array([0.2])]}, classes=3),
        lambda: head_embedding({"MA": VECTORS.tolist(), "RMA": VECTORS.numpy()}, seeds=(0,)),
    ],
)
def test_lists_and_arrays_are_drawn(draw: Callable):
    assert draw().axes


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: sentence_heatmap(["a"], {"head 0": [0.2]}, width=0), "width is 0"),
        (lambda: sentence_heatmap(["a"], {"head 0": [math.nan]}), "expected one per token, finite"),
        (lambda: ablation_histogram({"a": [[]]}, axis="fall"), "the costs of a has nothing for model 0"),
        (lambda: head_embedding({"a": VECTORS * math.nan}), "some are not finite"),
        (lambda: head_embedding({"a": VECTORS[:, :0]}), "vectors of 0 numbers"),
        (lambda: head_embedding({"a": VECTORS}, seeds=(-1,)), "seed is -1"),
        (lambda: head_similarity({"a": [[1.0, math.nan], [0.0, 1.0]]}, measure="CKA"), "expected .H, H. with values"),
        (lambda: sweep({"a": {0: [1.0]}}, setting="alpha", measure="%", scale="log"), "runs at alpha 0; .* above 0"),
        (lambda: sweep({"a": {math.nan: [1.0]}}, setting="alpha", measure="%"), "runs at alpha nan; expected finite"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Callable, message: str):
    with pytest.raises(SettingError, match=message):
        draw()
