"""hw.clip_scores against loops in float64, on the families of models, and in training loops."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from heads.families import BY_NAME
from headwise.errors import LayoutError, NotFired, SettingError
from headwise.optim import clipping
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
        allowed = allowed.expand(*query.shape[:3], key.shape[2])
        keys = key.detach().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        found[running[-1]].append((query.detach(), keys, allowed, query.shape[-1] ** -0.5 if scale is None else scale))
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **others)

    handles = [site.module.register_forward_pre_hook(lambda *_, name=site.name: running.append(name)) for site in heads]
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
        hw.clip_scores(heads, limit=1e9, measure="bound") as bound,
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
            # DeepSeek-V2 rotates in float32
            rtol = 1e-6 if name == "DeepSeek-V2" else 1e-10
            torch.testing.assert_close(clip.largest[site.name].tolist(), limited, rtol=rtol, atol=1e-13)


def encoder(layers: int = 1) -> tuple[nn.Module, Tensor]:
    """An encoder of torch, in training mode, whose scores are near 1, and two sequences."""
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return model, torch.randn(2, 5, 8)


def step(model: nn.Module, optimizer, *batches: Tensor) -> None:
    optimizer.zero_grad()
    for x in batches:
        model(x).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module, rate: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def largest(clip) -> Tensor:
    return torch.cat([*clip.largest.values()])


@pytest.mark.parametrize("name", ["torch", "Llama", "DeepSeek-V3"])
def test_after_a_step_scores_of_the_batch_are_at_most_the_limit(name: str):
    model, x = encoder()
    model, inputs = (model, {"src": x}) if name == "torch" else (BY_NAME[name].build(), BY_NAME[name].inputs())
    in_step(model)
    heads = hw.find_heads(model)
    heads = heads.layer(0)
    for measure in ("exact", "bound"):
        trained = copy.deepcopy(model)
        own = hw.find_heads(trained).layer(0)
        optimizer = sgd(trained)
        with hw.clip_scores(own, limit=1e-3, measure=measure, optimizer=optimizer):
            output = trained(**inputs)
            output = output if isinstance(output, Tensor) else output[0]
            output.square().mean().backward()
            optimizer.step()
        with hw.clip_scores(own, measure="exact") as after:
            trained(**inputs)
            after.apply()
        if measure == "exact":
            torch.testing.assert_close(largest(after), torch.full_like(largest(after), 1e-3), rtol=1e-5, atol=0.0)
        else:
            assert (largest(after) < 1e-3).all()


def test_the_largest_score_is_that_of_all_micro_batches_and_of_none_in_evaluation():
    model, x = encoder()
    optimizer, batches = sgd(model), [x, 3 * x, 2 * x]
    clip = hw.clip_scores(hw.find_heads(model), limit=1e9, measure="exact", optimizer=optimizer)
    alone = []
    for batch in batches:
        step(model, optimizer, batch)
        alone.append(largest(clip).clone())
    assert (alone[1] > alone[0]).all()
    with torch.no_grad():
        model(10 * x)
    model.eval()
    model(10 * x)
    model.train()
    step(model, optimizer, *batches)
    assert torch.equal(largest(clip), torch.stack(alone).amax(0))
    # and a step begins anew
    step(model, optimizer, x)
    assert torch.equal(largest(clip), alone[0])


def test_a_clipped_step_leaves_the_state_of_the_optimizer_and_other_weights():
    model, x = encoder(2)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in (model, twin)]
    hw.clip_scores(hw.find_heads(model).layer(1), limit=0.01, optimizer=optimizers[0])
    # attached, so that it computes alike
    hw.clip_scores(hw.find_heads(twin).layer(1), limit=1e9)
    for own, optimizer in zip((model, twin), optimizers, strict=True):
        step(own, optimizer, x)
    states = [list(optimizer.state.values()) for optimizer in optimizers]
    assert all(torch.equal(a[key], b[key]) for a, b in zip(*states, strict=True) for key in ("exp_avg", "exp_avg_sq"))
    changed = {name for name, own in model.named_parameters() if not torch.equal(own, twin.get_parameter(name))}
    # the step itself moved the biases away from zero
    assert changed == {"layers.1.self_attn.in_proj_weight", "layers.1.self_attn.in_proj_bias"}
    rows = (model.layers[1].self_attn.in_proj_weight != twin.layers[1].self_attn.in_proj_weight).any(1)
    assert rows.tolist() == [True] * 16 + [False] * 8


def test_a_learned_key_keeps_its_size_and_queries_alone_are_scaled():
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True), torch.randn(3, 5, 8)
    before = attention.in_proj_weight.detach().clone()
    clip = hw.clip_scores(hw.find_heads(attention), limit=1e-3, measure="exact")
    attention(x, x, x)
    clip.apply()
    factor = (1e-3 / largest(clip)).repeat_interleave(4)[:, None]
    torch.testing.assert_close(attention.in_proj_weight[:8], before[:8] * factor)
    assert torch.equal(attention.in_proj_weight[8:], before[8:])


def test_a_run_that_resumes_goes_on_alike():
    def train(steps: int, saved=None):
        model, x = encoder(2)
        optimizer = sgd(model, 0.5)
        run = hw.attach(hw.find_heads(model), hw.ClipScores(limit=0.3), optimizer=optimizer)
        if saved is not None:
            for own, state in zip((model, optimizer, run), saved, strict=True):
                own.load_state_dict(state)
        for _ in range(steps):
            step(model, optimizer, x)
        run.check()
        assert run.stats()["clipped_heads"] > 0
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), run.state_dict()))

    whole, resumed = train(4)[0], train(2, train(2))[0]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_removal_takes_everything_off_and_leaves_the_weights():
    model, x = encoder()
    optimizer = sgd(model)
    kind = type(model.layers[0].self_attn)
    with hw.clip_scores(hw.find_heads(model), limit=1e-3, optimizer=optimizer) as clip:
        step(model, optimizer, x)
        weights = copy.deepcopy(model.state_dict())
    step(model, optimizer, 5 * x)
    assert clip.steps == 1
    assert all(torch.equal(weights[name], own) for name, own in model.state_dict().items())
    assert type(model.layers[0].self_attn) is kind
    assert not optimizer._optimizer_step_post_hooks
    with pytest.raises(NotFired, match="removed"):
        clip.apply()
    llama = BY_NAME["Llama"].build()
    before = {name: set(vars(module)) for name, module in llama.named_modules()}
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in llama.modules())
    hw.clip_scores(hw.find_heads(llama)).remove()
    assert {name: set(vars(module)) for name, module in llama.named_modules()} == before
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in llama.modules()) == hooks


def test_a_block_without_steps_or_scores_raises():
    model, _ = encoder()
    with pytest.raises(NotFired, match="no step was seen"), hw.clip_scores(hw.find_heads(model)):
        pass
    optimizer = sgd(model)
    with pytest.raises(NotFired, match="no scores of"), hw.clip_scores(hw.find_heads(model), optimizer=optimizer):
        optimizer.step()


def test_all_processes_scale_by_the_largest_of_their_scores(monkeypatch):
    model, x = encoder()
    optimizer = sgd(model)
    clip = hw.clip_scores(hw.find_heads(model), limit=1.0, measure="exact", optimizer=optimizer)

    def reduce(own: torch.Tensor, op: object) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        own.clamp_min_(4.0)

    monkeypatch.setattr(clipping, "is_distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    before = model.layers[0].self_attn.in_proj_weight.detach().clone()
    step(model, optimizer, x)
    assert torch.equal(largest(clip), torch.full((2,), 4.0))
    torch.testing.assert_close(model.layers[0].self_attn.in_proj_weight[:16], before[:16] / 2)


def test_blocks_of_muon_are_weights_of_their_optimizer():
    model, x = encoder()
    heads = hw.find_heads(model)
    blocks = hw.heads.head_blocks(heads)
    muon = torch.optim.Muon(list(blocks), lr=0.01, adjust_lr_fn="match_rms_adamw")
    blocks.attach(muon)
    rest = torch.optim.AdamW(blocks.rest)
    clip = hw.clip_scores(heads, limit=1e-3, optimizer=[muon, rest])
    model(x).square().mean().backward()
    rest.step()
    assert clip.steps == 0
    muon.step()
    assert clip.stats()["clipped_heads"] == 2


def test_heads_whose_scores_are_not_finite_stay():
    model, x = encoder()
    clip = hw.clip_scores(hw.find_heads(model), limit=1e-3, measure="bound")
    before = copy.deepcopy(model.state_dict())
    # the bound of the last is infinite
    for bad in (math.inf, math.nan, 1e25):
        model(bad * x)
        clip.apply()
        assert clip.stats()["clipped_heads"] == 0
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())


def test_scores_of_a_checkpointed_forward_count():
    scores = []
    for reentrant in (None, False, True):
        model, x = encoder(2)
        clip = hw.clip_scores(hw.find_heads(model), measure="exact")
        x.requires_grad_()
        output = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        output.square().mean().backward()
        clip.apply()
        scores.append(largest(clip))
    assert scores[0].isfinite().all()
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


def test_what_cannot_be_clipped_is_refused(monkeypatch):
    qwen = hw.find_heads(BY_NAME["Qwen3"].build())
    with pytest.raises(LayoutError, match=r"normalizes its queries or keys after their projection \(k_norm|q_norm"):
        hw.clip_scores(qwen)
    with pytest.raises(LayoutError, match="writes its softmax out"):
        hw.clip_scores(hw.find_heads(BY_NAME["DeBERTa-v3"].build()))
    model, _ = encoder()
    heads = hw.find_heads(model)
    with pytest.raises(LayoutError, match="in_proj_weight is not held by the optimizer"):
        hw.clip_scores(heads, optimizer=sgd(nn.Linear(2, 2)))
    for wrong in ({"limit": 0.0}, {"measure": "all"}):
        with pytest.raises(SettingError):
            hw.clip_scores(heads, **wrong)
        with pytest.raises(SettingError):
            hw.ClipScores(**wrong)
    with monkeypatch.context() as sharded:
        sharded.setattr(clipping, "is_sharded", lambda _: True)
        with pytest.raises(LayoutError, match="is sharded over processes"):
            hw.clip_scores(heads)
    one, two = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
    two.in_proj_weight = one.in_proj_weight
    with pytest.raises(LayoutError, match="has the same heads as"):
        hw.clip_scores(hw.find_heads(nn.ModuleList([one, two])))
    model.requires_grad_(False)
    with pytest.raises(LayoutError, match="does not require a gradient"):
        hw.clip_scores(heads)
    pair = hw.nn.DifferentialAttention(8, 2, batch_first=True)
    with pytest.raises(LayoutError, match="two maps"):
        hw.clip_scores(hw.find_heads(pair))
    assert not any(module._forward_pre_hooks for module in qwen.model.modules())
