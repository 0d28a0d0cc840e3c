"""torch's multi-head attention with a visible output projection, and a way to convert stock modules to it."""

import inspect
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import LayoutError, ShapeError
from headwise.nn.average_weights import mean_of, mean_weights
from headwise.nn.checkpointing import Request, find_frame, resolve_request
from headwise.nn.difference import CHILD, HeadDifference, find_difference
from headwise.nn.hooks import hold
from headwise.nn.mixing import compute_weights, drop_weights, find_mixer
from headwise.nn.scores import Bias, Observer, ScoreCall, clear_empty_rows, show_compared, sum_masks

# Padding is written as -inf, the smallest number of the dtype, -1e9 or -1e4, all far below the scores of tokens.
VERY_NEGATIVE = -5e3
# The attribute of an attention that counts who needs it adopted.
HOLDERS = "_headwise_holders"


class MultiheadAttention(nn.MultiheadAttention):
    """torch's multi-head attention with a visible output projection.

    O_h = softmax(Q_h K_h^T / sqrt(e) + mask) V_h and output = [O_1 ... O_H] W_O (Vaswani et al. 2017), as in
    `torch.nn.MultiheadAttention`: same constructor, arguments, return values, parameters and state dict. Three
    differences: `out_proj` is called as a module on [B, Q, H * e], so a hook on it sees the heads and another module
    can take its place; the C++ fast path, which bypasses both, is never taken; a query that may attend to no key has
    weights and O_h of 0 at every flag, where torch's has NaN with `need_weights` and on its fast path.

    Args:
        embed_dim: Width d of queries and output.
        num_heads: Number of heads H; must divide `embed_dim`.
        dropout: Probability of dropping an attention weight while training, in [0, 1).
        bias: Whether the projections have biases.
        add_bias_kv, add_zero_attn: Whether a learned, or a zero, key and value are appended to the sequence.
        kdim, vdim: Widths of keys and values; `embed_dim` when None.
        batch_first: Whether tensors are [B, L, d] rather than [L, B, d].

    Example:
        >>> attention = MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> attention(x, x, x, need_weights=False)[0].shape
        torch.Size([3, 5, 8])
    """

    observers: tuple[Observer, ...] = ()
    biases: tuple[Bias, ...] = ()

    __signature__ = inspect.signature(nn.MultiheadAttention)

    def __init__(self, *args, **kwargs) -> None:  # the signature is torch's own
        super().__init__(*args, **kwargs)
        self.register_forward_pre_hook(_observe_nothing)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output and, with `need_weights`, the weights; see torch's documentation.

        Raises:
            LayoutError: The inputs are nested tensors, which only the fast path can take.
            ShapeError: Inputs or masks whose shapes do not fit one another.
            RuntimeError: `is_causal` was given without a mask, as in torch.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise LayoutError(
                "MultiheadAttention was given a nested tensor, which only torch's C++ fast path takes; "
                "pass padded tensors with key_padding_mask (enable_nested_tensor=False on TransformerEncoder)."
            )
        frame = find_frame() if HOLDERS in vars(self) else None
        if frame is not None:
            # an activation checkpoint that is computed again must save the tensors that it saved before
            weakref.finalize(frame, _hold(self, vars(self)[HOLDERS].encoders)).atexit = False
        batched = _is_batched(query, key, value, key_padding_mask)
        if not batched:
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = _transpose_keeping_identity(query, key, value)
        _require_fitting(self, query, key, value, key_padding_mask)
        causal_hint = is_causal and key_padding_mask is None and not need_weights
        mask = _merge_masks(self, query, key, key_padding_mask, attn_mask, is_causal, causal_hint)
        q, k, v = self._project(query, key, value)
        q, k, v = (tensor.unflatten(-1, (self.num_heads, self.head_dim)) for tensor in (q, k, v))
        observed_values = v
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        call = ScoreCall(len(q), self.num_heads, q.shape[2], k.shape[2], dtype=q.dtype, device=q.device)
        k, v = self._append(k, v)
        show_compared(self.observers, q, k, mask, causal_hint)
        extra = resolve_request(self, self.observers, self.biases, call)
        if extra.biases:
            appended = k.shape[2] - call.keys
            biases = [F.pad(bias, (0, appended)) if appended else bias for bias in extra.biases]
            mask = sum_masks(mask, causal_hint, biases, call.queries, k.shape[2], q.dtype)
            causal_hint = False
        heads, weights, dropped, mean = self._attend(q, k, v, mask, causal_hint, need_weights, extra)
        for observer in self.observers:
            observer.notify(observed_values, weights, valid_keys(key_padding_mask), mean)

        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        returned = dropped if need_weights else None
        if returned is not None and average_attn_weights:
            returned = returned.mean(dim=1)
        if not batched:
            return output.squeeze(0), None if returned is None else returned.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), returned

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None = None) -> Tensor:
        """Return the outputs of the heads [B, H, Q, e] of projected tensors, without dropout, and unobserved.

        Queries are [B, H, Q, e], keys and values [B, H, K, e]; `may_attend` is bool, broadcastable to [B, H, Q, K].
        """
        mixer, difference = find_mixer(self), find_difference(self)
        if mixer is None and difference is None:
            return F.scaled_dot_product_attention(q, k, v, may_attend)
        mask = None if may_attend is None else q.new_zeros(()).masked_fill(~may_attend, -math.inf)
        if difference is not None:
            return difference(q, k, v, mask)[0]
        return drop_weights(compute_weights(q, k, mask, False, mixer), 0.0, mixer) @ v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, need_weights: bool, extra: Request
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the outputs of the heads [B, H, Q, e], and where wanted weights, those after dropout and their mean.

        In differential attention weights and mean are those of the first maps.
        """
        mixer, difference = find_mixer(self), find_difference(self)
        dropout = self.dropout if self.training else 0.0
        explicit = need_weights or mixer is not None or (extra.weights and not extra.beside)
        heads = weights = dropped = mean = None
        if difference is not None:
            heads, weights, dropped = difference(q, k, v, mask, causal, dropout, explicit)
            q, k = (difference.take_first(difference.split(tensor)) for tensor in (q, k))
        if weights is None and (explicit or extra.weights):
            weights = compute_weights(q, k, mask, causal, mixer)
        if heads is None and weights is not None and explicit:
            dropped = drop_weights(weights, dropout, mixer)
            heads = dropped @ v
        if heads is None:
            finite, empty = clear_empty_rows(mask) if mask is not None and extra.biases else (mask, None)
            heads = F.scaled_dot_product_attention(q, k, v, finite, dropout, causal)
            heads = heads if empty is None else heads.masked_fill(empty, 0.0)
        if extra.mean_weights:
            mean = mean_weights(q, k, mask, causal=causal) if weights is None else mean_of(weights)
        return heads, weights, dropped, mean

    def __prepare_scriptable__(self) -> nn.Module:
        # torch.jit.script asks every module for this first
        raise LayoutError(
            "MultiheadAttention cannot be scripted: TorchScript would drop what listens to its heads. "
            "Use torch.compile or torch.export, or script the model before headwise adopts its attention."
        )

    def __getstate__(self) -> dict:
        # copies and pickles have no listeners
        return {name: value for name, value in self.__dict__.items() if name not in ("observers", "biases")}

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if HOLDERS not in vars(self) or _stays(self):
            return reduced
        # adopted for handles, which a copy or a pickle does not have
        _, _, state, *others = reduced
        hooks = {number: hook for number, hook in self._forward_pre_hooks.items() if hook is not _observe_nothing}
        own = {**state, "_forward_pre_hooks": OrderedDict(hooks)}
        own.pop(HOLDERS)
        return _make_stock, (), own, *others

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            q, k, v = packed.chunk(3, dim=-1)
            return q, k, v
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(tensor, weight, bias)
            for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the learned and the zero key and value to [B, H, K, e] tensors where the module has them."""
        if self.bias_k is not None and self.bias_v is not None:
            split = (1, 1, self.num_heads, self.head_dim)
            learned = [
                bias.view(split).transpose(1, 2).expand(len(k), -1, -1, -1) for bias in (self.bias_k, self.bias_v)
            ]
            k, v = torch.cat([k, learned[0]], dim=2), torch.cat([v, learned[1]], dim=2)
        if self.add_zero_attn:
            zero = k.new_zeros(k.shape[0], k.shape[1], 1, k.shape[3])
            k, v = torch.cat([k, zero], dim=2), torch.cat([v, zero], dim=2)
        return k, v


