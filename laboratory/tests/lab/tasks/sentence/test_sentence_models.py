"""The classifiers of sentences: padding changes nothing, heads may be of any size, and the starts are as said."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.errors import SettingError, ShapeError
from headwise.nn.multihead import MultiheadAttention
from headwise_lab.experiment.seeding import initialize_parameters
from headwise_lab.models.encoder import Encoder, EncoderLayer, SizedAttention
from headwise_lab.models.text_classifiers import SentenceCNN, SentenceLSTM, SentenceTransformer, WordVectors
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES

SCALE = dataclasses.replace(CLASSIFICATION_SCALES["demo"], width=10, heads=3, head_size=4, hidden=14, dropout=0.3)
MODELS = [SentenceTransformer, SentenceLSTM, SentenceCNN]


def vectors(known: int = 0) -> WordVectors:
    ids = np.arange(5, 5 + known)
    return WordVectors(20, 10, dropout=0.3, ids=ids, known=np.full((known, 10), 3.0, dtype=np.float32))


def model(kind, seed: int = 3):
    made = kind(vectors(), 3, *([SCALE] if kind is SentenceTransformer else []))
    initialize_parameters(made, seed)
    return made


def test_padding_and_other_sentences_change_nothing_and_the_order_of_the_words_does():
    alone = torch.tensor([[2, 7, 8, 9, 3]])
    padded = torch.tensor([[2, 7, 8, 9, 3, 0, 0, 0], [2, 11, 12, 13, 14, 15, 16, 3]])
    for kind in MODELS:
        classifier = model(kind).eval()
        one, both = classifier(alone)["logits"], classifier(padded)["logits"]
        torch.testing.assert_close(one[0], both[0])
        assert not torch.allclose(both[0], both[1])
        # a text that lost all its words still has its two special tokens
        assert torch.isfinite(classifier(torch.tensor([[2, 3]]))["logits"]).all()
        assert not torch.allclose(one, classifier(torch.tensor([[2, 9, 8, 7, 3]]))["logits"])
        numbered = classifier(alone, labels=torch.tensor([2]), numbers=torch.tensor([77]))
        assert torch.equal(numbered["logits"], one)
        torch.testing.assert_close(numbered["loss"], -one.log_softmax(-1)[0, 2])


def test_heads_of_any_size_are_found_and_proved():
    classifier = model(SentenceTransformer)
    heads = hw.find_heads(classifier)
    assert [(site.num_heads, site.head_size, site.width) for site in heads] == [(3, 4, 10)] * 2
    assert len(hw.verify(heads, [torch.tensor([[2, 7, 8, 9, 3], [2, 5, 3, 0, 0]])]).sites) == 2


def test_attention_with_heads_of_a_size_is_the_equation():
    attention = SizedAttention(10, 3, head_size=4).double()
    states = torch.randn(2, 5, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    found = attention(states, states, states, key_padding_mask=padding, need_weights=False)[0]
    heads = []
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        q, k, v = (
            states @ weight[rows].T
            for weight in (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        )
        scores = (q @ k.mT / 2.0).masked_fill(padding[:, None, :], -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(found, torch.cat(heads, -1) @ attention.out_proj.weight.T)


def test_heads_that_share_the_width_are_the_module_they_were():
    one, other = SizedAttention(12, 3), MultiheadAttention(12, 3, bias=False, batch_first=True)
    assert one.state_dict().keys() == other.state_dict().keys()
    initialize_parameters(one, 7)
    initialize_parameters(other, 7)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    layer = EncoderLayer(12, heads=3, norm_first=True, dropout=0.0)
    assert layer.feed_forward[0].out_features == 24


def test_known_vectors_start_as_given_the_others_as_large_and_padding_stays_zero():
    table = vectors(known=2)
    initialize_parameters(table, 5)
    assert torch.equal(table.weight[0], torch.zeros(10))
    torch.testing.assert_close(table.weight[5:7], torch.full((2, 10), 3.0))
    drawn = vectors()
    initialize_parameters(drawn, 5)
    assert torch.equal(drawn.weight[0], torch.zeros(10))
    torch.testing.assert_close(table.weight[7:], drawn.weight[7:] * 15.0)
    assert 0.15 < float(drawn.weight[1:].detach().std()) < 0.25
    # word dropout acts in training alone
    table = vectors()
    tokens = torch.tensor([[5, 6, 7]])
    assert (table.train()(tokens) == 0).any()
    assert torch.equal(table.eval()(tokens), table.weight[tokens])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match=r"tokens has shape \(3,\); expected \(B, L\)"):
        model(SentenceTransformer)(torch.tensor([2, 5, 3]))
    with pytest.raises(SettingError, match="num_labels is 1"):
        SentenceLSTM(vectors(), 1)
    with pytest.raises(SettingError, match="width is 10 with 3 heads"):
        Encoder(9, width=10, layers=1, heads=3, norm_first=True, dropout=0.0)
    with pytest.raises(SettingError, match="width is 11; expected an even number"):
        dataclasses.replace(SCALE, width=11)
