"""Attentions that write their softmax out, in the forms in which people write them, and others that only look alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.attentions import SeparateAttention

TOKENS = 6
X = torch.randn(3, TOKENS, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
KEEP = torch.arange(TOKENS) < torch.tensor([[6], [4], [5]])


class Written(SeparateAttention):
    """Scores by `@`, masked by -inf, and the softmax a method of the tensor."""

    causal = False

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        return self.o_proj(self.join(self.attend(q, k, v, self.allow(keep))))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [B, H, L, e]."""
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def allow(self, keep: Tensor | None) -> Tensor:
        """True where a query may attend, [B or 1, 1, Q, K]."""
        allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
        allowed = allowed.tril() if self.causal else allowed
        return allowed if keep is None else allowed & keep[:, None, None, :]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
        return scores.softmax(-1) @ v


class OfAModule(Written):
    """A fused projection, as in vision transformers; the softmax and the dropout are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = self.num_heads
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj
        self.to_out = nn.Sequential(nn.Linear(20, 12))
        self.to_qkv, self.attending, self.dropping = nn.Linear(12, 60), nn.Softmax(dim=-1), nn.Dropout(0.5)

    def o_proj(self, joined: Tensor) -> Tensor:
        return self.to_out(joined)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.split(part) for part in self.to_qkv(x).chunk(3, dim=-1))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return torch.matmul(self.dropping(self.attending(scores.masked_fill(~allowed, -1e30))), v)


class Causal(Written):
    """A causal mask of its own, and torch's function imported with its package."""

    causal = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = F.softmax(scores.masked_fill(allowed == 0, float("-inf")), dim=-1)
        return F.dropout(weights, 0.3, self.training) @ v