class DifferentialAttention(MultiheadAttention):
    """Differential attention (Ye et al. 2024) as a module like `torch.nn.MultiheadAttention`.

    Each of G heads has d / G numbers, half of them for each of its two maps, and values of d / G: the projections are
    those of an attention with 2 G heads. The equations are those of `HeadDifference`, which it holds as
    `head_difference`. A head is another thing than in plain attention, and no start computes what plain attention
    does: train it from the beginning. `find_heads` finds G heads; `Taps` read the first map of each, whose rows sum to
    1, while `need_weights=True` returns the difference.

    Args:
        embed_dim: Width d of queries and output.
        num_heads: Number G of heads, half as many as those of a plain attention in its place; d / G must be even.
        layer: Number of the layer, from 1, which lambda starts from.
        second: As in `HeadDifference`.
        options: Those of `torch.nn.MultiheadAttention`.

    Raises:
        SettingError: As `HeadDifference`.

    Example:
        >>> attention = DifferentialAttention(8, 2, layer=1, batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> attention(x, x, x)[0].shape
        torch.Size([3, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, layer: int = 1, second: bool = True, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        difference = HeadDifference(self.head_dim, layer, second=second)
        self.add_module(CHILD, difference.to(self.out_proj.weight))


def adopt(model: nn.Module, attention: nn.Module) -> bool:
    """Turn a stock `torch.nn.MultiheadAttention` inside `model` into headwise's, in place; True if it changed.

    The module keeps its identity, parameters and state dict; only its class changes. Nested tensors are turned
    off in the `nn.TransformerEncoder`s of `model` that hold it, since only the fast path can take them. It stays so;
    what is attached to a model adopts attentions for itself, and gives them back when it is removed.

    Raises:
        LayoutError: `attention` is a subclass with its own forward, which the swap would discard.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> adopt(layer, layer.self_attn)
        True
        >>> type(layer.self_attn).__module__
        'headwise.nn.multihead'
    """
    changed = not isinstance(attention, MultiheadAttention)
    hold_adopted(model, attention)
    vars(attention).pop(HOLDERS, None)
    for encoder in _find_around(model, attention):
        _refuse_nested(encoder).for_good = True
    return changed


def hold_adopted(model: nn.Module, attention: nn.Module) -> Callable[[], None]:
    """Adopt an attention until the returned function is called, by the last of those who do.

    The module then is torch's again, and so are its encoders; unless it has got parts, such as gates or an aggregator,
    which torch's fast path would pass by. A copy of the model is torch's as well where the original would become so.

    Raises:
        LayoutError: As of `adopt`.
    """
    if type(attention) is nn.MultiheadAttention:
        attention.__class__ = MultiheadAttention
        attention.register_forward_pre_hook(_observe_nothing)
        vars(attention)[HOLDERS] = _Holders(_list_parts(attention))
    elif not isinstance(attention, MultiheadAttention):
        raise LayoutError(
            f"{type(attention).__name__} is not torch.nn.MultiheadAttention itself; its own forward would be lost. "
            "Derive it from headwise.nn.MultiheadAttention, or pass a layout row for it to find_heads."
        )
    return _hold(attention, _find_around(model, attention))


def _hold(attention: nn.Module, encoders: list[nn.TransformerEncoder]) -> Callable[[], None]:
    ends = [hold(_refuse_nested(encoder), partial(_allow_nested, encoder)) for encoder in encoders]
    own: _Holders | None = vars(attention).get(HOLDERS)
    if own is not None:
        own.encoders += [encoder for encoder in encoders if all(encoder is not other for other in own.encoders)]
        ends.append(hold(own, partial(_give_back, attention, own)))

    def release() -> None:
        # the attention first: an encoder with an adopted one stays as it is
        while ends:
            ends.pop()()

    return release


@dataclass
class _Holders:
    """How many handles need an attention adopted; a copy or a pickle is needed by none.

    Attributes:
        parts: The types of the modules of the attention before, by name, and the width of its heads.
        holders: The number of handles.
        encoders: The encoders that the attention is in.
    """

    parts: dict[str, object] = field(default_factory=dict)
    holders: int = 0
    encoders: list[nn.TransformerEncoder] = field(default_factory=list)

    def __reduce__(self) -> tuple:
        return _Holders, (self.parts,)


class _NoNested(int):
    """False as the `use_nested_tensor` of an encoder, `for_good` or while it has holders; else a copy has `before`."""

    encoder: nn.Module
    before: bool
    holders: int
    for_good: bool

    def __new__(cls, encoder: nn.Module, before: bool, for_good: bool = False) -> Self:
        own = super().__new__(cls, 0)
        own.encoder, own.before, own.holders, own.for_good = encoder, before, 0, for_good
        return own

    def __reduce__(self) -> tuple:
        # for copy and pickle; it is needed where an attention inside stays headwise's though nothing holds it
        adopted = (module for module in self.encoder.modules() if HOLDERS in vars(module))
        needed = self.for_good or any(_stays(module) for module in adopted)
        return (_NoNested, (self.encoder, self.before, self.for_good)) if needed else (bool, (self.before,))

    def __repr__(self) -> str:
        return "False"


def _refuse_nested(encoder: Any) -> _NoNested:
    if not isinstance(encoder.use_nested_tensor, _NoNested):
        encoder.use_nested_tensor = _NoNested(encoder, encoder.use_nested_tensor)
    return encoder.use_nested_tensor


def _allow_nested(encoder: Any) -> None:
    own = encoder.use_nested_tensor
    adopted = any(HOLDERS in vars(module) for module in encoder.modules())
    if isinstance(own, _NoNested) and not own.for_good and not adopted:
        encoder.use_nested_tensor = own.before


def _list_parts(attention: Any) -> dict[str, object]:
    parts = {name: None if part is None else type(part) for name, part in attention._modules.items()}
    return {**parts, "width of heads": attention.num_heads * attention.head_dim}


def _stays(attention: nn.Module) -> bool:
    """Return whether an adopted attention has got parts that torch's fast path would pass by."""
    return vars(attention)[HOLDERS].parts != _list_parts(attention)


