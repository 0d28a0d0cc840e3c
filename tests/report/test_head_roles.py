"""`roles_of`: the roles of heads are those of slow loops, planted ones are found, and what has none is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.family import BERT, GPT, HEADS, LLAMA, VOCABULARY, make
from heads.language_families import LATENT
from headwise.errors import DataError, LayoutError, SettingError
from headwise.heads.record import keep as keep_value
from headwise.heads.record import record
from headwise.report.head_roles import MEASURES, HeadRoles
from reference import head_roles as reference

P, WINDOW = 9, 4
SIZES = {**LLAMA, "initializer_range": 0.5}
OSS = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 64}
OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MODELS = {
    "Llama": make("Llama", "LlamaForCausalLM", **SIZES),
    "GPT-2": make("GPT2", "GPT2LMHeadModel", **GPT, initializer_range=0.3),
    "Qwen3": make("Qwen3", "Qwen3ForCausalLM", **SIZES, head_dim=12),
    "DeepSeek-V3": make("DeepseekV3", "DeepseekV3ForCausalLM", **LATENT, initializer_range=0.3),
    "GPT-OSS": make("GptOss", "GptOssForCausalLM", **SIZES, **OSS),
    "Gemma": make("Gemma", "GemmaForCausalLM", **{**SIZES, "num_key_value_heads": 1}, head_dim=10),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(3)
    model = MODELS[name]().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                # gains of norms are not all one, nor biases zero
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def padded_text() -> dict[str, Tensor]:
    torch.manual_seed(4)
    ids, keep = torch.randint(3, VOCABULARY, (2, 13)), torch.ones(2, 13, dtype=torch.long)
    ids[1, :5], keep[1, :5] = 0, 0
    keep[0, 11:] = 0
    return {"input_ids": ids, "attention_mask": keep}


def compute(model: Any, heads: hw.Heads, batch: dict[str, Tensor], queries: range, window: int) -> dict[str, Any]:
    """The scores of each layer on a text, by loops, from what the model itself returns under eager attention."""
    norm = next(part for name, part in model.named_modules() if name.endswith((".norm", ".ln_f")))
    projections = [site.output_projection.module for site in heads]
    with torch.no_grad(), record([norm, *projections], inputs=keep_value) as calls:
        attentions = model(**batch, output_attentions=True, use_cache=False).attentions
    keep = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    centered, gain = isinstance(norm, nn.LayerNorm), norm.weight + (1 if "Gemma" in type(norm).__name__ else 0)
    epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    residual = next(call.given for call in calls if call.module is norm)
    found: dict[str, Any] = {}
    for site, weights, module in zip(heads, attentions, projections, strict=True):
        joined = next(call.given for call in calls if call.module is module)
        matrix = module.weight if isinstance(module, nn.Linear) else module.weight.T
        outputs = joined.unflatten(-1, (site.num_heads, site.head_size))
        columns = matrix.unflatten(1, (site.num_heads, site.head_size))
        contributions = torch.stack([outputs[:, :, h] @ columns[:, h].T for h in range(site.num_heads)], 2)
        found[site.name] = reference.text_scores(weights, keep, window)
        found[site.name]["output"] = reference.relative_norms(contributions, keep, window)
        found[site.name]["direct"] = reference.direct_effects(
            *(contributions, residual, gain, epsilon, model.get_output_embeddings().weight, batch["input_ids"], keep),
            queries,
            centered=centered,
        )
        found[site.name]["weights"] = weights
    return found


@cases("name", MODELS)
def test_every_measure_is_that_of_loops_in_double_precision_under_sdpa(name: str):
    # attention of transformers has its softmax in float32, and experts have no float64
    model = build(name, torch.float32 if name == "GPT-OSS" else torch.float64)
    model.set_attn_implementation("eager" if name == "GPT-OSS" else "sdpa")
    heads, drawn = hw.find_heads(model), []

    def watch(model: Any, batch: dict[str, Tensor]) -> Any:
        drawn.append(batch)
        return model(**batch, use_cache=False)

    alone = hw.roles_of(heads, tokens=P, window=WINDOW, rows=2, forward=watch)
    (ids,) = [batch["input_ids"] for batch in drawn]
    text = {"input_ids": padded_text()["input_ids"][:1]}
    read = hw.roles_of(heads, [text], tokens=P, window=WINDOW, rows=2)
    model.set_attn_implementation("eager")
    size = 1 + 2 * P
    assert ids.shape == (2, size)
    assert (ids[:, 0] == 1).all()
    assert torch.equal(ids[:, 1 : 1 + P], ids[:, 1 + P :])
    assert all(len(set(row.tolist())) == P for row in ids[:, 1 : 1 + P])
    assert not {0, 1, 2} & set(ids[:, 1:].flatten().tolist())
    repeated = compute(model, heads, {"input_ids": ids}, range(1 + P, size), WINDOW)
    whole = compute(model, heads, text, range(WINDOW, 13), WINDOW)
    for site in heads:
        expected = reference.repeat_scores(repeated[site.name]["weights"], P, 1)
        for measure in ("induction", "previous", "duplicate"):
            assert alone.scores[measure][site.name] == pytest.approx(expected[measure], abs=1e-6), measure
            assert read.scores[measure] == alone.scores[measure]
        for measure in MEASURES[3:]:
            if measure == "learned_sink" and name != "GPT-OSS":
                assert measure not in alone.scores
                continue
            tight = {"abs": 1e-4 if name == "GPT-OSS" else 3e-6, "rel": 1e-5}
            assert alone.scores[measure][site.name] == pytest.approx(repeated[site.name][measure], **tight), measure
            assert read.scores[measure][site.name] == pytest.approx(whole[site.name][measure], **tight), measure
    assert not any("direct" in note for note in alone.notes)


class Planted(nn.Module):
    """Attention with given weights, on one-hot vectors of token, position and previous token."""

    def __init__(self, size: int, heads: int, width: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(size, heads * width, bias=False))
        self.o_proj = nn.Linear(heads * width, size, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class PlantedModel(nn.Module):
    """Two layers: a head that reads the previous token feeds one that copies; beside them, what else is planted."""

    V, L, SHARP = 30, 24, 30.0

    def __init__(self) -> None:
        super().__init__()
        v, length = self.V, self.L
        size, width = 3 * v + length, v + length
        self.embed, self.place = nn.Embedding(v, size), nn.Embedding(length, size)
        for table in (self.embed, self.place):
            nn.init.zeros_(table.weight)
        token, place, before, said = (
            torch.arange(a, b) for a, b in ((0, v), (v, v + length), (v + length, size - v), (size - v, size))
        )
        self.layers = nn.ModuleList([Planted(size, 3, width), Planted(size, 3, width)])
        self.norm, self.head = nn.RMSNorm(size), nn.Linear(size, v, bias=False)
        nn.init.zeros_(self.head.weight)
        with torch.no_grad():
            self.embed.weight[:, token] = torch.eye(v)
            self.place.weight[:, place] = torch.eye(length)
            # what was said is a logit, and the token itself is none
            self.head.weight[:, said] = torch.eye(v)
            first, second = self.layers
            own = torch.arange(width)
            for layer in self.layers:
                for h in range(3):
                    layer.v_proj.weight[h * width + own[:v], token] = 1.0
            sharp = self.SHARP
            # layer 0: the previous token; the first token; W_O is zero
            first.q_proj.weight[own[v + 1 :], place[1:]] = sharp
            first.k_proj.weight[own[v + 1 :], place[:-1]] = 1.0
            first.o_proj.weight[before, own[:v]] = 1.0
            first.q_proj.weight[width, token] = sharp
            first.k_proj.weight[width, place[0]] = 1.0
            first.o_proj.weight[token, width + own[:v]] = 0.1
            # layer 1: induction; the same token before, but not itself; W_O is zero
            second.q_proj.weight[own[:v], token] = sharp
            second.k_proj.weight[own[:v], before] = 1.0
            second.o_proj.weight[said, own[:v]] = 1.0
            second.q_proj.weight[width + own[:v], token] = sharp
            second.k_proj.weight[width + own[:v], token] = 1.0
            second.q_proj.weight[width + own[v:], place] = -sharp
            second.k_proj.weight[width + own[v:], place] = 1.0
            second.o_proj.weight[token, width + own[:v]] = 0.1

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def test_planted_heads_are_recognized_and_heads_whose_output_projection_is_zero_are_inactive():
    model = PlantedModel()
    roles = hw.roles_of(hw.find_heads(model), vocabulary=model.V, tokens=11)
    assert roles.of("previous") == {"layers.0": (0,)}
    assert roles.of("induction") == {"layers.1": (0,)}
    assert roles.of("duplicate") == {"layers.1": (1,)}
    assert roles.of("first") == {"layers.0": (1,)}
    assert roles.of("inactive") == {"layers.0": (2,), "layers.1": (2,)}
    effects = roles.scores["direct"]["layers.1"]
    assert effects[0] > 1 > abs(effects[1])
    assert effects[2] == 0
    first, *table = str(roles).splitlines()[:4]
    assert first == (
        "PlantedModel: of 6 heads, 1 is an induction head, 1 mostly reads the first token, 1 mostly reads the previous "
        "token, 1 mostly reads the same token before, 2 are inactive."
    )
    assert table == [
        "layer  induction  first token  previous  duplicate  inactive  direct effect",
        "    0                       1         0                    2               ",
        f"    1          0                                 1         2      0 ({effects[0]:+.2f})",
    ]


def test_it_takes_one_forward_pass_and_one_for_each_batch_and_leaves_the_model_as_it_was():
    model, counted = build("Llama").train(), []
    handle = model.register_forward_hook(lambda *_: counted.append(1))
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    heads, text, state = hw.find_heads(model), padded_text(), torch.random.get_rng_state()
    one = hw.roles_of(heads, tokens=P)
    assert len(counted) == 1
    hw.roles_of(heads, [text], tokens=P)
    assert len(counted) == 3
    assert model.training
    assert hooks == sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    assert torch.equal(state, torch.random.get_rng_state())
    assert hw.roles_of(heads, tokens=P) == one
    assert hw.roles_of(heads, tokens=P, seed=1) != one
    handle.remove()


def test_a_text_counts_the_same_in_a_batch_with_padding_and_in_one_of_its_own():
    model, text = build("Llama", torch.float32), padded_text()
    heads, ids = hw.find_heads(model), text["input_ids"]
    apart, together = (
        hw.roles_of(heads, batches, tokens=P, window=WINDOW).scores for batches in ([ids[:1, :11], ids[1:, 5:]], [text])
    )
    for measure, sites in apart.items():
        for site, values in sites.items():
            assert together[measure][site] == pytest.approx(values, rel=1e-4, abs=1e-5), measure


def test_special_tokens_of_the_tokenizer_are_not_drawn_and_its_first_token_is_the_start():
    model, seen = build("Llama"), []
    added = {9: SimpleNamespace(special=True), 10: SimpleNamespace(special=False)}

    class Tokenizer(SimpleNamespace):
        def __len__(self) -> int:
            return 30

    tokenizer = Tokenizer(bos_token_id=7, all_special_ids=[7, 8], added_tokens_decoder=added)
    watch = lambda model, batch: seen.append(batch["input_ids"]) or model(**batch)  # noqa: E731
    hw.roles_of(hw.find_heads(model), tokenizer=tokenizer, tokens=19, rows=40, forward=watch)
    assert (seen[0][:, 0] == 7).all()
    # 0, 1 and 2 are the configuration's, and 30 to 60 are no tokens
    assert set(seen[0][:, 1:].flatten().tolist()) == {*range(3, 30)} - {7, 8, 9}


def test_layers_that_normalize_or_scale_what_heads_add_have_no_direct_effect_and_a_note_says_why():
    gemma = {**SIZES, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    models = {
        "normalize what heads add": make("Gemma2", "Gemma2ForCausalLM", **gemma, final_logit_softcapping=None),
        "scale what heads add": make("Granite", "GraniteForCausalLM", **SIZES, residual_multiplier=0.5),
        "scaled or capped": make("Cohere", "CohereForCausalLM", **SIZES),
        "no unembedding": make("Llama", **SIZES),
    }
    for reason, model in models.items():
        torch.manual_seed(0)
        roles = hw.roles_of(hw.find_heads(model()), tokens=P)
        assert "direct" not in roles.scores, reason
        assert [note for note in roles.notes if "direct effect was left out" in note and reason in note], roles.notes
        assert {"induction", "output"} <= set(roles.scores)


class Wrong(nn.Module):
    """It reads vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x))


