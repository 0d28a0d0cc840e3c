"""headwise's multi-head attention is torch's, to rounding, at every flag."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from cases import cases
from headwise.nn.multihead import MultiheadAttention, adopt, valid_keys

CONSTRUCTOR = set(inspect.signature(nn.MultiheadAttention.__init__).parameters) - {"self"}
FORWARD = set(inspect.signature(nn.MultiheadAttention.forward).parameters) - {"self"}


@st.composite
def constructors(draw) -> dict[str, Any]:
    """Every argument of the constructor, with sizes that are no powers of two."""
    heads = draw(st.integers(1, 4), label="num_heads")
    width = heads * draw(st.integers(1, 5), label="head size")
    return {
        "embed_dim": width,
        "num_heads": heads,
        "dropout": draw(st.sampled_from([0.0, 0.4]), label="dropout"),
        "bias": draw(st.booleans(), label="bias"),
        "add_bias_kv": draw(st.booleans(), label="add_bias_kv"),
        "add_zero_attn": draw(st.booleans(), label="add_zero_attn"),
        "kdim": draw(st.sampled_from([None, width, 7]), label="kdim"),
        "vdim": draw(st.sampled_from([None, width, 9]), label="vdim"),
        "batch_first": draw(st.booleans(), label="batch_first"),
        "device": draw(st.sampled_from([None, "cpu", torch.device("cpu")]), label="device"),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64]), label="dtype"),
    }


def inputs(draw, module: nn.MultiheadAttention) -> tuple[tuple[Tensor, Tensor, Tensor], int, int, int, bool]:
    """Query, key and value of one call, the batch size, both lengths, and whether there is a batch."""
    batch, queries, keys = (draw(st.integers(1, most), label=name) for most, name in ((3, "B"), (5, "Q"), (4, "K")))
    same_width = module.kdim == module.vdim == module.embed_dim
    sharing = draw(st.sampled_from(["all", "key and value", "none"]), label="shared inputs")
    if sharing == "all" and same_width:
        keys = queries
    batched = draw(st.booleans(), label="batched")
    dtype = module.out_proj.weight.dtype

    def tensor(length: int, width: int) -> Tensor:
        sizes = (batch, length) if module.batch_first else (length, batch)
        return torch.randn(*(sizes if batched else (length,)), width, dtype=dtype, requires_grad=True)

    query = tensor(queries, module.embed_dim)
    if sharing == "all" and same_width:
        return (query, query, query), batch, queries, keys, batched
    key = tensor(keys, module.kdim)
    shared = sharing != "none" and module.kdim == module.vdim
    return (query, key, key if shared else tensor(keys, module.vdim)), batch, queries, keys, batched


def masked(draw, name: str, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask in one of the ways people write it: bool, -inf, or numbers with a few -inf that learn."""
    how = draw(st.sampled_from(["bool", "-inf", "learned"]), label=f"{name} as")
    if how == "bool":
        return ~allowed
    numbers = torch.randn(allowed.shape, dtype=dtype) if how == "learned" else torch.zeros(allowed.shape, dtype=dtype)
    return numbers.masked_fill(~allowed, -torch.inf).requires_grad_(how == "learned")


def masks(draw, module: nn.MultiheadAttention, sizes: tuple[int, int, int, bool], empty: bool) -> dict[str, Any]:
    """Every mask of one call; a whole row may be padding only where `empty`."""
    batch, queries, keys, batched = sizes
    dtype = module.out_proj.weight.dtype
    padding = attention = None
    if draw(st.booleans(), label="padding") or empty:
        keep = torch.rand(batch, keys) > 0.4
        keep[:, 0] = True
        if empty:
            keep[-1] = False
        padding = masked(draw, "padding", keep if batched else keep[-1], dtype)
    kinds = [None, 2, 3] + (["causal"] if queries == keys else [])
    kind = draw(st.sampled_from(kinds), label="attn_mask")
    if kind == "causal":
        causal = torch.ones(queries, keys, dtype=torch.bool).tril()
        attention = causal.logical_not()
        if draw(st.booleans(), label="causal mask of floats"):
            attention = torch.zeros(queries, keys, dtype=dtype).masked_fill(~causal, -torch.inf)
    elif kind is not None:
        leading = () if kind == 2 else ((batch if batched else 1) * module.num_heads,)
        allowed = torch.rand(*leading, queries, keys) > 0.3
        allowed[..., 0] = True
        attention = masked(draw, "attn_mask", allowed, dtype)
    return {
        "key_padding_mask": padding,
        "attn_mask": attention,
        "is_causal": kind == "causal" and draw(st.booleans(), label="is_causal"),
    }


# torch's own, where one mask is bool and the other is not
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.full)])
def test_outputs_weights_and_gradients_equal_torchs_at_every_flag(count: int):
    settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])(given(st.data())(compare))()