def _make_stock() -> nn.Module:
    return nn.MultiheadAttention.__new__(nn.MultiheadAttention)


def _give_back(attention: nn.Module, own: _Holders) -> None:
    if vars(attention).get(HOLDERS) is not own or _stays(attention):
        return
    hooks = attention._forward_pre_hooks
    del hooks[next(number for number, hook in hooks.items() if hook is _observe_nothing)]
    for name in (HOLDERS, "observers", "biases"):
        vars(attention).pop(name, None)
    attention.__class__ = nn.MultiheadAttention


# By model, its encoders whose fast path takes nested tensors, and the modules inside each, by id; see `walk_once`.
_walked: dict[int, list[tuple[nn.TransformerEncoder, set[int]]]] = {}


@contextmanager
def walk_once(model: nn.Module) -> Iterator[None]:
    """Have `adopt` walk through a model once for all calls in the block, in which no module is added or removed."""
    if id(model) in _walked:
        yield
        return
    _walked[id(model)] = _find_encoders(model)
    try:
        yield
    finally:
        del _walked[id(model)]


def _find_around(model: nn.Module, attention: nn.Module) -> list[nn.TransformerEncoder]:
    """Return the encoders of a model whose fast path takes nested tensors and that hold an attention."""
    known = _walked[id(model)] if id(model) in _walked else _find_encoders(model)
    return [encoder for encoder, inside in known if id(attention) in inside]


