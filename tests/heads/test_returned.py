"""Projections of a user's own may return heads along axes of their own, in any order, or are refused when found."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from cases import thin, tiers

WIDTH, HEADS, SIZE = 12, 3, 4
# What is returned of [B, T, H, e], and back.
ORDERS = {
    "b t h e": (0, 1, 2, 3),
    "b h t e": (0, 2, 1, 3),
    "t b h e": (1, 0, 2, 3),
    "h b t e": (2, 0, 1, 3),
    "b t e h": (0, 1, 3, 2),
}


def back(order: str) -> list[int]:
    return [ORDERS[order].index(axis) for axis in range(4)]


class Wrapper(nn.Module):
    """A Linear inside."""

    def __init__(self, rows: int, heads: int, order: str) -> None:
        super().__init__()
        self.linear, self.heads, self.order = nn.Linear(WIDTH, rows), heads, order

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(-1, (self.heads, -1)).permute(ORDERS[self.order])


class Derived(nn.Linear):
    """A Linear itself."""

    def __init__(self, rows: int, heads: int, order: str) -> None:
        super().__init__(WIDTH, rows)
        self.heads, self.order = heads, order

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (self.heads, -1)).permute(ORDERS[self.order])


class Attention(nn.Module):
    def __init__(self, kind: type, order: str, groups: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.order = HEADS, SIZE, order
        self.query = kind(HEADS * SIZE, HEADS, order)
        self.key, self.value = (kind(groups * SIZE, groups, order) for _ in range(2))
        self.output = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        projected = (project(x).permute(back(self.order)) for project in (self.query, self.key, self.value))
        q, k, v = (one.transpose(1, 2).expand(-1, self.num_heads, -1, -1) for one in projected)
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """One projection, which returns query, key and value along an axis, or as a tuple."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.num_heads, self.form = HEADS, form
        self.qkv, self.proj = FusedProjection(form), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x)
        q, k, v = fused if self.form.startswith(("tuple", "p")) else fused.movedim(self.form.split().index("p"), 0)
        q, k, v = (part if self.form == "p b h t e" else part.transpose(1, 2) for part in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FusedProjection(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(WIDTH, 3 * WIDTH), form

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        fused = self.linear(x).unflatten(-1, (3, HEADS, SIZE))
        if self.form == "tuple":
            return fused.unbind(2)
        return fused.permute(2, 0, 3, 1, 4) if self.form == "p b h t e" else fused


READ = [(kind, order, groups) for kind in (Wrapper, Derived) for order in ORDERS for groups in (HEADS, 1)]
READ = [one for one in READ if one[1] != "b t e h"]


def check(model: nn.Module, values: nn.Module, first: int) -> None:
    state = torch.get_rng_state()
    heads, linear = hw.find_heads(model), getattr(values, "linear", values)
    assert torch.equal(torch.get_rng_state(), state)
    # also as many tokens, or sequences, as heads
    for batch, tokens in ((2, 5), (2, HEADS), (HEADS, 5), (HEADS, HEADS)):
        x = torch.randn(batch, tokens, WIDTH)
        assert hw.verify(heads, (x,)).sites == ("0",)
        with hw.Taps(heads, values=True, outputs=True) as taps:
            model(x)
            (capture,) = taps.read()
        expected = F.linear(x, linear.weight, linear.bias)[..., first:]
        torch.testing.assert_close(capture.values.flatten(2), expected)
    assert len(hw.measure(heads, [x]).layers) == 1


@tiers(("kind", "order", "groups"), *thin(READ, 8))
def test_heads_along_axes_of_their_own_are_proved_and_read(kind: type, order: str, groups: int):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(kind, order, groups)).eval()
    check(model, model[0].value, 0)
    x = torch.randn(2, 5, WIDTH)
    with hw.ablate(hw.find_heads(model), 1):
        without = model(x)
    if groups == HEADS:
        hw.prune(hw.find_heads(model), {0: [1]}, inputs=(x,))
        torch.testing.assert_close(model(x), without)


@tiers("form", ["p b h t e"], ["b t p h e"])
def test_projections_along_an_axis_of_their_own_are_proved_and_read(form: str):
    torch.manual_seed(0)
    model = nn.Sequential(Fused(form)).eval()
    check(model, model[0].qkv, 2 * WIDTH)


def test_a_wrong_reading_of_axes_is_rejected():
    model = nn.Sequential(Attention(Wrapper, "b h t e")).eval()
    row = hw.layouts.SeparateLinears(output=("output",), num_heads=6, head_size=())
    with pytest.raises(hw.errors.LayoutError, match="has no axis of 6 query heads and one of 2 features"):
        hw.find_heads(model, (row,))


class Folding(Wrapper):
    """Heads and sequences along one axis."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2).flatten(0, 1)


class Merging(nn.Module):
    """A W_O that takes heads apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, heads: Tensor) -> Tensor:
        return self.linear(heads.transpose(1, 2).flatten(2))


def test_what_cannot_be_read_is_refused_when_it_is_found():
    folding, merging = Attention(Folding, "b t h e"), Attention(Wrapper, "b t h e")
    merging.output = Merging()
    for module, told in (
        (folding, r"its query projection, a Folding, returns a tensor of shape \(15, 7, 4\)"),
        (Fused("tuple"), "its query projection, a FusedProjection, returns a tuple"),
        (merging, r"its output projection, a Merging, takes heads along an axis of their own"),
        (Attention(Wrapper, "b t e h"), r"misreads Attention: .*alternate|has no axis of|changing feature"),
    ):
        with pytest.raises(hw.errors.LayoutError, match=told):
            hw.find_heads(nn.Sequential(nn.LayerNorm(WIDTH), module))