def compare(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 999), label="seed"))
    flags = draw(constructors())
    assert flags.keys() == CONSTRUCTOR
    theirs, ours = nn.MultiheadAttention(**flags), MultiheadAttention(**flags)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)  # torch starts biases at zero
    ours.load_state_dict(theirs.state_dict(), strict=True)
    training, gradients = draw(st.booleans(), label="training"), draw(st.booleans(), label="gradients")
    empty = draw(st.sampled_from([False, False, False, True]), label="empty rows")
    given_inputs, batch, queries, keys, batched = inputs(draw, theirs)
    arguments = {
        "need_weights": draw(st.booleans(), label="need_weights"),
        "average_attn_weights": draw(st.booleans(), label="average_attn_weights"),
        **masks(draw, theirs, (batch, queries, keys, batched), empty),
    }
    assert arguments.keys() | {"query", "key", "value"} == FORWARD
    learned = [t for t in (*given_inputs, *arguments.values()) if isinstance(t, Tensor) and t.requires_grad]
    results = []
    for module in (theirs, ours):
        module.train(training)
        torch.manual_seed(1)  # of dropout
        with torch.set_grad_enabled(gradients):
            output, weights = module(*given_inputs, **arguments)
        slopes = None
        if gradients:
            # inputs and masks given twice have one gradient
            wanted = [*module.parameters(), *{id(tensor): tensor for tensor in learned}.values()]
            slopes = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True, materialize_grads=True)
        results.append((output, weights, slopes))
    (expected, expected_weights, expected_slopes), (output, weights, slopes) = results
    assert (weights is None) == (expected_weights is None)
    groups = [((output,), (expected,)), (slopes or (), expected_slopes or ())]
    if weights is not None:
        groups.append(((weights,), (expected_weights,)))
    for found, wanted in groups:
        # sums of a hundred products or so, each rounded; a gradient that cancels carries the rounding of the largest
        largest = max((float(tensor.detach().nan_to_num().abs().max()) for tensor in wanted), default=0.0)
        size = 100 * torch.finfo(flags["dtype"]).eps * max(1.0, largest)
        for tensor, expected_tensor in zip(found, wanted, strict=True):
            # torch returns NaN where a query has no key, unless its fused attention runs; ours is a number always
            known = torch.where(expected_tensor.isnan(), tensor, expected_tensor) if empty else expected_tensor
            torch.testing.assert_close(tensor, known, rtol=0, atol=size)


def test_what_does_not_fit_is_refused():
    own = type("Own", (nn.MultiheadAttention,), {})
    with pytest.raises(hw.errors.LayoutError, match="Own is not torch"):
        adopt(nn.Module(), own(8, 2))
    attention = MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    with pytest.raises(hw.errors.ShapeError, match=r"\(3, 2, 3\)"):
        attention(x, x[0], x)
    with pytest.raises(hw.errors.ShapeError, match=r"attn_mask has shape \(4, 5\); expected \(5, 5\)"):
        attention(x, x, x, attn_mask=torch.zeros(4, 5))
    with pytest.raises(RuntimeError, match="is_causal=True was given without attn_mask"):
        attention(x, x, x, is_causal=True)
    nested = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
    with pytest.raises(hw.errors.LayoutError, match="nested tensor"):
        attention(nested, nested, nested)


def as_batch(length: int, batch: int = 3, width: int = 8) -> Tensor:
    return torch.randn(batch, length, width)


@cases("separate", [False, True])
@cases(
    ("changes", "message"),
    [
        ({"query": as_batch(5, 1)}, r"query, key and value have shapes \[\(1, 5, 8\)"),
        ({"key": as_batch(4, 1), "value": as_batch(4, 1)}, r"expected \[\(1, 5, 8\)"),
        ({"value": as_batch(4, 1)}, r"\(1, 4, 8\)\] as \[B, L, width\]"),
        ({"value": as_batch(1)}, r"\(3, 1, 8\)\] as \[B, L, width\]"),
        ({"query": as_batch(5, width=7)}, r"\(3, 5, 7\)"),
        ({"key": as_batch(4, width=1)}, r"\(3, 4, 1\)"),
        ({"key_padding_mask": torch.zeros(4, 3, dtype=torch.bool)}, r"mask has shape \(4, 3\); expected \(3, 4\)"),
        ({"key_padding_mask": torch.zeros(1, 4, dtype=torch.bool)}, r"key_padding_mask has shape \(1, 4\)"),
        ({"attn_mask": torch.zeros(3, 2, 5, 4)}, r"attn_mask has shape \(3, 2, 5, 4\); expected \(6, 5, 4\)"),
        ({"attn_mask": torch.zeros(1, 5, 4)}, r"attn_mask has shape \(1, 5, 4\); expected \(6, 5, 4\)"),
        ({"attn_mask": torch.zeros(5, 4, dtype=torch.uint8)}, "only bool and floating types of attn_mask"),
    ],
)
def test_what_torch_refuses_is_not_broadcast(changes, message, separate):
    widths = {"kdim": 8, "vdim": 8} if separate else {}
    arguments = {"query": as_batch(5), "key": as_batch(4), "value": as_batch(4)} | changes
    for need_weights in (True, False):
        with pytest.raises((AssertionError, RuntimeError)):
            nn.MultiheadAttention(8, 2, batch_first=True, **widths)(**arguments, need_weights=need_weights)
        with pytest.raises((hw.errors.ShapeError, AssertionError), match=message):
            MultiheadAttention(8, 2, batch_first=True, **widths)(**arguments, need_weights=need_weights)


