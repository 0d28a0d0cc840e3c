"""What `gate_heads` and gated calls refuse, in a sentence; nothing is attached by a refused `gate_heads`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import HieraConfig, HieraModel, LlamaConfig, LlamaModel, ProphetNetConfig, ProphetNetModel

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from heads.families import BY_NAME
from headwise.errors import LayoutError, NotFired, SettingError, ShapeError
from headwise.gating.attach import NAME

peft = pytest.importorskip("peft")

WIDTH, HEADS = 12, 4
SIGMOID = hw.gating.SigmoidGate()


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def half_gated() -> nn.Module:
    model = encoder()
    hw.gate_heads(hw.find_heads(model).layer(1), SIGMOID)
    return model


def shared() -> nn.Module:
    """Two attentions with one output projection."""
    model = nn.Sequential(SeparateAttention(WIDTH, HEADS), SeparateAttention(WIDTH, HEADS))
    model[1].o_proj = model[0].o_proj
    return model


def managed() -> nn.Module:
    model: Any = encoder()
    model.layers[0].self_attn.out_proj._is_fsdp_managed_module = True
    return model


class OwnParameters(nn.Module):
    """W_O is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(HEADS, WIDTH, 3)) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(HEADS, 3, WIDTH))


ROW = hw.layouts.SeparateParameters(query=("wq",), key=("wk",), value=("wv",), output=("wo",), axes="h d e")


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return LlamaModel(LlamaConfig(vocab_size=20, intermediate_size=16, **sizes))


def states(model: nn.Module) -> Tensor:
    return model(input_ids=torch.arange(8).view(2, 4)).last_hidden_state


def under_peft(model: nn.Module, **settings: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **{"target_modules": ["q_proj", "v_proj"], **settings}))


