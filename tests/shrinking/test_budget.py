"""Budgets of key/value heads: the cache against a mask over the whole of it, the scores against the loss."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

import headwise as hw
from cases import cases, find_unrefused
from heads import shared
from heads.transformers_versions import CACHE
from headwise.caching import budget_cache, static_cache
from headwise.caching.budget_cache import require_mask
from headwise.errors import DataError, LayoutError, SettingError
from headwise.heads.scores.huggingface import InterfaceCall
from headwise.shrinking import KVBudget

SINK, WINDOW, PADS = 2, 6, (0, 3, 9)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 61}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, "bos_token_id": 1, "eos_token_id": None}
EVEN = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("Llama", "sdpa", {}),
    "Llama, eager": ("Llama", "eager", {}),
    "Mistral, all layers slide": ("Mistral", "sdpa", {"sliding_window": 14}),
    "GPT-2": ("GPT2", "sdpa", GPT2),
}
MORE = {
    "Qwen3": ("Qwen3", "sdpa", {"layer_types": EVEN, "sliding_window": 9, "use_sliding_window": True}),
    "Gemma 2, capped": ("Gemma2", "eager", {"layer_types": EVEN, "sliding_window": 10, "query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3Text", "sdpa", {"layer_types": EVEN, "sliding_window": 10}),
    "GPT-NeoX": ("GPTNeoX", "sdpa", {}),
    "OPT": ("OPT", "sdpa", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "GPT-OSS, with sinks": ("GptOss", "eager", {"layer_types": EVEN, "sliding_window": 10, **EXPERTS}),
    "Cohere 2": ("Cohere2", "sdpa", {"layer_types": EVEN, "sliding_window": 10}),
}


def build(kind: str, attention: str, own: dict[str, Any]) -> Any:
    """Return a model with weights large enough for heads to matter."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**({} if kind == "GPT2" else SIZES) | own)
    name = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() == 2 else 1.0)
    model.set_attn_implementation(attention)
    return model


def draw(model: Any, *, sink: int = SINK, window: int = WINDOW) -> KVBudget:
    """Return a budget with random scores."""
    heads = hw.find_heads(model)
    budget = hw.kv_budget(heads, [torch.randint(61, (1, 32))], sink=sink, window=window, copies=0)
    generator = torch.Generator().manual_seed(1)
    scores = {layer: tuple(torch.rand(len(one), generator=generator).tolist()) for layer, one in budget.scores.items()}
    return replace(budget, scores=scores, keep=0.5)


def mask_heads(model: Any, budget: KVBudget, keep: torch.Tensor) -> Any:
    """Have streaming heads see the first and last real tokens alone, by a bias on a model without a cache."""
    tokens = keep.cumsum(1) - 1
    far = (tokens[:, None] >= budget.sink) & (tokens[:, :, None] - tokens[:, None] >= budget.window)
    full = budget.full

    def find(site: Any, call: Any) -> torch.Tensor:
        bias = torch.zeros(call.batch, site.num_heads, call.queries, call.keys)
        for group in range(site.key_value_heads):
            if site.layer in full and group not in full[site.layer]:
                bias[:, list(site.list_members(group))] = torch.where(far, -torch.inf, 0.0)[:, None]
        return bias

    return hw.bias_heads(hw.find_heads(model), find)


@torch.no_grad()
def run(model: Any, ids: torch.Tensor, keep: torch.Tensor, cache: Any = None, start: int = 0) -> torch.Tensor:
    """Return logits of the tokens after `start`, with a cache of the others or without one."""
    own = {} if cache is None else {CACHE: cache}
    positions = (keep.cumsum(1) - 1).clamp_min(0)[:, start:]
    return model(ids[:, start:], attention_mask=keep, position_ids=positions, use_cache=bool(own), **own).logits


def pad(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 61, (len(PADS), length), generator=torch.Generator().manual_seed(2))
    keep = (torch.arange(length)[None] >= torch.tensor(PADS)[:, None]).long()
    # and in the midst of a row
    keep[1, 20:23] = 0
    return ids * keep, keep


