"""Small vision transformers with timm's structure: fused `qkv`, `proj`, windows and relative biases in Swin."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """timm's `Attention`: rows of `qkv` are [query; key; value]."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.q_norm, self.k_norm = nn.Linear(dim, 3 * dim), nn.Identity(), nn.Identity()
        self.proj, self.attn_drop, self.fused_attn = nn.Linear(dim, dim), nn.Dropout(0.1), True

    def bias(self) -> Tensor | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, bias = self.q_norm(q), self.k_norm(k), self.bias()
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, bias)
        else:
            attn = q * self.head_dim**-0.5 @ k.transpose(-2, -1)
            x = self.attn_drop((attn if bias is None else attn + bias).softmax(dim=-1)) @ v
        return self.proj(x.transpose(1, 2).flatten(2))


class WindowAttention(Attention):
    """timm Swin's `WindowAttention`: a learned bias per head and relative position; called on windows as a batch."""

    def __init__(self, dim: int, num_heads: int, window: int = 2) -> None:
        super().__init__(dim, num_heads)
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, num_heads))
        place = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offset = place[:, :, None] - place[:, None, :] + window - 1
        self.register_buffer("relative_position_index", offset[0] * (2 * window - 1) + offset[1])

    def bias(self) -> Tensor | None:
        return self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)


class Block(nn.Module):
    """Pre-norm block around one attention."""

    def __init__(self, dim: int, attention: nn.Module, window: int = 0) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), attention, nn.LayerNorm(dim)
        self.mlp, self.window = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)), window

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        if not self.window:
            return self.attn(x)
        batch, height, width, dim = x.shape
        rows, columns = height // self.window, width // self.window
        x = x.view(batch, rows, self.window, columns, self.window, dim).transpose(2, 3)
        x = self.attn(x.reshape(-1, self.window**2, dim)).view(batch, rows, columns, self.window, self.window, dim)
        return x.transpose(2, 3).reshape(batch, height, width, dim)


class VisionTransformer(nn.Module):
    """timm's `VisionTransformer` on [B, 3, 8, 8] images in patches of 2."""

    def __init__(self, dim: int, num_heads: int, depth: int) -> None:
        super().__init__()
        self.patch_embed, self.pos_embed = nn.Conv2d(3, dim, 2, 2), nn.Parameter(torch.randn(1, 16, dim))
        self.blocks = nn.Sequential(*(Block(dim, Attention(dim, num_heads)) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class Stage(nn.Module):
    """One stage of a Swin: its blocks, then a halving of the resolution that doubles the width."""

    def __init__(self, dim: int, num_heads: int, depth: int, merge: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dim, WindowAttention(dim, num_heads), 2) for _ in range(depth)))
        self.downsample = nn.Linear(4 * dim, 2 * dim) if merge else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        if isinstance(self.downsample, nn.Identity):
            return x
        return self.downsample(torch.cat([x[:, i::2, j::2] for i in range(2) for j in range(2)], -1))


class SwinTransformer(nn.Module):
    """timm's `SwinTransformer` on [B, 3, 8, 8] images: stages of window attention, heads doubling with the width."""

    def __init__(self, dim: int, num_heads: tuple[int, ...], depth: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 2, 2)
        last = len(num_heads) - 1
        self.layers = nn.Sequential(*(Stage(dim * 2**i, h, depth, i < last) for i, h in enumerate(num_heads)))
        self.head = nn.Linear(dim * 2**last, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.patch_embed(x).permute(0, 2, 3, 1)).mean((1, 2)))
