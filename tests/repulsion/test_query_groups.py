"""What a head is under grouped queries: inside a group, groups as wholes, key/value heads; each by hand in float64."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

import headwise as hw
from cases import cases
from headwise.repulsion.groups import find_groups
from reference import disagreement as reference
from reference import particles

HEADS, GROUPS, SIZE, WIDTH = 6, 2, 4, 24
MEMBERS = HEADS // GROUPS
SIZES = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
}
IDS = torch.arange(14).reshape(2, 7)


of_both = cases("make", [lambda: LlamaModel(LlamaConfig(**SIZES)), lambda: Qwen3Model(Qwen3Config(**SIZES))])


def seeded(make) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(input_ids=IDS, use_cache=False).last_hidden_state.square().sum().backward()


def repelled(theta: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What the optimizer gets of particles [M, D] under SVGD with alpha 0.4 and step size 0.3."""
    kappa = particles.rbf(particles.median_bandwidth(theta))
    settings = {"alpha": 0.4, "epsilon": 0.3, "tau": 0.0, "N": 1.0, "beta": 1.0, "smoothing": True}
    return particles.svgd(theta, gradient, kappa, particles.repulsion(theta, kappa), **settings)


@of_both
def test_a_key_value_head_serves_the_query_heads_of_its_group(make):
    model = seeded(make)
    heads = hw.find_heads(model)
    (value,) = (part for part in heads.sites[0].slices if part.projection == "value")
    outputs = []
    for change in (0.0, 1.0):
        with torch.no_grad(), hw.Taps(heads, outputs=True) as taps:
            value.of(value.parameter)[1] += change
            model(input_ids=IDS)
            outputs.append(taps.read()[0].outputs)
    changed = [not torch.equal(outputs[0][:, :, head], outputs[1][:, :, head]) for head in range(HEADS)]
    assert changed == [False] * MEMBERS + [True] * MEMBERS


