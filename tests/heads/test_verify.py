"""`verify` proves true heads, tells those that attend from those that do not, and rejects wrong readings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from cases import cases, thin, tiers
from heads import attentions
from heads.attentions import (
    FusedAttention,
    GatedAttention,
    KeyValueAttention,
    NormedValuesAttention,
    RotatedValuesAttention,
    SeparateAttention,
    SinglePrecisionAttention,
)
from heads.calling import CallingAttention, NanoGPT
from heads.own import LensAttention, ListAttention, ParameterAttention, ThreeLists
from heads.vision import SwinTransformer, VisionTransformer
from heads.wrappers import wrap
from headwise.heads.heads import Heads, Site
from headwise.heads.view import HeadView

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(4))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
# These hide a head behind another, have no softmax, or are given more than tokens.
ODD = ("Module", "StridedAttention", "ShuffledAttention", "SwappedAttention", "BlendedAttention", "LinearAttention")
ODD = (*ODD, "PointwiseGates", "MixedHeadsAttention", "KeyValueAttention")


def torch_attention(**settings: Any) -> tuple[Callable[[], nn.Module], dict[str, Tensor]]:
    key, value = (torch.randn(2, 5, settings.get(name, 12)) for name in ("kdim", "vdim"))
    build = lambda: nn.MultiheadAttention(12, 3, batch_first=True, **settings)  # noqa: E731
    return build, {"query": X, "key": key, "value": value}


def aggregated(model: nn.Module) -> nn.Module:
    hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting(capsules=4))
    return model


TRUE: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    **{
        name: (kind, (X,))
        for name, kind in vars(attentions).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and name not in ODD
    },
    "grouped": (lambda: SeparateAttention(key_value_heads=2), (X,)),
    "one key/value head": (lambda: SeparateAttention(key_value_heads=1), (X,)),
    "one head of one feature": (lambda: SeparateAttention(num_heads=1, key_value_heads=1, head_dim=1), (X,)),
    "grouped and gated": (lambda: GatedAttention(key_value_heads=2), (X,)),
    "keys and values of a context": (KeyValueAttention, (X, X.flip(0)[:, :5])),
    "calling": (lambda: CallingAttention(key_value_heads=2, dropout=0.3), (X,)),
    "nanoGPT": (NanoGPT, (X,)),
    "list": (lambda: ListAttention(12), (X,)),
    "lists": (ThreeLists, (X,)),
    "TransformerLens": (lambda: LensAttention(12), (X,)),
    "parameters": (lambda: ParameterAttention(width=12, output_axes="h e d", causal=True), (X,)),
    "LoRA": (lambda: wrap(SeparateAttention(), "q_proj", "v_proj"), (X,)),
    "ViT": (lambda: VisionTransformer(24, 3, 2), (IMAGES,)),
    "Swin": (lambda: SwinTransformer(16, (2, 4), 1), (IMAGES,)),
    "torch": torch_attention(),
    "torch, no biases": torch_attention(bias=False),
    "torch, separate weights": torch_attention(kdim=12, vdim=12),
    "torch, other widths": torch_attention(kdim=5, vdim=7),
    "torch, appended keys": torch_attention(add_bias_kv=True, add_zero_attn=True),
    "torch, one query": (torch_attention()[0], {"query": X[:, :1], "key": X, "value": X}),
    "torch's transformer": (lambda: nn.Transformer(12, 2, 1, 1, 24, batch_first=True), (X, X)),
}


@tiers("name", *thin(TRUE, 3))
def test_true_heads_are_found_in_any_precision_proved_and_seen_to_attend_and_the_model_stays_as_it_was(name: str):
    torch.manual_seed(0)
    build, inputs = TRUE[name]
    assert len(hw.find_heads(build().to(torch.bfloat16))) > 0
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    heads = hw.find_heads(model)
    assert hw.verify(heads, inputs) == hw.heads.Verification(tuple(site.name for site in heads))
    assert kinds == [type(module) for module in model.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training


def test_a_model_is_proved_under_another_default_device():
    heads = hw.find_heads(SeparateAttention(key_value_heads=2))
    with torch.device("meta"):
        assert hw.verify(heads, (X,)).sites == ("",)


@cases("name", ["LinearAttention", "PointwiseGates", "MixedHeadsAttention"])
def test_heads_that_only_a_proof_disproves_are_found(name: str):
    for dtype in (torch.float32, torch.bfloat16):
        assert len(hw.find_heads(getattr(attentions, name)().to(dtype))) == 1


def resized(site: Site, count: int) -> Site:
    """The site as if its 32 features were those of another number of heads."""
    size = 32 // count

    def misread(part: HeadView) -> HeadView:
        return replace(part, heads=count, head_size=size, stride=size)

    counts = {"num_heads": count, "key_value_heads": count, "head_size": size}
    return replace(site, slices=tuple(misread(part) for part in site.slices), output=misread(site.output), **counts)


def permuted(projection: str) -> Heads:
    """Heads whose queries, or keys, are computed in another order than they are read in."""
    heads = hw.find_heads(SeparateAttention(head_dim=4, num_heads=2, key_value_heads=2))
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    linear = getattr(heads.sites[0].module, f"{projection[0]}_proj")
    linear.register_forward_hook(lambda _m, _i, output: output[..., order])
    return heads


def misread() -> Iterator[tuple[str, Heads, Any]]:
    """What is said of wrong heads, the heads, and inputs."""
    for kind in (SeparateAttention, NormedValuesAttention):
        heads = hw.find_heads(kind(head_dim=8, num_heads=4))
        for count in (2, 8):
            wrong = Heads(heads.model, (resized(heads.sites[0], count),))
            yield f"with {count} heads of {32 // count} misreads", wrong, (X,)
    for projection in ("query", "key"):
        said = f"changing the {projection} rows of head 0 changed the features"
        yield said, permuted(projection), (X,)
    swaps = {(2, 1, 0): SinglePrecisionAttention, (1, 0, 2): torch_attention()[0]}
    for order, build in swaps.items():
        (site,) = hw.find_heads(build()).sites
        kinds = [part.projection for part in site.slices]
        swapped = tuple(replace(site.slices[i], projection=kind) for i, kind in zip(order, kinds, strict=True))
        given = (X,) if order == (2, 1, 0) else TRUE["torch, one query"][1]
        yield "misreads", Heads(site.module, (replace(site, slices=swapped),)), given
    (site,) = hw.find_heads(GatedAttention(key_value_heads=2)).sites
    query, *others = site.slices
    assert (query.heads, query.head_size, query.stride, query.along) == (4, 5, 10, 40)
    # the gates in the place of the queries
    yield "misreads", Heads(site.module, (replace(site, slices=(replace(query, start=5), *others)),)), (X,)


def test_wrong_heads_are_rejected():
    for said, heads, inputs in misread():
        with pytest.raises(hw.errors.LayoutError, match=said):
            hw.verify(heads, inputs)


ORDERS = [("query", "key", "value"), ("query", "value", "key"), ("key", "value", "query")]
READINGS: list[dict[str, Any]] = [*({"order": order} for order in ORDERS), {"interleaved": True}]


@tiers("key_value_heads", [2], [4, 1])
@cases("given", READINGS)
def test_a_fused_projection_is_proved_as_its_row_says_and_in_no_other_order(given: dict, key_value_heads: int):
    readings = READINGS if key_value_heads == 4 else READINGS[:3]
    if given not in readings:
        return
    model = FusedAttention(key_value_heads=key_value_heads, **given)
    for reading in readings:
        row = hw.layouts.FusedLinear("mine", ("qkv",), ("proj",), **reading)
        if reading == given:
            assert hw.verify(hw.find_heads(model, (row,)), (X,)).sites == ("",)
        else:
            # some are told by the cheap experiment of find_heads
            with pytest.raises(hw.errors.LayoutError, match="layout 'mine' with 4 heads of 5 misreads FusedAttention"):
                hw.verify(hw.find_heads(model, (row,)), (X,))


def test_a_site_without_an_output_projection_is_told():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole, self.part = SeparateAttention(), SeparateAttention()
            del self.part.o_proj

        def forward(self, x: Tensor) -> Tensor:
            return self.whole(x)

    result = hw.verify(hw.find_heads(Both()), (X,))
    assert (result.sites, result.skipped) == (("whole",), ("part",))
    assert str(result).splitlines()[1] == "not verifiable without an output projection: part"


@cases(("kind", "layout"), [(SeparateAttention, "separate"), (GatedAttention, "separate gated")])
def test_an_aggregator_stands_where_w_o_stood_and_its_heads_are_proved(kind: type[nn.Module], layout: str):
    model = kind(key_value_heads=2)
    model.dense = nn.Linear(20, 20)
    before = hw.find_heads(model)
    aggregated(model)
    heads = hw.find_heads(model)
    (site,) = heads
    assert (site.layout, site.num_heads, site.output) == (layout, 4, None)
    assert site.output_projection.attribute == "o_proj"
    for found in (before, heads):
        assert hw.verify(found, (X,)).sites == ("",)


def decay(scores: Tensor) -> Tensor:
    """Weights of a past that fades."""
    places = torch.arange(scores.shape[-1])
    return scores * 0.9 ** (places[:, None] - places).clamp_min(0)


# What becomes of q k^T: weights of at least 0 that sum to 1 ...
ATTENDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda q, k: (q @ k.mT).softmax(-1),
    "causal softmax": lambda q, k: (q @ k.mT - 9e9 * torch.ones(q.shape[-2], k.shape[-2]).triu(1)).softmax(-1),
    "in single precision": lambda q, k: (q @ k.mT).float().softmax(-1).to(q.dtype),
    "linear attention that is normalized": lambda q, k: F.normalize((F.elu(q) + 1) @ (F.elu(k) + 1).mT, p=1.0, dim=-1),
}
# ... or others.
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear attention": lambda q, k: (F.elu(q) + 1) @ (F.elu(k) + 1).mT,
    "mLSTM": lambda q, k: (q @ k.mT).tril() / (q @ k.mT).tril().sum(-1, keepdim=True).abs().clamp_min(1.0),
    "retention": lambda q, k: decay(q @ k.mT).tril(),
    "sums to 1 with signs": lambda q, k: 2.0 * (q @ k.mT).softmax(-1) - (-q @ k.mT).softmax(-1),
    "sigmoid": lambda q, k: (q @ k.mT).sigmoid(),
    "squared": lambda q, k: (q @ k.mT).relu().square(),
}


class Weighing(SeparateAttention):
    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.join(self.weigh(q, k) @ v))


class WeighingParameters(ParameterAttention):
    """Likewise, of weights that are parameters."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(width=12)
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bld,hed->bhle", x, self.weights()[kind]) for kind in ("query", "key", "value"))
        return self.proj((self.weigh(q, k) @ v).transpose(1, 2).flatten(2))


