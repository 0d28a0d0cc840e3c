"""The position penalty without the weights of all heads: the same numbers, and what is kept for the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

import headwise as hw
from cases import cases

HEADS, LENGTH = 4, 24
EXPLICIT, RECOMPUTED = hw.similarity.Position(), hw.similarity.Position(recompute=True)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, HEADS, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def bert(implementation: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 8}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(vocab_size=50, attn_implementation=implementation, **sizes, **drops)).double()


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 8}
    return LlamaModel(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).double()


def padding() -> Tensor:
    mask = torch.zeros(3, LENGTH, dtype=torch.bool)
    mask[1, 15:] = True
    return mask


def states() -> Tensor:
    return torch.randn(3, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def tokens() -> Tensor:
    return torch.randint(0, 50, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def causal(model: nn.Module) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    return model(states(), mask=mask, is_causal=True)


CASES = {
    "torch, padded": (encoder, lambda m: m(states(), src_key_padding_mask=padding())),
    "torch, causal": (encoder, causal),
    "torch, neither": (encoder, lambda m: m(states())),
    "bert, padded": (bert, lambda m: m(tokens(), attention_mask=(~padding()).long()).last_hidden_state),
    "bert, eager": (lambda: bert("eager"), lambda m: m(tokens()).last_hidden_state),
    "llama, grouped and padded": (llama, lambda m: m(tokens(), attention_mask=(~padding()).long()).last_hidden_state),
    "llama, causal": (llama, lambda m: m(tokens()).last_hidden_state),
}


def stepped(make, forward, term, biased=False) -> list[Tensor]:
    """The penalty, the output and all gradients."""
    model = make().train()
    heads = hw.find_heads(model)
    penalty = hw.Disagreement(heads, term)
    biases = []
    if biased:
        bias = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        # leaves a query of the padded sentence without a key
        bias[2, 5, :15] = -torch.inf
        biases.append(bias[None].requires_grad_())
        hw.bias_heads(heads.layer(1), biases[0])
    output = forward(model)
    value = penalty()
    (3.0 * value + 0.1 * output.square().mean()).backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [value, output, *grads, *(bias.grad for bias in biases)]


@cases("biased", [False, True])
@cases(("make", "forward"), CASES.values())
def test_it_is_the_explicit_penalty_with_its_gradients(make, forward, biased):
    found, expected = (stepped(make, forward, term, biased) for term in (RECOMPUTED, EXPLICIT))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_beside_a_term_that_wants_the_weights_they_are_made_once():
    term = RECOMPUTED + 0.5 * hw.similarity.Frobenius()
    for one, other in zip(
        stepped(*CASES["torch, padded"], term),
        stepped(*CASES["torch, padded"], EXPLICIT + 0.5 * hw.similarity.Frobenius()),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def largest_kept(make, forward, term) -> int:
    """The size of the largest tensor kept for the backward pass."""
    model = make().train()
    penalty = hw.Disagreement(hw.find_heads(model), term)
    sizes = [0]

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        (forward(model).square().mean() + penalty()).backward()
    return max(sizes)


@cases("case", ["torch, padded", "torch, causal", "bert, padded", "llama, causal"])
def test_nothing_of_the_size_of_all_weights_is_kept_for_the_backward_pass(case):
    everything = 3 * HEADS * LENGTH * LENGTH
    assert largest_kept(*CASES[case], RECOMPUTED) < everything
    assert largest_kept(*CASES[case], EXPLICIT) >= everything


def test_attention_stays_in_the_fused_kernel(monkeypatch):
    calls = []
    fused = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k)
    )
    for make, forward in (CASES["torch, padded"], CASES["bert, padded"]):
        for term, expected in ((RECOMPUTED, 2), (EXPLICIT, 0)):
            calls.clear()
            model = make().train()
            penalty = hw.Disagreement(hw.find_heads(model), term)
            forward(model)
            penalty()
            assert len(calls) == expected


def test_activation_checkpointing_makes_it_again():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.inner.layers:
                x = checkpoint(layer, x, None, padding(), use_reentrant=False)
            return x

    plain = CASES["torch, padded"]
    for one, other in zip(
        stepped(Checkpointed, lambda m: m(states()), RECOMPUTED), stepped(*plain, RECOMPUTED), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_it_says_which_it_is():
    assert (repr(EXPLICIT), repr(RECOMPUTED)) == ("Position()", "Position(recompute=True)")


def test_heads_divided_by_tensor_parallel_are_refused(monkeypatch):
    model = encoder()
    heads = hw.find_heads(model)
    monkeypatch.setattr(type(heads.sites[0]), "divided", property(lambda _site: True))
    with pytest.raises(hw.errors.LayoutError, match="under tensor parallel"):
        hw.Disagreement(heads, RECOMPUTED)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@cases("case", ["torch, padded", "bert, padded", "llama, causal"])
def test_gradients_inside_torch_func_are_those_of_a_backward_pass(case: str):
    make, forward = CASES[case]
    model = make().train()
    penalty = hw.Disagreement(hw.find_heads(model), RECOMPUTED)
    own = dict(model.named_parameters())
    forward(model)
    expected = torch.autograd.grad(penalty(), list(own.values()), allow_unused=True, materialize_grads=True)

    class Penalized(nn.Module):
        def forward(self) -> Tensor:
            forward(model)
            return penalty()

    held = Penalized()
    held.add_module("model", model)
    found = torch.func.grad(lambda given: torch.func.functional_call(held, given, ()))(
        {f"model.{name}": parameter for name, parameter in own.items()}
    )
    for one, other in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_each_item_has_the_gradient_that_it_has_alone():
    model = encoder().train()
    penalty = hw.Disagreement(hw.find_heads(model), RECOMPUTED)
    own = dict(model.named_parameters())

    def measure(given: dict[str, Tensor], x: Tensor) -> Tensor:
        torch.func.functional_call(model, given, (x[None],))
        return penalty()

    found = torch.func.vmap(torch.func.grad(measure), (None, 0))(own, states())
    alone = torch.func.grad(measure)(own, states()[1])
    for name in own:
        torch.testing.assert_close(found[name][1], alone[name])
