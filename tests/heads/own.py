"""Attentions that hold their weights in parameters of any axes, or one head after another in a list."""

from __future__ import annotations

import re
from math import prod

import torch
from torch import Tensor, nn

import headwise as hw
from reference import particles as reference

WIDTH, HEADS, SIZE = 10, 4, 3
X = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(3))
RULE = hw.SVGD(alpha=0.7, step_size=0.3, prior_precision=0.2, data_size=3.0, inverse_temperature=1.7)


def unpack(tensor: Tensor, axes: str, sizes: dict[str, int]) -> Tensor:
    """A tensor with the axes of a pattern such as "(p h e) d", as a view in the order p, h, e, d of those it has."""
    groups = [(inside.split() if inside else [alone]) for inside, alone in re.findall(r"\(([^()]*)\)|(\w+)", axes)]
    letters = [letter for group in groups for letter in group]
    apart = tensor.reshape([sizes[letter] for letter in letters])
    return apart.permute([letters.index(letter) for letter in "phed" if letter in letters])


def shape_of(axes: str, sizes: dict[str, int]) -> list[int]:
    """The shape of a parameter with these axes."""
    groups = re.findall(r"\(([^()]*)\)|(\w+)", axes)
    return [prod(sizes[letter] for letter in (inside or alone).split()) for inside, alone in groups]


class ParameterAttention(nn.Module):
    """Softmax attention written out, with weights in parameters of any axes; W_O is a parameter too, or a Linear."""

    def __init__(
        self,
        axes: str = "h d e",
        output_axes: str = "",
        key_value_heads: int = HEADS,
        packed: bool = False,
        order: tuple[str, ...] = ("query", "key", "value"),
        width: int = WIDTH,
        head_size: int = SIZE,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.axes, self.output_axes, self.order, self.causal = HEADS, axes, output_axes, order, causal
        self.sizes = {"p": 3, "h": HEADS, "e": head_size, "d": width}
        counts = {"query": HEADS, "key": key_value_heads, "value": key_value_heads}
        self.counts = {kind: {**self.sizes, "h": count} for kind, count in counts.items()}
        if packed:
            together = self.sizes if "p" in axes else {**self.sizes, "h": sum(counts.values())}
            self.w_qkv = nn.Parameter(torch.randn(shape_of(axes, together)) / 2)
        else:
            for kind, name in (("query", "W_Q"), ("key", "W_K"), ("value", "W_V")):
                setattr(self, name, nn.Parameter(torch.randn(shape_of(axes, self.counts[kind])) / 2))
        if output_axes:
            self.W_O = nn.Parameter(torch.randn(shape_of(output_axes, self.sizes)) / 2)
        else:
            self.proj = nn.Linear(HEADS * head_size, width)

    def weights(self) -> dict[str, Tensor]:
        """The weights of query, key and value heads [M, e, d]."""
        return self.split(self.state_dict(keep_vars=True))

    def split(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The heads [M, e, d] of tensors shaped like the parameters."""
        if "w_qkv" not in tensors:
            names = {"query": "W_Q", "key": "W_K", "value": "W_V"}
            return {kind: unpack(tensors[name], self.axes, self.counts[kind]) for kind, name in names.items()}
        if "p" in self.axes:
            return dict(zip(self.order, unpack(tensors["w_qkv"], self.axes, self.sizes), strict=True))
        counts = [self.counts[kind]["h"] for kind in self.order]
        whole = unpack(tensors["w_qkv"], self.axes, {**self.sizes, "h": sum(counts)})
        return dict(zip(self.order, whole.split(counts), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bld,hed->bhle", x, self.weights()[kind]) for kind in ("query", "key", "value"))
        k, v = (part.repeat_interleave(HEADS // part.shape[1], 1) for part in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf)
        heads = scores.softmax(-1) @ v
        if not self.output_axes:
            return self.proj(heads.transpose(1, 2).flatten(2))
        return torch.einsum("bhqe,hed->bqd", heads, unpack(self.W_O, self.output_axes, self.sizes))


class LensAttention(nn.Module):
    """The names and shapes of TransformerLens: W_Q [H, d, e], b_Q [H, e], W_O [H, e, d], b_O [d]."""

    def __init__(self, width: int = WIDTH, num_heads: int = HEADS, head_size: int = SIZE) -> None:
        super().__init__()
        self.n_heads = num_heads
        for name in ("Q", "K", "V"):
            setattr(self, f"W_{name}", nn.Parameter(torch.randn(num_heads, width, head_size) / 2))
            setattr(self, f"b_{name}", nn.Parameter(torch.randn(num_heads, head_size)))
        self.W_O, self.b_O = nn.Parameter(torch.randn(num_heads, head_size, width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.einsum("bld,hde->bhle", x, weight) + bias[:, None]
            for weight, bias in ((self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V))
        )
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -torch.inf)
        return torch.einsum("bhqe,hed->bqd", scores.softmax(-1) @ v, self.W_O) + self.b_O


class Head(nn.Module):
    """One head of the lecture's attention: causal, with three Linears of its own."""

    def __init__(self, width: int, size: int, context: int = 16) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(width, size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(context, context)))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = (q @ k.mT * k.shape[-1] ** -0.5).masked_fill(self.tril[:tokens, :tokens] == 0, -torch.inf)
        return self.dropout(scores.softmax(-1)) @ v


class ListAttention(nn.Module):
    """The lecture's `MultiHeadAttention`: a ModuleList of heads, concatenated and projected."""

    def __init__(self, width: int = WIDTH, num_heads: int = HEADS, size: int = 3, projected: bool = True) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(width, size) for _ in range(num_heads)])
        self.proj = nn.Linear(num_heads * size, width) if projected else nn.Identity()
        if not projected:
            del self.proj
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([head(x) for head in self.heads], dim=-1)
        return self.dropout(self.proj(joined) if hasattr(self, "proj") else joined)


class ThreeLists(nn.Module):
    """A list of Linears for each projection, each on its own part of the input, as in a ViT written from scratch."""

    def __init__(self, width: int = 12, num_heads: int = HEADS) -> None:
        super().__init__()
        self.n_heads, self.d_head = num_heads, width // num_heads
        for name in ("q_mappings", "k_mappings", "v_mappings"):
            setattr(self, name, nn.ModuleList([nn.Linear(self.d_head, self.d_head) for _ in range(num_heads)]))

    def forward(self, x: Tensor) -> Tensor:
        heads = []
        for head, part in enumerate(x.split(self.d_head, -1)):
            q, k, v = (maps[head](part) for maps in (self.q_mappings, self.k_mappings, self.v_mappings))
            heads.append((q @ k.mT / self.d_head**0.5).softmax(-1) @ v)
        return torch.cat(heads, -1)


def forces(theta: Tensor, gradient: Tensor) -> Tensor:
    """The gradient that SVGD hands to the optimizer, by loops over pairs of heads."""
    flat, g = theta.flatten(1), gradient.flatten(1)
    kappa = reference.rbf(reference.median_bandwidth(flat))
    settings = {"alpha": 0.7, "epsilon": 0.3, "tau": 0.2, "N": 3.0, "beta": 1.7, "smoothing": True}
    step = reference.svgd(flat, g, kappa, reference.repulsion(flat, kappa), **settings)
    return step.view(theta.shape)


def with_gradients(model: nn.Module) -> nn.Module:
    model.double()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model
