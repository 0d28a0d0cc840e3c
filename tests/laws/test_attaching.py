"""Attaching anything never changes what a model computes: over masks, methods, layouts, modes and dtypes.

Left out is what changes a model by design: `aggregate`, `guide`, `bias_heads` and `ablate`, of which the last two must
leave nothing behind; and the steps of an optimizer that `repel` is attached to, whose gradients only are the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from heads.calling import EinsumAttention, NanoGPT
from heads.families import FAMILIES
from heads.family import Family
from heads.own import ListAttention
from laws.attaching import DTYPES, METHODS, MODES, Method, changes

BATCH, LENGTH, HEADS, WIDTH = 3, 5, 2, 8
Masks = dict[str, Tensor | bool]
# at the kink of relu a rounding would decide between two gradients
SMOOTH: Any = {"batch_first": True, "activation": "gelu"}
# a dtype and a mode each; neighbors share neither
COMBINATIONS = [(dtype, MODES[(row + column) % 3]) for column in range(3) for row, dtype in enumerate(DTYPES)]


def additive(allowed: Tensor, dtype: torch.dtype, forbidden: float = -math.inf) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, forbidden)


def build_masks(dtype: torch.dtype) -> dict[str, Masks]:
    """Masks of a self-attention in torch's convention, with queries that have no key in most of them."""
    right, full, left = torch.ones(3, BATCH, LENGTH, dtype=torch.bool)
    right[1, 3:] = False
    full[1, 3:] = full[0] = False
    left[0, :2] = left[2, :4] = False
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    row = causal.clone()
    row[2] = False
    heads = torch.rand(BATCH * HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.4
    heads[1, 3] = heads[4] = False
    return {
        "none": {},
        "causal": {"attn_mask": ~causal, "is_causal": True},
        "causal, additive": {"attn_mask": additive(causal, dtype)},
        "causal, least numbers": {"attn_mask": additive(causal, dtype, torch.finfo(dtype).min)},
        "padding": {"key_padding_mask": ~right},
        "a row of padding": {"key_padding_mask": ~full},
        "a row of padding, additive": {"key_padding_mask": additive(full, dtype)},
        "left padding, causal": {"attn_mask": ~causal, "key_padding_mask": ~left, "is_causal": True},
        "left padding, causal, additive": {
            "attn_mask": additive(causal, dtype),
            "key_padding_mask": additive(left, dtype),
        },
        "a query without keys": {"attn_mask": ~row},
        "a query without keys, additive": {"attn_mask": additive(row, dtype)},
        "heads": {"attn_mask": ~heads},
        "heads, additive": {"attn_mask": additive(heads, dtype)},
    }


class Attention(nn.Module):
    """torch's attention on one sequence."""

    def __init__(self, kind: type[nn.MultiheadAttention] = nn.MultiheadAttention, **settings: Any) -> None:
        super().__init__()
        self.attention = kind(WIDTH, HEADS, **{"batch_first": True, **settings})

    def forward(self, x: Tensor, need_weights: bool = False, **masks: Any) -> tuple[Tensor, Tensor | None]:
        query = x if self.attention.batch_first else x.transpose(0, 1)
        key, value = query[..., : self.attention.kdim], query[..., : self.attention.vdim]
        # one projection of three equal inputs is a layout of its own
        inputs = (query, query, query) if self.attention._qkv_same_embed_dim else (query, key, value)
        return self.attention(*inputs, need_weights=need_weights, **masks)


def run_attention(model: nn.Module, x: Tensor, masks: Masks) -> Any:
    return model(x, **masks)


def run_with_weights(model: nn.Module, x: Tensor, masks: Masks) -> Any:
    return model(x, need_weights=True, **masks)


def run_encoder(model: nn.Module, x: Tensor, masks: Masks) -> Any:
    # an encoder of several layers calls its masks otherwise
    mask = "mask" if isinstance(model, nn.TransformerEncoder) else "src_mask"
    names = {"attn_mask": mask, "key_padding_mask": "src_key_padding_mask"}
    return model(x, **{names.get(name, name): given for name, given in masks.items()})


def run_decoder(model: nn.Module, x: Tensor, masks: Masks) -> Any:
    mask, padding = masks.get("attn_mask"), masks.get("key_padding_mask")
    return model(
        x,
        x.flip(1),
        tgt_mask=mask,
        memory_mask=mask,
        tgt_key_padding_mask=padding,
        memory_key_padding_mask=padding,
        tgt_is_causal=masks.get("is_causal", False),
    )


def run_bare(model: nn.Module, x: Tensor, _masks: Masks) -> Any:
    return model(x)


def run_own(model: nn.Module, x: Tensor, masks: Masks) -> Any:
    return model(x, key_padding_mask=masks.get("key_padding_mask"))


@dataclass(frozen=True)
class Layout:
    build: Callable[[], nn.Module]
    run: Callable[[nn.Module, Tensor, Masks], Any] = run_attention
    reads: tuple[str, ...] = ("outputs", "values", "weights", "mean_weights", "parameters", "output weights")
    masks: Callable[[str], bool] = lambda _name: True


def methods_of(*reads: str) -> dict[str, Method]:
    return {name: method for name, method in METHODS.items() if set(method.reads) <= set(reads)}


def pads(name: str) -> bool:
    return "padding" in name and "causal" not in name and "additive" not in name


def build_stack() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **SMOOTH, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


LAYOUTS = {
    "packed": Layout(Attention),
    "packed, weights returned": Layout(Attention, run_with_weights),
    "headwise's own": Layout(lambda: Attention(hw.nn.MultiheadAttention)),
    "differential": Layout(lambda: Attention(hw.nn.DifferentialAttention)),
    "separate": Layout(lambda: Attention(kdim=6, vdim=7)),
    "appended keys": Layout(lambda: Attention(add_bias_kv=True, add_zero_attn=True)),
    "length first": Layout(lambda: Attention(batch_first=False, dropout=0.4)),
    "encoder layer": Layout(lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **SMOOTH, dropout=0.3), run_encoder),
    "encoder layer, norm first": Layout(
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **SMOOTH, norm_first=True, dropout=0.0),
        run_encoder,
    ),
    "encoder": Layout(build_stack, run_encoder),
    "decoder layer": Layout(lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, 16, **SMOOTH, dropout=0.0), run_decoder),
    # a user's modules call the fused kernel themselves
    "grouped, a user's": Layout(
        lambda: SeparateAttention(WIDTH, 4, 2, 3),
        run_own,
        ("outputs", "values", "weights", "mean_weights", "parameters", "output weights", "groups"),
        pads,
    ),
    "nanoGPT": Layout(lambda: NanoGPT(WIDTH, HEADS, 2, dropout=0.3), run_bare, masks=lambda name: name == "none"),
    "parameters": Layout(
        lambda: EinsumAttention(WIDTH, HEADS, WIDTH // HEADS), run_bare, masks=lambda name: name == "none"
    ),
    "a list": Layout(
        lambda: ListAttention(WIDTH, HEADS, 3),
        run_bare,
        ("outputs", "values", "parameters", "output weights"),
        lambda name: name == "none",
    ),
    "pooling": Layout(lambda: hw.nn.AdditiveAttention(WIDTH, 6, HEADS), run_own, ("outputs", "weights"), pads),
}


