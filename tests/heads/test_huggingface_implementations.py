"""Weights and biases under each attention implementation, when it is changed, and in copies and pickles."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from cases import cases, thin, tiers
from heads.families import BY_NAME, bed
from heads.family import BERT
from heads.forwards import copies, no_bias, results, same, slanted

# families whose attentions ask for the name of the implementation, and do something else for another one
ASKING = ("DeepseekV32", "GlmMoeDsa")
LATENT = BERT | {
    **dict.fromkeys(("moe_intermediate_size", "kv_lora_rank"), 16),
    **dict.fromkeys(("v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("num_key_value_heads", "n_routed_experts", "qk_rope_head_dim", "head_dim"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "first_k_dense_replace", "index_n_heads"), 2),
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "index_topk": 3,
    "topk_group": 1,
    "pad_token_id": 0,
}
ATTACHED = {
    "weights": lambda heads: hw.Taps(heads, weights=True),
    "mean weights": lambda heads: hw.Taps(heads, mean_weights=True),
    "a bias of 0": lambda heads: hw.bias_heads(heads, no_bias),
    "mixers of nothing": hw.mix_heads,
    "a penalty": lambda heads: hw.Disagreement(heads, hw.similarity.Position()),
}


def build_asking(name: str) -> torch.nn.Module | None:
    import transformers

    if name == "GPT-2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, bos_token_id=1, eos_token_id=2)
        config.reorder_and_upcast_attn = True
        return transformers.GPT2Model(config).eval()
    if not hasattr(transformers, f"{name}Model"):
        return None  # an older version
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**LATENT)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return model


@tiers("attached", *thin(ATTACHED, 3))
@cases("implementation", ["sdpa", "eager"])
@cases("name", [*ASKING, "GPT-2"])
def test_a_model_that_asks_for_its_implementation_takes_the_same_way(name: str, implementation: str, attached: str):
    torch.manual_seed(0)
    model = build_asking(name)
    if model is None:
        return
    model.set_attn_implementation(implementation)
    heads, ids = hw.find_heads(model), torch.arange(7)[None] + 4
    seen = [(site.module.config, type(site.module.config), vars(site.module.config).copy()) for site in heads]
    with torch.no_grad():
        plain = model(ids)[0]
        handle = ATTACHED[attached](heads)
        now = [(site.module.config, type(site.module.config), vars(site.module.config)) for site in heads]
        assert all(one[0] is two[0] and one[1:] == two[1:] for one, two in zip(seen, now, strict=True))
        if name == "GPT-2" and implementation == "eager":
            # its eager attention is a method of its own
            with pytest.raises(hw.errors.NotFired, match=r"did not call .* it took another way"):
                model(ids)
        else:
            torch.testing.assert_close(model(ids)[0], plain, atol=5e-6, rtol=1e-5)
        handle.remove()
        assert torch.equal(model(ids)[0], plain)


def test_an_implementation_without_scores_is_refused():
    model = BY_NAME["BERT"].build()
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(hw.errors.LayoutError, match=r"'flex_attention'.*set_attn_implementation\('sdpa'\)"):
        hw.Taps(hw.find_heads(model), weights=True)


def test_weights_are_computed_for_the_sites_that_are_read_and_only_while_they_are(monkeypatch):
    from headwise.heads.scores import huggingface

    compute = huggingface._compute_weights
    computed: list[str] = []

    def counted(module, *args, **settings):
        computed.append(type(module).__name__)
        return compute(module, *args, **settings)

    monkeypatch.setattr(huggingface, "_compute_weights", counted)
    model, inputs, heads = bed(BY_NAME["BERT"], padded=True)
    with hw.Taps(heads, outputs=True, values=True):
        model(**inputs)
    assert not computed
    with hw.Taps(heads.layer(1), weights=True) as taps:
        model(**inputs)
        taps.read()
    assert computed == ["BertSelfAttention"]
    model(**inputs)
    assert len(computed) == 1


def hooks(module: torch.nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


@cases("name", ["BERT", "GPT-2", "T5"])
@cases(("first", "then"), [("sdpa", "eager"), ("eager", "sdpa"), ("sdpa", "sdpa")])
def test_weights_and_biases_stay_when_the_implementation_is_set_to_another(name: str, first: str, then: str):
    model, inputs, heads = bed(BY_NAME[name], padded=True)
    model.set_attn_implementation(first)

    with hw.Taps(heads, weights=True) as taps, hw.bias_heads(heads, slanted) as handle:
        results(model, inputs)
        before = taps.read()
        model.set_attn_implementation(then)
        results(model, inputs)
        after = taps.read()
        assert set(handle.calls.values()) == {2}
    for left, right in zip(before, after, strict=True):
        torch.testing.assert_close(left.weights, right.weights)
    assert {site.module.config._attn_implementation for site in heads.sites} == {then}


def test_eager_weights_are_read_in_a_subclass_of_a_family_s_attention():
    family = BY_NAME["Llama"]
    model, inputs = family.build(), family.inputs(padded=True)
    model.set_attn_implementation("eager")
    heads = hw.find_heads(model)

    def read() -> list[Tensor]:
        with hw.Taps(heads, weights=True) as taps:
            model(**inputs)
            return [capture.weights for capture in taps.read()]

    expected = read()
    kind = type(heads.sites[0].module)

    class Own(kind):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Unrelated(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return kind.forward(self, *args, **kwargs)

    for other in (Own, Unrelated):
        for site in heads:
            site.module.__class__ = other
        assert all(map(torch.equal, read(), expected))


def test_a_module_that_takes_its_function_from_the_mapping_is_reached_at_what_that_calls():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

    model, inputs, heads = bed(BY_NAME["Llama"], padded=True)
    kind = type(heads.sites[0].module)

    class Own(kind):
        """As code of one's own on the hub has it."""

        def forward(self, hidden_states, position_embeddings, attention_mask=None, **_settings):
            split = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k, v = (
                one(hidden_states).view(split).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)
            )
            attend = eager_attention_forward
            if self.config._attn_implementation != "eager":
                attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            joined, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0)
            return self.o_proj(joined.flatten(2)), weights

    found = []
    for own in (False, True):
        for site in heads:
            site.module.__class__ = Own if own else kind
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            heads = hw.find_heads(model)
            with hw.Taps(heads, weights=True) as taps, hw.bias_heads(heads, slanted):
                returned = model(**inputs, use_cache=False)[0]
                found.append([returned, *(capture.weights for capture in taps.read())])
    for others in found[1:]:
        torch.testing.assert_close(found[0], others, atol=1e-5, rtol=1e-5)