@cases("need_weights", [True, False])
@cases("mask", [None, "bool", "float"])
def test_autocast_computes_what_torchs_computes(need_weights, mask):
    theirs, ours = nn.MultiheadAttention(12, 3, batch_first=True), MultiheadAttention(12, 3, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 12)
    keep = torch.ones(5, 5, dtype=torch.bool).tril(1)
    given_mask = {None: None, "bool": ~keep, "float": torch.zeros(5, 5).masked_fill(~keep, -torch.inf)}[mask]
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs(x, x, x, attn_mask=given_mask, need_weights=need_weights)
        result = ours(x, x, x, attn_mask=given_mask, need_weights=need_weights)
    assert result[0].dtype == torch.bfloat16
    torch.testing.assert_close(result, expected)


@cases("flags", [{}, {"kdim": 6, "vdim": 10}, {"add_bias_kv": True}, {"bias": False}])
def test_state_dicts_fit_strictly_both_ways_and_copies_compute_the_same(flags):
    theirs, ours = nn.MultiheadAttention(8, 2, **flags), MultiheadAttention(8, 2, **flags)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict(), strict=True)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    q, k, v = torch.randn(5, 2, 8), torch.randn(4, 2, flags.get("kdim", 8)), torch.randn(4, 2, flags.get("vdim", 8))
    for twin in (theirs, copy.deepcopy(ours), torch.load(file, weights_only=False)):
        torch.testing.assert_close(twin(q, k, v), ours(q, k, v))
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict({}, strict=True)


def test_constructor_and_forward_have_torchs_signatures():
    assert inspect.signature(MultiheadAttention) == inspect.signature(nn.MultiheadAttention)
    theirs, ours = (inspect.signature(kind.forward) for kind in (nn.MultiheadAttention, MultiheadAttention))
    arguments = [[(p.name, p.default, p.kind) for p in signature.parameters.values()] for signature in (theirs, ours)]
    assert arguments[0] == arguments[1]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch has deprecated scripting
def test_scripting_is_refused_in_a_sentence_and_exporting_is_not():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    adopt(layer, layer.self_attn)
    with pytest.raises(hw.errors.LayoutError, match=r"cannot be scripted.*torch\.compile or torch\.export"):
        torch.jit.script(layer)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def test_the_fast_path_is_left_without_any_hook_of_a_user():
    class Negated(nn.Linear):
        """In the place of an output projection, with its parameters: C++ would see no difference."""

        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    adopted = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    made = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    made.self_attn = MultiheadAttention(8, 2, batch_first=True)
    x, padding = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    for model in (adopted.eval(), made.eval()):
        for layer in getattr(model, "layers", [model]):
            adopt(model, layer.self_attn)
            layer.self_attn.out_proj.__class__ = Negated
        slow = model(x, src_key_padding_mask=padding)
        with torch.no_grad():
            torch.testing.assert_close(model(x, src_key_padding_mask=padding), slow)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # the stock encoder makes them
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # without batch_first it does not
@pytest.mark.filterwarnings("ignore:Support for mismatched")  # a float mask of the future and a bool one of padding
@cases(("batch_first", "norm_first"), [(True, False), (False, False), (True, True)])
def test_an_adopted_encoder_decoder_computes_the_same_with_every_mask(batch_first: bool, norm_first: bool):
    torch.manual_seed(0)
    stock = nn.Transformer(12, 4, 2, 2, 16, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    adopted = copy.deepcopy(stock)
    with hw.Taps(hw.find_heads(adopted), outputs=True) as taps:
        source, target = torch.randn(3, 6, 12), torch.randn(3, 5, 12)
        padding = torch.zeros(3, 6, dtype=torch.bool)
        padding[1, 4:] = padding[2, 2:] = True
        target_padding = torch.zeros(3, 5, dtype=torch.bool)
        target_padding[2, 3:] = True
        if not batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        arguments = {
            "src_mask": torch.zeros(6, 6, dtype=torch.bool).fill_diagonal_(True),
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5),
            "tgt_is_causal": True,
            "src_key_padding_mask": padding,
            "memory_key_padding_mask": padding,
            "tgt_key_padding_mask": target_padding,
        }
        arguments["src_mask"][0, 0] = False
        for training, gradients in itertools.product([True, False], [True, False]):
            stock.train(training)
            adopted.train(training)
            with torch.set_grad_enabled(gradients):
                expected, result = stock(source, target, **arguments), adopted(source, target, **arguments)
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
            assert len(taps.read()) == 6
    assert list(adopted.state_dict()) == list(stock.state_dict())


def test_valid_keys_reads_both_kinds_of_padding_mask():
    padding = torch.tensor([[False, True]])
    assert valid_keys(None) is None
    assert torch.equal(valid_keys(padding), ~padding)
    assert torch.equal(valid_keys(torch.tensor([[0.0, -torch.inf]])), ~padding)
    for padded in (torch.finfo(torch.float32).min, -1e9, -1e4):
        assert torch.equal(valid_keys(torch.tensor([[-30.0, padded]])), ~padding)
