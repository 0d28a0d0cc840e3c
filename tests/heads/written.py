"""Attentions in the forms that people write and copy, small: one table, used by the tests and by docs/any-model.md.

Each is written anew from the idea: names, shapes and order of operations are those of the form it stands for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from heads.attentions import KeyValueAttention, StridedAttention
from heads.calling import CausalSelfAttention, EinsumAttention
from heads.own import LensAttention, ListAttention, ThreeLists
from heads.vision import Attention as VisionAttention
from heads.vision import WindowAttention

WIDTH, HEADS, SIZE, GROUPS, TOKENS = 24, 4, 6, 2, 7


@dataclass(frozen=True)
class Written:
    """One form.

    Attributes:
        name: Where it is copied from, or what it is.
        make: Builds one; call `build` instead.
        form: What is particular about it, for the documentation.
        arguments: How many sequences of tokens it takes.
        tokens: Their number in a sequence.
        width: Their width.
        tokens_first: Whether it takes [L, B, d].
        row: The kind of row that the refusal prints and that reads it; empty where it is read as it is.
        refused: Why it is refused, a part of the message; empty where it is read.
    """

    name: str
    make: Callable[[], nn.Module]
    form: str
    arguments: int = 1
    tokens: int = TOKENS
    width: int = WIDTH
    tokens_first: bool = False
    row: str = ""
    refused: str = ""

    def build(self) -> nn.Module:
        """The attention, in evaluation mode, float64, the same at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return self.make().double().eval()

    def inputs(self) -> tuple[Tensor, ...]:
        """Positional arguments of one forward pass."""
        generator = torch.Generator().manual_seed(12)
        size = (self.tokens, 2, self.width) if self.tokens_first else (2, self.tokens, self.width)
        return tuple(torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(self.arguments))

    def __str__(self) -> str:
        return self.name


def capture(heads: hw.heads.Heads, model: nn.Module, inputs: tuple[Tensor, ...]) -> hw.heads.Capture | None:
    """What one call computed: weights, values and outputs of heads; None where weights are refused."""
    try:
        with hw.Taps(heads, weights=True, values=True, outputs=True) as taps:
            model(*inputs)
            return taps.read()[0]
    except (hw.errors.LayoutError, hw.errors.NotFired):
        return None


def find(form: Written, model: nn.Module) -> hw.heads.Heads:
    """The heads, by the call that the refusal prints where a row is needed."""
    if not form.row:
        return hw.find_heads(model)
    try:
        hw.find_heads(model)
    except hw.errors.LayoutError as refusal:
        (call,) = re.findall(r"^ +(hw\.find_heads\(.*)$", str(refusal), re.MULTILINE)
        assert f"(hw.layouts.{form.row}(" in call
        return eval(call, {"hw": hw, "model": model})
    raise AssertionError(f"{form} was found without a row")


def split(x: Tensor, heads: int) -> Tensor:
    """[B, L, H * e] -> [B, H, L, e]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    """[B, H, L, e] -> [B, L, H * e]."""
    return x.transpose(1, 2).contiguous().flatten(2)


def linears(count: int, out: int = WIDTH, bias: bool = True) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, out, bias=bias) for _ in range(count)]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: nn.Module | None = None):
    """The function of The Annotated Transformer: outputs and weights."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = scores.softmax(dim=-1)
    if dropout is not None:
        weights = dropout(weights)
    return torch.matmul(weights, value), weights


class Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h, self.d_k, self.attn = HEADS, SIZE, None
        self.linears, self.dropout = nn.ModuleList(linears(4)), nn.Dropout(0.1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        projected = [split(linear(x), self.h) for linear, x in zip(self.linears, (query, key, value), strict=False)]
        x, self.attn = attend(*projected, mask=mask, dropout=self.dropout)
        return self.linears[-1](join(x))


class BertPytorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h, self.d_k = HEADS, SIZE
        self.linear_layers, self.output_linear = nn.ModuleList(linears(3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_linear(join(attend(*(split(linear(x), self.h) for linear in self.linear_layers))[0]))


class MinGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = linears(4)
        self.attn_drop, self.n_head = nn.Dropout(0.1), HEADS
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(project(x), self.n_head) for project in (self.query, self.key, self.value))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, : x.size(1), : x.size(1)] == 0, float("-inf"))
        return self.proj(join(self.attn_drop(F.softmax(att, dim=-1)) @ v))