class Gated(GatedAttention):
    """Gates of outputs behind heads that do not attend."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.num_heads, 2 * self.head_dim)).chunk(2, -1)
        heads = (self.weigh(q.transpose(1, 2), self.split(self.k_proj(x))) @ self.split(self.v_proj(x))).transpose(1, 2)
        return self.o_proj((heads * gate.sigmoid()).flatten(2))


class Rotated(RotatedValuesAttention):
    """Values turned by their places, likewise."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.rotate(self.split(one(x))) for one in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.join(self.weigh(q, k) @ v))


@tiers("kind", [Weighing], [WeighingParameters])
@cases("name", [*ATTENDING, *OTHERS])
def test_what_weighs_positions_by_a_mean_attends_and_nothing_else_does(name: str, kind: type):
    torch.manual_seed(0)
    model = nn.Sequential(kind((ATTENDING | OTHERS)[name]))
    result = hw.verify(hw.find_heads(model), (X,))
    assert result == hw.heads.Verification(("0",), unweighted=() if name in ATTENDING else ("0",))
    assert ("not seen to attend" in str(result)) is (name in OTHERS)


@cases(("kind", "name"), [(Gated, "mLSTM"), (Rotated, "retention")])
def test_gates_and_rotated_values_hide_nothing_of_heads_that_do_not_attend(kind: type, name: str):
    torch.manual_seed(0)
    assert hw.verify(hw.find_heads(kind(OTHERS[name])), (X,)).unweighted == ("",)
