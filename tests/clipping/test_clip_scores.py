"""hw.clip_scores against loops in float64, on the families of models, and in training loops."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise import clipping
from headwise.errors import LayoutError, NotFired, SettingError
from heads.families import BY_NAME
from reference.clipping import clip_rows, largest_score, length_bound

FAMILIES = (
    *("BERT", "GPT-2", "GPT-NeoX", "Llama", "Qwen2", "Phi-3", "T5", "BART", "CodeGen", "DeepSeek-V2", "DeepSeek-V3"),
    *("torch.nn.Transformer", "timm ViT"),
)
Scored = dict[str, list[tuple[Tensor, Tensor, Tensor, float]]]


def in_step(model: nn.Module) -> nn.Module:
    """Have a model count as training, without dropout."""
    model.eval().training = True
    return model


def record_scored(heads: hw.Heads, run, monkeypatch) -> Scored:
    """Return, by site, the (queries, keys, allowed, scale) that torch's attention was called with in a forward."""
    found: Scored = {site.name: [] for site in heads}
    running: list[str] = []
    attend = F.scaled_dot_product_attention

    def note(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **others):
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        if is_causal:
            allowed = allowed.tril()
        if attn_mask is not None:
            allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -1e3
        allowed = allowed.expand(len(query), query.shape[1], -1, -1)
        keys = key.detach().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        found[running[-1]].append((query.detach(), keys, allowed, query.shape[-1] ** -0.5 if scale is None else scale))
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **others)

    handles = [
        site.module.register_forward_pre_hook(lambda *_, name=site.name: running.append(name)) for site in heads
    ]
    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", note)
        run()
    for handle in handles:
        handle.remove()
    return found


def by_head(calls, compute) -> list[float]:
    """Return the largest over calls and sequences of what a function of one head gives, for each head."""
    return [
        max(compute(q[b, h], k[b, h], allowed[b, h], scale) for q, k, allowed, scale in calls for b in range(len(q)))
        for h in range(calls[0][0].shape[1])
    ]


def read_rows(site, projection: str, model: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    """Return copies of the rows [e, d] and the bias [e] of each head, read by their numbers."""
    part = next(own for own in site.slices if own.projection == projection)
    weight = model.get_parameter(part.name).detach()
    weight = weight if part.axes.inputs == 1 else weight.T
    rows = torch.tensor(part.rows).view(part.heads, -1)
    bias = None if part.bias is None else model.get_parameter(part.name.removesuffix("weight") + "bias").detach()
    if part.name.endswith("in_proj_weight"):
        bias = model.get_parameter(part.name.removesuffix("weight") + "bias").detach()
    return [(weight[own].clone(), None if bias is None else bias[own].clone()) for own in rows]


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_are_scaled_as_loops_over_the_equations_say(name: str, monkeypatch):
    family = BY_NAME[name]
    model = in_step(family.build().double())
    inputs = {
        key: value.double() if value.is_floating_point() else value for key, value in family.inputs(padded=True).items()
    }
    heads = hw.find_heads(model)
    scored = record_scored(heads, lambda: model(**inputs), monkeypatch)
    expected = {site.name: by_head(scored[site.name], largest_score) for site in heads}
    bounds = {site.name: by_head(scored[site.name], lambda q, k, _, scale: length_bound(q, k, scale)) for site in heads}
    positive = sorted(score for own in expected.values() for score in own if score > 0)
    middle = len(positive) // 2
    limit = (positive[middle - 1] + positive[middle]) / 2
    before = {site.name: [read_rows(site, kind, model) for kind in ("query", "key")] for site in heads}
    with (
        hw.clip_scores(heads, limit=limit, measure="exact") as clip,
        hw.clip_scores(heads, limit=1e9) as bound,
        hw.clip_scores(heads, limit=1e9, measure="sample") as sample,
    ):
        model(**inputs)
        for handle in (clip, bound, sample):
            handle.apply()
        scaled = sum(score > limit for own in expected.values() for score in own)
        assert int(clip.stats()["clipped_heads"]) == scaled > 0
        for site in heads:
            close = {"rtol": 1e-11, "atol": 1e-13}
            torch.testing.assert_close(clip.largest[site.name].tolist(), expected[site.name], **close)
            torch.testing.assert_close(bound.largest[site.name].tolist(), bounds[site.name], **close)
            assert (sample.largest[site.name] <= clip.largest[site.name] + 1e-12).all()
            queries, keys = before[site.name]
            for kind, after in (("query", read_rows(site, "query", model)), ("key", read_rows(site, "key", model))):
                for head, pair in enumerate(after):
                    own = queries[head], keys[head * len(keys) // len(queries)]
                    if kind == "key" and len(keys) < len(queries):
                        own = queries[head], keys[head]
                    for place in (0, 1):
                        if pair[place] is None:
                            continue
                        rows = clip_rows(
                            own[0][place],
                            own[1][place],
                            expected[site.name][head],
                            limit,
                            grouped=len(keys) < len(queries),
                            shared=4 if site.layout == "latent" else 0,
                        )
                        torch.testing.assert_close(pair[place], rows[kind == "key"], rtol=1e-12, atol=0.0)
        # the input of a first layer is the same again
        model(**inputs)
        clip.apply()
        for site in heads.sites[:1]:
            limited = [min(score, limit) for score in expected[site.name]]
            torch.testing.assert_close(clip.largest[site.name].tolist(), limited, rtol=1e-10, atol=1e-13)
