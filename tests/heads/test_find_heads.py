"""`find_heads` reads the heads of torch's and users' attention modules, or says why it cannot."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headwise as hw
from heads.attentions import FusedAttention, GatedAttention, KeyValueAttention, SeparateAttention
from heads.families import FAMILIES
from headwise.heads.view import COLUMNS, ROWS, HeadView, check_head_views


def test_every_attention_of_a_torch_transformer_is_found_with_its_kind_and_layer():
    heads = hw.find_heads(nn.Transformer(8, 2, 2, 3, 16, batch_first=True))
    found = [(site.kind, site.stack, site.layer) for site in heads]
    assert found[:2] == [("self", "encoder.layers", 0), ("self", "encoder.layers", 1)]
    assert sorted(found[2:]) == sorted(
        (kind, "decoder.layers", layer) for kind in ("decoder", "cross") for layer in range(3)
    )
    assert all(site.num_heads == 2 and site.head_size == 4 for site in heads)


def test_packed_and_separate_weights_give_the_rows_of_each_projection():
    packed = nn.MultiheadAttention(6, 3)
    views = [head_slice.of(head_slice.parameter) for head_slice in hw.find_heads(packed).slices()]
    weight = packed.in_proj_weight
    for index, view in enumerate(views):
        for head in range(3):
            start = 6 * index + 2 * head
            assert torch.equal(view[head], weight[start : start + 2])
    separate = nn.MultiheadAttention(6, 3, kdim=5, vdim=4)
    shapes = [tuple(head_slice.of(head_slice.parameter).shape) for head_slice in hw.find_heads(separate).slices()]
    assert shapes == [(3, 2, 6), (3, 2, 5), (3, 2, 4)]


def test_grouped_queries_and_narrow_heads_are_counted_from_the_weights():
    site = hw.find_heads(SeparateAttention(key_value_heads=2)).sites[0]
    assert (site.num_heads, site.key_value_heads, site.head_size) == (4, 2, 5)
    assert [head_slice.heads for head_slice in site.slices] == [4, 2, 2]
    assert site.width == 12


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


def test_selectors_narrow_and_refuse_to_be_empty():
    heads = hw.find_heads(nn.Transformer(8, 2, 2, 2, 16, batch_first=True))
    assert [site.name for site in heads.kind("self").layer(-1)] == ["encoder.layers.1.self_attn"]
    assert len(heads.where("decoder.*")) == 4
    assert heads.kind("cross").layers(0, 1).projection("value", "query").projections == ("query", "value")
    with pytest.raises(hw.errors.LayoutError, match=r"several places.*select one first with \.kind"):
        heads.layer(0)
    with pytest.raises(hw.errors.LayoutError, match=r"no attention in layer 7.*layers \[0, 1\]"):
        heads.kind("self").layer(7)
    with pytest.raises(hw.errors.LayoutError, match="named like 'head'"):
        heads.where("head")
    with pytest.raises(hw.errors.SettingError, match="projection is 'output'"):
        heads.projection("output")


def test_heads_print_as_a_table_that_counts_them():
    text = str(hw.find_heads(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)))
    assert "decoder.layers.0.multihead_attn" in text
    assert text.splitlines()[-1] == "6 heads in 3 sites; projections: query, key, value"


def test_a_model_without_a_known_layout_is_refused_with_its_candidates_and_a_row_to_add():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nh, self.w1, self.w2, self.w3, self.w4 = 2, *(nn.Linear(4, 4) for _ in range(4))

    model = nn.Sequential(nn.Linear(4, 4))
    model.odd_attention = Odd()
    with pytest.raises(
        hw.errors.LayoutError, match=r"(?s)odd_attention: Odd with w1\.weight \[4, 4\].*find_heads\(model"
    ):
        hw.find_heads(model)
    row = hw.layouts.SeparateLinears(
        name="odd", query=("w1",), key=("w2",), value=("w3",), output=("w4",), num_heads=("nh",)
    )
    assert hw.find_heads(model, (row, *hw.layouts.LAYOUTS)).sites[0].layout == "odd"


def test_rows_that_do_not_divide_and_heads_that_do_not_group_are_refused():
    wrong = SeparateAttention()
    wrong.head_dim = 3
    with pytest.raises(hw.errors.LayoutError, match="20 rows do not divide into heads of 3 rows"):
        hw.find_heads(wrong)
    ungrouped = SeparateAttention()
    ungrouped.k_proj = nn.Linear(12, 15)
    with pytest.raises(hw.errors.LayoutError, match="4 query and 3 key heads of 5 rows and 20 value rows do not group"):
        hw.find_heads(ungrouped)
    unknown = SeparateAttention()
    del unknown.head_dim, unknown.num_heads
    with pytest.raises(hw.errors.LayoutError, match="give its number of heads, find_heads"):
        hw.find_heads(unknown)


def test_a_shared_module_is_one_site():
    attention = SeparateAttention()
    assert len(hw.find_heads(nn.ModuleList([attention, attention]))) == 1


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


class Deformable(nn.Module):
    """Projects values and is called attention, but has neither queries nor keys."""

    def __init__(self) -> None:
        super().__init__()
        self.sampling_offsets, self.value_proj = nn.Linear(8, 8), nn.Linear(8, 8)


class DeformableAttention(Deformable):
    pass


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


def test_what_is_called_attention_and_projects_values_alone_is_not_passed_over():
    with pytest.raises(hw.errors.LayoutError, match="second: DeformableAttention"):
        hw.find_heads(Holding(first=SeparateAttention(), second=DeformableAttention()))
    assert len(hw.find_heads(Holding(first=SeparateAttention(), second=Deformable()))) == 1


def test_projections_held_as_parameters_of_three_dimensions_are_not_passed_over():
    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Parameter(torch.zeros(8, 2, 4)) for _ in range(3))

    with pytest.raises(hw.errors.LayoutError, match=r"second: Relative with q \[8, 2, 4\]"):
        hw.find_heads(Holding(first=SeparateAttention(), second=Relative()))


def test_encoders_of_queries_keys_and_values_are_no_projections():
    names = ("query_encoder", "key_encoder", "value_encoder")
    model = Holding(**{name: nn.Sequential(SeparateAttention(), nn.Linear(12, 12)) for name in names})
    assert [site.name for site in hw.find_heads(model)] == [f"{name}.0" for name in names]


def test_projections_beside_those_of_the_row_are_refused_unless_the_row_names_them():
    model = SeparateAttention()
    model.query_global = nn.Linear(12, 20)
    with pytest.raises(
        hw.errors.LayoutError, match=r"holds query_global in addition to k_proj, q_proj, v_proj, which the layout 'sep"
    ):
        hw.find_heads(model)
    row = hw.layouts.SeparateLinears(beside=("query_global",))
    assert hw.find_heads(model, (row,)).sites[0].num_heads == 4
    short = SeparateAttention()
    short.conv1d = nn.Conv1d(12, 12, 3)
    with pytest.raises(hw.errors.LayoutError, match=r"holds conv1d .*exclude="):
        hw.find_heads(short)
    normed = SeparateAttention()
    normed.q_norm, normed.k_norm = nn.LayerNorm(5), nn.RMSNorm(5)
    normed.key_positions = nn.Embedding(5, 5)
    assert len(hw.find_heads(normed)) == 1


def test_a_fused_weight_is_read_only_beside_the_output_projection_its_row_names():
    model = FusedAttention()
    assert hw.find_heads(model).sites[0].layout == "fused"
    model.merge, model.proj = model.proj, None
    with pytest.raises(
        hw.errors.LayoutError, match=r"(?s)no attention heads found in FusedAttention.*\(model\): FusedAttention"
    ):
        hw.find_heads(model)
    row = hw.layouts.FusedLinear("mine", ("qkv",), ("merge",))
    assert hw.find_heads(model, (row, *hw.layouts.LAYOUTS)).sites[0].output_projection.attribute == "merge"


def test_a_fused_weight_whose_rows_do_not_add_up_is_refused_with_the_numbers():
    model = FusedAttention()
    model.qkv = nn.Linear(12, 70)
    with pytest.raises(hw.errors.LayoutError, match=r"qkv\.weight: 70 rows .* for 4 query heads of 5 rows"):
        hw.find_heads(model)
    with pytest.raises(hw.errors.SettingError, match=r"order is \('query', 'key'\); expected key, query, value"):
        hw.layouts.FusedLinear("mine", ("qkv",), ("proj",), order=("query", "key"))
    with pytest.raises(hw.errors.SettingError, match="as the query has its own projection"):
        hw.layouts.FusedLinear("mine", ("kv",), ("proj",), query=("q",))


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
    bert = next(family for family in FAMILIES if family.name == "BERT").build()
    whole = hw.find_heads(bert).sites[0]
    (part,) = hw.find_heads(bert.encoder.layer[0].attention).sites
    assert (part.name, part.output_projection.module) == ("self", whole.output_projection.module)
    (alone,) = hw.find_heads(bert.encoder.layer[0].attention.self).sites
    assert alone.output_projection is None
    with pytest.raises(hw.errors.LayoutError, match=r"the model .* no output projection was found"):
        alone.expose()


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


def test_layers_of_nothing_or_of_no_number_are_refused():
    heads = hw.find_heads(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    for asked, message in (((), "was given nothing"), (("0",), "layer is '0'"), ((True,), "layer is True")):
        with pytest.raises(hw.errors.SettingError, match=message):
            heads.layers(*asked)


@pytest.mark.parametrize(("head_first", "layout"), [(True, "interleaved"), (False, "fused"), (None, "fused")])
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
    with pytest.raises(hw.errors.LayoutError, match=r"2: RecursiveScriptModule is compiled by torch\.jit"):
        hw.find_heads(model)
    assert len(hw.find_heads(model, exclude="2")) == 1
    with pytest.raises(
        hw.errors.LayoutError, match=r"^MultiheadAttention is compiled by torch\.jit.*torch\.jit\.script"
    ):
        hw.find_heads(model[2])


def test_lazy_modules_are_passed_by_unless_an_attention_holds_them():
    assert len(hw.find_heads(nn.Sequential(SeparateAttention(), nn.LazyLinear(3)))) == 1
    for name in ("q_proj", "o_proj"):
        model = nn.Sequential(SeparateAttention())
        setattr(model[0], name, nn.LazyLinear(getattr(model[0], name).out_features))
        with pytest.raises(
            hw.errors.LayoutError, match=rf"^0 \(SeparateAttention\): its {name}\.weight has no shape.*once"
        ):
            hw.find_heads(model)
        model(torch.randn(2, 6, 12))
        assert len(hw.find_heads(model)) == 1
    own = Holding()
    for name in ("w_q", "w_k", "w_v"):
        own.register_parameter(name, nn.UninitializedParameter())
    with pytest.raises(
        hw.errors.LayoutError, match=r"^the model \(Holding\): its w_q has no shape before the first forward"
    ):
        hw.find_heads(own)
    with pytest.raises(hw.errors.LayoutError, match=r"x_proj: LazyLinear with weight of no shape yet"):
        hw.find_heads(Holding(x_proj=nn.LazyLinear(3)))
    model = SeparateAttention()
    model.q_extra = nn.LazyLinear(3)
    with pytest.raises(hw.errors.LayoutError, match=r"holds q_extra in addition to"):
        hw.find_heads(model)
