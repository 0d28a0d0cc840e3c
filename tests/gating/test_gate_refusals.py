"""What `gate_heads` refuses, in a sentence and before anything is attached."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import HieraConfig, HieraModel, ProphetNetConfig, ProphetNetModel

import headwise as hw
from heads.attentions import SeparateAttention
from heads.families import FAMILIES
from headwise.gating.attach import NAME

WIDTH, HEADS = 12, 4


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def gated(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith(NAME)]


def refused(model: nn.Module, error: type[Exception], message: str, setting: Any = None, heads: Any = None) -> None:
    heads = hw.find_heads(model) if heads is None else heads
    before = gated(model)
    with pytest.raises(error, match=message):
        hw.gate_heads(heads, hw.gating.SigmoidGate() if setting is None else setting)
    assert gated(model) == before


def test_other_arguments_are_refused():
    model = encoder()
    refused(model, hw.errors.SettingError, "heads is a TransformerEncoder; expected heads of a model", heads=model)
    refused(
        model,
        hw.errors.SettingError,
        r"the setting is the class SigmoidGate; expected hw\.gating\.SigmoidGate",
        hw.gating.SigmoidGate,
    )
    refused(model, hw.errors.SettingError, r"the setting is a Gate; expected", hw.routing.Gate())
    refused(model, hw.errors.SettingError, "uses 5 heads of an attention that has 4", hw.gating.MixtureOfHeads(2, 3))
    refused(model, hw.errors.LayoutError, "gate_heads was given no attention", heads=hw.Heads(model, ()))


def test_second_gates_are_refused_and_the_first_ones_stay():
    model = encoder()
    hw.gate_heads(hw.find_heads(model).layer(1), hw.gating.SigmoidGate())
    refused(model, hw.errors.LayoutError, r"layers\.1\.self_attn already has head_gates; call remove\(\)")
    assert gated(model) == ["layers.1.self_attn.head_gates"]


class Shared(nn.Module):
    """Two attentions with one output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SeparateAttention(WIDTH, HEADS) for _ in range(2))
        self.layers[1].o_proj = self.layers[0].o_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


def test_a_shared_output_projection_is_refused_also_where_one_of_its_attentions_is_selected():
    model = Shared()
    message = "calls the same output projection as another attention"
    refused(model, hw.errors.LayoutError, message)
    refused(model, hw.errors.LayoutError, message, heads=hw.find_heads(model).layer(0))


