"""Readings that shapes alone do not determine are told by a call, a name or the user, or are not acted on."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.attentions import FusedAttention

WIDTH = 16


class Wide(nn.Module):
    """Four heads whose values are twice as wide as their queries and keys: LeViT's."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.num_heads, self.asks = 4, asks
        self.qkv, self.proj = nn.Linear(WIDTH, 4 * (2 + 2 + 4)), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.asks:
            assert positions is not None
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(x).split([8, 8, 16], -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Grouped(FusedAttention):
    """The same shapes, and grouped queries."""

    def __init__(self, asks: bool, told: str = "") -> None:
        super().__init__(width=WIDTH, head_dim=4, key_value_heads=2)
        self.asks = asks
        del self.key_value_heads, self.head_dim
        if told:
            setattr(self, told, 2)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.asks:
            assert positions is not None
        q, k, v = (one.unflatten(-1, (-1, 4)).transpose(1, 2) for one in self.qkv(x).split([16, 8, 8], -1))
        k, v = (one.repeat_interleave(2, 1) for one in (k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_wider_values_and_grouped_queries_of_one_shape_are_told_apart_or_refused():
    with pytest.raises(hw.errors.LayoutError, match="misreads Wide"):
        hw.find_heads(Wide(asks=False))
    for kind in (Wide, Grouped):
        told = r"may be 4 query and 2 key/value heads of 4, or 4 heads whose .* keys have 2 features and whose values"
        with pytest.raises(hw.errors.LayoutError, match=told) as refusal:
            hw.find_heads(nn.Sequential(kind(asks=True)))
        assert "num_key_value_heads = 2" in str(refusal.value)
        assert "FusedLinear('mine'" in str(refusal.value)
    row = hw.layouts.FusedLinear("mine", fused=("qkv",), output=("proj",), num_heads=4)
    for heads in (
        hw.find_heads(Grouped(asks=True), (row,)),
        *(hw.find_heads(Grouped(asks=True, told=name)) for name in ("num_key_value_heads", "n_kv_heads", "n_rep")),
    ):
        assert heads.sites[0].key_value_heads == 2
    # a call of one tells those of its class
    assert hw.find_heads(Grouped(asks=False)).sites[0].key_value_heads == 2
    assert hw.find_heads(Grouped(asks=True)).sites[0].key_value_heads == 2


class Asking(FusedAttention):
    """Cannot be called with tokens alone."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        return super().forward(x + positions)


def repel(heads: hw.Heads) -> None:
    hw.repel(heads, hw.SVGD(), torch.optim.SGD(heads.model.parameters(), lr=0.1)).remove()


def test_nothing_repels_heads_of_a_guess_until_it_is_proved():
    class Blocks(Asking):
        pass

    class Alternating(Asking):
        def __init__(self) -> None:
            super().__init__(interleaved=True)

    x = torch.randn(2, 6, 12)
    heads = hw.find_heads(nn.Sequential(Blocks()))
    with pytest.raises(
        hw.errors.LayoutError, match=r"0 \(Blocks\): its fused projection .*hw\.verify\(heads, inputs\)"
    ):
        repel(heads)
    own = hw.layouts.FusedLinear("mine", fused=("qkv",), output=("proj",))
    repel(hw.find_heads(nn.Sequential(Blocks()), (own,)))
    heads.model.forward = lambda x: heads.model[0](x, x)
    assert hw.verify(hw.find_heads(heads.model[0]), (x, x)).sites == ("",)
    # heads found before and after, and those of a copy
    for again in (heads, hw.find_heads(heads.model), hw.find_heads(copy.deepcopy(heads.model))):
        repel(again)
    wrong = hw.find_heads(Alternating())
    for _ in range(2):
        with pytest.raises(hw.errors.LayoutError, match="proves it; or describe it"):
            repel(wrong)
        with pytest.raises(hw.errors.LayoutError, match="misreads Alternating"):
            hw.verify(wrong, (x, x))


class Packed(nn.Module):
    """Queries, keys and values in a parameter of two axes, as blocks or head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = 4, nn.Parameter(torch.randn(48, WIDTH)), nn.Linear(16, WIDTH)

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        return projected.unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(*self.split(x @ self.qkv.T))
        return self.proj(attended.transpose(1, 2).flatten(2))


class PackedByHead(Packed):
    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        return projected.unflatten(-1, (4, 3, 4)).permute(3, 0, 2, 1, 4).unbind()


def test_a_fused_parameter_is_a_guess_until_it_is_proved():
    x = torch.randn(2, 5, WIDTH)
    for kind in (Packed, PackedByHead):
        heads = hw.find_heads(kind())
        with pytest.raises(hw.errors.LayoutError, match="proves it; or describe it"):
            repel(heads)
        if kind is Packed:
            hw.verify(heads, (x,))
            repel(heads)
        else:
            with pytest.raises(hw.errors.LayoutError, match="misreads PackedByHead"):
                hw.verify(heads, (x,))
    row = hw.layouts.FusedParameter("mine", fused=("qkv",), output=("proj",), axes="(h p e) d", num_heads=4)
    repel(hw.find_heads(PackedByHead(), row))


def test_what_a_call_has_told_may_be_repelled_at_once():
    class Told(FusedAttention):
        pass

    repel(hw.find_heads(Told()))


class Windowed(FusedAttention):
    """Takes as many tokens as its table is made for, or a square of them."""

    def __init__(self, table: tuple[int, ...], tokens: int, interleaved: bool, square: bool = False) -> None:
        super().__init__(interleaved=interleaved)
        self.register_buffer("index", torch.zeros(table))
        self.tokens, self.square = tokens, square

    def forward(self, x: Tensor) -> Tensor:
        if self.square:
            assert x.dim() == 4
            return super().forward(x.flatten(1, 2)).view_as(x)
        assert x.shape[1] == self.tokens
        return super().forward(x)


@cases(
    ("table", "tokens", "square"),
    [((9, 9), 9, False), ((1, 1, 7, 7), 7, False), ((49, 4), 16, False), ((13, 5), 7, False), ((36, 36), 36, True)],
)
def test_a_module_is_called_with_as_many_tokens_as_its_tables_show(table: tuple[int, ...], tokens: int, square: bool):
    kind = type("Told", (Windowed,), {})
    repel(hw.find_heads(kind(table, tokens, False, square)))
    with pytest.raises(hw.errors.LayoutError, match="misreads"):
        hw.find_heads(kind(table, tokens, True, square))
