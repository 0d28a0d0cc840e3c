"""A model with fused weights steps exactly like its twin, in which every head has parameters of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.attentions import FusedAttention, KeyValueAttention
from heads.families import BY_NAME
from headwise.repulsion.rules import update

RULE = hw.SVGD(alpha=0.4, step_size=0.7, prior_precision=0.02)
X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))


def block(weight: Tensor, which: int, head: int, heads: int, size: int) -> Tensor:
    return weight[(which * heads + head) * size :][:size]


def alternating(weight: Tensor, which: int, head: int, heads: int, size: int) -> Tensor:  # noqa: ARG001  called as the others
    return weight[(head * 3 + which) * size :][:size]


def columns(weight: Tensor, which: int, head: int, heads: int, size: int) -> Tensor:
    return weight[:, (which * heads + head) * size :][:, :size]


def family(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    entry = BY_NAME[name]
    return entry.build(), entry.inputs()


CASES = {
    "fused block": (lambda: (FusedAttention(), {"x": X}), "qkv.weight", block, 3),
    "torch": (
        lambda: (nn.MultiheadAttention(12, 3, bias=False), dict.fromkeys(("query", "key", "value"), X)),
        "in_proj_weight",
        block,
        3,
    ),
    "timm ViT": (lambda: family("timm ViT"), "blocks.1.attn.qkv.weight", block, 3),
    "ModernBERT": (lambda: family("ModernBERT"), "layers.0.attn.Wqkv.weight", block, 3),
    "GPT-NeoX": (lambda: family("GPT-NeoX"), "layers.1.attention.query_key_value.weight", alternating, 3),
    "GPT-2": (lambda: family("GPT-2"), "transformer.h.1.attn.c_attn.weight", columns, 3),
    "GPT-2 key-value": (
        lambda: family("GPT-2 with cross-attention"),
        "transformer.h.0.crossattention.c_attn.weight",
        columns,
        2,
    ),
    "key-value": (lambda: (KeyValueAttention(), {"x": X, "context": X.flip(0)}), "to_kv.weight", block, 2),
}


@cases("case", CASES)
def test_a_fused_model_steps_exactly_like_its_per_head_twin(case: str):
    torch.manual_seed(0)
    make, name, part, kinds = CASES[case]
    model, inputs = make()
    heads = hw.find_heads(model)
    site = next(s for s in heads if any(head_slice.name == name for head_slice in s.slices))
    weight = dict(model.named_parameters())[name]
    nn.init.normal_(weight)
    sizes = (site.num_heads, site.head_size)
    # one parameter a projection, [heads, everything that is of one head]
    twins = [
        nn.Parameter(torch.stack([part(weight.detach(), which, h, *sizes).flatten() for h in range(sizes[0])]))
        for which in range(kinds)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    twin_optimizer = torch.optim.AdamW(twins, lr=0.05)
    hw.repel(hw.find_heads(model).where(site.name or ""), RULE, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        output = model(**inputs)
        (output if isinstance(output, Tensor) else output[0]).square().mean().mul(1000.0).backward()
        for which, twin in enumerate(twins):
            gradients = torch.stack([part(weight.grad, which, h, *sizes).flatten() for h in range(sizes[0])])
            twin.grad = update(RULE, twin.detach(), gradients).gradient
        optimizer.step()
        twin_optimizer.step()
    for which, twin in enumerate(twins):
        for head in range(sizes[0]):
            stepped = part(weight.detach(), which, head, *sizes)
            torch.testing.assert_close(stepped.flatten(), twin[head].detach(), rtol=2e-5, atol=2e-6)
    assert float((twins[0] - twins[0][:1]).detach().abs().max()) > 0.1