class DiveIntoDeepLearning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.W_q, self.W_k, self.W_v, self.W_o = linears(4, bias=False)

    def transpose_qkv(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).permute(0, 2, 1, 3).flatten(0, 1)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        q, k, v = (self.transpose_qkv(w(x)) for w, x in ((self.W_q, queries), (self.W_k, keys), (self.W_v, values)))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        if valid_lens is not None:
            hidden = torch.arange(scores.shape[-1]) >= valid_lens.repeat_interleave(self.num_heads)[:, None, None]
            scores = scores.masked_fill(hidden, -1e6)
        output = torch.bmm(F.softmax(scores, dim=-1), v).unflatten(0, (-1, self.num_heads)).permute(0, 2, 1, 3)
        return self.W_o(output.flatten(2))


class FromScratch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d_out, self.num_heads, self.head_dim = WIDTH, HEADS, SIZE
        self.W_query, self.W_key, self.W_value = linears(3, bias=False)
        self.out_proj, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.register_buffer("mask", torch.triu(torch.ones(8, 8), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        b, tokens, _ = x.shape
        shape = (b, tokens, self.num_heads, self.head_dim)
        keys, queries, values = (w(x).view(shape).transpose(1, 2) for w in (self.W_key, self.W_query, self.W_value))
        scores = queries @ keys.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:tokens, :tokens], -torch.inf)
        weights = self.dropout(torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1))
        return self.out_proj((weights @ values).transpose(1, 2).contiguous().view(b, tokens, self.d_out))