def compare(found: torch.Tensor, wanted: torch.Tensor, keep: torch.Tensor) -> None:
    keep = keep.bool()
    torch.testing.assert_close(found[keep], wanted[keep], rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def check_family(kind: str, attention: str, own: dict[str, Any]) -> None:
    model = build(kind, attention, own)
    budget = draw(model)
    for ids, keep in (pad(40), (pad(40)[0][:1], pad(40)[1][:1])):
        with mask_heads(model, budget, keep):
            wanted = run(model, ids, keep)
        # blocks of a prompt in one piece are smaller than it; pieces; single tokens
        sizes = (None,) if any(budget.windows[layer] for layer in budget.scores) else (None, 40)
        for size, ends in product(sizes, ((36, 37, 38, 39, 40), (7, 8, 9, 22, 23, 40))):
            cache, start, parts = budget.cache(size), 0, []
            for end in ends:
                parts.append(run(model, ids[:, :end], keep[:, :end], cache, start))
                start = end
            compare(torch.cat(parts, 1), wanted, keep)


def shorten_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in (budget_cache, static_cache):
        monkeypatch.setattr(form, "BLOCK", 4)


@cases("name", FAMILIES)
def test_the_cache_equals_the_same_mask_over_a_whole_cache(name, monkeypatch):
    shorten_blocks(monkeypatch)
    check_family(*FAMILIES[name])


@pytest.mark.full
@cases("name", MORE)
def test_the_cache_equals_the_same_mask_in_more_families(name, monkeypatch):
    shorten_blocks(monkeypatch)
    check_family(*MORE[name])


@pytest.fixture(scope="module")
def llama() -> tuple[Any, KVBudget]:
    model = build("Llama", "sdpa", {})
    return model, draw(model)


def test_the_cache_follows_crop_beams_and_rows(llama):
    model, budget = llama
    slides = build("Mistral", "sdpa", {"sliding_window": 14})
    for model, budget in (llama, (slides, draw(slides))):
        ids, keep = pad(40)
        order = torch.tensor([2, 0, 0, 1])
        with mask_heads(model, budget, keep):
            wanted = run(model, ids, keep)[:, 30:]
        cache = budget.cache()
        run(model, ids[:, :24], keep[:, :24], cache)
        cache.activate_past_recording()
        for drafts in (5, 9):
            # tokens that are taken back, longer than the window too
            draft = torch.cat([ids[:, : cache.get_seq_length()], ids[:, :drafts]], 1)
            whole = torch.cat([keep[:, : cache.get_seq_length()], torch.ones_like(ids[:, :drafts])], 1)
            run(model, draft, whole, cache, cache.get_seq_length())
            cache.crop(-drafts)
            end = cache.get_seq_length() + 3
            run(model, ids[:, :end], keep[:, :end], cache, end - 3)
            cache.crop(0)
        again = copy.deepcopy(cache)
        compare(run(model, ids, keep, cache, 30), wanted, keep[:, 30:])
        again.reorder_cache(order)
        compare(run(model, ids[order], keep[order], copy.deepcopy(again), 30), wanted[order], keep[order, 30:])
        again.batch_select_indices(torch.tensor([1, 3]))
        again.batch_repeat_interleave(2)
        order = order[[1, 1, 3, 3]]
        compare(run(model, ids[order], keep[order], again, 30), wanted[order], keep[order, 30:])
        with pytest.raises(SettingError, match=r"crop\(-20\) would need tokens that streaming heads dropped"):
            cache.crop(-20)
        cache.reset()
        compare(run(model, ids, keep, cache)[:, 30:], wanted, keep[:, 30:])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_the_cache_of_a_fixed_size_follows_beams_and_is_emptied(llama):
    model, budget = llama
    ids, keep = pad(20)
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3, "attention_mask": keep, "pad_token_id": 0}
    cache = budget.cache(32)
    # not compiled, as it would be on a GPU
    found = [model.generate(ids, past_key_values=cache, disable_compile=True, **settings)]
    held = cache.nbytes
    cache.reset()
    found.append(model.generate(ids, past_key_values=cache, disable_compile=True, **settings))
    wanted = model.generate(ids, past_key_values=budget.cache(), **settings)
    assert all(torch.equal(one, wanted) for one in found)
    full, rows = sum(map(len, budget.full.values())), 3 * len(ids)
    states = 2 * 8 * 4 * (full * 32 + (8 - full) * (SINK + WINDOW + 1))
    assert held == cache.nbytes == rows * (states + 4 * 8 * (SINK + WINDOW + 2)) + 4 * 8


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_calls_with_one_token_compile_once(llama, backend):
    model, budget = llama
    ids, keep = pad(40)
    cache, growing = budget.cache(40), budget.cache()
    for one in (cache, growing):
        run(model, ids[:, :20], keep[:, :20], one)
    counter = CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for place in range(20, 40):
        # a mask of a fixed size, as generate makes it
        seen = torch.nn.functional.pad(keep[:, : place + 1], (0, 39 - place))
        own = {"position_ids": keep[:, : place + 1].sum(1, keepdim=True) - 1, "use_cache": True}
        with torch.no_grad():
            found = compiled(ids[:, place, None], attention_mask=seen, **{CACHE: cache}, **own).logits
        compare(found, run(model, ids[:, : place + 1], keep[:, : place + 1], growing, place), keep[:, place, None])
    assert counter.frame_count == 1


