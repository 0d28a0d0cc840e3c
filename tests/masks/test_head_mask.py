"""HeadMask against loops that spell its rules out, and what it refuses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from cases import cases


def by_loops(mask: hw.roles.HeadMask) -> Tensor:
    """Where each head may attend, cell by cell."""
    found = torch.zeros(mask.batch, mask.num_heads, mask.tokens, mask.tokens, dtype=torch.bool)
    roles = mask.roles.expand(mask.batch, -1, mask.tokens, -1)
    for b in range(mask.batch):
        for h in range(mask.num_heads):
            for q in range(mask.tokens):
                regular = [
                    k
                    for k in range(mask.tokens)
                    if (mask.keep is None or mask.keep[b, k]) and (k <= q or not mask.causal)
                ]
                allowed = regular
                if h in mask.heads:
                    allowed = [k for k in regular if roles[b, mask.heads.index(h), q, k]]
                    if not allowed:
                        allowed = regular if mask.empty == "regular" else [k for k in regular if k == q]
                found[b, h, q, allowed] = True
    return found


@st.composite
def head_masks(draw: st.DrawFn) -> hw.roles.HeadMask:
    batch, roles, tokens = draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 5))
    total = draw(st.integers(max(1, roles), 5))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    share = draw(st.sampled_from([0.0, 0.2, 0.6]))
    shape = (draw(st.sampled_from([1, batch])), roles, draw(st.sampled_from([1, tokens])), tokens)
    keep = torch.rand(batch, tokens, generator=rng) < draw(st.sampled_from([0.0, 0.5, 0.9]))
    return hw.roles.HeadMask(
        torch.rand(shape, generator=rng) < share,
        draw(st.sampled_from([None, keep])),
        total,
        tuple(draw(st.permutations(range(total)))[:roles]),
        empty=draw(st.sampled_from(["regular", "self"])),
        causal=draw(st.booleans()),
    )


@settings(max_examples=150)
@given(head_masks())
def test_what_is_allowed_is_what_the_rules_say(mask: hw.roles.HeadMask):
    assert torch.equal(mask.allowed(), by_loops(mask))


@settings(max_examples=60)
@given(head_masks(), st.data())
def test_parts_of_a_batch_and_their_concatenation_are_the_batch(mask: hw.roles.HeadMask, data: st.DataObject):
    cut = data.draw(st.integers(0, mask.batch))
    whole = mask.allowed()
    assert torch.equal(mask[cut:].allowed(), whole[cut:])
    assert torch.equal(mask[-1].allowed(), whole[-1:])
    order = data.draw(st.permutations(range(mask.batch)))
    assert torch.equal(mask[order].allowed(), whole[list(order)])
    parts = [part for part in (mask[:cut], mask[cut:]) if part.batch]
    assert torch.equal(hw.roles.HeadMask.concatenate(parts).allowed(), whole)


@cases("shared", [True, False])
def test_sentences_are_chosen_by_integers_of_any_kind_or_by_a_boolean_for_each(shared: bool):
    roles = torch.rand(1 if shared else 3, 2, 4, 4, generator=torch.Generator().manual_seed(2)) < 0.4
    mask = hw.roles.HeadMask(
        roles, torch.tensor([[True] * 4, [True, False, True, False], [False, True, True, True]]), 3
    )
    whole = mask.allowed()
    for one in (1, -2, np.int64(1), torch.tensor(1), torch.tensor(-2)):
        assert torch.equal(mask[one].allowed(), whole[1:2])
    for chosen in ([True, False, True], (True, False, True), np.array([True, False, True]), [np.True_, False, True]):
        assert torch.equal(mask[chosen].allowed(), whole[[0, 2]])
    assert torch.equal(mask[torch.tensor([False, True, True])].allowed(), whole[1:])
    for chosen in ([2, 0], np.array([2, 0]), [np.int64(2), 0], torch.tensor([-1, 0]), torch.tensor([2, 0]).byte()):
        assert torch.equal(mask[chosen].allowed(), whole[[2, 0]])
    assert mask[[]].batch == 0
    assert [part.batch for part in mask] == [1, 1, 1]
    for wrong in (True, [True, False], [0.0, 1.0], 1.0, "01", None, [[0, 1]], torch.zeros(3, dtype=torch.complex64)):
        with pytest.raises(hw.errors.SettingError, match="a list of integers, or 3 booleans, one for each sentence"):
            mask[wrong]
    for outside in (3, -4, np.int64(3), torch.tensor(3), [0, 3]):
        with pytest.raises(IndexError):
            mask[outside]


@settings(max_examples=60)
@given(head_masks(), st.integers(0, 3))
def test_padding_adds_tokens_nobody_attends_to(mask: hw.roles.HeadMask, extra: int):
    padded = mask.padded(mask.tokens + extra).allowed()
    assert torch.equal(padded[:, :, : mask.tokens, : mask.tokens], mask.allowed())
    assert not padded[..., mask.tokens :].any()


def test_masks_of_other_lengths_are_concatenated_at_the_longest():
    short, long = (
        hw.roles.HeadMask(torch.eye(n, dtype=torch.bool)[None, None], num_heads=2, empty="self") for n in (2, 4)
    )
    both = hw.roles.HeadMask.concatenate([short, long])
    assert both.tokens == 4
    assert both.keep.tolist() == [[True, True, False, False], [True] * 4]
    assert both.allowed()[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    with pytest.raises(hw.errors.MaskError, match="of one kind"):
        hw.roles.HeadMask.concatenate(
            [short, hw.roles.HeadMask(torch.eye(4, dtype=torch.bool)[None, None], num_heads=3)]
        )


def test_a_role_that_is_dropped_leaves_a_regular_head():
    roles = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.4
    keep = torch.tensor([[True] * 4, [True, True, False, False]])
    mask = hw.roles.HeadMask(roles, keep, 5, (4, 0, 2), ("rare", "window", "major"))
    without = mask.without("window")
    assert without.heads == (4, 2)
    assert without.names == ("rare", "major")
    assert torch.equal(without.allowed()[:, 0], keep[:, None, :].expand(2, 4, 4))
    assert torch.equal(without.allowed()[:, [1, 2, 3, 4]], mask.allowed()[:, [1, 2, 3, 4]])
    nothing = mask.without("rare", "window", "major")
    assert torch.equal(nothing.allowed(), hw.roles.HeadMask.regular(keep, 5).allowed())
    with pytest.raises(hw.errors.SettingError, match="separator"):
        mask.without("separator")


def test_random_masks_have_as_many_keys_a_row_and_come_from_the_sentence_alone():
    roles = torch.rand(2, 2, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    keep = torch.tensor([[True] * 6, [True, True, True, True, False, False]])
    mask = hw.roles.HeadMask(roles, keep, 3)
    drawn = mask.randomized([7, 8])
    real = keep[:, None, :, None] & keep[:, None, None, :]
    assert torch.equal((drawn.roles & real).sum(-1), (mask.roles & real).sum(-1))
    assert not torch.equal(drawn.roles & real, mask.roles & real)
    assert not (drawn.roles & ~real).any()
    assert torch.equal(drawn.roles, mask.randomized([7, 8]).roles)
    with torch.device("meta"):
        assert torch.equal(drawn.roles, mask.randomized([7, 8]).roles)
    assert not torch.equal(drawn.roles, mask.randomized([7, 9]).roles)
    # another batch and more padding change nothing
    alone = mask[1].padded(9).randomized([8])
    assert torch.equal(alone.roles[0, :, :6, :6], drawn.roles[1])
    causal = hw.roles.HeadMask(roles, keep, 3, causal=True).randomized([7, 8])
    assert not causal.roles.triu(1).any()
    with pytest.raises(hw.errors.SettingError, match="one per sentence"):
        mask.randomized([7])


def test_every_key_is_drawn_as_often_by_the_random_control():
    mask = hw.roles.HeadMask(torch.eye(5, dtype=torch.bool)[None, None], num_heads=1)
    counts = sum(mask.randomized([seed]).roles[0, 0].int() for seed in range(400))
    assert counts.sum() == 2000
    # 80 expected; five standard deviations are 40
    assert counts.min() > 40
    assert counts.max() < 120


def test_a_mask_of_no_sentence_has_a_text():
    assert repr(hw.roles.HeadMask(torch.zeros(0, 1, 2, 2, dtype=torch.bool))) == (
        "HeadMask(0 sentences, 0 tokens, 1 head; allowed in role 0: 0 %; 0 regular heads)"
    )


def test_a_mask_travels_between_processes_and_devices():
    mask = hw.roles.HeadMask(torch.eye(3, dtype=torch.bool)[None, None], torch.tensor([[True, True, False]]), 2)
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.allowed(), mask.allowed())
    assert mask.to("meta", non_blocking=True).roles.device.type == "meta"
    assert mask.to("meta").keep.device.type == "meta"


def test_the_text_of_a_mask_says_sizes_and_shares():
    roles = torch.zeros(2, 2, 4, 4, dtype=torch.bool)
    roles[:, 0] = torch.eye(4, dtype=torch.bool)
    keep = torch.tensor([[True] * 4, [True, True, False, False]])
    text = repr(hw.roles.HeadMask(roles, keep, 4, names=("self", "nothing"), causal=True))
    # 6 of 13 causal cells of real tokens
    assert text == (
        "HeadMask(2 sentences, 8 tokens of which 2 padding, 4 heads, causal; allowed in self: 46 %, nothing: 0 %; "
        "2 regular heads)"
    )