@cases("what", ["weights", "a bias of 0", "mixers of nothing"])
def test_an_implementation_without_scores_set_in_between_is_refused_in_the_forward(what: str):
    model, inputs = BY_NAME["BERT"].build(), BY_NAME["BERT"].inputs()
    attached = ATTACHED[what](hw.find_heads(model))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(hw.errors.NotFired, match=r"'flash_attention_2', set after .* or remove\(\) what is attached"):
        model(**inputs)
    model.set_attn_implementation("sdpa")
    model(**inputs)
    model.config._attn_implementation = "flash_attention_2"
    attached.remove()
    assert model.config._attn_implementation == "flash_attention_2"


@cases("name", ["BERT", "T5", "GPT-2"])
def test_what_is_made_of_a_model_that_is_listened_to_names_the_implementation_underneath(name: str, tmp_path: Path):
    model, inputs, heads = bed(BY_NAME[name])
    plain = results(model, inputs)
    with hw.Taps(heads, weights=True):
        results(model, inputs)
        model.save_pretrained(tmp_path)
        models = [
            *copies(model),
            type(model)(copy.deepcopy(model.config)),
            type(model)(pickle.loads(pickle.dumps(model.config))),
            type(model)(copy.copy(model.config)),
            type(model).from_pretrained(tmp_path),
        ]
    for made in models:
        configs = {id(m.config): m.config for m in made.modules() if hasattr(m, "config")}.values()
        assert {config._attn_implementation for config in configs} == {"sdpa"}
        assert {type(config) for config in configs} == {type(model.config)}
    for made in models[:3]:
        assert same(plain, results(made, inputs))


@pytest.mark.full
def test_a_model_pickled_while_it_is_listened_to_runs_in_a_fresh_process(tmp_path: Path):
    family = BY_NAME["BERT"]
    model, inputs = family.build(), family.inputs()
    expected = results(model, inputs)
    heads = hw.find_heads(model)
    with hw.Taps(heads, outputs=True, weights=True), hw.ablate(heads, 1) as ablation:
        torch.save((model, inputs, expected), tmp_path / "model.pt")
        results(model, inputs)
        ablation.check()
    code = (
        "import sys, torch\n"
        "model, inputs, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "found = [value for value in model(**inputs).values() if isinstance(value, torch.Tensor)]\n"
        "assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model.pt"], check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
