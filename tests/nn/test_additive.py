"""Additive attention and everything that acts on its heads, against the equation written out."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases

WIDTH, HIDDEN, HEADS, LENGTH = 6, 4, 3, 5


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = hw.nn.AdditiveAttention(WIDTH, HIDDEN, HEADS)
        self.classifier = nn.Linear(HEADS * WIDTH, 2)

    def forward(self, states: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.classifier(self.attention(states, padding)[0])


def model() -> Classifier:
    torch.manual_seed(4)
    return Classifier().double()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), padding


def test_the_equation_written_out_sentence_by_sentence():
    attention, (states, padding) = model().attention, batch()
    embedding, weights = attention(states, padding)
    for row, length in enumerate((5, 3)):
        h = states[row, :length]
        scores = attention.score.weight @ torch.tanh(attention.hidden.weight @ h.T)
        a = torch.stack([torch.exp(one) / torch.exp(one).sum() for one in scores])
        assert torch.allclose(weights[row, :, :length], a)
        assert torch.allclose(embedding[row], (a @ h).flatten())
    assert (weights[1, :, 3:] == 0).all()


def test_padding_has_no_influence_and_all_padding_gives_zeros():
    attention, (states, padding) = model().attention, batch()
    before = attention(states, padding)[0]
    states[1, 3:] = 1e3
    assert torch.equal(attention(states, padding)[0], before)
    embedding, weights = attention(states, torch.ones_like(padding))
    assert not embedding.any()
    assert not weights.any()


def test_shapes_that_do_not_fit_are_refused():
    attention, (states, padding) = model().attention, batch()
    with pytest.raises(hw.errors.ShapeError, match=r"expected \(B, L, 6\)"):
        attention(states[..., :5])
    with pytest.raises(hw.errors.ShapeError, match=r"expected torch.bool of shape \(2, 5\)"):
        attention(states, padding.float())
    with pytest.raises(hw.errors.SettingError, match="num_heads"):
        hw.nn.AdditiveAttention(6, 4, 0)


def test_its_heads_are_the_rows_of_the_score_matrix():
    found = model()
    heads = hw.find_heads(found)
    (site,) = heads
    assert (site.kind, site.num_heads, site.key_value_heads, site.head_size) == ("pooling", HEADS, 1, WIDTH)
    (head_slice,) = heads.slices()
    view = head_slice.of(found.attention.score.weight)
    assert torch.equal(view, found.attention.score.weight.unsqueeze(1))
    assert len(heads.kind("pooling")) == 1
    assert "pooling" in str(heads)


def test_taps_read_outputs_and_weights_with_the_padding_of_the_keys_alone():
    found, (states, padding) = model(), batch()
    with hw.Taps(hw.find_heads(found), outputs=True, weights=True, mean_weights=True) as taps:
        # what listens is not copied
        for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
            assert twin.attention.observers == ()
        found(states, padding)
        (capture,) = taps.read()
    embedding, weights = found.attention(states, padding)
    assert capture.outputs is not None
    assert capture.weights is not None
    assert torch.equal(capture.outputs, embedding.view(2, 1, HEADS, WIDTH))
    assert torch.equal(capture.weights.squeeze(2), weights)
    torch.testing.assert_close(capture.mean_weights, weights.mean(1, keepdim=True))
    assert torch.equal(capture.key_keep, ~padding)
    # a learned query is no token of the sequence: none is padding, whichever side that lies on
    assert torch.equal(capture.query_keep, torch.tensor([[True], [True]]))
    with pytest.raises(hw.errors.LayoutError, match="no module computes values"):
        hw.Taps(hw.find_heads(found), values=True)


def test_a_text_of_padding_alone_counts_nowhere():
    found, (states, padding) = model(), batch()
    heads = hw.find_heads(found)
    empty = torch.cat([padding, torch.ones(1, LENGTH, dtype=torch.bool)])
    alone, beside = (states, padding), (torch.cat([states, states[:1]]), empty)
    reports = [hw.measure(heads, [given], forward=lambda model, b: model(*b)) for given in (alone, beside)]
    assert [report.tokens for report in reports] == [2, 2]
    assert reports[0].layers == reports[1].layers
    penalty = hw.Disagreement(heads, hw.similarity.Frobenius())
    values = []
    for given in (alone, beside):
        found(*given)
        values.append(penalty())
    torch.testing.assert_close(values[1], values[0])


def test_the_frobenius_penalty_is_lins_over_sentences():
    found, (states, padding) = model(), batch()
    penalty = hw.Disagreement(hw.find_heads(found), hw.similarity.Frobenius())
    found(states, padding.flip(1))
    value = penalty()
    weights = found.attention(states, padding.flip(1))[1]
    wanted = torch.stack([(a @ a.T - torch.eye(HEADS)).square().sum() for a in weights]).mean()
    assert torch.allclose(value, wanted)
    with pytest.raises(hw.errors.LayoutError, match="key/value head"):
        hw.Disagreement(hw.find_heads(found), hw.similarity.Subspace())


@cases(
    "rule",
    [
        hw.SVGD(alpha=0.7, step_size=0.3),
        hw.SVGD(alpha=0.7, step_size=0.3, kernel=hw.kernels.Cosine(), smoothing=False),
        hw.repulsion.CosineRepulsion(alpha=0.7, step_size=0.3),
        hw.repulsion.CosinePenalty(alpha=0.7, step_size=0.3),
    ],
)
def test_every_rule_moves_the_rows_and_leaves_the_shared_matrix(rule):
    from headwise.repulsion.rules import update

    found, (states, padding) = model(), batch()
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    repulsion = hw.repel(hw.find_heads(found), rule, optimizer, when="manual")
    found(states, padding).square().sum().backward()
    shared = found.attention.hidden.weight.grad.clone()
    wanted = update(rule, found.attention.score.weight, found.attention.score.weight.grad).gradient
    repulsion.apply()
    assert torch.allclose(found.attention.score.weight.grad, wanted)
    assert torch.equal(found.attention.hidden.weight.grad, shared)


def test_keys_alone_cannot_be_repelled():
    found = model()
    with pytest.raises(hw.errors.LayoutError, match=r"heads.projection\('query'\)"):
        hw.repel(hw.find_heads(found).projection("key"), hw.SVGD(), torch.optim.SGD(found.parameters(), lr=0.1))


def test_a_removed_head_adds_nothing():
    found, (states, padding) = model(), batch()
    heads = hw.find_heads(found)
    embedding = found.attention(states, padding)[0].unflatten(-1, (HEADS, WIDTH)).clone()
    embedding[:, 2] = 0.0
    with hw.ablate(heads, 2):
        without = found(states, padding)
    assert torch.allclose(without, found.classifier(embedding.flatten(1)))
    drops = hw.importance(heads, lambda: float(found(states, padding).sum())).drops["attention"]
    assert drops.shape == (HEADS,)
    assert drops.abs().min() > 0


def test_a_bias_turns_a_head_to_a_word():
    found, (states, padding) = model(), batch()
    bias = torch.zeros(1, HEADS, 1, LENGTH, dtype=torch.float64)
    bias[0, 1, 0, 2] = 50.0
    stop = hw.find_heads(found).sites[0].reach_scores().listen(lambda _call: bias)
    weights = found.attention(states, padding)[1]
    stop()
    assert torch.allclose(weights[:, 1, 2], torch.ones(2, dtype=torch.float64))
    assert (weights[1, :, 3:] == 0).all()
    assert torch.equal(found.attention(states, padding)[1], found.attention(states, padding)[1])
    assert found.attention(states, padding)[1][:, 1, 2].max() < 0.9


def test_verify_proves_the_rows_and_refuses_rows_that_are_no_heads():
    found, inputs = model(), batch()
    heads = hw.find_heads(found)
    assert hw.verify(heads, inputs).sites == ("attention",)
    (head_slice,) = heads.slices()
    # one head more than there is a row of its own for
    site = dataclasses.replace(heads.sites[0], slices=(dataclasses.replace(head_slice, heads=2, head_size=1, start=1),))
    with pytest.raises(hw.errors.LayoutError, match=r"changing the query of head 0 changes the outputs of heads \[1\]"):
        hw.verify(dataclasses.replace(heads, sites=(site,)), inputs)
