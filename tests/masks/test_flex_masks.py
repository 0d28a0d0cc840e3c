"""Role masks as flex attention takes them, against the boolean masks of the same roles."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import headwise as hw
from cases import cases
from headwise.masks.flex import FlexMask
from headwise.roles.word_table import AlignedRow, Alignment
from roles.test_roles import FREQUENT, SENTENCE
from roles.tokenizers_for_tests import KINDS, fast_tokenizer

HEADS = 7
TEXTS = [
    SENTENCE,
    hw.roles.WordTable(["a", "sesquipedalian", "film"], [2, 2, 2], ["det", "amod", "ROOT"], text="asesquipedalianfilm"),
]


def previous(table: hw.roles.WordTable) -> list[tuple[int, int]]:
    return [(word, word - 1) for word in range(1, len(table))]


ROLES = hw.roles.Roles(
    hw.roles.Rare(),
    hw.roles.Separator(),
    hw.roles.Dependency(),
    hw.roles.Major(),
    hw.roles.Window(3),
    previous,
    idf=FREQUENT,
)
PLACES = (5, 0, 2, 1, 6, 3)


def both(kind: str, side: str, *, empty: str, causal: bool) -> tuple[FlexMask, hw.roles.HeadMask]:
    encoding = fast_tokenizer(kind, padding_side=side)([table.text for table in TEXTS], padding=True)
    given = {"encoding": encoding, "heads": PLACES, "empty": empty}
    return ROLES.for_flex(TEXTS, HEADS, causal=causal, **given), replace(ROLES(TEXTS, HEADS, **given), causal=causal)


def evaluated(mask: FlexMask) -> Tensor:
    size = mask.keep.shape[1]
    grid = torch.meshgrid(*(torch.arange(n) for n in (len(mask.keep), HEADS, size, size)), indexing="ij")
    return mask.mask_mod()(*grid)


@cases("causal", [False, True])
@cases("empty", ["regular", "self"])
@cases("side", ["right", "left"])
@cases("kind", KINDS)
def test_it_allows_what_the_boolean_mask_allows(kind, side, empty, causal):
    flex, dense = both(kind, side, empty=empty, causal=causal)
    assert torch.equal(flex.keep, dense.keep)
    assert torch.equal(evaluated(flex), dense.allowed())


def test_a_token_of_several_words_is_a_column_where_any_of_them_is():
    tables = (hw.roles.WordTable(["film", ",", "I", "."]),)
    row = AlignedRow(first=[0, 2, 3, -1], last=[1, 2, 3, -1], units=4, special=(), places=((0, 1, 2, 3),))
    aligned = Alignment((tables,), (row,), 4)
    roles = hw.roles.Roles(hw.roles.Separator(), hw.roles.Window(3))
    flex, dense = roles.for_flex([tables[0]], HEADS, encoding=aligned), roles([tables[0]], HEADS, encoding=aligned)
    assert flex.columns[0, 0].tolist() == [True, False, True, False]
    assert torch.equal(evaluated(flex), dense.allowed())


@cases("block", [4, 16])
@cases("causal", [False, True])
def test_its_blocks_are_those_of_create_block_mask(causal, block):
    flex, _ = both("WordPiece", "right", empty="self", causal=causal)
    size = flex.keep.shape[1]
    found, expected = (
        flex.block_mask(block),
        create_block_mask(flex.mask_mod(), 2, HEADS, size, size, device="cpu", BLOCK_SIZE=block),
    )
    assert found.shape == expected.shape
    assert torch.equal(found.to_dense(), expected.to_dense())
    for counts, order in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        one, other = getattr(found, counts), getattr(expected, counts)
        assert torch.equal(one, other)
        listed = torch.arange(getattr(found, order).shape[-1]) < one[..., None]
        assert torch.equal(getattr(found, order)[listed], getattr(expected, order)[listed])
    assert found.full_kv_num_blocks.any() or block == 16


@pytest.mark.full
@cases("causal", [False, True])
def test_flex_attention_computes_what_sdpa_does_with_the_boolean_mask(causal):
    flex, dense = both("BPE across words", "right", empty="regular", causal=causal)
    shape = (2, HEADS, flex.keep.shape[1], 4)
    q, k, v = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        # uncompiled on purpose
        warnings.simplefilter("ignore")
        found = flex_attention(q, k, v, block_mask=flex.block_mask())
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, dense.for_sdpa()))


def test_windows_and_columns_take_memory_of_the_length():
    roles = hw.roles.Roles(hw.roles.Separator(), hw.roles.Window(3))
    sizes = {}
    for words in (200, 400):
        tables = [hw.roles.WordTable(["film", "."] * (words // 2))] * 2
        sizes[words] = roles.for_flex(tables, 8).nbytes
        assert roles(tables, 8).roles.numel() == 2 * 2 * words * words
    # two numbers of 8 bytes and two booleans a token, and two numbers a head
    assert sizes[400] - 8 * 16 == 2 * (sizes[200] - 8 * 16) == 2 * 400 * (2 * 8 + 2)
    with_pairs = hw.roles.Roles(hw.roles.Separator(), hw.roles.Window(3), previous).for_flex(tables, 8)
    assert with_pairs.nbytes == sizes[400] + 2 * 400 * 400


def test_no_mask_of_all_pairs_of_tokens_is_made_on_the_way(monkeypatch):
    tables = [hw.roles.WordTable(["film", "."] * 150)] * 2
    roles = hw.roles.Roles(hw.roles.Separator(), hw.roles.Window(3))

    def refuse(*_args: object) -> None:
        raise AssertionError("the boolean mask was made")

    monkeypatch.setattr(hw.roles.Roles, "_mask_units", refuse)
    mask = roles.for_flex(tables, 4)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            own = [t for t in (found if isinstance(found, tuple | list) else [found]) if isinstance(t, Tensor)]
            largest = max([largest, *(t.numel() for t in own)])
            return found

    with Sizes():
        mask.block_mask(32)
    # a row of blocks at a time, of 300 tokens
    assert largest <= 2 * 4 * 32 * 320


def test_it_moves_to_a_device():
    flex, _ = both("WordPiece", "right", empty="self", causal=True)
    moved = flex.to("meta")
    assert {tensor.device.type for tensor in moved._tensors.values()} == {"meta"}
    assert (moved.empty, moved.causal) == ("self", True)
