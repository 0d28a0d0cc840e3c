"""The balance term of a mixture of heads: which calls and which tokens it counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import headwise as hw
from cases import cases
from headwise.errors import NotFired
from headwise.gating import balance

WIDTH, HEADS, BATCH, LENGTH = 12, 4, 3, 6
MIXTURE = hw.gating.MixtureOfHeads(1, 2, balance=0.3)
KEEP = torch.arange(LENGTH) < torch.tensor([[6], [4], [1]])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = draw(BATCH, LENGTH, WIDTH)


def encoder() -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def decoder() -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    return nn.TransformerDecoder(layer, 1).double()


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 1, "intermediate_size": 8}
    config = BertConfig(vocab_size=20, hidden_dropout_prob=0.0, **sizes)
    return BertModel(config, add_pooling_layer=False).double().train()


def gated(model: Any, setting: Any = MIXTURE) -> hw.gating.Gating:
    return hw.gate_heads(hw.find_heads(model), setting)


def run_decoder(model: nn.Module) -> None:
    model(X, draw(BATCH, 4, WIDTH, seed=1), tgt_key_padding_mask=~KEEP, memory_key_padding_mask=~KEEP[:, 2:])


# A model, the kind of its gated attentions, these and the modules that get their queries' input, and a call.
PADDED: dict[str, tuple[Callable[[], Any], str, Callable[[Any], list[tuple[Any, Any]]], Callable[[Any], object]]] = {
    "torch": (
        *(encoder, "self", lambda m: [(layer.self_attn, layer.self_attn) for layer in m.layers]),
        lambda m: m(X, src_key_padding_mask=~KEEP),
    ),
    # the queries of cross-attention have the padding of the decoder
    "cross": (*(decoder, "cross", lambda m: [(m.layers[0].multihead_attn, m.layers[0].multihead_attn)]), run_decoder),
    "transformers": (
        *(bert, "self", lambda m: [(layer.attention.self, layer.attention.self.query) for layer in m.encoder.layer]),
        lambda m: m(input_ids=torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 20, attention_mask=KEEP.long()),
    ),
}


@cases("name", PADDED)
def test_padded_tokens_are_not_counted(name: str):
    build, kind, find, run = PADDED[name]
    model = build()
    gating = hw.gate_heads(hw.find_heads(model).kind(kind), MIXTURE)
    seen: list[Tensor] = []
    for _, source in find(model):
        source.register_forward_pre_hook(lambda _m, args, _k: seen.append(args[0]), with_kwargs=True)
    run(model)
    found = gating.balance()
    # the valid tokens alone are given to the gates without the others
    counted, whole = (
        torch.stack(
            [
                balance(gates.shares, gates.chosen)
                for (attention, _), x in zip(find(model), seen, strict=True)
                for gates in [attention.head_gates(x[keep])]
            ]
        ).mean()
        for keep in (KEEP, KEEP | True)
    )
    torch.testing.assert_close(found, counted, rtol=0.0, atol=1e-14)
    assert (found - whole).abs() > 1e-3


def test_the_term_is_the_mean_over_attentions_and_calls_and_trains_the_router():
    model, second = encoder(), draw(BATCH, LENGTH, WIDTH, seed=1)
    gating = gated(model)
    terms = []
    for x in (X, second):
        model(x)
        terms.append(gating.balance())
    loss = model(X).square().mean() + model(second).square().mean()
    total = gating.loss(loss)
    torch.testing.assert_close(total, loss + 0.3 * (terms[0] + terms[1]) / 2, rtol=0.0, atol=1e-14)
    slopes = torch.autograd.grad(total - loss, [layer.self_attn.head_gates.routed for layer in model.layers])
    assert all(slope.abs().max() > 0 for slope in slopes)


def test_training_with_the_term_evens_out_which_heads_are_chosen():
    model, x = encoder(), draw(8, 32, WIDTH)
    torch.manual_seed(0)
    gating = gated(model, hw.gating.MixtureOfHeads(0, 1, balance=1.0))
    routers = [layer.self_attn.head_gates.routed for layer in model.layers]
    with torch.no_grad():
        for router in routers:
            router[0] += 0.5 * x.mean((0, 1)).sign()
    optimizer = torch.optim.Adam(routers, lr=0.02)
    values = []
    for _ in range(60):
        model(x)
        value = gating.balance()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert values[-1] < 1.03 < values[0]


def test_evaluation_a_failed_forward_and_a_copy_are_not_counted():
    model = encoder()
    gating = gated(model)
    model(X)
    expected = gating.balance()
    failing = model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        model(2.0 * X)
    failing.remove()
    with torch.no_grad():
        model(X)
    model.eval()(X)
    twin = copy.deepcopy(model).train()
    for _ in range(70):
        twin(X[:1, :2])
    message = "no gated attention ran in training mode with gradients.* A copy of the model is not counted"
    with pytest.raises(NotFired, match=message):
        gating.balance()
    model.train()(X)
    assert torch.equal(gating.balance(), expected)


def test_a_loop_that_never_reads_the_term_is_told_so():
    model, x = encoder(), X[:1, :2]
    gating = gated(model)
    for _ in range(64):
        model(x)
    with pytest.raises(NotFired, match=r"65 calls of layers\.0\.self_attn were counted .* or set balance=0"):
        model(x)
    gating.remove()
    gated(model, hw.gating.MixtureOfHeads(1, 2, balance=0.0))
    for _ in range(70):
        model(x)


@cases("setting", [hw.gating.SigmoidGate(), hw.gating.MixtureOfHeads(1, 2, balance=0.0)])
def test_gates_without_a_balance_say_so_and_add_nothing(setting: Any):
    gating, loss = gated(encoder(), setting), torch.zeros(())
    with pytest.raises(hw.errors.SettingError, match="has no balance term; expected a MixtureOfHeads whose balance is"):
        gating.balance()
    assert gating.loss(loss) is loss