def attend_freely(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: Any = None
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    weights = torch.softmax(scores.masked_fill(mask == 0, -1e9), dim=-1)
    weights = weights if dropout is None else dropout(weights)
    return torch.matmul(weights, value), weights


class OfAFunction(Written):
    """A function outside the class; it keeps the weights that it used."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        heads, self.attn = attend_freely(q, k, v, allowed)
        return heads


class TimeFirst(Written):
    """Tokens first, heads in the axis of the batch, and a softmax in single precision that is cast back."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = x.transpose(0, 1)
        tokens, batch, _ = x.shape
        q, k, v = (
            projection(x).contiguous().view(tokens, batch * self.num_heads, self.head_dim).transpose(0, 1)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = torch.bmm(q * self.head_dim**-0.5, k.transpose(1, 2))
        if keep is not None:
            scores = scores.view(batch, self.num_heads, tokens, tokens)
            scores = scores.masked_fill(~keep[:, None, None, :], float("-inf")).view(-1, tokens, tokens)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores)
        heads = torch.bmm(F.dropout(weights, p=0.1, training=self.training), v)
        joined = heads.transpose(0, 1).contiguous().view(tokens, batch, -1)
        return self.o_proj(joined).transpose(0, 1)


class Folded(Written):
    """Heads in the axis of the batch, which comes first."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        allowed = allowed.expand(len(q), self.num_heads, -1, -1).reshape(-1, TOKENS, TOKENS)
        q, k, v = (part.reshape(-1, TOKENS, self.head_dim) for part in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.head_dim)
        heads = torch.bmm(nn.functional.softmax(torch.where(allowed, scores, -1e6), dim=-1), v)
        return heads.reshape(-1, self.num_heads, TOKENS, self.head_dim)


class WithoutOutput(Written):
    """The output projection is outside; the mask is added, and the weights are returned."""

    def __init__(self) -> None:
        super().__init__()
        del self.o_proj

    def forward(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        weights = nn.Softmax(dim=-1)(scores + (~self.allow(keep)).to(q.dtype) * -10000.0)
        return self.join(torch.matmul(weights, v)), weights


class Grouped(Written):
    """The query heads of a key/value head in an axis of their own."""

    def __init__(self) -> None:
        super().__init__(key_value_heads=2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = q.unflatten(1, (2, 2)), k[:, ::2], v[:, ::2]
        scores = torch.einsum("bgrqe,bgke->bgrqk", q, k) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(~(allowed if allowed.dim() == 2 else allowed.unsqueeze(1)), -1e20)
        weights = torch.softmax(scores.float(), dim=-1).to(q.dtype)
        return torch.einsum("bgrqk,bgke->bgrqe", weights, v).flatten(1, 2)


class ClearedAfter(Written):
    """Keys that are masked before the softmax by a large number are cleared after it again."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1).masked_fill(~allowed, 0.0)
        return torch.matmul(F.dropout(weights, 0.2, self.training), v)


class Attending(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        scores = torch.einsum("... i d, ... j d -> ... i j", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~allowed, -torch.finfo(scores.dtype).max).softmax(dim=-1)
        return torch.einsum("... i j, ... j d -> ... i d", weights, v)


class OfAnInnerModule(Written):
    """The softmax is in a module inside the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attending = Attending()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return self.attending(q, k, v, allowed)


class BesideGates(Written):
    """Gates beside the attention have a softmax of other axes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 3)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        gates = self.gate(x).softmax(-1)
        return super().forward(x, keep) * gates.sum(-1, keepdim=True)


WRITTEN = (
    *(Written, OfAModule, Causal, OfAFunction, TimeFirst, Folded, WithoutOutput, Grouped, ClearedAfter),
    *(OfAnInnerModule, BesideGates),
)


class Called(Written):
    """The fused kernel attends: under grouped queries, with a mask of any form and a scale."""

    def __init__(
        self,
        key_value_heads: int = 2,
        grouped: str = "enable_gqa",
        mask: str = "boolean",
        causal: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__(key_value_heads=key_value_heads)
        self.grouped, self.mask, self.causal, self.scale = grouped, mask, causal, scale
        own = torch.randn(1, 4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        self.added = own if mask == "with a bias of its own" else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        members = self.num_heads // self.key_value_heads
        k, v = (k, v) if self.grouped == "repeated" else (k[:, ::members], v[:, ::members])
        plain = allowed.dim() == 2
        is_causal = self.mask == "is_causal" and plain
        mask = None if is_causal or (plain and not self.causal) else allowed
        if self.mask in ("additive", "with a bias of its own"):
            mask = torch.zeros_like(allowed, dtype=q.dtype).masked_fill(~allowed, -math.inf)
            mask = mask if self.added is None else mask + self.added
        settings = {"is_causal": is_causal, "scale": self.scale, "enable_gqa": self.grouped == "enable_gqa"}
        return F.scaled_dot_product_attention(q, k, v, mask, 0.3 if self.training else 0.0, **settings)


FORMS = (*WRITTEN, Called)
CALLED = (
    Called,
    partial(Called, key_value_heads=4, causal=False),
    partial(Called, mask="is_causal"),
    partial(Called, grouped="repeated", mask="additive"),
    partial(Called, key_value_heads=1, mask="with a bias of its own", scale=0.7),
)


def build(form: Callable[[], Written]) -> Written:
    torch.manual_seed(0)
    return form().double().eval()


def written_out(model: Any, x: Tensor, keep: Tensor | None = None, bias: Tensor | None = None) -> dict[str, Tensor]:
    """What an attention computes, from its queries, keys and values alone."""
    q, k, v = model.project(x)
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    scale = getattr(model, "scale", None) or q.shape[-1] ** -0.5
    scores = scale * torch.einsum("bhqe,bhke->bhqk", q, k)
    for added in (bias, getattr(model, "added", None)):
        scores = scores if added is None else scores + added
    weights = scores.masked_fill(~model.allow(keep), -math.inf).softmax(-1).nan_to_num(0.0)
    outputs = torch.einsum("bhqk,bhke->bqhe", weights, v)
    returned = outputs.flatten(2) if isinstance(model, WithoutOutput) else model.o_proj(outputs.flatten(2))
    return {"weights": weights, "outputs": outputs, "values": v.transpose(1, 2), "returned": returned}


class Transposed(Written):
    """Scores [B, Q, H, K]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        scores = torch.einsum("bhqe,bhke->bqhk", q, k)
        return torch.einsum("bqhk,bhke->bhqe", scores.softmax(-1), v)


class HeadsFirst(Written):
    """Scores [H * B, Q, K]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1).flatten(0, 1) for part in (q, k, v))
        heads = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
        return heads.unflatten(0, (self.num_heads, -1)).transpose(0, 1)


class Twice(Written):
    """Two attentions of the same heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return super().attend(q, k, v, allowed) + super().attend(k, q, v, allowed)


class Linearized(Written):
    """A softmax over the features of queries, and another over the tokens of keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)


class OverQueries(Written):
    """A softmax over the queries of each key."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-2) @ v


class BetweenHeads(Written):
    """The heads of one token attend to one another."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2)


class Gated(Written):
    """Scores divided by sums of exponentials, and a gate of queries with the shape of scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        weights = (q @ k.mT).exp()
        return weights / weights.sum(-1, keepdim=True) @ v * q.softmax(-1).sum(-1, keepdim=True)


class Changed(Written):
    """Weights that are raised to a power."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1).square() @ v


ALIKE = (Transposed, HeadsFirst, Twice, Linearized, OverQueries, BetweenHeads, Gated, Changed)