def broken(name: str, mask: str, dtype: torch.dtype, mode: str) -> list[str]:
    layout, masks = LAYOUTS[name], build_masks(dtype)[mask]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = layout.build(), torch.randn(BATCH, LENGTH, WIDTH)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, std=0.5)  # torch starts biases at zero
    model, x = model.to(dtype), x.to(dtype)
    found = changes(model, lambda one: layout.run(one, x, masks), mode, methods_of(*layout.reads))
    return [f"{name}, {mask}, {dtype}, {mode}: {line}" for line in found]


def test_the_law_is_of_every_term_there_is():
    public = {name: getattr(hw.similarity, name) for name in hw.similarity.__all__}
    terms = {
        name
        for name, one in public.items()
        if is_dataclass(one) and (hasattr(one, "sum_and_count") or hasattr(one, "sum_and_count_at"))
    }
    assert terms > {"Output", "Position", "MapCosine"}
    assert terms <= METHODS.keys()


@pytest.mark.full
@cases("name", LAYOUTS)
def test_attaching_to_a_torch_model_changes_nothing_it_computes(name: str):
    place = list(LAYOUTS).index(name)
    masks = [mask for mask in build_masks(torch.float32) if LAYOUTS[name].masks(mask)]
    lines = []
    # the slow test has them all
    numbered = list(enumerate(masks, start=place))
    for number, mask in numbered[place % 3 :: 3] or numbered:
        lines += broken(name, mask, *COMBINATIONS[number % len(COMBINATIONS)])
    assert lines == []


@pytest.mark.slow
@cases("name", LAYOUTS)
def test_attaching_to_a_torch_model_changes_nothing_in_any_mode_and_dtype(name: str):
    lines = []
    for mask in build_masks(torch.float32):
        for dtype, mode in COMBINATIONS if LAYOUTS[name].masks(mask) else ():
            lines += broken(name, mask, dtype, mode)
    assert lines == []


# families that take a mask of four axes
FOUR_AXES = ("BERT", "GPT-2", "Llama", "Mistral", "Qwen3")
PADDED = ("none", "right", "left", "a row of padding")
PER_QUERY = ("four axes, bool", "four axes, additive", "four axes, least numbers")
KEEPS = ("attention_mask", "encoder_attention_mask")
PADS = ("src_key_padding_mask", "memory_key_padding_mask")


