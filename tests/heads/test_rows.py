"""Rows name dotted paths of modules, parameters and attributes, and say how query heads share keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases, thin, tiers
from heads.attentions import FusedAttention, KeyValueAttention, SeparateAttention
from heads.calling import EinsumAttention
from heads.own import LensAttention, ListAttention
from heads.written import WRITTEN, Tiled, find
from headwise.repulsion.groups import find_groups
from headwise.shrinking.prune import choose_heads

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))


def boxed(module: nn.Module, *names: str) -> nn.Module:
    """The module with some of its parts in a dictionary in a list, and how many heads it has in a mapping."""
    held = {name: module._modules.pop(name) for name in names if name in module._modules}
    own = {name: module._parameters.pop(name) for name in names if name in module._parameters}
    module.box = nn.ModuleList([nn.ModuleDict(held), nn.ParameterDict(own)])
    module.sizes = [{"heads": 4}]
    places = {name: property(lambda self, name=name: self.box[0 if name in held else 1][name]) for name in names}
    module.__class__ = type(f"Boxed{type(module).__name__}", (type(module),), places)
    return module


COUNT: dict[str, Any] = {"num_heads": ("sizes.0.heads",), "head_size": ("sizes.0.size",)}
BOXED = [
    (
        boxed(SeparateAttention(), "q_proj", "k_proj", "v_proj", "o_proj"),
        hw.layouts.SeparateLinears(
            "mine", ("box.0.q_proj",), ("box.0.k_proj",), ("box.0.v_proj",), ("box.0.o_proj",), **COUNT
        ),
    ),
    (boxed(FusedAttention(), "qkv", "proj"), hw.layouts.FusedLinear("mine", ("box.0.qkv",), ("box.0.proj",), **COUNT)),
    (
        boxed(KeyValueAttention(), "to_q", "to_kv", "to_out"),
        hw.layouts.FusedLinear(
            "mine", ("box.0.to_kv",), ("box.0.to_out.0",), ("key", "value"), query=("box.0.to_q",), **COUNT
        ),
    ),
    (
        boxed(LensAttention(12, 4, 5), "W_Q", "W_K", "W_V", "W_O"),
        hw.layouts.SeparateParameters(
            "mine", ("box.1.W_Q",), ("box.1.W_K",), ("box.1.W_V",), ("box.1.W_O",), "h d e", **COUNT
        ),
    ),
    (
        boxed(EinsumAttention(12, 4, 5), "w_qkv", "w_o"),
        hw.layouts.FusedParameter("mine", ("box.1.w_qkv",), ("box.1.w_o",), "p d h e", **COUNT),
    ),
    (
        boxed(ListAttention(12, 4, 5), "heads", "proj"),
        hw.layouts.HeadList("mine", ("box.0.heads",), output=("box.0.proj",)),
    ),
]


@tiers(("module", "row"), *thin(BOXED, 4))
def test_every_row_names_dotted_paths(module: nn.Module, row: hw.layouts.Layout):
    heads = hw.find_heads(module, row)
    (site,) = heads
    assert (site.num_heads, site.layout) == (4, "mine")
    inputs = (X, X) if isinstance(module, KeyValueAttention) else (X,)
    assert hw.verify(heads, inputs).sites == ("",)


def test_latent_attention_is_found_by_dotted_paths_too():
    module = nn.Module()
    module.config = {"heads": 4, "value": 3}
    module.box = nn.ModuleDict({"q": nn.Linear(12, 20), "kv": nn.Linear(6, 28), "down": nn.Linear(12, 6)})
    module.out = nn.Sequential(nn.Linear(12, 12))
    row = hw.layouts.LatentLinears(
        "mine", ("box.q",), ("box.kv",), ("out.0",), num_heads=("config.heads",), value_size=("config.value",)
    )
    (site,) = hw.find_heads(module, row)
    assert [head_slice.head_size for head_slice in site.slices] == [5, 4, 3]


def test_conditions_and_projections_that_no_heads_have_are_dotted_paths():
    module, row = BOXED[0]
    assert isinstance(row, hw.layouts.SeparateLinears)
    module.box[0].q_more = nn.Linear(12, 20)
    with pytest.raises(hw.errors.LayoutError, match=r"holds box\.0\.q_more in addition to box\.0\.k_proj"):
        hw.find_heads(module, row)
    settings: dict[str, Any] = {name: getattr(row, name) for name in row.__dataclass_fields__}
    assert hw.find_heads(module, hw.layouts.SeparateLinears(**{**settings, "beside": ("box.0.q_more",)}))
    del module.box[0]["q_more"]
    assert hw.find_heads(module, hw.layouts.SeparateLinears(**{**settings, "when": (("sizes.0.heads", (4, None)),)}))
    with pytest.raises(hw.errors.LayoutError, match="no attention heads found"):
        hw.find_heads(module, hw.layouts.SeparateLinears(**{**settings, "when": (("sizes.0.heads", (5,)),)}))


TILED = next(form for form in WRITTEN if form.make is Tiled)


def test_a_row_that_groups_the_other_way_is_refused_at_once_and_by_verify(monkeypatch: pytest.MonkeyPatch):
    x = TILED.inputs()
    for module, tiled in ((TILED.build(), False), (SeparateAttention(24, 4, 2, 6).double(), True)):
        row = hw.layouts.SeparateLinears("mine", tiled=tiled)
        with pytest.raises(
            hw.errors.LayoutError, match=rf"changing key head 1 changed query heads .* \(tiled={not tiled}\)"
        ):
            hw.find_heads(module, row)
        with monkeypatch.context() as patched:
            patched.setattr("headwise.heads.find.require_arranged", lambda *_: None)
            heads = hw.find_heads(module, row)
        with pytest.raises(hw.errors.LayoutError, match="key features of head 0 changed the heads"):
            hw.verify(heads, x)
        assert hw.verify(hw.find_heads(module, hw.layouts.SeparateLinears("mine", tiled=not tiled)), x).sites == ("",)


def test_every_row_of_grouped_queries_may_be_tiled():
    class Blocks(FusedAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (-1, 5)).transpose(1, 2) for part in self.qkv(x).split((20, 10, 10), -1))
            heads = (q @ k.repeat(1, 2, 1, 1).mT).softmax(-1) @ v.repeat(1, 2, 1, 1)
            return self.proj(heads.transpose(1, 2).flatten(2))

    class Own(LensAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (torch.einsum("bld,hde->bhle", x, weight) for weight in (self.W_Q, self.W_K, self.W_V))
            heads = (q @ k.repeat(1, 2, 1, 1).mT).softmax(-1) @ v.repeat(1, 2, 1, 1)
            return torch.einsum("bhqe,hed->bqd", heads, self.W_O)

    own = Own(12, 4, 5)
    own.W_K, own.W_V = (nn.Parameter(torch.randn(2, 12, 5)) for _ in range(2))
    blocks = hw.layouts.FusedLinear("mine", ("qkv",), ("proj",), tiled=True)
    for module, row in (
        (Blocks(key_value_heads=2), blocks),
        (own, hw.layouts.SeparateParameters("mine", axes="h d e", tiled=True)),
    ):
        heads = hw.find_heads(module, row)
        assert [list(site.list_members(1)) for site in heads] == [[1, 3]]
        assert hw.verify(heads, (X,)).sites == ("",)


def test_groups_of_queries_follow_the_tiling():
    model, (x,) = TILED.build(), TILED.inputs()
    heads = find(TILED, model)
    own = model.q_proj.weight.detach().view(4, 6, 24)
    groups = find_groups(heads.projection("query").grouped("within"), joint=False)
    assert [group.name for group in groups] == ["query 0:4:2", "query 1:4:2"]
    for index, group in enumerate(groups):
        assert torch.equal(group.slices[0].read(), own[index::2])
    with pytest.raises(hw.errors.LayoutError, match="other query heads lie between those of a group"):
        find_groups(heads.grouped("across"), joint=False)
    term = hw.similarity.GroupedQueries(hw.similarity.CKA(debiased=False))
    with hw.Taps(heads, outputs=True) as taps:
        model(x)
        outputs = taps.read()[0].outputs
    assert outputs is not None
    apart = [
        hw.similarity.CKA(debiased=False).sum_and_count_at(heads.sites[0], outputs[:, :, index::2], None)[0]
        for index in range(2)
    ]
    assert torch.allclose(term.sum_and_count_at(heads.sites[0], outputs, None)[0], torch.stack(apart).mean())


def test_the_least_important_groups_are_chosen_by_the_tiling():
    chosen = choose_heads(find(TILED, TILED.build()), 0.5, {"(model)": [5.0, 1.0, 5.0, 2.0]})
    assert chosen == {"": [1, 3]}


@cases("gone", [[0, 2], [1, 3], [0, 1], [2, 3]])
def test_tiled_heads_are_removed_by_group_or_from_the_front_or_the_end(gone: list[int]):
    model, (x,) = TILED.build(), TILED.inputs()
    heads = find(TILED, model)
    with hw.ablate(heads, gone):
        expected = model(x)
    hw.prune(heads, {0: gone}, inputs=(x,))
    assert torch.allclose(model(x), expected)


def test_heads_that_would_group_otherwise_are_neither_removed_nor_merged():
    heads = find(TILED, TILED.build())
    with pytest.raises(hw.errors.LayoutError, match=r"in another order; .*\(group g has heads g, g \+ 2 and so on\)"):
        hw.prune(heads, {0: [0, 3]}, inputs=TILED.inputs())
    with pytest.raises(hw.errors.LayoutError, match=r"head h mod G.*; leave its heads as they are"):
        hw.merge(heads, 1, batches=[TILED.inputs()])