def _find_encoders(model: nn.Module) -> list[tuple[nn.TransformerEncoder, set[int]]]:
    found = [encoder for encoder in model.modules() if isinstance(encoder, nn.TransformerEncoder)]
    return [(encoder, {id(module) for module in encoder.modules()}) for encoder in found]


def valid_keys(key_padding_mask: Tensor | None) -> Tensor | None:
    """Return True where a key is a real token, from torch's mask (True, or below -5000, is padding), [B, K]."""
    if key_padding_mask is None:
        return None
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    return key_padding_mask > VERY_NEGATIVE


def _observe_nothing(_module: nn.Module, _inputs: tuple[Tensor, ...]) -> None:
    """Keep `nn.TransformerEncoderLayer` off its fast path: in evaluation it calls C++ unless a child has a hook."""


def _is_batched(query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> bool:
    dims = (query.dim(), key.dim(), value.dim())
    padding = None if key_padding_mask is None else key_padding_mask.dim()
    if dims not in ((2, 2, 2), (3, 3, 3)) or (padding is not None and padding != dims[0] - 1):
        raise ShapeError(
            f"query, key and value have {dims} dimensions and key_padding_mask {padding}; expected 3 and 2 for a "
            "batch, 2 and 1 for a single sequence."
        )
    return dims[0] == 3


def _transpose_keeping_identity(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # `_project` projects once where query, key and value are the same tensor
    key_first = key.transpose(0, 1)
    value_first = key_first if value is key else value.transpose(0, 1)
    return key_first if query is key else query.transpose(0, 1), key_first, value_first


def _require_fitting(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
) -> None:
    # sizes of 1 would be broadcast and a transposed padding mask be read as if it were not
    batch, keys = key.shape[0], key.shape[1]
    found = [tuple(tensor.shape) for tensor in (query, key, value)]
    expected = [(batch, query.shape[1], module.embed_dim), (batch, keys, module.kdim), (batch, keys, module.vdim)]
    if found != expected:
        raise ShapeError(
            f"query, key and value have shapes {found} as [B, L, width]; expected {expected}, "
            f"with batch_first={module.batch_first}."
        )
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != (batch, keys):
        raise ShapeError(f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; expected {(batch, keys)}.")


def _merge_masks(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    causal_hint: bool,
) -> Tensor | None:
    """Return one additive mask broadcastable to [B, H, Q, K], with torch's rules for merging the two masks."""
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "is_causal=True was given without attn_mask; pass the causal mask as well, "
            "for example nn.Transformer.generate_square_subsequent_mask(L)."
        )
    padding = F._canonical_mask(
        key_padding_mask, "key_padding_mask", F._none_or_dtype(attn_mask), "attn_mask", query.dtype
    )
    if causal_hint:
        return None
    mask = F._canonical_mask(attn_mask, "attn_mask", None, "", query.dtype, check_other=False)
    batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    if mask is not None:
        expected = (queries, keys) if mask.dim() == 2 else (batch * module.num_heads, queries, keys)
        if tuple(mask.shape) != expected:
            raise ShapeError(f"attn_mask has shape {tuple(mask.shape)}; expected {expected}.")
        shape = (1, 1) if mask.dim() == 2 else (batch, module.num_heads)
        mask = mask.view(*shape, queries, keys)
    if padding is not None:
        padding = padding.view(batch, 1, 1, keys)
        mask = padding if mask is None else mask + padding
    appended = int(module.bias_k is not None) + int(module.add_zero_attn)
    return mask if mask is None or appended == 0 else F.pad(mask, (0, appended))