class Prepared(nn.Module):
    """[L, B, d] -> [L, B, H, e]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.heads, self.d_k = nn.Linear(WIDTH, WIDTH), HEADS, SIZE

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(*x.shape[:-1], self.heads, self.d_k)


class Labml(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d_k, self.heads, self.scale = SIZE, HEADS, 1 / math.sqrt(SIZE)
        self.query, self.key, self.value = Prepared(), Prepared(), Prepared()
        self.softmax, self.output = nn.Softmax(dim=1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        attn = self.softmax(torch.einsum("ibhd,jbhd->ijbh", query, key) * self.scale)
        return self.output(torch.einsum("ijbh,jbhd->ibhd", attn, value).reshape(*x.shape[:2], -1))


class VitPytorch(nn.Module):
    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, (inner // HEADS) ** -0.5
        self.norm, self.attend, self.dropout = nn.LayerNorm(WIDTH), nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.to_qkv = nn.Linear(WIDTH, 3 * inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part, self.heads) for part in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        attn = self.dropout(self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale))
        return self.to_out(join(torch.matmul(attn, v)))


class XTransformers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, SIZE**-0.5
        self.to_q, self.to_k, self.to_v, self.to_out = linears(4, bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        q, k, v = (split(w(y), self.heads) for w, y in ((self.to_q, x), (self.to_k, source), (self.to_v, source)))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        attn = F.softmax(sim, dim=-1).type(sim.dtype)
        return self.to_out(join(torch.einsum("b h i j, b h j d -> b h i d", attn, v)))


class Fairseq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim, self.scaling = WIDTH, HEADS, SIZE, SIZE**-0.5
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = linears(4)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        tokens, batch, width = query.size()

        def shape(x: Tensor) -> Tensor:
            return x.contiguous().view(-1, batch * self.num_heads, self.head_dim).transpose(0, 1)

        q, k, v = shape(self.q_proj(query) * self.scaling), shape(self.k_proj(key)), shape(self.v_proj(value))
        weights = F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
        attn = torch.bmm(weights, v).transpose(0, 1).contiguous().view(tokens, batch, width)
        return self.out_proj(attn), weights.view(batch, self.num_heads, tokens, -1).mean(1)


class OpenNMT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dim_per_head, self.head_count = SIZE, HEADS
        self.linear_keys, self.linear_values, self.linear_query, self.final_linear = linears(4)
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.1)

    def forward(self, key: Tensor, value: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
        key, value = split(self.linear_keys(key), self.head_count), split(self.linear_values(value), self.head_count)
        query = split(self.linear_query(query), self.head_count) / math.sqrt(self.dim_per_head)
        scores = torch.matmul(query, key.transpose(2, 3))
        scores = scores if mask is None else scores.masked_fill(mask.unsqueeze(1), -1e18)
        return self.final_linear(join(torch.matmul(self.dropout(self.softmax(scores)), value)))


class LitGPT(nn.Module):
    def __init__(self, name: str = "qkv") -> None:
        super().__init__()
        self.config = SimpleNamespace(n_head=HEADS, n_query_groups=GROUPS, head_size=SIZE, n_embd=WIDTH)
        setattr(self, name, nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * SIZE))
        self.name, self.proj = name, nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads, groups, size = self.config.n_head, self.config.n_query_groups, self.config.head_size
        qkv = getattr(self, self.name)(x)
        if self.name == "attn":
            # queries of a group, its key and its value
            grouped = qkv.view(*x.shape[:2], groups, -1, size).permute(0, 2, 3, 1, 4)
            q, k, v = grouped.split((heads // groups, 1, 1), dim=2)
            k, v = (part.expand(-1, -1, heads // groups, -1, -1) for part in (k, v))
            q, k, v = (part.reshape(len(x), heads, -1, size) for part in (q, k, v))
        else:
            q, k, v = qkv.split((heads * size, groups * size, groups * size), dim=-1)
            q, k, v = split(q, heads), split(k, groups), split(v, groups)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < heads)
        return self.proj(join(y))


class InProjection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.scale = HEADS, SIZE**-0.5
        self.in_proj_weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 4)
        self.in_proj_bias, self.out_proj = nn.Parameter(torch.randn(3 * WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(y, self.num_heads) for y in F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        return self.out_proj(join(((q * self.scale) @ k.transpose(-1, -2)).softmax(dim=-1) @ v))


class EspNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d_k, self.h, self.attn, self.dropout = SIZE, HEADS, None, nn.Dropout(0.1)
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = linears(4)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        linear = (self.linear_q, self.linear_k, self.linear_v)
        q, k, v = (split(project(x), self.h) for project, x in zip(linear, (query, key, value), strict=True))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1).eq(0), torch.finfo(scores.dtype).min)
        self.attn = torch.softmax(scores, dim=-1)
        return self.linear_out(join(torch.matmul(self.dropout(self.attn), v)))


class RelativeBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.d_kv = HEADS, SIZE
        self.q, self.k, self.v, self.o = linears(4, bias=False)
        self.relative_attention_bias = nn.Embedding(9, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        bias = self.relative_attention_bias((place - place[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)
        scores = split(self.q(x), self.n_heads) @ split(self.k(x), self.n_heads).mT + bias
        return self.o(join(F.softmax(scores.float(), dim=-1).type_as(scores) @ split(self.v(x), self.n_heads)))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads, self.head_dim = HEADS, GROUPS, SIZE
        self.n_rep = HEADS // GROUPS
        self.wq, self.wo = linears(2, bias=False)
        self.wk, self.wv = linears(2, GROUPS * SIZE, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), torch.tensor([1.0, 0.1, 0.01], dtype=x.dtype))
        turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(3)

    def repeat(self, x: Tensor) -> Tensor:
        b, tokens, groups, size = x.shape
        return x[:, :, :, None].expand(b, tokens, groups, self.n_rep, size).reshape(b, tokens, -1, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).view(*x.shape[:2], -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = self.rotate(q), self.rotate(k)
        q, k, v = (part.transpose(1, 2) for part in (q, self.repeat(k), self.repeat(v)))
        hidden = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        scores = F.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim) + hidden, dim=-1)
        return self.wo(join(torch.matmul(scores, v)))


class Mistral(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.repeats = self.n_local_heads, self.n_rep

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).view(*x.shape[:2], -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        k, v = (torch.repeat_interleave(part, self.repeats, dim=2).transpose(1, 2) for part in (self.rotate(k), v))
        seen = torch.ones(x.shape[1], x.shape[1]).tril().triu(-3).bool()
        return self.wo(join(F.scaled_dot_product_attention(self.rotate(q).transpose(1, 2), k, v, seen)))


class NeoX(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.hidden_size_per_attention_head = HEADS, SIZE
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.query_key_value(hidden).unflatten(-1, (self.num_attention_heads, -1)).chunk(3, dim=-1)
        q, k, v = (part.permute(0, 2, 1, 3) for part in (q, k, v))
        scores = torch.baddbmm(
            torch.zeros((), dtype=q.dtype), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=0.0, alpha=0.5
        ).view(*q.shape[:3], -1)
        return self.dense(join(torch.softmax(scores, -1) @ v))


class Detr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        self.place = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        placed = x + self.place * torch.arange(x.shape[1])[:, None]
        return x + self.self_attn(placed, placed, value=x)[0]


class KerasLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.key_dim = HEADS, SIZE
        for name in ("query", "key", "value"):
            setattr(self, f"{name}_kernel", nn.Parameter(torch.randn(WIDTH, HEADS, SIZE) / 4))
            setattr(self, f"{name}_bias", nn.Parameter(torch.randn(HEADS, SIZE)))
        self.output_kernel = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("btd,dhe->bthe", x, self.query_kernel) + self.query_bias
        k = torch.einsum("btd,dhe->bthe", x, self.key_kernel) + self.key_bias
        v = torch.einsum("btd,dhe->bthe", x, self.value_kernel) + self.value_bias
        weights = torch.softmax(torch.einsum("bqhe,bkhe->bhqk", q / self.key_dim**0.5, k), dim=-1)
        return torch.einsum("bqhe,hed->bqd", torch.einsum("bhqk,bkhe->bqhe", weights, v), self.output_kernel)


class Tensor2Tensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.output_transform = linears(4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(project(x), self.num_heads) for project in (self.q, self.k, self.v))
        logits = torch.matmul(q * SIZE**-0.5, k.transpose(-1, -2))
        logits = logits + torch.ones_like(logits[0, 0]).triu(1) * -1e9
        return self.output_transform(join(torch.matmul(F.softmax(logits, dim=-1), v)))


class AllYouNeed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.d_k, self.d_v = HEADS, SIZE, 9
        self.w_qs, self.w_ks = linears(2, bias=False)
        self.w_vs, self.fc = nn.Linear(WIDTH, HEADS * 9, bias=False), nn.Linear(HEADS * 9, WIDTH, bias=False)
        self.dropout, self.layer_norm = nn.Dropout(0.1), nn.LayerNorm(WIDTH)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        residual = q
        q, k, v = (split(w(x), self.n_head) for w, x in ((self.w_qs, q), (self.w_ks, k), (self.w_vs, v)))
        attn = self.dropout(F.softmax(torch.matmul(q / self.d_k**0.5, k.transpose(2, 3)), dim=-1))
        return self.layer_norm(self.dropout(self.fc(join(torch.matmul(attn, v)))) + residual), attn


class Former(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.heads = WIDTH, HEADS
        self.tokeys, self.toqueries, self.tovalues = linears(3, bias=False)
        self.unifyheads = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.size()
        keys, queries, values = (
            split(project(x), self.heads).contiguous().view(b * self.heads, t, -1) / scale
            for project, scale in ((self.tokeys, SIZE**0.25), (self.toqueries, SIZE**0.25), (self.tovalues, 1.0))
        )
        dot = F.softmax(torch.bmm(queries, keys.transpose(1, 2)), dim=2)
        return self.unifyheads(join(torch.bmm(dot, values).view(b, self.heads, t, -1)))


class SetTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dim_V, self.num_heads = WIDTH, HEADS
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = linears(4)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        q, k, v = self.fc_q(q), self.fc_k(k), self.fc_v(k)
        q_, k_, v_ = (torch.cat(part.split(self.dim_V // self.num_heads, 2), 0) for part in (q, k, v))
        weights = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(self.dim_V), 2)
        o = torch.cat((q_ + weights.bmm(v_)).split(q.size(0), 0), 2)
        return o + F.relu(self.fc_o(o))


class Unnamed(nn.Module):
    """Four projections whose names tell nothing, not in the order of their roles."""

    def __init__(self) -> None:
        super().__init__()
        self.nh = HEADS
        self.a, self.b, self.c, self.d = linears(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(join(attend(*(split(project(x), self.nh) for project in (self.c, self.a, self.d)))[0]))


class Dictionary(nn.Module):
    """Projections in a dictionary, sizes in another; part of a module that has more."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"heads": HEADS}
        self.maps = nn.ModuleDict(dict(zip(("theta", "phi", "g", "back"), linears(4), strict=True)))
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(self.maps[name](x), self.sizes["heads"]) for name in ("theta", "phi", "g"))
        return self.feed_forward(x + self.maps["back"](join(F.scaled_dot_product_attention(q, k, v))))


