"""The ways in which models of Hugging Face are called: each is read and steered rightly, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases, tiers
from heads.calling import CallingAttention, X
from heads.families import BY_NAME
from heads.forwards import generator, no_bias, prompt, require_same_gradients, results, without_dropout
from heads.transformers_versions import given_cache

FROM_A_CACHE = r"called with a cache, which holds keys whose values the call itself did not compute.*use_cache=False"
THREE = hw.similarity.Output() + 0.5 * hw.similarity.Subspace() + 2 * hw.similarity.Position()
TOKENS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def by_position(_site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
    """Heads prefer keys at different positions, wherever in a cache these lie."""
    places = torch.arange(call.first_key, call.first_key + call.keys)
    scale = torch.linspace(-2.0, 2.0, call.heads).view(1, -1, 1, 1)
    return (scale * torch.sin(1.3 * places)).to(call.dtype)


def steered(model: nn.Module) -> hw.Heads:
    """The heads whose bias may depend on the position: the encoder has another length."""
    heads = hw.find_heads(model)
    return heads if {site.kind for site in heads.sites} == {"self"} else heads.kind("decoder", "cross")


@tiers("name", ["T5"], ["GPT-2", "Llama", "Marian"])
@cases("cache", ["dynamic", "static"])
def test_values_from_a_cache_are_refused_and_without_one_match_their_keys(name: str, cache: str):
    model, inputs = generator(name), prompt(name)
    heads = hw.find_heads(model)
    settings = {**TOKENS, **({"cache_implementation": "static", "disable_compile": True} if cache == "static" else {})}
    for kind in {site.kind for site in heads.sites} - {"self"} or {"self"}:
        with hw.Taps(heads.kind(kind), outputs=True, values=True) as taps:
            model.generate(**inputs, **settings)
            with pytest.raises(hw.errors.NotFired, match=FROM_A_CACHE):
                taps.read()
        penalty = hw.Disagreement(heads.kind(kind), hw.similarity.Subspace())
        model.generate(**inputs, **settings)
        with pytest.raises(hw.errors.NotFired, match=FROM_A_CACHE):
            penalty()
        penalty.remove()
    with hw.Taps(heads, values=True, weights=True) as taps:
        model.generate(**inputs, **TOKENS, use_cache=False)
        for capture in taps.read():
            assert capture.values.shape[1] == capture.weights.shape[3] > 1
            assert capture.key_keep is None or capture.key_keep.shape == capture.values.shape[:2]


def test_values_of_a_call_that_fills_a_part_of_a_cache_or_follows_a_prefix_are_refused():
    from transformers import DynamicCache, StaticCache

    model, inputs = BY_NAME["Llama"].build(), BY_NAME["Llama"].inputs()
    padded = BY_NAME["Llama"].inputs(padded=True)
    prefix = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        prefix.update(*torch.randn(2, 2, 2, 3, 8), layer)
    for given, weights, slots, refused in (
        *((inputs, True, 7, False), (inputs, False, 12, False), (padded, False, 7, False)),
        *((inputs, True, 12, True), (padded, False, 12, True), ({"input_ids": inputs["input_ids"]}, False, 0, True)),
    ):
        cache = StaticCache(config=model.config, max_cache_len=slots) if slots else prefix
        with hw.Taps(hw.find_heads(model), values=True, weights=weights) as taps, torch.no_grad():
            model(**given, **given_cache(cache))
            if refused:
                with pytest.raises(hw.errors.NotFired, match=FROM_A_CACHE):
                    taps.read()
            else:
                assert all(capture.values.shape[1] == 7 for capture in taps.read())


@tiers("name", ["Llama"], ["GPT-2", "T5"])
@cases("way", ["dynamic", "static", "beams", "prompt lookup", "assistant"])
def test_generating_in_every_way_has_the_bias_of_every_position(name: str, way: str):
    model, inputs = swayed(name), prompt(name)
    if way in ("prompt lookup", "assistant"):
        inputs = {key: value[:1] for key, value in inputs.items()}
    ways: dict[str, Callable[[], dict]] = {
        "dynamic": dict,
        "static": lambda: {"cache_implementation": "static", "disable_compile": True},
        "beams": lambda: {"num_beams": 3},
        "prompt lookup": lambda: {"prompt_lookup_num_tokens": 2},
        "assistant": lambda: {"assistant_model": swayed(name, noise=0.05)},
    }
    beams = ways[way]() if way == "beams" else {}
    heads = steered(model)
    unsteered = model.generate(**inputs, **TOKENS, **beams)
    with hw.bias_heads(heads, by_position), hw.ablate(heads, 1):
        expected = model.generate(**inputs, **TOKENS, **beams, use_cache=False)
        with hw.Taps(heads, outputs=True, weights=True) as taps:
            whole = taps_of_last_query(model, taps, {**inputs, **TOKENS, "use_cache": False})
            found = model.generate(**inputs, **TOKENS, **ways[way]())
            captures = taps.read()
    assert torch.equal(found, expected)
    assert not torch.equal(found, unsteered)
    assert sorted(capture.site.name for capture in captures) == sorted(site.name for site in heads.sites)
    for capture in captures:
        queries, keys = capture.weights.shape[2:]
        assert bool((capture.outputs[:, :, 1] == 0).all())
        assert capture.outputs.shape[1] == queries
        assert capture.key_keep is None or capture.key_keep.shape[1] == keys
        assert capture.query_keep is None or capture.query_keep.shape[1] == queries
        if way in ("dynamic", "static"):
            expected = whole[capture.site.name]
            torch.testing.assert_close(capture.weights[..., : expected.shape[-1]], expected, atol=1e-5, rtol=1e-4)
            assert bool((capture.weights[..., expected.shape[-1] :] == 0).all())


def taps_of_last_query(model: nn.Module, taps: hw.Taps, settings: dict) -> dict[str, Tensor]:
    """The weights of the newest token of a generation, by site."""
    model.generate(**settings)
    return {capture.site.name: capture.weights[:, :, -1:] for capture in taps.read()}


def swayed(name: str, noise: float = 0.0) -> nn.Module:
    """A model whose next token depends on what its heads attend to; with noise, another such model."""
    model, drawn = generator(name), torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            # the weights of GPT-2 start smaller than others'
            parameter.mul_(4.0 if name == "GPT-2" else 1.0)
            parameter.add_(noise * torch.randn(parameter.shape, generator=drawn))
    return model


@cases("reentrant", [False, True])
@tiers("name", ["T5"], ["BERT", "Llama"])
def test_aggregators_have_the_same_gradients_under_checkpointing(name: str, reentrant: bool):
    def step(model: nn.Module) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            hw.aggregate(hw.find_heads(model), hw.routing.EMRouting(capsules=8))
        results(model, BY_NAME[name].inputs(padded=True))[0].square().mean().backward()

    assert any("vote" in key for key in require_same_gradients(name, step, reentrant=reentrant))


@cases("implementation", ["sdpa", "eager"])
@cases("precision", ["bfloat16", "float16", "autocast"])
@tiers("name", ["Llama"], ["BERT", "GPT-2", "T5"])
def test_every_method_works_in_half_precision(name: str, precision: str, implementation: str):
    family = BY_NAME[name]
    model, inputs = family.build().train(), family.inputs(padded=True)
    without_dropout(model)
    model.set_attn_implementation(implementation)
    if precision != "autocast":
        model.to(getattr(torch, precision))
    heads = hw.find_heads(model)
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")
    with torch.no_grad(), mixed:
        plain = results(model, inputs)
    penalty = hw.Disagreement(heads, THREE)
    with mixed, hw.bias_heads(heads, by_position):
        results(model, inputs)
        loss = penalty()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert bool(loss.isfinite())
    assert gradients
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    penalty.remove()
    with torch.inference_mode(), mixed, hw.Taps(heads, outputs=True, values=True, weights=True) as taps:
        tapped = results(model, inputs)
        captures = taps.read()
    for before, after in zip(plain, tapped, strict=True):
        torch.testing.assert_close(before.float(), after.float(), atol=0.1, rtol=0.05)
    for capture in captures:
        values = capture.values.repeat_interleave(capture.site.num_heads // capture.site.key_value_heads, dim=2)
        expected = torch.einsum("bhqk,bkhe->bqhe", capture.weights.double(), values.double())
        scale = float(expected.abs().max())
        torch.testing.assert_close(capture.outputs.double(), expected, atol=0.02 * scale, rtol=0.0)


def test_inference_mode_is_an_evaluation():
    family = BY_NAME["BERT"]
    model, inputs = family.build().train(), family.inputs(padded=True)
    heads = hw.find_heads(model)
    penalty = hw.Disagreement(heads, hw.similarity.Output() + hw.similarity.Position())
    with torch.inference_mode():
        for _ in range(3):
            results(model, inputs)
        assert not penalty().requires_grad
        results(model, inputs)
    results(model, inputs)
    assert penalty().requires_grad
    importance = hw.importance(heads, lambda: float(results(model.eval(), inputs)[0].flatten()[0]))
    assert all(bool((drops != 0).any()) for drops in importance.drops.values())


def t5() -> nn.Module:
    model = generator("T5")
    without_dropout(model)
    return model


@cases("training", [True, False])
def test_an_encoder_whose_output_is_used_twice_is_read_once(training: bool):
    model = t5().train(training)
    inputs, labels = prompt("T5"), torch.randint(3, 50, (2, 4))
    heads = hw.find_heads(model)
    mask = inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    mask[0, 5:] = 0
    with hw.Taps(heads, outputs=True) as taps, hw.bias_heads(heads, no_bias) as handle:
        encoded = model.get_encoder()(**inputs)
        for _ in range(2):
            model(encoder_outputs=encoded, attention_mask=mask, labels=labels)
        captures = taps.read()
    calls = {"self": 1, "decoder": 2 if training else 1, "cross": 2 if training else 1}
    for site in heads.sites:
        own = [capture for capture in captures if capture.site is site]
        assert len(own) == calls[site.kind]
        assert handle.calls[site.name] == (1 if site.kind == "self" else 2)
        assert all(site.kind == "decoder" or torch.equal(c.key_keep, mask.bool()) for c in own)


def test_a_forward_without_gradients_before_the_penalty_is_read_is_refused():
    family = BY_NAME["BERT"]
    model, inputs = family.build().train(), family.inputs()
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    results(model, inputs)
    with torch.no_grad():
        results(model, inputs)
    with pytest.raises(hw.errors.NotFired, match=r"carries no gradient.* a forward without gradients before"):
        penalty()


def test_an_encoder_run_without_gradients_in_a_training_step_is_refused_and_reads_when_left_out():
    model = t5().train()
    inputs, labels = prompt("T5"), torch.randint(3, 50, (2, 4))
    heads = hw.find_heads(model)

    def penalize(*kinds: str) -> Tensor:
        with hw.Disagreement(heads.kind(*kinds), hw.similarity.Output()) as penalty:
            with torch.no_grad():
                encoded = model.get_encoder()(**inputs)
            model(encoder_outputs=encoded, labels=labels)
            return penalty()

    with pytest.raises(hw.errors.NotFired, match=r"2 of 6 .* calls without gradients, .* are dropped"):
        penalize("self", "decoder", "cross")
    assert penalize("decoder", "cross").requires_grad


@cases(
    ("kind", "sizes"),
    [
        ("GPTNeo", {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}),
        ("XLM", {"emb_dim": 16, "n_layers": 2, "n_heads": 4, "pad_index": 0}),
    ],
)
def test_the_place_in_a_cache_is_read_whatever_the_module_calls_it(kind: str, sizes: dict):
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=20, max_position_embeddings=16, **sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with hw.Taps(hw.find_heads(model), values=True) as taps, torch.no_grad():
        model(torch.arange(1, 13).view(2, 6), use_cache=True)
        assert [capture.values.shape for capture in taps.read()] == [(2, 6, 4, 4)] * 2


class PlacedCache:
    """Keys and values of some layers; asked about any other place it raises, as a place of a state space does."""

    def __init__(self, *places: int) -> None:
        self.held: dict[int, tuple[Tensor, Tensor] | None] = dict.fromkeys(places)

    def get_seq_length(self, layer: int) -> int:
        held = self.held[layer]
        return 0 if held is None else held[0].shape[-2]

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        held = self.held[layer]
        self.held[layer] = (
            (key, value) if held is None else (torch.cat([held[0], key], -2), torch.cat([held[1], value], -2))
        )
        return self.held[layer]


class PlacedAttention(CallingAttention):
    """Holds no place of its own, or a wrong one."""

    def __init__(self, held: int | None) -> None:
        super().__init__()
        self.layer_idx = held

    def forward(self, x: Tensor, layer_idx: int, cache: PlacedCache | None = None) -> Tensor:
        q, k, v = self.project(x)
        first = 0
        if cache is not None:
            first = cache.get_seq_length(layer_idx)
            k, v = cache.update(k, v, layer_idx)
        mask = torch.ones(q.shape[-2], k.shape[-2]).tril(first).bool()
        heads = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.o_proj(heads.transpose(-2, -3).flatten(-2))


class Sharing(nn.Module):
    """One attention called at places 1, 3 and 4, its place given by position or by name."""

    def __init__(self, held: int | None, named: bool) -> None:
        super().__init__()
        self.attention, self.named = PlacedAttention(held), named

    def forward(self, x: Tensor, cache: PlacedCache | None = None) -> Tensor:
        for place in (1, 3, 4):
            given = ((), {"layer_idx": place, "cache": cache}) if self.named else ((place, cache), {})
            x = x + self.attention(x, *given[0], **given[1])
        return x


@cases("held", [None, -1, 0, 3])
@cases("named", [True, False])
def test_every_call_counts_the_tokens_of_its_own_place(held: int | None, named: bool):
    torch.manual_seed(0)
    model = Sharing(held, named).double().eval()
    heads, expected = hw.find_heads(model), model(X)
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    with hw.bias_heads(heads, bias):
        biased = model(X)
    assert not torch.allclose(biased, expected)
    cache = PlacedCache(1, 3, 4)
    with hw.Taps(heads, outputs=True, weights=True) as taps, hw.bias_heads(heads, lambda _site, call: part(bias, call)):
        torch.testing.assert_close(model(X[:, :4], cache), biased[:, :4])
        assert [tuple(capture.weights.shape) for capture in taps.read()] == [(2, 4, 4, 4)] * 3
        torch.testing.assert_close(model(X[:, 4:], cache), biased[:, 4:])
        captures = taps.read()
    assert [tuple(capture.weights.shape) for capture in captures] == [(2, 4, 2, 6)] * 3
    assert [tuple(capture.outputs.shape) for capture in captures] == [(2, 2, 4, 5)] * 3
    with hw.Taps(heads, values=True) as taps:
        model(X, PlacedCache(1, 3, 4))
        assert len(taps.read()) == 3
    assert hw.verify(heads, (X, PlacedCache(1, 3, 4))).sites == ("attention",)


def part(bias: Tensor, call: hw.nn.ScoreCall) -> Tensor:
    """The rows of a bias that belong to the queries of a call."""
    return bias[:, :, call.first : call.first + call.queries, : call.keys]


@pytest.mark.filterwarnings("ignore")
def test_a_hybrid_whose_layers_share_an_attention_is_read_and_biased_with_its_cache():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Zamba2Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=4,
        n_mamba_heads=4,
        mamba_headdim=16,
        mamba_ngroups=1,
        adapter_rank=4,
        num_mem_blocks=1,
        use_mem_rope=True,
        pad_token_id=0,
    )
    model = transformers.Zamba2ForCausalLM(config).eval()
    heads, tokens = hw.find_heads(model), torch.randint(3, 50, (2, 7))
    with torch.no_grad():
        expected = model(tokens).logits
        for what in ("outputs", "values", "weights", "mean_weights"):
            with hw.Taps(heads, **{what: True}) as taps:
                torch.testing.assert_close(model(tokens, use_cache=True).logits, expected, rtol=1e-4, atol=1e-4)
                assert len(taps.read()) == 2
        with hw.bias_heads(heads, lambda _site, call: torch.zeros(1, 4, 1, call.keys)):
            torch.testing.assert_close(model(tokens, use_cache=True).logits, expected, rtol=1e-4, atol=1e-4)
            generated = model.generate(tokens, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(tokens, max_new_tokens=3, do_sample=False), generated)