class OwnParameters(nn.Module):
    """W_O is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(HEADS, WIDTH, 3)) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(HEADS, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bld,hde->bhle", x, weight) for weight in (self.wq, self.wk, self.wv))
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.einsum("bhle,hed->bld", heads, self.wo)


def test_attentions_without_a_module_that_takes_their_heads_are_refused():
    model = OwnParameters()
    row = hw.layouts.SeparateParameters(query=("wq",), key=("wk",), value=("wv",), output=("wo",), axes="h d e")
    heads = hw.find_heads(model, (row, *hw.layouts.LAYOUTS))
    refused(model, hw.errors.LayoutError, "W_O is the parameter wo, which its forward uses itself", heads=heads)
    wavlm = next(family for family in FAMILIES if family.name == "WavLM").build()
    refused(wavlm, hw.errors.LayoutError, "hands the weight of its output projection to a function")


def test_pooling_with_learned_queries_is_refused():
    pooling = hw.nn.AdditiveAttention(WIDTH, 8, HEADS)
    refused(pooling, hw.errors.LayoutError, "pools a sequence with one learned query for each head")


def test_a_model_that_an_engine_has_wrapped_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = encoder()
    heads = hw.find_heads(model)
    wrapped = hw.Heads(model, heads.sites, replicated=True)
    refused(
        model, hw.errors.LayoutError, "wrapped by DistributedDataParallel.*would train gates of its own", heads=wrapped
    )
    monkeypatch.setattr(model.layers[0].self_attn.out_proj, "_is_fsdp_managed_module", True, raising=False)
    refused(model, hw.errors.LayoutError, r"wrapped by FSDP.*call hw\.gate_heads first and wrap the model afterwards")


@pytest.mark.parametrize("what", ["headwise.gating.attach.is_sharded", "headwise.heads.heads.computes_part"])
def test_weights_divided_over_processes_are_refused(what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(what, lambda *_weight: True)
    refused(encoder(), hw.errors.LayoutError, "its heads or its output projection are divided over processes")


def test_a_call_whose_queries_have_other_tokens_is_refused():
    class Pooled(SeparateAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
            return self.o_proj(self.join(nn.functional.scaled_dot_product_attention(q, k, v)).mean(1))

    model = Pooled(WIDTH, HEADS)
    hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    with pytest.raises(
        hw.errors.ShapeError, match=r"made from a tensor of shape \(2, 5, 12\) and its output projection gets"
    ):
        model(torch.randn(2, 5, WIDTH))


def test_a_call_that_bypasses_the_attention_or_its_queries_is_told_so():
    model = SeparateAttention(WIDTH, HEADS)
    hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    with pytest.raises(hw.errors.NotFired, match="computed no queries before its output projection was called"):
        model.o_proj(torch.randn(2, 3, 20))
    model.o_proj = nn.Linear(20, WIDTH)
    with pytest.raises(hw.errors.NotFired, match=r"its output projection is now a Linear, set after hw\.gate_heads"):
        model(torch.randn(2, 3, WIDTH))


def test_pruned_heads_are_told_of():
    model = SeparateAttention(WIDTH, HEADS)
    hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    model.join = lambda heads: heads[:, :3].transpose(1, 2).flatten(2)
    with pytest.raises(hw.errors.ShapeError, match=r"expected 4 heads of 5 numbers on the last axis"):
        model(torch.randn(2, 3, WIDTH))


def test_replicas_of_data_parallel_are_refused():
    model = encoder(1)
    hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    model.layers[0].self_attn._is_replica = True
    with pytest.raises(hw.errors.NotFired, match=r"is called as a replica that nn\.DataParallel made"):
        model(torch.randn(1, 3, WIDTH))


def test_gates_frozen_before_their_first_step_are_told_of():
    model = encoder(1)
    hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    gates = model.layers[0].self_attn.head_gates.requires_grad_(False)
    x = torch.randn(1, 3, WIDTH, requires_grad=True)
    message = r"layers\.0\.self_attn\.head_gates: its new gate is frozen, .*LoraConfig\(modules_to_save="
    with pytest.raises(hw.errors.SettingError, match=message):
        model(x)
    gates.load_state_dict(gates.state_dict())
    model(x)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return transformers.LlamaModel(transformers.LlamaConfig(vocab_size=20, intermediate_size=16, **sizes))


def states(model: nn.Module) -> Tensor:
    return model(input_ids=torch.arange(8).view(2, 4)).last_hidden_state


def under_peft(model: nn.Module, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj", "v_proj"], **settings}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))


def test_a_model_under_peft_is_refused():
    model = under_peft(llama())
    message = r"holds adapters of peft.*LoraConfig\(modules_to_save=\['head_gates'\]\)"
    refused(model, hw.errors.LayoutError, message)


def test_gates_made_before_peft_are_trained_saved_and_loaded_as_it_is_told(tmp_path: Any):
    peft = pytest.importorskip("peft")
    base = llama()
    hw.gate_heads(hw.find_heads(base), hw.gating.SigmoidGate())
    model = under_peft(base, modules_to_save=[NAME])
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=5.0)
    plain = states(model).detach()
    for _ in range(2):
        optimizer.zero_grad()
        states(model)[..., 0].sum().backward()
        optimizer.step()
    gates = base.layers[0].self_attn.head_gates.modules_to_save["default"]
    assert gates.weight.abs().max() > 0.0
    trained = states(model.eval())
    assert not torch.allclose(trained, plain, atol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(states(model), plain)
    model.save_pretrained(tmp_path)
    again = llama()
    hw.gate_heads(hw.find_heads(again), hw.gating.SigmoidGate())
    torch.testing.assert_close(states(peft.PeftModel.from_pretrained(again, str(tmp_path)).eval()), trained)


def test_peft_that_would_freeze_or_bypass_gates_is_told_of():
    base = llama()
    hw.gate_heads(hw.find_heads(base), hw.gating.SigmoidGate())
    model = under_peft(base)
    with pytest.raises(hw.errors.SettingError, match="its new gate is frozen"):
        states(model)
    base = llama()
    hw.gate_heads(hw.find_heads(base), hw.gating.SigmoidGate())
    model = under_peft(base, target_modules=["o_proj"], modules_to_save=[NAME])
    with pytest.raises(hw.errors.NotFired, match="its output projection is now a Linear, set after"):
        states(model)


def build_prophet() -> nn.Module:
    counts = {f"num_{stack}_{what}": 2 for stack in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes = {
        "hidden_size": 16,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
        "vocab_size": 9,
        "max_position_embeddings": 8,
    }
    return ProphetNetModel(ProphetNetConfig(**sizes, **counts))


def build_hiera() -> nn.Module:
    return HieraModel(HieraConfig(embed_dim=16, image_size=[64, 64], depths=[1, 1], num_heads=[2, 4], num_query_pool=1))


def test_attentions_whose_output_projection_gets_other_tokens_are_refused_when_gates_are_put_on():
    canine = next(family for family in FAMILIES if family.name == "CANINE").build()
    tokens = ".*other tokens than its queries are made from.*leave it out"
    refused(
        build_prophet(),
        hw.errors.LayoutError,
        rf"decoder\.layers\.0\.self_attn .*several streams .*\(ngram=2\){tokens}",
    )
    refused(build_hiera(), hw.errors.LayoutError, rf"stages\.1\..*pools its queries \(query_stride=4\){tokens}")
    refused(
        canine, hw.errors.LayoutError, rf"initial_char_encoder\..*one chunk .* after another \(local=True\){tokens}"
    )


@pytest.mark.parametrize(
    "attach",
    [
        lambda heads: hw.gate_heads(heads, hw.gating.SigmoidGate()),
        lambda heads: hw.aggregate(heads, hw.routing.EMRouting()),
    ],
)
def test_a_copy_that_kept_what_was_attached_is_told_so_and_the_remedy_works(attach):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    handle = attach(hw.find_heads(model))
    with pytest.raises(hw.errors.LayoutError, match=r"A copy keeps .*: remove\(\) them before it is copied"):
        attach(hw.find_heads(copy.deepcopy(model)))
    handle.remove()
    attach(hw.find_heads(copy.deepcopy(model)))