def prophet() -> nn.Module:
    counts = {f"num_{stack}_{what}": 2 for stack in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes = {"hidden_size": 16, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 8}
    return ProphetNetModel(ProphetNetConfig(vocab_size=9, **sizes, **counts))


def hiera() -> nn.Module:
    return HieraModel(HieraConfig(embed_dim=16, image_size=[64, 64], depths=[1, 1], num_heads=[2, 4], num_query_pool=1))


@dataclass(frozen=True)
class Refused:
    """A model, what of it is given with a setting, and the refusal."""

    build: Callable[[], Any]
    message: str
    error: type[Exception] = LayoutError
    select: Callable[[Any], Any] = hw.find_heads
    setting: Any = SIGMOID


def first_layer(model: nn.Module) -> hw.Heads:
    return hw.find_heads(model).layer(0)


TOKENS = ".*other tokens than its queries are made from.*leave it out"
ONE_PROJECTION = "calls the same output projection as another attention"
REFUSED = {
    "a model": Refused(encoder, "heads is a TransformerEncoder; expected heads of a", SettingError, lambda m: m),
    "no attention": Refused(encoder, "gate_heads was given no attention", select=lambda m: hw.Heads(m, ())),
    "a class": Refused(encoder, "is the class SigmoidGate; expected", SettingError, setting=hw.gating.SigmoidGate),
    "another gate": Refused(encoder, "is a Gate; expected hw", SettingError, setting=hw.routing.Gate()),
    "too many": Refused(encoder, "uses 5 heads of .* has 4", SettingError, setting=hw.gating.MixtureOfHeads(2, 3)),
    "second gates": Refused(half_gated, r"layers\.1\.self_attn already has head_gates; call remove\(\)"),
    "one projection of two": Refused(shared, ONE_PROJECTION),
    "one of two": Refused(shared, ONE_PROJECTION, select=first_layer),
    "a parameter": Refused(
        OwnParameters,
        "W_O is the parameter wo, which its forward uses itself",
        select=lambda m: hw.find_heads(m, (ROW, *hw.layouts.LAYOUTS)),
    ),
    "a weight handed over": Refused(BY_NAME["WavLM"].build, "hands the weight of its output projection to a function"),
    "pooling": Refused(
        lambda: hw.nn.AdditiveAttention(WIDTH, 8, HEADS), "pools a sequence with one learned query for each head"
    ),
    "DistributedDataParallel": Refused(
        encoder,
        "wrapped by DistributedDataParallel.*would train gates of its own",
        select=lambda m: hw.Heads(m, hw.find_heads(m).sites, replicated=True),
    ),
    "FSDP": Refused(managed, r"wrapped by FSDP.*call hw\.gate_heads first and wrap the model afterwards"),
    "peft": Refused(lambda: under_peft(llama()), r"holds adapters of peft.*modules_to_save=\['head_gates'\]\)"),
    "streams": Refused(prophet, rf"decoder\.layers\.0\.self_attn .*several streams .*\(ngram=2\){TOKENS}"),
    "pooled queries": Refused(hiera, rf"stages\.1\..*pools its queries \(query_stride=4\){TOKENS}"),
    "chunks": Refused(BY_NAME["CANINE"].build, rf"initial_char_encoder\..*one chunk .* \(local=True\){TOKENS}"),
}


@cases("name", REFUSED)
def test_what_cannot_be_gated_is_refused_before_anything_is_attached(name: str):
    case = REFUSED[name]
    model = case.build()
    given = case.select(model)
    before = [name for name, _ in model.named_modules() if name.endswith(NAME)]
    with pytest.raises(case.error, match=case.message):
        hw.gate_heads(given, case.setting)
    assert [name for name, _ in model.named_modules() if name.endswith(NAME)] == before


@cases("what", ["headwise.gating.attach.is_sharded", "headwise.heads.heads.computes_part"])
def test_weights_divided_over_processes_are_refused(what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(what, lambda *_weight: True)
    with pytest.raises(LayoutError, match="its heads or its output projection are divided over processes"):
        hw.gate_heads(hw.find_heads(encoder()), SIGMOID)


class Pooled(SeparateAttention):
    """W_O gets one token of each sequence."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.join(nn.functional.scaled_dot_product_attention(q, k, v)).mean(1))


def call(model: Any) -> None:
    model(torch.randn(2, 5, WIDTH, requires_grad=True))


@dataclass(frozen=True)
class Call:
    """What happens to a gated model, a call of it, and the refusal."""

    message: str
    error: type[Exception] = NotFired
    build: Callable[[], Any] = lambda: SeparateAttention(WIDTH, HEADS)
    change: Callable[[Any], object] = lambda _model: None
    run: Callable[[Any], object] = call


CALLS = {
    "other tokens": Call(
        r"made from a tensor of shape \(2, 5, 12\) and its output projection gets",
        *(ShapeError, lambda: Pooled(WIDTH, HEADS)),
    ),
    "no queries": Call(
        "computed no queries before its output projection was called", run=lambda m: m.o_proj(torch.randn(2, 3, 20))
    ),
    "another projection": Call(
        r"its output projection is now a Linear, set after hw\.gate_heads",
        change=lambda m: setattr(m, "o_proj", nn.Linear(20, WIDTH)),
    ),
    "fewer heads": Call(
        r"expected 4 heads of 5 numbers on the last axis",
        ShapeError,
        change=lambda m: setattr(m, "join", lambda heads: heads[:, :3].transpose(1, 2).flatten(2)),
    ),
    "a replica": Call(
        r"is called as a replica that nn\.DataParallel made",
        build=encoder,
        change=lambda m: setattr(m.layers[0].self_attn, "_is_replica", True),
    ),
    "frozen gates": Call(
        r"layers\.0\.self_attn\.head_gates: its new gate is frozen, .*LoraConfig\(modules_to_save=",
        *(SettingError, encoder, lambda m: m.layers[0].self_attn.head_gates.requires_grad_(False)),
    ),
    "gates that peft froze": Call("its new gate is frozen", SettingError, llama, under_peft, states),
    "a projection of peft": Call(
        "its output projection is now a Linear, set after",
        build=llama,
        change=lambda m: under_peft(m, target_modules=["o_proj"], modules_to_save=[NAME]),
        run=states,
    ),
}


@cases("name", CALLS)
def test_a_call_that_cannot_be_gated_is_told_so(name: str):
    case = CALLS[name]
    model = case.build()
    hw.gate_heads(hw.find_heads(model), SIGMOID)
    case.change(model)
    with pytest.raises(case.error, match=case.message):
        case.run(model)
    # gates that were loaded may be frozen
    if case.error is SettingError:
        model.load_state_dict(model.state_dict())
        case.run(model)


def test_gates_made_before_peft_are_trained_saved_and_loaded_as_it_is_told(tmp_path: Any):
    base = llama()
    hw.gate_heads(hw.find_heads(base), SIGMOID)
    model = under_peft(base, modules_to_save=[NAME])
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=5.0)
    plain = states(model).detach()
    for _ in range(2):
        optimizer.zero_grad()
        states(model)[..., 0].sum().backward()
        optimizer.step()
    assert base.layers[0].self_attn.head_gates.modules_to_save["default"].weight.abs().max() > 0.0
    trained = states(model.eval())
    assert not torch.allclose(trained, plain, atol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(states(model), plain)
    model.save_pretrained(tmp_path)
    again = llama()
    hw.gate_heads(hw.find_heads(again), SIGMOID)
    torch.testing.assert_close(states(peft.PeftModel.from_pretrained(again, str(tmp_path)).eval()), trained)


@cases(
    "attach", [lambda heads: hw.gate_heads(heads, SIGMOID), lambda heads: hw.aggregate(heads, hw.routing.EMRouting())]
)
def test_a_copy_that_kept_what_was_attached_is_told_so_and_the_remedy_works(attach: Callable[[hw.Heads], Any]):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    handle = attach(hw.find_heads(model))
    with pytest.raises(LayoutError, match=r"A copy keeps .*: remove\(\) them before it is copied"):
        attach(hw.find_heads(copy.deepcopy(model)))
    handle.remove()
    attach(hw.find_heads(copy.deepcopy(model)))