def refused(**given: Any) -> Any:
    model = given.pop("model", None) or build("Llama", torch.float32)
    return hw.roles_of(given.pop("heads") if "heads" in given else hw.find_heads(model), **given)


@cases(
    ("given", "error", "words"),
    [
        (lambda: {"model": make("Bert", "BertForMaskedLM", **BERT)()}, LayoutError, "is not causal.*later tokens"),
        (lambda: {"vocabulary": 12, "tokens": 11}, SettingError, "has 9 tokens that are not special.*tokens=9 or"),
        (lambda: {"model": Wrong()}, SettingError, "no configuration that tells its vocabulary; give vocabulary="),
        (lambda: {"model": Wrong(), "vocabulary": 70}, SettingError, "could not be run on token ids"),
        (lambda: {"tokens": 3}, SettingError, "has 7 tokens.*window=8"),
        (lambda: {"tokens": 1}, SettingError, "tokens is 1; expected an integer of at least 2"),
        (lambda: {"rows": 0}, SettingError, "rows is 0"),
        (lambda: {"window": 0}, SettingError, "window is 0"),
        (lambda: {"threshold": 1.5}, SettingError, "threshold is 1.5"),
        (lambda: {"inactive": -1.0}, SettingError, "inactive is -1"),
        (lambda: {"batches": [torch.ones(2, 8).long()]}, SettingError, "no text has a token with 8 before it"),
        (lambda: {"batches": []}, SettingError, "no text has"),
        (lambda: {"batches": ["text"]}, SettingError, "a batch is a str"),
        (lambda: {"batches": [torch.full((1, 20), 99)]}, SettingError, "could not be run on token ids"),
        (lambda: {"heads": torch.ones(2)}, SettingError, "heads is a Tensor"),
        (
            lambda: {"model": make("T5", "T5ForConditionalGeneration", vocab_size=61, d_model=32, num_heads=2)()},
            LayoutError,
            "kind",
        ),
    ],
)
def test_what_has_no_roles_is_refused(given: Any, error: type[Exception], words: str):
    arguments = given()
    with pytest.raises(error, match=words):
        refused(**arguments)


