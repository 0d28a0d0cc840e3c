"""Every export of one mask makes the same attention, whatever the backend calls allowed."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import headwise as hw
from cases import cases

BATCH, HEADS, TOKENS, SIZE = 3, 4, 6, 8


def mask_of(empty: str = "regular", causal: bool = False, padded: bool = True) -> hw.roles.HeadMask:
    """A mask with empty rows in role 1; the last sentence is padding alone where `padded`."""
    roles = torch.rand(BATCH, 2, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.4
    roles[:, 1, 2] = False
    keep = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    if padded:
        keep[1, 4:] = False
        keep[2] = False
    return hw.roles.HeadMask(roles, keep, HEADS, (2, 0), empty=empty, causal=causal)


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(4)
    made = torch.randn(3, BATCH, HEADS, TOKENS, SIZE, generator=rng, dtype=dtype)
    return made[0], made[1], made[2]


def expected(mask: hw.roles.HeadMask) -> Tensor:
    """softmax over the allowed keys alone; 0 where there is none."""
    query, key, value = qkv()
    allowed = mask.allowed()
    output = torch.zeros_like(value)
    for b in range(BATCH):
        for h in range(HEADS):
            for q in range(TOKENS):
                keys = allowed[b, h, q].nonzero().squeeze(1)
                if len(keys):
                    scores = key[b, h, keys] @ query[b, h, q] / SIZE**0.5
                    output[b, h, q] = torch.softmax(scores, 0) @ value[b, h, keys]
    return output


SETTINGS = [("regular", False), ("self", False), ("regular", True), ("self", True)]


@cases(("empty", "causal"), SETTINGS)
def test_sdpa_takes_it_boolean_and_additive_and_a_query_without_a_key_has_output_zero(empty: str, causal: bool):
    mask = mask_of(empty, causal)
    want = expected(mask)
    assert bool((want[2] == 0).all())
    for given in (mask.for_sdpa(), mask.for_sdpa(torch.float64)):
        torch.testing.assert_close(F.scaled_dot_product_attention(*qkv(), attn_mask=given), want)


@cases(("empty", "causal"), SETTINGS)
@cases("need_weights", [False, True])
def test_torch_multihead_attention_takes_it_in_its_own_polarity(empty: str, causal: bool, need_weights: bool):
    mask = mask_of(empty, causal)
    module = nn.MultiheadAttention(HEADS * SIZE, HEADS, batch_first=True, bias=False).double()
    with torch.no_grad():
        for part in module.in_proj_weight.chunk(3):
            part.copy_(torch.eye(HEADS * SIZE))
        module.out_proj.weight.copy_(torch.eye(HEADS * SIZE))
    query, key, value = (tensor.transpose(1, 2).flatten(2) for tensor in qkv())
    found, weights = module(
        query, key, value, attn_mask=mask.for_mha(), need_weights=need_weights, average_attn_weights=False
    )
    found = found.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
    torch.testing.assert_close(found[:2], expected(mask)[:2])
    # a sentence of padding alone is finite, and its output is padding
    assert bool(found.isfinite().all())
    if need_weights:
        assert torch.equal(weights[:2] > 0, mask.allowed()[:2])


@cases(("empty", "causal"), SETTINGS)
def test_flex_attention_takes_it(empty: str, causal: bool):
    mask = mask_of(empty, causal)
    blocks = create_block_mask(mask.mask_mod(), BATCH, HEADS, TOKENS, TOKENS, device="cpu")
    with warnings.catch_warnings():
        # uncompiled on purpose
        warnings.simplefilter("ignore")
        found = flex_attention(*qkv(), block_mask=blocks)
    torch.testing.assert_close(found, expected(mask))


@cases("implementation", ["sdpa", "eager"])
@cases("empty", ["regular", "self"])
def test_a_model_of_hugging_face_takes_it_as_a_mask_and_as_guidance(implementation: str, empty: str):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=50, attn_implementation=implementation, **sizes)).eval().double()
    mask = mask_of(empty)[:2]
    tokens = torch.randint(0, 50, (2, TOKENS))
    by_mask = model(tokens, attention_mask=mask.for_huggingface(torch.float64)).last_hidden_state
    with hw.guide(hw.find_heads(model), mask):
        guided = model(tokens, attention_mask=mask.keep.long()).last_hidden_state
    real = mask.keep
    torch.testing.assert_close(by_mask[real], guided[real])
    plain = model(tokens, attention_mask=mask.keep.long()).last_hidden_state
    assert not torch.allclose(plain[real], guided[real])


def test_half_precision_masks_forbid_without_overflow():
    mask = mask_of()
    for dtype in (torch.float16, torch.bfloat16):
        additive = mask.for_huggingface(dtype)
        assert additive.dtype == dtype
        assert additive.min() == torch.finfo(dtype).min
        assert torch.equal(additive == 0, mask.allowed())
        assert torch.equal(mask.for_sdpa(dtype) == 0, mask.allowed())