def build_inputs(family: Family, mask: str, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = family.inputs(padded=family.maskable)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    for name in inputs.keys() & {*KEEPS, *PADS}:
        real, given = int(name in KEEPS), inputs[name]
        if mask == "none":
            given[:] = real
        elif mask == "left":
            given[:] = real
            given[-1, :3] = 1 - real
        elif mask == "a row of padding":
            given[-1] = 1 - real
    if mask in PER_QUERY:
        size = inputs["attention_mask"].shape
        allowed = torch.ones(size[1], size[1], dtype=torch.bool).tril().expand(size[0], 1, -1, -1).clone()
        allowed[0, :, 1] = allowed[1, :, 4] = False
        forbidden = torch.finfo(dtype).min if "least" in mask else -math.inf
        inputs["attention_mask"] = allowed if "bool" in mask else additive(allowed, dtype, forbidden)
    return inputs


# Models that forbid every key of some queries by the least number.
FORBIDDEN_BY_LEAST = (("T5", "a row of padding"), ("Kosmos-2", "left"), ("Kosmos-2", "a row of padding"))


def broken_in_family(family: Family, implementation: str, mask: str, dtype: torch.dtype, mode: str) -> list[str]:
    inputs = build_inputs(family, mask, dtype)
    if implementation == "sdpa" and ("least" in mask or (family.name, mask) in FORBIDDEN_BY_LEAST):
        # where every key is forbidden by the least number, torch's fused backward gives each the weight 1 and not 1/K
        mode = "eval"
    models = [family.build().to(dtype) for _ in range(2)]
    reads = ("outputs", "values", "parameters", "weights", "mean_weights")
    if family.interface:
        for model, name in zip(models, (implementation, "eager"), strict=True):
            cast(Any, model).set_attn_implementation(name)
            # the fused product of experts takes no float64
            cast(Any, model).set_experts_implementation("eager")
            # a layer that is left out cannot be ablated
            cast(Any, model).config.layerdrop = 0.0
    elif any(site.scores is None for site in hw.find_heads(models[0])):
        reads = reads[:3]
    if all(attention.key_value_heads < attention.heads for attention in family.attentions):
        reads = (*reads, "groups")
    if all(site.output is not None for site in hw.find_heads(models[0])):
        reads = (*reads, "output weights")
    methods = methods_of(*reads)
    if implementation == "eager":
        # its own weights are read
        methods = {name: replace(method, exact=True) for name, method in methods.items()}
    if any(attention.key_value_heads == 1 for attention in family.attentions):
        del methods["Subspace"]
    slack = models[1] if implementation == "sdpa" and dtype == torch.bfloat16 else None
    found = changes(models[0], lambda one: one(**inputs), mode, methods, eager=slack)
    return [f"{family}, {implementation}, {mask}, {dtype}, {mode}: {line}" for line in found]


def implementations(family: Family) -> tuple[str, ...]:
    if not family.interface:
        return ("own",)
    return ("sdpa", "eager") if getattr(family.build(), "_supports_sdpa", True) else ("eager",)


def masks_of(family: Family, implementation: str) -> tuple[str, ...]:
    more = PER_QUERY if family.name in FOUR_AXES else ()
    # written out, forbidding every key by -inf gives NaN
    more = more[2:] if implementation == "eager" else more
    return (*PADDED, *more) if family.maskable else ("none",)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("Llama", "eager"),
        pytest.param("BERT", "sdpa", marks=pytest.mark.full),
        pytest.param("BERT", "eager", marks=pytest.mark.full),
        pytest.param("Llama", "sdpa", marks=pytest.mark.full),
    ],
)
def test_attaching_to_a_model_of_transformers_changes_nothing_it_computes(name: str, implementation: str):
    family = next(family for family in FAMILIES if family.name == name)
    lines = []
    for number, mask in enumerate(("left", "a row of padding", *masks_of(family, implementation)[5:6])):
        lines += broken_in_family(family, implementation, mask, *COMBINATIONS[2 * number])
    assert lines == []


@pytest.mark.slow
@cases("family", FAMILIES)
def test_attaching_to_any_family_changes_nothing_it_computes(family: Family):
    cells = [(one, mask) for one in implementations(family) for mask in masks_of(family, one)]
    lines = []
    for number, (implementation, mask) in enumerate(cells):
        # each dtype, in another mode with every mask
        for dtype, mode in COMBINATIONS[3 * (number % 3) : 3 * (number % 3) + 3]:
            if family.name == "torch.nn.Transformer" and dtype == torch.bfloat16:
                continue  # its relu has the kink that `SMOOTH` avoids, and bfloat16 is never far from it
            if family.name in ("XGLM", "Kosmos-2") and dtype == torch.float64:
                continue  # transformers compares scores with the least number of float64 in float32
            lines += broken_in_family(family, implementation, mask, dtype, mode)
    assert lines == []