def test_an_unknown_role_is_refused_and_what_is_not_finite_too():
    roles = HeadRoles("Model", {"a": 0}, {"first": {"a": (0.2, 0.9)}})
    assert roles.of("first") == {"a": (1,)}
    assert replace(roles, scores={**roles.scores, "learned_sink": {"a": (0.4, 0.0)}}).of("first") == {"a": (0, 1)}
    assert roles.of("induction") == {}
    with pytest.raises(SettingError, match="role is 'sink'; expected one of induction"):
        roles.of("sink")
    model = build("Llama", torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"layers\.1\.self_attn.*not finite"):
        hw.roles_of(hw.find_heads(model), tokens=P)


def test_what_was_saved_is_read_again_and_damage_is_refused(tmp_path: Path):
    heads = hw.find_heads(build("GPT-OSS", torch.float32))
    roles, place = hw.roles_of(heads, tokens=P), tmp_path / "roles.json"
    roles.save(place)
    assert HeadRoles.load(place) == roles
    content = json.loads(place.read_text())
    site = heads.sites[0].name
    damage = {
        "other format": {"format": "headwise roles 9"},
        "no number": {"scores": {"first": {site: ["x"]}}},
        "unknown measure": {"scores": {"sinks": {site: [0.5]}}},
        "unknown layer": {"scores": {"first": {"nowhere": [0.5]}}},
        "other heads": {"scores": {"first": {site: [0.5]}, "local": {site: [0.5, 0.5]}}},
        "infinite": {"scores": {"first": {site: ["inf"]}}},
        "no layers": {"layers": None},
    }
    for name, change in damage.items():
        place.write_text(json.dumps({**content, **change}))
        with pytest.raises(DataError, match="holds no roles"):
            pytest.fail(f"{name}: {HeadRoles.load(place)}")
    with pytest.raises(DataError):
        HeadRoles.load(tmp_path / "missing.json")


def test_the_table_is_short_and_a_frame_has_a_row_for_each_head():
    frame = hw.roles_of(hw.find_heads(build("GPT-OSS", torch.float32)), tokens=P).to_frame()
    assert list(frame.columns) == ["site", "layer", "head", *MEASURES]
    assert list(frame["head"]) == [*range(HEADS)] * 2
    many = {f"layers.{layer}": layer for layer in range(60)}
    scores = {"first": dict.fromkeys(many, (0.9,) * 9), "previous": dict.fromkeys(many, (0.1,) * 9)}
    lines = str(HeadRoles("Model", many, scores)).splitlines()
    assert lines[0] == "Model: of 540 heads, 540 mostly read the first token."
    assert len(lines[1].split("  ")) >= 7
    assert "0 1 2 3 +5" in lines[2]
    assert "... 21 layers ..." in lines
    assert len(lines) < 55