def test_a_short_text_is_cropped_without_recording(llama):
    model, budget = llama
    ids, keep = pad(40)
    ids, keep, cache = ids[:1], keep[:1], budget.cache()
    run(model, ids[:, :6], keep[:, :6], cache)
    cache.crop(-4)
    with mask_heads(model, budget, keep):
        wanted = run(model, ids, keep)[:, 2:]
    compare(run(model, ids, keep, cache, 2), wanted, keep[:, 2:])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@cases(
    "settings",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4, "one": True}, {"num_beams": 2, "num_return_sequences": 2}],
)
def test_generate_gives_the_tokens_of_the_same_mask(llama, settings):
    model, budget = llama
    ids, keep = pad(20)
    settings = dict(settings)
    if settings.pop("one", False):
        ids = ids[:1, :5].repeat(1, 4)
        keep = torch.ones_like(ids)
    settings |= {"max_new_tokens": 12, "do_sample": False, "attention_mask": keep, "pad_token_id": 0}
    found = model.generate(ids, past_key_values=budget.cache(), **settings)
    settings.pop("prompt_lookup_num_tokens", None)
    width = settings.get("num_beams", 1)
    longer = torch.cat([keep, keep.new_ones(len(keep), 12)], 1).repeat_interleave(width, 0)
    tokens = longer.cumsum(1) - 1
    far = (tokens[:, None] >= budget.sink) & (tokens[:, :, None] - tokens[:, None] >= budget.window)

    def find(site: Any, call: Any) -> torch.Tensor:
        bias = torch.zeros(call.batch, site.num_heads, call.queries, call.keys)
        part = far[:: 1 if call.batch == len(far) else width, : call.queries, : call.keys]
        for group in {*range(site.key_value_heads)} - {*budget.full[site.layer]}:
            bias[:, list(site.list_members(group))] = torch.where(part, -torch.inf, 0.0)[:, None]
        return bias

    with hw.bias_heads(hw.find_heads(model), find):
        wanted = model.generate(ids, use_cache=False, **settings)
    assert torch.equal(found, wanted)


def test_the_cache_holds_what_it_says(llama):
    model, budget = llama
    cache, tokens = budget.cache(), 300
    ids = torch.randint(61, (1, tokens))
    run(model, ids, torch.ones_like(ids), cache)
    run(model, ids.repeat(1, 2), torch.ones_like(ids.repeat(1, 2)), cache, tokens)
    full = sum(map(len, budget.full.values()))
    token = 2 * 8 * 4
    held = full * 2 * tokens * token + (8 - full) * (SINK + WINDOW - 1) * token
    assert held <= cache.nbytes <= held + 4 * (2 * 8 * (SINK + WINDOW) + 64)


