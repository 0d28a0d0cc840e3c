"""`find_heads` reads the heads of torch's and users' attention modules, or says why it cannot."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.attentions import FusedAttention, GatedAttention, KeyValueAttention, SeparateAttention
from heads.families import BY_NAME
from headwise.heads.view import COLUMNS, ROWS, HeadView, check_head_views


@settings(max_examples=30)
@given(
    heads=st.integers(1, 4),
    size=st.integers(1, 3),
    gap=st.integers(0, 2),
    start=st.integers(0, 2),
    axis=st.sampled_from([0, 1]),
    transposed=st.booleans(),
)
def test_a_view_reads_and_writes_exactly_its_rows(heads, size, gap, start, axis, transposed):
    owner = nn.Module()
    rows = start + heads * (size + gap)
    shape = (rows, 3) if axis == 0 else (3, rows)
    owner.weight = nn.Parameter(torch.arange(float(rows * 3)).reshape(shape))
    axes, stride = COLUMNS if axis else ROWS, size + gap
    head_slice = HeadView("query", "weight", owner, "weight", heads, size, start=start, stride=stride, axes=axes)
    check_head_views([head_slice])
    tensor = torch.arange(float(rows * 3)).reshape(shape)
    if transposed:
        tensor = tensor.t().contiguous().t()
    before = tensor.clone()
    view = head_slice.of(tensor)
    assert view.data_ptr() >= tensor.data_ptr()
    for head in range(heads):
        own = slice(start + head * (size + gap), start + head * (size + gap) + size)
        assert torch.equal(view[head], before[own] if axis == 0 else before[:, own])
    view[-1] = -1.0
    own = slice(start + (heads - 1) * (size + gap), start + (heads - 1) * (size + gap) + size)
    expected = before.clone()
    expected[own if axis == 0 else (slice(None), own)] = -1.0
    assert torch.equal(tensor, expected)


class Holding(nn.Module):
    """A model that holds attention modules under given names."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class LowRank(nn.Module):
    """Latent attention of other names: keys and values come from a narrow state, and no row describes it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 4
        self.q_proj, self.kv_down, self.kv_up = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(3, 16)
        self.o_proj = nn.Linear(8, 8)


def test_a_model_is_never_half_found():
    model = Holding(plain=SeparateAttention(), latent=LowRank())
    with pytest.raises(hw.errors.LayoutError) as refusal:
        hw.find_heads(model)
    text = str(refusal.value)
    assert "1 modules of Holding look like attention and fit no layout" in text
    assert "latent: LowRank with q_proj.weight [8, 8]" in text
    assert "in addition to 1 that are" in text
    assert "exclude=('latent',)" in text
    assert [site.name for site in hw.find_heads(model, exclude=("latent",))] == ["plain"]
    assert [site.name for site in hw.find_heads(model, exclude="lat*")] == ["plain"]
    with pytest.raises(
        hw.errors.LayoutError, match=r"exclude has '\*\.latent', which matches no module name of Holding"
    ):
        hw.find_heads(model, exclude=("*.latent",))


def test_encoders_of_queries_keys_and_values_are_no_projections():
    names = ("query_encoder", "key_encoder", "value_encoder")
    model = Holding(**{name: nn.Sequential(SeparateAttention(), nn.Linear(12, 12)) for name in names})
    assert [site.name for site in hw.find_heads(model)] == [f"{name}.0" for name in names]


def test_projections_beside_those_of_the_row_are_named_in_it_or_norms():
    model = SeparateAttention()
    model.query_global = nn.Linear(12, 20)
    row = hw.layouts.SeparateLinears(beside=("query_global",))
    assert hw.find_heads(model, (row,)).sites[0].num_heads == 4
    normed = SeparateAttention()
    normed.q_norm, normed.k_norm = nn.LayerNorm(5), nn.RMSNorm(5)
    normed.key_positions = nn.Embedding(5, 5)
    assert len(hw.find_heads(normed)) == 1


def test_a_fused_weight_is_read_beside_the_output_projection_its_row_names():
    model = FusedAttention()
    assert hw.find_heads(model).sites[0].layout == "fused"
    model.merge, model.proj = model.proj, None
    row = hw.layouts.FusedLinear("mine", ("qkv",), ("merge",))
    assert hw.find_heads(model, (row, *hw.layouts.LAYOUTS)).sites[0].output_projection.attribute == "merge"


def test_flags_of_a_module_choose_between_rows_of_one_attribute():
    flagged = hw.layouts.FusedLinear("alternating", ("qkv",), ("proj",), interleaved=True, when=(("new", (True,)),))
    model = FusedAttention()
    assert hw.find_heads(model, (flagged, *hw.layouts.LAYOUTS)).sites[0].layout == "fused"
    model = FusedAttention(interleaved=True)
    model.new = True
    assert hw.find_heads(model, (flagged, *hw.layouts.LAYOUTS)).sites[0].layout == "alternating"


def test_w_o_is_found_by_the_order_of_its_names_and_not_by_what_else_has_its_width():
    model = SeparateAttention()
    model.dense = nn.Linear(20, 20)
    assert hw.find_heads(model).sites[0].output_projection.attribute == "o_proj"
    model.o_proj = nn.Bilinear(2, 2, 2)  # some module of another kind, in the same place
    (site,) = hw.find_heads(model).sites
    assert (site.output_projection.attribute, site.output) == ("o_proj", None)
    model.o_proj = nn.Linear(19, 12)  # cannot take 4 heads of 5
    assert hw.find_heads(model).sites[0].output_projection.attribute == "dense"


def test_w_o_beside_the_attention_is_found_also_where_their_parent_is_the_model():
    bert = BY_NAME["BERT"].build()
    whole = hw.find_heads(bert).sites[0]
    (part,) = hw.find_heads(bert.encoder.layer[0].attention).sites
    assert (part.name, part.output_projection.module) == ("self", whole.output_projection.module)
    (alone,) = hw.find_heads(bert.encoder.layer[0].attention.self).sites
    assert alone.output_projection is None


def test_layers_are_numbered_in_the_list_of_equal_modules():
    class Block(nn.Sequential):
        pass

    model = nn.Sequential(*(Block(nn.LayerNorm(12), SeparateAttention(), nn.Linear(12, 12)) for _ in range(3)))
    assert [(site.name, site.stack, site.layer) for site in hw.find_heads(model)] == [
        ("0.1", "", 0),
        ("1.1", "", 1),
        ("2.1", "", 2),
    ]
    single = nn.Sequential(nn.LayerNorm(12), SeparateAttention())
    assert [(site.stack, site.layer) for site in hw.find_heads(single)] == [("", 1)]


def test_self_attention_beside_cross_attention_is_a_decoders():
    layers = nn.ModuleList(Holding(attn=GatedAttention(), cross_attn=KeyValueAttention()) for _ in range(2))
    model = Holding(decoder=layers, encoder=nn.ModuleList([Holding(attn=SeparateAttention())]))
    assert [site.kind for site in hw.find_heads(model)] == ["decoder", "cross", "decoder", "cross", "self"]
    told = SeparateAttention()
    told.is_cross_attention = True
    assert hw.find_heads(told).sites[0].kind == "cross"


@cases(("head_first", "layout"), [(True, "interleaved"), (False, "fused"), (None, "fused")])
def test_one_name_of_a_projection_in_two_orders_is_told_by_the_flag_of_its_module(head_first, layout):
    attention = FusedAttention(interleaved=layout == "interleaved")
    if head_first is not None:
        attention.head_first = head_first
    heads = hw.find_heads(attention)
    assert [site.layout for site in heads] == [layout]
    assert hw.verify(heads, (torch.randn(2, 6, 12),)).sites == ("",)


def _compile(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        # torch.jit itself is deprecated
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def test_modules_compiled_by_torch_jit_are_passed_by_unless_they_are_attention():
    compiled = _compile(nn.Sequential(nn.Linear(12, 12), nn.ReLU()))
    model = nn.Sequential(SeparateAttention(), compiled)
    heads = hw.find_heads(model)
    assert [site.name for site in heads] == ["0"]
    assert hw.verify(heads, (torch.randn(2, 6, 12),)).sites == ("0",)
    model.append(_compile(nn.MultiheadAttention(12, 3)))
    assert len(hw.find_heads(model, exclude="2")) == 1


def test_lazy_modules_are_passed_by_and_an_attention_that_holds_them_is_found_after_a_forward():
    assert len(hw.find_heads(nn.Sequential(SeparateAttention(), nn.LazyLinear(3)))) == 1
    for name in ("q_proj", "o_proj"):
        model = nn.Sequential(SeparateAttention())
        setattr(model[0], name, nn.LazyLinear(getattr(model[0], name).out_features))
        model(torch.randn(2, 6, 12))
        assert len(hw.find_heads(model)) == 1


def test_what_is_no_attention_is_passed_by_and_a_shared_module_is_one_site():
    attention = SeparateAttention()
    held = Holding(first=attention, second=attention, third=Holding(value_proj=nn.Linear(8, 8)))
    assert [site.name for site in hw.find_heads(held)] == ["first"]


def test_one_layout_row_needs_no_tuple():
    model, row = SeparateAttention(), hw.layouts.SeparateLinears("mine")
    assert str(hw.find_heads(model, row)) == str(hw.find_heads(model, [row]))
    assert hw.find_heads(model, iter(hw.layouts.LAYOUTS)).sites[0].layout == "separate"


X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))


class TwoAttentions(SeparateAttention):
    """Attends, and has another attention attend to what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        x = self.o_proj(self.join(F.scaled_dot_product_attention(q, k, v)))
        return self.inner(x, x, x)[0]


def test_the_projector_of_aria_is_its_inner_attention():
    from transformers.models.aria.modeling_aria import AriaConfig, AriaProjector

    vision = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 16}
    words = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    config = AriaConfig(vision_config={**vision, "model_type": "idefics3_vision"}, text_config=words)
    config.projector_patch_to_query_dict = {6: 4}
    projector = AriaProjector(config)
    heads = hw.find_heads(projector)
    assert [(site.name, site.layout) for site in heads] == [("cross_attn.multihead_attn", "torch packed")]
    assert hw.verify(heads, (X,)).sites == ("cross_attn.multihead_attn",)


def test_an_attention_inside_one_that_attends_itself_is_refused_and_not_half_read():
    with pytest.raises(
        hw.errors.LayoutError, match=r"the model \(TwoAttentions\) holds .* and inner \(MultiheadAttention\)"
    ):
        hw.find_heads(TwoAttentions())
    (site,) = hw.find_heads(TwoAttentions(), exclude="inner").sites
    assert (site.name, site.num_heads) == ("", 4)
