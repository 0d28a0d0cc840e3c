"""What is given as heads, as a model and as layout rows: refused in a sentence where it is something else or stale."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import headwise as hw
from heads.attentions import SeparateAttention
from heads.families import FAMILIES
from heads.wrappers import Linear8bit, LoraLinear, wrap

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# every public function that takes heads
TAKES_HEADS = {
    "repel": lambda model, heads: hw.repel(heads, hw.SVGD(), sgd(model)),
    "jitter": lambda _, heads: hw.repulsion.jitter(heads, 1e-3),
    "verify": lambda _, heads: hw.verify(heads, (X,)),
    "Disagreement": lambda _, heads: hw.Disagreement(heads, hw.similarity.Output()),
    "aggregate": lambda _, heads: hw.aggregate(heads, hw.routing.SimpleRouting(capsules=4)),
    "Taps": lambda _, heads: hw.Taps(heads, outputs=True),
    "ablate": lambda _, heads: hw.ablate(heads, 0),
    "importance": lambda _, heads: hw.importance(heads, lambda: 1.0),
    "bias_heads": lambda _, heads: hw.bias_heads(heads, torch.zeros(1, 4, 1, 6)),
}


@pytest.mark.parametrize("function", TAKES_HEADS)
def test_anything_but_heads_is_refused_with_what_to_call(function):
    model = SeparateAttention()
    before = copy.deepcopy(model.state_dict())
    for given, named in (
        (model, "a SeparateAttention"),
        (hw.find_heads(model).sites, "a tuple"),
        (hw.Heads, "the class"),
    ):
        with pytest.raises(
            hw.errors.SettingError, match=rf"heads is {named}.*expected heads of a model: hw\.find_heads\(model\)"
        ):
            TAKES_HEADS[function](model, given)
    assert str(before) == str(model.state_dict())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("function", TAKES_HEADS)
def test_heads_found_before_a_projection_was_wrapped_are_refused(function):
    model = SeparateAttention().eval()
    heads = hw.find_heads(model)
    wrap(model, "q_proj", "v_proj")
    with pytest.raises(
        hw.errors.LayoutError,
        match=r"q_proj\.weight is not where the model calls it.*LoraLinear.*first, then call find_heads",
    ):
        TAKES_HEADS[function](model, heads)
    assert hw.verify(hw.find_heads(model), (X,)).sites == ("",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: wrap(m, "v_proj", wrapper=Linear8bit), r"^v_proj\.weight .* a Linear8bit has taken its place"),
        (lambda m: setattr(m, "k_proj", nn.Linear(12, 20)), r"^k_proj\.weight .* a Linear has taken its place"),
        (lambda m: delattr(m, "k_proj"), r"^k_proj\.weight is not where the model calls it anymore\. Wrap"),
        (
            lambda m: nn.utils.parametrizations.weight_norm(m.v_proj),
            r"^v_proj\.weight is no longer a parameter of ParametrizedLinear.*call find_heads again",
        ),
    ],
    ids=["quantized", "replaced", "deleted", "parametrized"],
)
def test_heads_found_before_another_change_are_refused(change, message):
    model = SeparateAttention()
    heads = hw.find_heads(model)
    change(model)
    with pytest.raises(hw.errors.LayoutError, match=message):
        hw.verify(heads, (X,))


def test_heads_found_in_a_lora_layer_are_refused_once_it_is_merged():
    model = wrap(SeparateAttention(), "q_proj")
    heads = hw.find_heads(model)
    model.q_proj = model.q_proj.base_layer
    with pytest.raises(
        hw.errors.LayoutError, match=r"^q_proj\.base_layer\.weight is not where the model calls it anymore"
    ):
        hw.Disagreement(heads, hw.similarity.Output())


def test_heads_found_in_an_attention_that_was_exchanged_are_refused():
    model = nn.Sequential(SeparateAttention(), SeparateAttention())
    heads = hw.find_heads(model)
    model[1] = SeparateAttention()
    with pytest.raises(hw.errors.LayoutError, match=r"^1 \(SeparateAttention\) is no longer part of the model"):
        hw.Disagreement(heads, hw.similarity.Output())
    assert hw.Disagreement(heads.where("0"), hw.similarity.Output())


def test_changes_that_leave_the_layers_in_their_place_are_no_reason_to_refuse():
    model = nn.Sequential(nn.Sequential(SeparateAttention()), SeparateAttention()).eval()
    heads = hw.find_heads(model)
    model[0] = nn.Sequential(model[0])  # checkpoint wrappers do this to whole layers
    wrap(model[1], "o_proj")  # read by its place, not by its weights
    model.to(torch.float64).load_state_dict(model.state_dict())
    torch.compile(model, backend="eager")
    assert len(hw.verify(heads, (X.double(),)).sites) == 2
    hw.aggregate(heads.where("0.0"), hw.routing.SimpleRouting(capsules=4))
    hw.repel(heads, hw.SVGD(), sgd(model))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in ("BERT", "GPT-2", "T5")], ids=str)
def test_a_family_wrapped_too_late_is_refused(family):
    model = family.build()
    heads = hw.find_heads(model)
    head_slice = heads.sites[-1].slices[2]
    parent, _, name = head_slice.name.removesuffix(".weight").rpartition(".")
    assert not isinstance(model.get_submodule(parent), LoraLinear)
    wrap(model.get_submodule(parent), name)
    with pytest.raises(hw.errors.LayoutError, match="a LoraLinear has taken its place"):
        hw.Taps(heads, values=True)


@pytest.mark.parametrize("given", ["bert", nn.Linear, None, 3])
def test_a_model_that_is_none_is_refused(given):
    with pytest.raises(
        hw.errors.SettingError, match=r"model is .*; expected a torch\.nn\.Module, the loaded model itself"
    ):
        hw.find_heads(given)


def test_one_layout_row_needs_no_tuple():
    model = SeparateAttention()
    assert str(hw.find_heads(model, hw.layouts.SeparateLinears("mine"))) == str(
        hw.find_heads(model, [hw.layouts.SeparateLinears("mine")])
    )
    assert hw.find_heads(model, iter(hw.layouts.LAYOUTS)).sites[0].layout == "separate"


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (
            hw.layouts.SeparateLinears,
            "layouts holds <class .*SeparateLinears.*expected layout rows, for example find_heads",
        ),
        ((hw.layouts.SeparateLinears(), hw.layouts.TorchMultihead), "layouts holds <class .*TorchMultihead"),
        ("torch", "layouts holds 'torch'"),
        (None, "layouts holds None"),
        ((), "layouts is empty; expected at least one layout row"),
    ],
)
def test_what_is_no_layout_row_is_refused(layouts, message):
    with pytest.raises(hw.errors.SettingError, match=message):
        hw.find_heads(SeparateAttention(), layouts)


def test_names_that_would_be_read_letter_by_letter_are_refused():
    with pytest.raises(hw.errors.SettingError, match=r"query is 'wq'; expected a tuple of names, such as \('wq',\)"):
        hw.layouts.SeparateLinears(query="wq")
    with pytest.raises(hw.errors.SettingError, match="output is 'o'; expected a tuple of names"):
        hw.layouts.FusedLinear("mine", ("qkv",), "o")
    with pytest.raises(hw.errors.SettingError, match="exclude holds 3; expected shell patterns"):
        hw.find_heads(SeparateAttention(), exclude=3)


def test_selectors_refuse_what_selects_nothing():
    heads = hw.find_heads(SeparateAttention())
    with pytest.raises(
        hw.errors.SettingError, match=r"pattern is 3; expected a shell pattern of site names, such as 'decoder"
    ):
        heads.where(3)
    with pytest.raises(
        hw.errors.SettingError, match=r"kind\(\) was given nothing; expected some of self, decoder, cross"
    ):
        heads.kind()


@pytest.mark.parametrize("inputs", [X, "text", 3])
def test_inputs_that_are_no_arguments_are_refused(inputs):
    with pytest.raises(
        hw.errors.SettingError, match=r"inputs is a .*; expected what the model is called with: .*\(x,\)"
    ):
        hw.verify(hw.find_heads(SeparateAttention()), inputs)