def test_scores_sum_to_what_the_window_costs(llama):
    model, _ = llama
    texts = [torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(3))]
    with torch.no_grad():
        for parameter in (small := copy.deepcopy(model)).parameters():
            parameter.mul_(0.5 if parameter.dim() == 2 else 1.0)
    from headwise.caching import budget as module

    budget = replace(draw(small), keep=0.5)
    like = {layer: torch.zeros(len(one), dtype=torch.float64) for layer, one in budget.scores.items()}
    found = module._integrate(small, [{"input_ids": texts[0]}], like, budget, budget.windows)

    def lose(share: float) -> float:
        with torch.no_grad():
            logits = small(texts[0], **{CACHE: replace(budget, keep=share).cache()}).logits[:, :-1]
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[0][:, 1:].flatten()))

    gained = lose(0.0) - lose(1.0)
    assert sum(float(one.sum()) for one in found.values()) == pytest.approx(gained, rel=0.05)


def test_heads_that_give_nothing_score_nothing_and_the_model_is_left_as_it_was():
    model = build("Llama", "sdpa", {})
    heads = hw.find_heads(model)
    with torch.no_grad():
        # all other heads give nothing
        for site in heads:
            gone = [head for head in range(4) if (site.layer, head // 2) != (2, 1)]
            site.output.of(site.output.parameter)[gone] = 0.0
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    model.train()
    before, flags = copy.deepcopy(model.state_dict()), [one.requires_grad for one in model.parameters()]
    budget = hw.kv_budget(heads, keep=1 / 8, sink=1, window=8)
    assert abs(budget.scores.pop(2)[1]) == pytest.approx(1.0)
    assert {one for scores in budget.scores.values() for one in scores} == {0.0}
    assert model.training
    assert flags == [one.requires_grad for one in model.parameters()]
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())


def test_a_budget_is_printed_drawn_and_saved(tmp_path):
    budget = KVBudget({0: (0.25, 0.5), 2: (-0.125, 0.75)}, (None, 16, None), 0.5, 2, 8)
    title, *rows = str(budget).splitlines()
    assert title == "2 of 4 key/value heads (#) keep all positions, the others the first 2 and the last 8"
    assert rows == ["  layer 0  . #", "  layer 2  . #"]
    assert len(str(replace(budget, scores=dict.fromkeys(range(90), (0.0,)), windows=(None,) * 90)).splitlines()) < 50
    figure = hw.plots.budget_map(budget)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["0", "2"]
    budget.save(tmp_path / "budget.json")
    assert KVBudget.load(tmp_path / "budget.json") == budget
    held = json.loads((tmp_path / "budget.json").read_text())
    assert held["full"] == {"0": [1], "2": [1]}
    for key, value in (("format", "x"), ("scores", {"7": [1.0]}), ("keep", 2.0), ("windows", 3)):
        (tmp_path / "bad.json").write_text(json.dumps(held | {key: value}))
        with pytest.raises(DataError, match=r"bad.json holds no budget \(.*expected a file written by KVBudget.save"):
            KVBudget.load(tmp_path / "bad.json")


def test_what_has_no_exact_cache_is_refused(llama):
    model, budget = llama
    heads = hw.find_heads(model)
    text = [torch.randint(61, (1, 20))]

    def find(kind: str, name: str = "", **own: Any) -> Any:
        config = getattr(transformers, f"{kind}Config")(**SIZES | own)
        model = getattr(transformers, name or f"{kind}ForCausalLM")(config).eval()
        return hw.find_heads(model, exclude=("model.layers.*.linear_attn",) if "linear" in str(own) else ())

    def score(found: Any, **settings: Any) -> Any:
        return lambda: hw.kv_budget(found, text, **{"window": 8, **settings})

    def call(change: Any) -> Any:
        def attend() -> None:
            with change():
                model(text[0], **{CACHE: budget.cache()})

        return attend

    latent = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "q_lora_rank": 8}
    latent |= {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    linear = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 2, "num_experts_per_tok": 1}
    other = KVBudget({0: (0.0,) * 3}, (None,) * 4)
    plain = torch.nn.TransformerEncoderLayer(8, 2, 16)
    missed = find_unrefused(
        [
            (score(heads, keep=1.5), SettingError, "keep is 1.5; expected a finite number"),
            (score(heads, sink=-1), SettingError, "sink is -1; expected"),
            (score(heads, window=0), SettingError, "window is 0; expected"),
            (score(heads, window=30), SettingError, "no text of the batches has more than 34 tokens"),
            (
                lambda: hw.kv_budget(heads, copies=0),
                SettingError,
                "nothing to score heads by: no batches, and 0 copies",
            ),
            (lambda: hw.kv_budget(heads, ["a text"]), SettingError, "a batch is a str; expected token ids"),
            (score(find("Mistral", sliding_window=8)), SettingError, "no layer .* attends beyond a window of 8"),
            (score(hw.find_heads(plain)), LayoutError, "no model of transformers that generates"),
            (score(find("Bert", "BertForMaskedLM")), LayoutError, "BertForMaskedLM .*(not causal|generates)"),
            (score(find("Bert", "BertLMHeadModel")), LayoutError, "BertLMHeadModel is not causal"),
            (score(find("T5", "T5ForConditionalGeneration")), LayoutError, "is an encoder-decoder"),
            (score(find("Bloom")), LayoutError, "does not call the attention interface"),
            (score(find("DeepseekV3", **latent)), LayoutError, "computes with what the cache .*latent attention"),
            (
                score(hw.find_heads(shared.build("Gemma 4"))),
                LayoutError,
                "keys and values of its own for each",
            ),
            (score(find("Qwen3Next", **linear)), LayoutError, "layer 0 .* LinearAttentionLayer .*linear attention"),
            (lambda: model(text[0], **{CACHE: other.cache()}), LayoutError, "computes 2 key/value heads .* has 3"),
            (lambda: model(text[0], **{CACHE: budget.cache(19)}), SettingError, "made for 19 tokens and is given 20"),
            (lambda: budget.cache(19).crop(-1), SettingError, r"crop\(-1\) of a cache of a fixed size"),
            (lambda: budget.cache(0), SettingError, "max_length is 0; expected"),
            (lambda: replace(budget, windows=(9,) * 4).cache(19), LayoutError, "layer 0 has a window of its own"),
            (call(lambda: hw.Taps(heads, weights=True)), LayoutError, "has a bias, taps, or paired or mixed heads"),
        ]
    )
    assert not missed, "\n".join(missed)


