"""Differential attention in decoders of transformers: the equation under grouped queries, caches, copies, refusals."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import headwise as hw
from cases import cases, tiers
from heads.families import BY_NAME
from heads.forwards import checkpoint_activations
from headwise.errors import DataError, LayoutError, NotFired
from headwise.heads.scores.mixing import pair_decoder_heads
from reference.attention import differential_heads

FAMILIES: dict[str, Any] = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
SIZES = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 31, "head_dim": 6}
HEADS, GROUPS, SIZE = 8, 4, 6
IDS = torch.randint(1, 31, (2, 7), generator=torch.Generator().manual_seed(3))
# two documents in the second row
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3]])
INSIDE = torch.ones(7, 7).tril().bool().repeat(2, 1, 1)
INSIDE[1, 3:, :3] = False


def build(family: str = "llama", *, heads: int = HEADS, groups: int = GROUPS, **more: Any) -> Any:
    torch.manual_seed(0)
    make_config, make_model = FAMILIES[family]
    config = make_config(num_attention_heads=heads, num_key_value_heads=groups, **{**SIZES, **more})
    return make_model(config).double().eval()


def pair(model: Any, *, second: bool = True) -> Any:
    """Return the model with paired heads, whose vectors and gains are not what they start from."""
    for site in hw.find_heads(model):
        pair_decoder_heads(site, site.layer + 1, second=second)
    drawn = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "head_difference" in name:
                parameter.add_(torch.randn(parameter.shape, generator=drawn).double(), alpha=0.5)
    return model


def project(model: Any, attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every head and group before pairing, as the papers of the families say."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (projection(hidden).unflatten(-1, (-1, SIZE)) for projection in projections)
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    cos, sin = model.model.rotary_emb(hidden, POSITIONS)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return *apply_rotary_pos_emb(q, k, cos, sin), v


def join(tensor: Tensor, heads: tuple[int, int]) -> Tensor:
    return torch.cat([tensor[:, one] for one in heads], dim=-1)


def expected(model: Any, attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """First maps and outputs of the loop, with the heads of each pair and of its keys written out."""
    q, k, v = project(model, attention, hidden)
    # 8 query heads, 4 groups: heads 0 to 3 are read with keys 0 and 1, heads 4 to 7 with keys 2 and 3
    queries = torch.stack([join(q, pair) for pair in ((0, 1), (2, 3), (4, 5), (6, 7))], 1)
    keys, values = (torch.stack([join(one, pair) for pair in ((0, 1), (0, 1), (2, 3), (2, 3))], 1) for one in (k, v))
    difference = attention.head_difference
    allowed = INSIDE[:, None].expand(-1, HEADS // 2, -1, -1)
    layer = attention.layer_idx + 1
    first, _, outputs = differential_heads(
        queries, keys, values, allowed, difference.vectors, difference.norm.weight, layer
    )
    return first, outputs


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@tiers("implementation", ["sdpa"], ["eager"])
@cases("family", FAMILIES)
def test_paired_heads_under_grouped_queries_compute_what_the_loop_says(family: str, implementation: str):
    model = pair(build(family))
    model.set_attn_implementation(implementation)
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
        )
    alone = model(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits
    heads = hw.find_heads(model)
    assert [(site.num_heads, site.key_value_heads, site.head_size) for site in heads] == [(4, 2, 12)] * 2
    assert hw.verify(heads, {"input_ids": IDS}).sites == tuple(site.name for site in heads)
    seen.clear()
    for asked in ({"weights": True, "mean_weights": True}, {"weights": True, "beside": True}, {"mean_weights": True}):
        with hw.Taps(heads, outputs=True, **asked) as taps:
            close(model(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits, alone)
            for layer, hidden, capture in zip(model.model.layers, seen, taps.read(), strict=True):
                first, outputs = expected(model, layer.self_attn, hidden)
                close(capture.outputs.transpose(1, 2), outputs)
                if "weights" in asked:
                    close(capture.weights, first)
                if "mean_weights" in asked:
                    close(capture.mean_weights, first.mean(1))
        seen.clear()


def test_the_control_has_one_map_of_both_heads_and_the_same_norm():
    model = pair(build("qwen3"), second=False)
    attention = model.model.layers[1].self_attn
    seen: list[Tensor] = []
    attention.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True)
    with hw.Taps(hw.find_heads(model), outputs=True, weights=True) as taps:
        model(input_ids=IDS, position_ids=POSITIONS, use_cache=False)
        capture: Any = taps.read()[1]
    q, k, v = project(model, attention, seen[0])
    q, k, v = (one.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3) for one in (q, k, v))
    k, v = (one[:, [0, 0, 1, 1]] for one in (k, v))
    scores = (q @ k.mT / (2 * SIZE) ** 0.5).masked_fill(~INSIDE[:, None], -torch.inf)
    heads = scores.softmax(-1) @ v
    gain, start = attention.head_difference.norm.weight, attention.head_difference.start
    close(capture.weights, scores.softmax(-1))
    wanted = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain * (1 - start)
    close(capture.outputs.transpose(1, 2), wanted)
    counts = [sum(one.numel() for one in pair(build(), second=second).parameters()) for second in (True, False)]
    # four vectors of e numbers in each of two layers, and a gain of 2e in both models
    assert counts[0] - counts[1] == 2 * 4 * SIZE
    assert counts[1] - sum(one.numel() for one in build().parameters()) == 2 * 2 * SIZE


@cases("second", [True, False])
def test_with_a_cache_and_padding_on_the_left_it_says_what_it_says_without(second: bool):
    model = pair(build(), second=second)
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
    steps = [model(input_ids=IDS[:, place : place + 1], **{name: cache}).logits for place in range(7)]
    close(torch.cat(steps, 1), model(input_ids=IDS).logits)
    padded = torch.cat([torch.zeros(2, 3, dtype=IDS.dtype), IDS], 1)
    keep = torch.cat([torch.zeros(2, 3), torch.ones(2, 7)], 1).long()
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    close(
        model(input_ids=padded, attention_mask=keep, position_ids=positions).logits[:, 3:], model(input_ids=IDS).logits
    )
    said = [
        model.generate(
            padded, attention_mask=keep, max_new_tokens=5, do_sample=False, use_cache=used, pad_token_id=0, **more
        )
        for used, more in ((True, {}), (False, {}), (True, {"num_beams": 1, "cache_implementation": "static"}))
    ]
    assert torch.equal(said[0], said[1])
    assert torch.equal(said[0], said[2])


def test_gradients_are_those_of_central_differences_and_of_activations_computed_again():
    model = pair(build())
    attention = model.model.layers[1].self_attn
    names, parameters = zip(*attention.named_parameters(), strict=True)
    hidden = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    positions = model.model.rotary_emb(hidden, POSITIONS)

    # the norms around it are computed in float32
    def run(hidden: Tensor, *values: Tensor) -> Tensor:
        call = {"hidden_states": hidden, "position_embeddings": positions, "attention_mask": INSIDE[:, None]}
        return torch.func.functional_call(attention, dict(zip(names, values, strict=True)), (), call)[0]

    assert torch.autograd.gradcheck(run, (hidden.requires_grad_(), *parameters), fast_mode=True)
    assert "head_difference.vectors" in names
    found = []
    for again in (False, True):
        own = pair(build()).train()
        if again:
            checkpoint_activations(own, reentrant=False)
        with hw.Disagreement(hw.find_heads(own), hw.similarity.CKA(), strength=hw.Relative(0.1)) as penalty:
            penalty.loss(own(input_ids=IDS, labels=IDS, use_cache=False).loss).backward()
        found.append([one.grad for one in own.parameters()])
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_a_bias_of_a_head_reaches_both_maps_and_removed_heads_are_those_of_its_outputs():
    model = pair(build())
    heads = hw.find_heads(model)
    hidden = torch.zeros(1, 4, 7, 7, dtype=torch.float64)
    hidden[:, 2, :, 1] = -torch.inf
    with hw.bias_heads(heads, hidden), hw.Taps(heads, weights=True, outputs=True) as taps:
        model(input_ids=IDS)
        capture: Any = taps.read()[0]
    assert not capture.weights[:, 2, 2:, 1].any()
    assert capture.weights[:, 1, 2:, 1].all()
    with hw.ablate(heads, 1), hw.Taps(heads, outputs=True) as taps:
        model(input_ids=IDS)
    with pytest.raises(LayoutError, match="has head_difference, which no folder that transformers"):
        hw.prune(heads, {0: [0, 2]})


def test_copies_and_pickles_attend_likewise():
    model = pair(build("qwen3"))
    wanted = model(input_ids=IDS).logits
    assert not torch.allclose(wanted, build("qwen3")(input_ids=IDS).logits)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=IDS).logits, wanted)
        assert type(other.config) is Qwen3Config
    loaded = pair(build("qwen3", attn_implementation="eager"))
    loaded.load_state_dict(model.state_dict())
    close(loaded(input_ids=IDS).logits, wanted)
    assert model.model.layers[0].self_attn.config.to_dict() == build("qwen3").config.to_dict()


def test_what_cannot_be_paired_is_refused_in_a_sentence(tmp_path):
    def refuse(model: Any, said: str) -> None:
        with pytest.raises(LayoutError, match=said):
            pair(model)

    refuse(build(groups=1), "has 8 query and 1 key/value heads; expected even numbers")
    refuse(pair(build()), "has paired or talking heads already")
    mixed = build()
    kept = hw.mix_heads(hw.find_heads(mixed))
    refuse(mixed, "has paired or talking heads already")
    kept.remove()
    refuse(get_peft_model(build(), LoraConfig(target_modules=["q_proj"])), "has adapters of peft")
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "vocab_size": 31}
    refuse(BertModel(BertConfig(num_attention_heads=4, **sizes)), "in causal self-attention of transformers with")
    gemma = Gemma2ForCausalLM(Gemma2Config(num_attention_heads=4, num_key_value_heads=2, head_dim=6, **sizes)).double()
    refuse(gemma, "attends with attn_logit_softcapping, .*which differential attention does not have")
    refuse(BY_NAME["GPT-OSS"].build(), "attends with sinks, which differential attention does not have")
    scaled = pair(build())
    scaled.model.layers[0].self_attn.scaling = 0.3
    with pytest.raises(LayoutError, match=r"attends with scores times 0\.3 instead of 0\.408248"):
        scaled(input_ids=IDS)
    model = pair(build())
    with pytest.raises(LayoutError, match="whose maps are subtracted in pairs"):
        hw.mix_heads(hw.find_heads(model))
    hw.aggregate(hw.find_heads(model), hw.routing.EMRouting())
    with pytest.raises(DataError, match=r"has differential attention, which load.* does not make"):
        hw.save(model, tmp_path)
    elsewhere = pair(build())
    elsewhere.config._attn_implementation = "flex_attention"
    with pytest.raises(NotFired, match="runs the attention implementation 'flex_attention'"):
        elsewhere.model.layers[0].self_attn(torch.zeros(1, 3, 24))