@of_both
@cases("grouping", ["", "within", "across"])
@cases("projection", ["query", "key", "value"])
def test_repulsion_is_between_the_heads_that_were_selected(projection, grouping, make):
    model = seeded(make)
    backward(model)
    heads = hw.find_heads(model).projection(projection)
    weight = getattr(model.layers[1].self_attn, f"{projection[0]}_proj").weight
    theta, gradient = weight.detach().clone(), weight.grad.clone()
    if projection == "query":
        sets = {"": [list(range(HEADS))], "within": [[0, 1, 2], [3, 4, 5]], "across": [[0, 1]]}[grouping]
        size = SIZE * MEMBERS if grouping == "across" else SIZE
    else:
        sets, size = [list(range(GROUPS))], SIZE
    expected = torch.zeros_like(gradient)
    for heads_of_set in sets:
        rows = torch.cat([torch.arange(head * size, (head + 1) * size) for head in heads_of_set])
        own = [tensor[rows].reshape(len(heads_of_set), -1) for tensor in (theta, gradient)]
        expected[rows] = repelled(*own).reshape(len(rows), WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    chosen = heads.grouped(grouping) if grouping else heads
    handle = hw.repel(chosen, hw.SVGD(alpha=0.4, step_size=0.3), optimizer)
    handle.apply()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(expected, 0.3 * gradient)


@of_both
def test_each_group_of_query_heads_gets_noise_of_its_own(make):
    model = seeded(make)
    weight = model.layers[0].self_attn.q_proj.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    heads = hw.find_heads(model).projection("query").grouped("within")
    hw.repel(heads, hw.SGLD(inverse_temperature=5.0, step_size=0.3), optimizer)
    backward(model)
    before = weight.grad.clone()
    optimizer.step()
    noise = (weight.grad - 0.3 * before).view(GROUPS, MEMBERS * SIZE, WIDTH)
    # of 288 pairs of independent draws
    assert abs(torch.corrcoef(noise.flatten(1))[0, 1]) < 0.25
    assert (noise.flatten(1).std(dim=1) > 0.5 * (2 * 0.3 / 5.0 / 0.25) ** 0.5).all()


@of_both
def test_groups_join_with_their_keys_and_values(make):
    model = seeded(make)
    backward(model)
    attention = model.layers[0].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    theta, gradient = (
        torch.cat([tensor.reshape(GROUPS, -1) for tensor in tensors], dim=1)
        for tensors in ([one.detach() for one in weights], [one.grad for one in weights])
    )
    expected = repelled(theta, gradient)
    heads = hw.find_heads(model)
    rule = hw.SVGD(alpha=0.4, step_size=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hw.repel(heads.grouped("across"), rule, optimizer, joint=True).apply()
    found = torch.cat([one.grad.reshape(GROUPS, -1) for one in weights], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    for chosen in (heads, heads.grouped("within")):
        with pytest.raises(hw.errors.SettingError, match="6 query heads and 2 key/value heads cannot be joined"):
            hw.repel(chosen, rule, torch.optim.SGD(model.parameters(), lr=0.0), joint=True)


@of_both
def test_groups_have_names_and_train_under_adapters_and_targets(make):
    model = seeded(make)
    names = [group.name for group in find_groups(hw.find_heads(model).layer(0).grouped("within"))]
    assert names == [f"layers.0.self_attn {one}" for one in ("query 0:3", "query 3:6", "key", "value")]
    adapted = get_peft_model(model.float(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.SGD([one for one in adapted.parameters() if one.requires_grad], lr=0.1)
    heads = hw.find_heads(adapted).projection("query").grouped("within")
    handle = hw.repel(heads, hw.SVGD(alpha=hw.Target(2.5)), optimizer)
    for _ in range(2):
        adapted(input_ids=IDS, use_cache=False).last_hidden_state.square().sum().backward()
        optimizer.step()
    assert len(handle.last.names) == 2 * GROUPS
    assert handle.last.finite.all()


@of_both
@cases("grouping", ["within", "across"])
@cases("name", ["output", "position"])
def test_a_penalty_compares_what_it_was_given(name, grouping, make):
    model = seeded(make)
    heads = hw.find_heads(model).layer(1)
    term, by_hand = {
        "output": (hw.similarity.Output(), reference.output_similarity),
        "position": (hw.similarity.Position(), reference.position_similarity),
    }[name]
    keep = torch.ones(IDS.shape, dtype=torch.bool)
    with hw.Taps(heads, outputs=True, weights=True) as taps:
        model(input_ids=IDS, use_cache=False)
        (capture,) = taps.read()
    if name == "output":
        parts = [capture.outputs[:, :, :MEMBERS], capture.outputs[:, :, MEMBERS:]]
        joined = torch.stack([part.flatten(2) for part in parts], dim=2)
    else:
        parts = [capture.weights[:, :MEMBERS], capture.weights[:, MEMBERS:]]
        joined = torch.stack([sum(part[:, head] for head in range(MEMBERS)) / MEMBERS for part in parts], dim=1)
    values = [by_hand(one.detach(), keep) for one in (parts if grouping == "within" else [joined])]
    penalty = hw.Disagreement(heads, hw.similarity.GroupedQueries(term, grouping))
    model(input_ids=IDS, use_cache=False)
    found = penalty()
    value = float(found.detach())
    assert value == pytest.approx(float(sum(values) / len(values)), rel=1e-9)
    every = by_hand(torch.cat(parts, dim=2 if name == "output" else 1).detach(), keep)
    # the overlap of means is that of all pairs
    assert (value == pytest.approx(float(every))) is (name == "position" and grouping == "across")
    found.backward()
    assert model.layers[1].self_attn.v_proj.weight.grad is not None or name == "position"


@of_both
def test_terms_of_calls_are_averaged_over_groups(make):
    model = seeded(make)
    heads = hw.find_heads(model).layer(0)
    outputs = torch.randn(2, 5, HEADS, SIZE, dtype=torch.float64)
    site = heads.sites[0]
    within, count = hw.similarity.GroupedQueries(hw.similarity.CKA(), "within").sum_and_count_at(site, outputs, None)
    single = [
        hw.similarity.CKA().sum_and_count_at(site, outputs[:, :, start : start + MEMBERS], None)[0]
        for start in (0, MEMBERS)
    ]
    assert float(within / count) == pytest.approx(float(sum(single) / 2), rel=1e-9)


@of_both
def test_what_has_no_groups_is_refused(make):
    model = seeded(make)
    plain = hw.find_heads(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    with pytest.raises(hw.errors.LayoutError, match="has 2 query heads and as many key/value heads"):
        plain.grouped("within")
    with pytest.raises(hw.errors.SettingError, match="grouping is 'inside'"):
        hw.find_heads(model).grouped("inside")
    for term in (hw.similarity.Subspace(), hw.similarity.SpanOverlap(), hw.similarity.CKA(of="contributions")):
        with pytest.raises(hw.errors.SettingError, match="term is"):
            hw.similarity.GroupedQueries(term)
    with pytest.raises(hw.errors.SettingError, match="grouping is 'inside'"):
        hw.similarity.GroupedQueries(hw.similarity.Output(), "inside")
    with pytest.raises(hw.errors.LayoutError, match="each of the 1 sites has only one head or group"):
        hw.Disagreement(plain, hw.similarity.GroupedQueries(hw.similarity.Output()))
    with pytest.raises(hw.errors.LayoutError, match="no group of query heads shares one"):
        hw.similarity.GroupedQueries(hw.similarity.Output()).sum_and_count_at(
            plain.sites[0], torch.randn(2, 3, 2, 4), None
        )
