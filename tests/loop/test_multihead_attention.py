"""headwise's multi-head attention is torch's, to rounding, at every flag."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headwise as hw
from headwise.nn import MultiheadAttention, adopt, valid_keys


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_outputs_weights_and_gradients_equal_torchs(data):
    flag = lambda name: data.draw(st.booleans(), label=name)  # noqa: E731  # hypothesis labels each draw
    flags = {
        "bias": flag("bias"),
        "add_bias_kv": flag("add_bias_kv"),
        "add_zero_attn": flag("add_zero_attn"),
        "batch_first": flag("batch_first"),
        "kdim": 6 if flag("kdim") else None,
        "vdim": 10 if flag("vdim") else None,
    }
    torch.manual_seed(data.draw(st.integers(0, 99), label="seed"))
    theirs = nn.MultiheadAttention(8, 2, 0.0, **flags).double()
    ours = MultiheadAttention(8, 2, 0.0, **flags).double()
    ours.load_state_dict(theirs.state_dict())
    batched, training = flag("batched"), flag("training")
    theirs.train(training)
    ours.train(training)
    same = flag("self-attention") and flags["kdim"] is None and flags["vdim"] is None
    batch, queries = 3, 5
    keys = queries if same else 4
    query = torch.randn(batch, queries, 8, dtype=torch.float64)
    key = query if same else torch.randn(batch, keys, theirs.kdim, dtype=torch.float64)
    value = query if same else torch.randn(batch, keys, theirs.vdim, dtype=torch.float64)
    if not batched:
        single = query[0]
        query, key, value = single, single if same else key[0], single if same else value[0]
    elif not flags["batch_first"]:
        first = query.transpose(0, 1)
        query, key, value = (
            first,
            first if same else key.transpose(0, 1),
            first if same else value.transpose(0, 1),
        )
    boolean = flag("boolean masks")
    padding = attention = None
    if flag("padding"):
        padding = torch.zeros(batch, keys, dtype=torch.bool)
        padding[1, -1] = padding[2, 2:] = True
        padding = padding if batched else padding[2]
        padding = padding if boolean else torch.zeros(padding.shape).double().masked_fill(padding, -torch.inf)
    shape = data.draw(st.sampled_from([None, 2, 3]), label="mask dimensions")
    if shape is not None:
        size = (queries, keys) if shape == 2 else ((batch if batched else 1) * 2, queries, keys)
        attention = torch.randn(size, dtype=torch.float64)
        if boolean:
            attention = attention > 0.8
            attention[..., 0] = False
    causal = attention is not None and shape == 2 and queries == keys and flag("causal")
    if causal:
        attention = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        attention = attention if boolean else torch.zeros(queries, keys).double().masked_fill(attention, -torch.inf)
    arguments = {
        "key_padding_mask": padding,
        "need_weights": flag("need_weights"),
        "attn_mask": attention,
        "average_attn_weights": flag("average"),
        "is_causal": causal,
    }
    expected, expected_weights = theirs(query, key, value, **arguments)
    output, weights = ours(query, key, value, **arguments)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights, expected_weights)
    for module, result in ((theirs, expected), (ours, output)):
        module.zero_grad()
        result.square().sum().backward()
    for (name, parameter), twin in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(twin.grad, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_dropout_drops_weights_as_torch_does():
    theirs = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
    ours = MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 8)
    torch.manual_seed(1)
    expected = theirs(x, x, x, average_attn_weights=False)
    torch.manual_seed(1)
    result = ours(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(result, expected)
    assert (result[1] == 0).any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # the stock encoder makes them
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_adopted_transformer_computes_the_same_also_in_evaluation(norm_first):
    stock = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, dropout=0.0),
        2,
        enable_nested_tensor=not norm_first,
    )
    adopted = copy.deepcopy(stock)
    for layer in adopted.layers:
        assert adopt(adopted, layer.self_attn)
        assert not adopt(adopted, layer.self_attn)
    x, padding = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    calls = []
    adopted.layers[0].self_attn.out_proj.register_forward_hook(lambda *_: calls.append(1))
    for training, gradients in itertools.product([True, False], [True, False]):
        stock.train(training)
        adopted.train(training)
        with torch.set_grad_enabled(gradients):
            expected = stock(x, src_key_padding_mask=padding)
            before = len(calls)
            result = adopted(x, src_key_padding_mask=padding)
        assert len(calls) == before + 1
        torch.testing.assert_close(result[~padding], expected[~padding], atol=1e-5, rtol=1e-5)
    assert adopted.state_dict().keys() == stock.state_dict().keys()


def test_a_subclass_with_its_own_forward_is_not_adopted():
    class Own(nn.MultiheadAttention):
        pass

    with pytest.raises(hw.LayoutError, match="Own is not torch"):
        adopt(nn.Module(), Own(8, 2))


def test_shapes_that_do_not_fit_are_refused():
    attention = MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    with pytest.raises(hw.ShapeError, match=r"\(3, 2, 3\)"):
        attention(x, x[0], x)
    with pytest.raises(hw.ShapeError, match=r"attn_mask has shape \(4, 5\); expected \(5, 5\)"):
        attention(x, x, x, attn_mask=torch.zeros(4, 5))
    with pytest.raises(RuntimeError, match="is_causal=True was given without attn_mask"):
        attention(x, x, x, is_causal=True)
    nested = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
    with pytest.raises(hw.LayoutError, match="nested tensor"):
        attention(nested, nested, nested)


def test_valid_keys_reads_both_kinds_of_padding_mask():
    padding = torch.tensor([[False, True]])
    assert valid_keys(None) is None
    assert torch.equal(valid_keys(padding), ~padding)
    assert torch.equal(valid_keys(torch.tensor([[0.0, -torch.inf]])), ~padding)
    for padded in (torch.finfo(torch.float32).min, -1e9, -1e4):
        assert torch.equal(valid_keys(torch.tensor([[-30.0, padded]])), ~padding)