class FusedUnnamed(nn.Module):
    """One projection in any order of blocks, or head by head."""

    def __init__(self, order: tuple[int, int, int] = (0, 2, 1), by_head: bool = False) -> None:
        super().__init__()
        self.count, self.order, self.by_head = HEADS, order, by_head
        self.mix, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x)
        parts = [split(part, self.count) for part in mixed.chunk(3, -1)]
        if self.by_head:
            parts = [part.transpose(1, 2) for part in mixed.unflatten(-1, (self.count, 3, -1)).unbind(-2)]
        q, k, v = (parts[place] for place in self.order)
        return self.back(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Conditioned(FusedUnnamed):
    """Names that a row knows, in an order that it does not expect."""

    def __init__(self, order: tuple[int, int, int] = (1, 0, 2)) -> None:
        super().__init__(order)
        self.num_heads, self.qkv, self.proj = HEADS, self.mix, self.back
        del self.mix, self.back

    def forward(self, x: Tensor) -> Tensor:
        parts = [split(part, self.num_heads) for part in self.qkv(x).chunk(3, -1)]
        q, k, v = (parts[place] for place in self.order)
        return self.proj(join(F.scaled_dot_product_attention(q, k, v)))


class PairByHead(KeyValueAttention):
    """Names that a row knows, with the key and the value of each head side by side."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        k, v = self.to_kv(context).unflatten(-1, (self.heads, 2, -1)).permute(3, 0, 2, 1, 4)
        return self.to_out(join(F.scaled_dot_product_attention(split(self.to_q(x), self.heads), k, v)))


class PairUnnamed(nn.Module):
    """A projection of values and keys beside one of queries, for a context."""

    def __init__(self) -> None:
        super().__init__()
        self.head_n, self.ask, self.tell, self.back = HEADS, *linears(1), nn.Linear(WIDTH, 2 * WIDTH), *linears(1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        v, k = (split(part, self.head_n) for part in self.tell(context).chunk(2, -1))
        return self.back(join(F.scaled_dot_product_attention(split(self.ask(x), self.head_n), k, v)))


class Tiled(nn.Module):
    """Grouped queries whose keys are repeated as a whole: query head h has key head h mod G."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.apart = apart
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, GROUPS, SIZE
        self.q_proj, self.o_proj = linears(2)
        self.k_proj, self.v_proj = linears(2, GROUPS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(w(x), w.out_features // self.head_dim) for w in (self.q_proj, self.k_proj, self.v_proj))
        if self.apart:
            weights = (q.unflatten(1, (-1, self.num_kv_heads)) @ k.unsqueeze(1).mT).softmax(-1)
            return self.o_proj(join((weights @ v.unsqueeze(1)).flatten(1, 2)))
        k, v = (part.repeat(1, q.shape[1] // part.shape[1], 1, 1) for part in (k, v))
        return self.o_proj(join(F.scaled_dot_product_attention(q, k, v)))


class Core(nn.Module):
    """Heads, joined and not projected."""

    def __init__(self) -> None:
        super().__init__()
        self.count = HEADS
        self.left, self.right, self.middle = linears(3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(project(x), self.count) for project in (self.right, self.middle, self.left))
        return join(F.scaled_dot_product_attention(q, k, v))


class Around(nn.Module):
    """A block that projects what the attention inside it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.mix, self.norm = Core(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mix(self.core(x)))


class UnnamedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y, self.z = linears(3, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.z(x) @ self.x(x).mT / 2).softmax(-1) @ self.y(x)


class UnnamedList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts, self.back = nn.ModuleList(UnnamedHead() for _ in range(HEADS)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.cat([part(x) for part in self.parts], -1))


class UnnamedParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, HEADS, SIZE) / 3 for _ in range(3))
        self.back = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = (torch.einsum("btd,dhe->bhte", x, weight) for weight in self.weights)
        return torch.einsum("bhte,hed->btd", F.scaled_dot_product_attention(q, k, v), self.back)


class SharedByHeads(nn.Module):
    """All heads have one projection, of the width of a head: there is nothing to tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim, self.fc_out = HEADS, SIZE, nn.Linear(WIDTH, WIDTH)
        self.queries, self.keys, self.values = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (self.heads, self.head_dim))
        energy = torch.einsum("nqhd,nkhd->nhqk", self.queries(x), self.keys(x))
        return self.fc_out(torch.einsum("nhqk,nkhd->nqhd", energy.softmax(3), self.values(x)).flatten(2))


class Asking(Unnamed):
    """Takes more than tokens."""

    def forward(self, x: Tensor, table: dict) -> Tensor:
        return super().forward(x + table["place"])


WRITTEN: tuple[Written, ...] = (
    Written("The Annotated Transformer", Annotated, "four Linears in a list; `h`", 3),
    Written("BERT-pytorch", BertPytorch, "three Linears in a list; `h`"),
    Written("minGPT", MinGPT, "`key`, `query`, `value`, `proj`; `n_head`; causal mask in a buffer"),
    Written("nanoGPT, flash", lambda: CausalSelfAttention(WIDTH, HEADS), "`c_attn` in blocks"),
    Written(
        "nanoGPT, slow", lambda: slow(CausalSelfAttention(WIDTH, HEADS)), "`c_attn` in blocks; softmax written out"
    ),
    Written("Dive into Deep Learning", DiveIntoDeepLearning, "`W_q`, ...; scores [B H, Q, K]", 3),
    Written("LLMs from scratch", FromScratch, "`W_query`, ..., `out_proj`; masked in place"),
    Written("labml", Labml, "tokens first; wrappers that return [L, B, H, e]; softmax over axis 1", tokens_first=True),
    Written("vit-pytorch", VitPytorch, "`to_qkv`; `to_out` is a Sequential; `heads`"),
    Written("x-transformers", XTransformers, "`to_q`, `to_k`, `to_v`, `to_out`; einsum"),
    Written("fairseq", Fairseq, "tokens first; heads folded into the batch", 3, tokens_first=True),
    Written("OpenNMT", OpenNMT, "`linear_keys`, ..., `final_linear`; `head_count`; keys come first", 3),
    Written("LitGPT", LitGPT, "`qkv` in grouped blocks; sizes in `config`"),
    Written("LitGPT, before", lambda: LitGPT("attn"), "`attn`: queries, key and value of each group"),
    Written("timm", lambda: VisionAttention(WIDTH, HEADS), "`qkv`, `proj`"),
    Written("Swin windows", lambda: WindowAttention(WIDTH, HEADS), "a bias for each head and distance", tokens=4),
    Written("open_clip", InProjection, "`in_proj_weight` is a parameter of its own"),
    Written("heads in a list", lambda: ListAttention(WIDTH, HEADS, SIZE), "each head a module, as in a lecture"),
    Written("three lists of maps", lambda: ThreeLists(WIDTH), "each head sees its part of the input; no W_O"),
    Written("ESPnet", EspNet, "`linear_q`, ..., `linear_out`; `h`; keeps its weights", 3),
    Written("T5-like", RelativeBias, "a relative bias for each head, no scale; softmax in float32"),
    Written("Llama, reference code", Llama, "`wq`, ...; rotary positions; grouped queries"),
    Written("Mistral, reference code", Mistral, "grouped queries, a sliding window"),
    Written("GPT-NeoX, Megatron", NeoX, "`query_key_value`, head by head; baddbmm"),
    Written(
        "Perceiver, cross-attention",
        lambda: KeyValueAttention(WIDTH, HEADS, SIZE),
        "`to_q`, and `to_kv` of a context",
        2,
    ),
    Written("DETR", Detr, "`nn.MultiheadAttention`, positions added to queries and keys"),
    Written("TransformerLens", lambda: LensAttention(WIDTH, HEADS, SIZE), "parameters [H, d, e], einsum"),
    Written("einsum around the call", lambda: EinsumAttention(WIDTH, HEADS, SIZE), "parameter [3, d, H, e]"),
    Written("Keras-like", KerasLike, "kernels [d, H, e] and biases [H, e]", row="SeparateParameters"),
    Written("tensor2tensor", Tensor2Tensor, "`q`, `k`, `v`, `output_transform`; mask added"),
    Written("Attention is all you need in PyTorch", AllYouNeed, "`w_qs`, ..., `fc`; wide values; norm inside", 3),
    Written("former", Former, "`tokeys`, ..., `unifyheads`; heads folded into the batch"),
    Written("Set Transformer", SetTransformer, "`fc_q`, ..., `fc_o`; heads joined along the batch; queries added", 2),
    Written("names that tell nothing", Unnamed, "four Linears in any order", row="SeparateLinears"),
    Written("a dictionary of maps", Dictionary, "`maps.theta`, ...; `sizes.heads`", row="SeparateLinears"),
    Written("fused, in another order", FusedUnnamed, "blocks [query; value; key]", row="FusedLinear"),
    Written(
        "fused, head by head", lambda: FusedUnnamed((0, 1, 2), True), "[query; key; value] of each", row="FusedLinear"
    ),
    Written("`qkv` in another order", Conditioned, "blocks [key; query; value]", row="FusedLinear"),
    Written("`qkv`, values first", lambda: Conditioned((0, 2, 1)), "blocks [query; value; key]", row="FusedLinear"),
    Written("`to_kv`, head by head", lambda: PairByHead(WIDTH, HEADS, SIZE), "[key; value]", 2, row="FusedLinear"),
    Written("values and keys in one", PairUnnamed, "blocks [value; key]", 2, row="FusedLinear"),
    Written("keys repeated as a whole", Tiled, "query head h has key head h mod G", row="SeparateLinears"),
    Written("keys of each tile", lambda: Tiled(True), "softmax of [B, H / G, G, Q, K]", row="SeparateLinears"),
    Written("W_O in the block around it", Around, "`..mix`", row="SeparateLinears"),
    Written("a list of heads of other names", UnnamedList, "each head three Linears", row="HeadList"),
    Written("a list of parameters", UnnamedParameters, "[d, H, e] in any order", row="SeparateParameters"),
    Written(
        "heads that alternate",
        lambda: StridedAttention(WIDTH, HEADS, HEADS, SIZE),
        "'b n (d h)'",
        refused="its heads alternate feature by feature",
    ),
    Written("one projection for all heads", SharedByHeads, "[e, e]", refused="has one projection for all 4 heads"),
    Written("more than tokens", Asking, "cannot be called alone", refused="calling it with tokens raises TypeError"),
)


def slow(attention: CausalSelfAttention) -> CausalSelfAttention:
    attention.flash = False
    return attention
