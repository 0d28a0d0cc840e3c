"""The ways in which models of Hugging Face are called: each is read and steered rightly, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases, tiers
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


@cases("name", ["GPT-2", "Llama", "T5"])
def test_values_of_a_call_that_only_fills_a_cache_are_read(name: str):
    family = BY_NAME[name]
    model, inputs = family.build().train(), family.inputs(padded=True)
    with hw.Taps(hw.find_heads(model), values=True) as taps:
        returned = model(**inputs, use_cache=True)
        assert returned.past_key_values.get_seq_length() > 0
        for capture in taps.read():
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


@tiers("name", ["T5"], ["GPT-2", "Llama"])
@cases("beams", [1, 3])
def test_generating_with_aggregators_and_a_cache_gives_the_tokens_of_generating_without(name: str, beams: int):
    model, inputs = swayed(name), prompt(name)
    unrouted = model.generate(**inputs, **TOKENS, num_beams=beams)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        hw.aggregate(hw.find_heads(model), hw.routing.EMRouting(capsules=8))
    expected = model.generate(**inputs, **TOKENS, num_beams=beams, use_cache=False)
    assert torch.equal(model.generate(**inputs, **TOKENS, num_beams=beams), expected)
    assert not torch.equal(unrouted, expected)


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


def test_two_readers_read_the_same_without_disturbing_each_other():
    family = BY_NAME["GPT-2"]
    model, inputs = family.build().train(), family.inputs(padded=True)
    heads = hw.find_heads(model)
    with (
        hw.Taps(heads, outputs=True, weights=True) as first,
        hw.Disagreement(heads.layer(1), hw.similarity.Position()) as penalty,
        hw.Taps(heads.layer(1), outputs=True, values=True) as second,
    ):
        results(model, inputs)
        (one,) = (capture for capture in first.read() if capture.site.layer == 1)
        (two,) = second.read()
        assert torch.equal(one.outputs, two.outputs)
        assert two.weights is None
        first.remove()
        results(model, inputs)
        assert len(second.read()) == 1
        # read late: both forwards are in it, and they were equal but for dropout
        assert penalty().requires_grad
        with pytest.raises(hw.errors.NotFired, match="attached to no model"):
            first.read()


@cases("name", ["BERT", "Llama", "T5"])
def test_a_penalty_over_accumulated_and_checkpointed_steps_has_the_gradients_of_plain_ones(name: str):
    def step(model: nn.Module) -> None:
        heads, losses = hw.find_heads(model), []
        penalty = hw.Disagreement(heads, THREE)
        for padded in (True, False):
            with hw.bias_heads(heads, by_position):
                output = results(model, BY_NAME[name].inputs(padded=padded))[0]
            losses.append(output.square().mean() + penalty())
        penalty.remove()
        # backward when nothing is attached any more, and in another order
        for loss in reversed(losses):
            loss.backward()

    require_same_gradients(name, step)


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
