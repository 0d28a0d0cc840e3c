"""The balance term of a mixture of heads: which calls and which tokens it counts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.gating import balance

WIDTH, HEADS, BATCH, LENGTH = 12, 4, 3, 6
MIXTURE = hw.gating.MixtureOfHeads(1, 2, balance=0.3)
KEEP = torch.arange(LENGTH) < torch.tensor([[6], [4], [1]])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def term(attention: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    """The balance of the valid tokens alone, which are given to the gates without the others."""
    found = attention.head_gates(x[keep])
    return balance(found.shares, found.chosen)


def inputs_of(model: nn.Module, attentions: list[nn.Module], run) -> list[Tensor]:
    """The queries that each attention gets."""
    seen: list[Tensor] = []
    hooks = [
        one.register_forward_pre_hook(lambda _m, args, _k: seen.append(args[0]), with_kwargs=True) for one in attentions
    ]
    run(model)
    for hook in hooks:
        hook.remove()
    return seen


def test_padded_tokens_are_not_counted():
    model, x = encoder(), draw(BATCH, LENGTH, WIDTH)
    gating = hw.gate_heads(hw.find_heads(model), MIXTURE)
    attentions = [layer.self_attn for layer in model.layers]
    seen = inputs_of(model, attentions, lambda m: m(x, src_key_padding_mask=~KEEP))
    expected = torch.stack([term(one, held, KEEP) for one, held in zip(attentions, seen, strict=True)]).mean()
    found = gating.balance()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-14)
    whole = torch.stack([term(one, held, KEEP | True) for one, held in zip(attentions, seen, strict=True)]).mean()
    assert (found - whole).abs() > 1e-3


def test_the_queries_of_cross_attention_have_the_padding_of_the_decoder():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 1).double()
    gating = hw.gate_heads(hw.find_heads(model).kind("cross"), MIXTURE)
    x, memory = draw(BATCH, LENGTH, WIDTH), draw(BATCH, 4, WIDTH, seed=1)
    masks = {"tgt_key_padding_mask": ~KEEP, "memory_key_padding_mask": ~KEEP[:, 2:]}
    cross = model.layers[0].multihead_attn
    (seen,) = inputs_of(model, [cross], lambda m: m(x, memory, **masks))
    torch.testing.assert_close(gating.balance(), term(cross, seen, KEEP), rtol=0.0, atol=1e-14)


def test_a_model_of_transformers_tells_its_padding():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 1, "intermediate_size": 8}
    torch.manual_seed(0)
    model = transformers.BertModel(
        transformers.BertConfig(vocab_size=20, hidden_dropout_prob=0.0, **sizes), add_pooling_layer=False
    ).double()
    gating = hw.gate_heads(hw.find_heads(model), MIXTURE)
    attention = model.encoder.layer[0].attention.self
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 20
    seen: list[Tensor] = []
    attention.query.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    model.train()(input_ids=ids, attention_mask=KEEP.long())
    torch.testing.assert_close(gating.balance(), term(attention, seen[0], KEEP), rtol=0.0, atol=1e-14)


def test_the_term_is_the_mean_over_attentions_and_calls_and_trains_the_router():
    model, first, second = encoder(), draw(BATCH, LENGTH, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=1)
    gating = hw.gate_heads(hw.find_heads(model), MIXTURE)
    terms = []
    for x in (first, second):
        model(x)
        terms.append(gating.balance())
    loss = model(first).square().mean() + model(second).square().mean()
    total = gating.loss(loss)
    torch.testing.assert_close(total, loss + 0.3 * (terms[0] + terms[1]) / 2, rtol=0.0, atol=1e-14)
    slopes = torch.autograd.grad(total - loss, [layer.self_attn.head_gates.routed for layer in model.layers])
    assert all(slope.abs().max() > 0 for slope in slopes)


def test_training_with_the_term_evens_out_which_heads_are_chosen():
    torch.manual_seed(0)
    model, x = encoder(), draw(8, 32, WIDTH)
    gating = hw.gate_heads(hw.find_heads(model), hw.gating.MixtureOfHeads(0, 1, balance=1.0))
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.head_gates.routed[0] += 0.5 * x.mean((0, 1)).sign()
    routers = [layer.self_attn.head_gates.routed for layer in model.layers]
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


def test_evaluation_is_not_counted():
    model, x = encoder(), draw(BATCH, LENGTH, WIDTH)
    gating = hw.gate_heads(hw.find_heads(model), MIXTURE)
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    with pytest.raises(hw.errors.NotFired, match="no gated attention ran in training mode with gradients"):
        gating.balance()


def test_a_forward_that_failed_is_not_counted():
    model, x = encoder(), draw(BATCH, LENGTH, WIDTH)
    gating = hw.gate_heads(hw.find_heads(model), MIXTURE)
    model(x)
    expected = gating.balance()
    failing = model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        model(2.0 * x)
    failing.remove()
    with pytest.raises(hw.errors.NotFired, match="no gated attention ran in training mode with gradients"):
        gating.balance()
    model(x)
    assert torch.equal(gating.balance(), expected)


def test_a_loop_that_never_reads_the_term_is_told_so():
    model, x = encoder(), draw(1, 2, WIDTH)
    gating = hw.gate_heads(hw.find_heads(model), MIXTURE)
    for _ in range(64):
        model(x)
    with pytest.raises(hw.errors.NotFired, match=r"65 calls of layers\.0\.self_attn were counted .* or set balance=0"):
        model(x)
    gating.remove()
    hw.gate_heads(hw.find_heads(model), hw.gating.MixtureOfHeads(1, 2, balance=0.0))
    for _ in range(70):
        model(x)


def test_a_copy_counts_nothing_for_a_handle_that_is_not_its_own():
    model, x = encoder(), draw(1, 2, WIDTH)
    gating = hw.gate_heads(hw.find_heads(model), MIXTURE)
    twin = copy.deepcopy(model)
    for _ in range(70):
        twin(x)
    with pytest.raises(hw.errors.NotFired, match="A copy of the model is not counted"):
        gating.balance()


@pytest.mark.parametrize("setting", [hw.gating.SigmoidGate(), hw.gating.MixtureOfHeads(1, 2, balance=0.0)])
def test_gates_without_a_balance_say_so_and_add_nothing(setting: hw.gating.SigmoidGate | hw.gating.MixtureOfHeads):
    model = encoder().train()
    gating, loss = hw.gate_heads(hw.find_heads(model), setting), torch.zeros(())
    with pytest.raises(hw.errors.SettingError, match="has no balance term; expected a MixtureOfHeads whose balance is"):
        gating.balance()
    assert gating.loss(loss) is loss