def test_padding_is_no_text_to_score_by(llama):
    heads = hw.find_heads(llama[0])
    text = torch.randint(1, 61, (1, 20))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), text], 1)
    keep = torch.ones_like(padded)
    keep[:, :5] = 0
    alone, beside = (
        hw.kv_budget(heads, [batch], sink=SINK, window=WINDOW, copies=0)
        for batch in (text, {"input_ids": padded, "attention_mask": keep})
    )
    for layer, scores in alone.scores.items():
        assert beside.scores[layer] == pytest.approx(scores, rel=1e-3, abs=1e-5)


def test_a_cache_that_is_not_exact_is_refused_before_it_is_used(llama, monkeypatch):
    heads, values = hw.find_heads(llama[0]), torch.ones(1, 2, 4, 8)
    call = InterfaceCall(lambda: None, "sdpa", heads.model, values, values, None, {})
    assert require_mask(call, values, 4) is None
    for changed, message in (
        (call._replace(value=values.clone()), "changes the values that its cache returned"),
        (call._replace(settings={"position_bias": values}), "adds a bias of each head to its scores"),
    ):
        with pytest.raises(LayoutError, match=message):
            require_mask(changed, values, 4)
    attend = budget_cache.BudgetLayer._attend_full
    monkeypatch.setattr(budget_cache.BudgetLayer, "_attend_full", lambda *given: 1.1 * attend(*given))
    with pytest.raises(LayoutError, match="computes something else with the cache of a budget"):
        hw.kv_budget(heads, window=WINDOW)
