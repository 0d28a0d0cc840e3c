"""`find_heads` notices heads that are not stored one after another, cheaply, and leaves the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.attentions import (
    BlendedAttention,
    FusedAttention,
    SeparateAttention,
    ShuffledAttention,
    StridedAttention,
    SwappedAttention,
)
from heads.calling import NanoGPT
from heads.test_verify import TRUE
from headwise.heads.experiments import arrangement


class Fused(nn.Module):
    """'b n (d k h) -> k b h n d', and back '(d h)' or '(h d)'."""

    def __init__(self, back: str = "(d h)", width: int = 12, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.back = num_heads, back
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.num_heads)).permute(3, 0, 4, 1, 2)
        heads = F.scaled_dot_product_attention(q, k, v, mask)
        order = (0, 2, 3, 1) if self.back == "(d h)" else (0, 2, 1, 3)
        return self.proj(heads.permute(order).flatten(2))


class Queries(SeparateAttention):
    """Queries and keys '(d h)', values and outputs '(h d)'."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = (
            projection(x).unflatten(-1, (self.head_dim, self.num_heads)).permute(0, 3, 1, 2)
            for projection in (self.q_proj, self.k_proj)
        )
        return self.o_proj(self.join(F.scaled_dot_product_attention(q, k, self.split(self.v_proj(x)))))


class Crossed(StridedAttention):
    """Takes queries, keys and values."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, need: bool = False) -> Tensor:
        assert query.shape == key.shape == value.shape
        assert not need
        return super().forward(query)


class ChannelAttention(Fused):
    """Weights between features of a head instead of tokens, as in XCiT, DaViT and EdgeNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 4, 1)
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1)
        return self.proj((weights @ v).permute(0, 3, 1, 2).flatten(2))


FEATURE = r"misreads .*: changing feature [01] of its first query head changed"
TOKEN = r"changing the query of one token changed what [24] tokens get"
BY_HEAD = r"feature 0 of its last query head changed features .* not those from 15"
ALTERNATE = r"features 0, 4, 8, 12, 16 of what W_O gets.*'b n \(d h\)'.*'\(h d\)'"
BLOCKS = hw.layouts.FusedLinear("mine", fused=("qkv",), output=("proj",))
OTHER: list[tuple[str, Callable[[], nn.Module]]] = [
    *(
        (FEATURE, kind)
        for kind in (StridedAttention, Fused, lambda: Fused("(h d)"), Queries, Crossed, ShuffledAttention)
    ),
    *((TOKEN, kind) for kind in (SwappedAttention, BlendedAttention, ChannelAttention)),
    (BY_HEAD, lambda: FusedAttention(interleaved=True)),
    (ALTERNATE, lambda: StridedAttention(num_heads=4, head_dim=5, key_value_heads=4)),
]


@pytest.mark.full
@cases(("said", "build"), OTHER)
def test_heads_that_are_not_one_after_another_are_refused_before_anything_is_attached(said: str, build):
    row = BLOCKS if said == BY_HEAD else hw.layouts.LAYOUTS
    with pytest.raises(hw.errors.LayoutError, match=said) as refusal:
        hw.find_heads(nn.Sequential(nn.LayerNorm(12), build()), row)
    assert build is not ShuffledAttention or "(d h)" not in str(refusal.value)


def test_the_bed_is_called_and_not_passed_over(monkeypatch: pytest.MonkeyPatch):
    called: list[str] = []
    seen = arrangement._list_changed

    def counted(replay, before, head, feature):
        called.append(type(replay.site.module).__name__)
        return seen(replay, before, head, feature)

    monkeypatch.setattr(arrangement, "_list_changed", counted)
    for build, _ in TRUE.values():
        hw.find_heads(build())
    expected = ("SeparateAttention", "FusedAttention", "KeyValueAttention", "CausalSelfAttention", "ListAttention")
    assert {*expected, "Attention", "WindowAttention", "GatedAttention", "CallingAttention"} <= {*called}
    called.clear()
    hw.find_heads(NanoGPT(layers=6))
    # one kind, two features of its first head and one of its last
    assert called == ["CausalSelfAttention"] * 3


def test_the_experiment_leaves_the_model_and_the_generator_as_they_were():
    class Counting(SeparateAttention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(F.dropout(x, 0.5, self.training)) + 0.0 * torch.rand(())

    model, seen = Counting().train(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    model.q_proj.register_forward_pre_hook(lambda *_: seen.append(2))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    hw.find_heads(model)
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.randn(2, 5, 12))
    assert seen == [2, 1]


class Asking(StridedAttention):
    """Cannot be called with tokens alone."""

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cache: object) -> Tensor:
        assert mask is not None
        assert cache is None
        return super().forward(x + positions)


def test_what_cannot_be_called_is_left_to_verify():
    x = torch.randn(2, 6, 12)
    heads = hw.find_heads(Asking())
    with pytest.raises(hw.errors.LayoutError, match="misreads Asking"):
        hw.verify(heads, (x, x, x, None))
    with torch.device("meta"):
        assert hw.find_heads(StridedAttention())
    strided = StridedAttention()
    with torch.device("meta"), pytest.raises(hw.errors.LayoutError, match="misreads StridedAttention"):
        hw.find_heads(strided)

    class Drawing(StridedAttention):
        def join(self, heads: Tensor) -> Tensor:
            return super().join(heads) * torch.rand(())

    assert hw.find_heads(Drawing())
