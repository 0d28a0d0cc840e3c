"""The forms of a step give one result: on views, by columns in single precision, and stacked as on an accelerator."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import headwise as hw
from cases import cases, thin, tiers
from heads.attentions import SeparateAttention
from headwise.repulsion import step
from headwise.repulsion.groups import find_groups
from headwise.repulsion.rules import Rule
from headwise.repulsion.step import apply_rule
from repulsion.by_hand import assert_gradients, expected_gradients
from repulsion.launches import Launches

WIDTH, HEADS = 128, 4
SVGD = hw.SVGD(alpha=0.7, step_size=0.3, prior_precision=0.2, data_size=3.0, inverse_temperature=1.7)
RULES = {
    "svgd": SVGD,
    "flat": hw.SVGD(alpha=0.7, step_size=0.3),
    "unsmoothed": hw.SVGD(alpha=0.5, smoothing=False),
    "relative": hw.SVGD(alpha=hw.Relative(0.4), prior_precision=0.3),
    "normalized": hw.SVGD(alpha=0.6, kernel=hw.kernels.NormalizedRBF()),
    "radial": hw.SVGD(alpha=0.6, kernel=hw.kernels.RadialRBF()),
    "imq": hw.SVGD(alpha=0.6, kernel=hw.kernels.IMQ(hw.kernels.ReleasedMedian())),
    "fixed": hw.SVGD(alpha=0.6, kernel=hw.kernels.RBF(hw.kernels.Fixed(3.0))),
    "cosine": hw.SVGD(alpha=0.6, kernel=hw.kernels.Cosine()),
    "spos": hw.SPOS(alpha=0.6, inverse_temperature=2.0),
    "sgld": hw.SGLD(inverse_temperature=2.0, prior_precision=0.3),
    "cosine penalty": hw.repulsion.CosinePenalty(alpha=0.8),
    "cosine repulsion": hw.repulsion.CosineRepulsion(alpha=0.8),
}
COLUMNS = [name for name in RULES if not RULES[name].needs_inner]
NORMS = ("driving_norm", "repulsion_norm", "particle_norm")


def act(model: nn.Module, rule: Rule, *, strength: float = 0.5, joint: bool = False, scale: Tensor | None = None):
    return apply_rule(rule, find_groups(hw.find_heads(model), joint=joint), strength=strength, scale=scale)


# Columns


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the groups that were mixed by columns."""
    names: list[str] = []
    apply = step.apply_in_place

    def noted(rule, batch, *rest, apart):
        names.extend(group.name for group, _, _ in batch if apart)
        return apply(rule, batch, *rest, apart=apart)

    monkeypatch.setattr(step, "apply_in_place", noted)
    return names


def make() -> nn.Module:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def require_close(model: nn.Module, expected: dict[str, Tensor]) -> None:
    # sums over heads of float32, whose distances have lost at most four bits
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert_gradients(model, expected, rtol=0, atol=2e-6 * largest)


@cases("most", [2**18, 2**10])
@cases("rule", COLUMNS)
def test_columns_give_the_gradients_and_norms_of_float64(rule: str, most: int, taken: list, monkeypatch):
    taken.clear()
    monkeypatch.setattr(step, "MIXED_PART", most)
    model, exact, scaled = make(), make().double(), make()
    expected = expected_gradients(model, RULES[rule], strength=0.5) if rule not in ("spos", "sgld") else None
    for parameter in scaled.parameters():
        parameter.grad *= 1024.0
    found, wanted = act(model, RULES[rule]), act(exact, RULES[rule])
    also = act(scaled, RULES[rule], scale=torch.tensor(1024.0))
    assert taken == ["query", "key", "value"] * 2
    if expected is not None:
        require_close(model, expected)
    require_close(model, {name: parameter.grad for name, parameter in exact.named_parameters()})
    require_close(model, {name: parameter.grad.double() / 1024.0 for name, parameter in scaled.named_parameters()})
    for name in NORMS:
        torch.testing.assert_close(getattr(found, name).double(), getattr(wanted, name), rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(getattr(also, name), getattr(found, name))
    assert found.finite.all()
    assert not found.equal.any()


def test_the_default_dtype_is_of_no_concern(taken: list):
    model, twin = make(), make()
    act(model, SVGD)
    torch.set_default_dtype(torch.float64)
    try:
        act(twin, SVGD)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(taken) == 6
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@cases("difference", [1e-2, 1e-4])
def test_heads_of_which_two_are_close_are_mixed_in_float64(difference: float, taken: list):
    taken.clear()
    model = make()
    heads = hw.find_heads(model).slices()[0].of(model.in_proj_weight.detach())
    heads[2] = heads[1] + difference * heads[2]
    expected = expected_gradients(model, SVGD, strength=0.5)
    act(model, SVGD)
    assert taken == ["key", "value"]
    require_close(model, expected)


@cases(("ratio", "wanted"), [(1.3, ["query", "key", "value"]), (0.7, ["key", "value"])])
def test_distances_above_the_share_are_apart_and_those_below_are_not(ratio: float, wanted: list, taken: list):
    taken.clear()
    model = make()
    heads = hw.find_heads(model).slices()[0].of(model.in_proj_weight.detach())
    # two heads c + s x and c + s y: squared distance 2 s^2 of squared norms 2 (1 + s^2)
    heads.copy_(torch.randn(heads.shape[1:]) + math.sqrt(ratio * step.APART) * heads / heads.std())
    act(model, SVGD)
    assert taken == wanted


@cases("most", [2**18, 2**10])
@cases("value", [math.nan, math.inf])
@cases("rule", ["svgd", "flat", "relative"])
def test_gradients_that_are_not_finite_stay(rule: str, value: float, most: int, taken: list, monkeypatch):
    taken.clear()
    monkeypatch.setattr(step, "MIXED_PART", most)
    model = make()
    model.in_proj_weight.grad[WIDTH + 3, 77] = value
    before = model.in_proj_weight.grad.clone()
    found = act(model, RULES[rule])
    assert len(taken) == 3
    assert found.finite.tolist() == [True, False, True]
    key = slice(WIDTH, 2 * WIDTH)
    torch.testing.assert_close(model.in_proj_weight.grad[key], before[key], rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(model.in_proj_weight.grad[:WIDTH], before[:WIDTH])
    assert model.in_proj_weight.grad[:WIDTH].isfinite().all()
    assert not found.driving_norm[1].isfinite()


def test_heads_that_are_not_finite_rules_on_directions_and_other_dtypes_are_left_to_float64(taken: list):
    model = make()
    with torch.no_grad():
        model.in_proj_weight[5, 5] = math.nan
    found = act(model, SVGD)
    assert taken == ["key", "value"]
    assert found.finite.sum() == 2
    act(make(), RULES["normalized"])
    act(make().double(), SVGD)
    assert len(taken) == 2


# Stacks


class Columns(nn.Module):
    """Attention whose weights are stored as GPT-2's, so that a head is columns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (Conv1D(12, 12) for _ in range(4))


def packed(layers: int) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 8), layers, enable_nested_tensor=False)


def mixed() -> nn.Module:
    return nn.ModuleList([SeparateAttention(key_value_heads=2), Columns(), *packed(3).layers])


def with_gradients(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = model.to(dtype)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def near_collapse() -> nn.Module:
    model = with_gradients(packed(2))
    with torch.no_grad():
        for layer in model.layers:
            weight = layer.self_attn.in_proj_weight.view(3, 3, 4, 12)
            weight.copy_(weight[:, :1] + 1e-7 * weight)
    return model


def with_nan() -> nn.Module:
    model = with_gradients(packed(3))
    model.layers[1].self_attn.in_proj_weight.grad[14, 2] = float("nan")
    return model


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets whether groups are stacked, as they are on a GPU."""
    # small groups are stacked on a CPU too
    monkeypatch.setattr(step, "MOST_CALLED", 0)
    return lambda value: monkeypatch.setattr(step, "stacks_on", lambda _device: value)


SCALE = torch.tensor(64.0, dtype=torch.float64)
CASES = {
    **{name: (lambda: with_gradients(mixed()), rule, 1e-12, {}) for name, rule in RULES.items()},
    "joint and scaled": (lambda: with_gradients(packed(4)), SVGD, 1e-12, {"joint": True, "scale": SCALE}),
    "relative and scaled": (lambda: with_gradients(packed(4)), RULES["relative"], 1e-12, {"scale": SCALE}),
    "float32": (lambda: with_gradients(mixed(), torch.float32), SVGD, 2e-6, {}),
    "bfloat16": (lambda: with_gradients(mixed(), torch.bfloat16), SVGD, 1e-2, {}),
    "heads that nearly agree": (near_collapse, hw.SVGD(alpha=1e3, step_size=0.3), 1e-6, {}),
    "not finite": (with_nan, SVGD, 1e-12, {}),
}


@tiers("case", *thin(CASES, 3))
def test_a_step_in_stacks_equals_one_on_views(case: str, stacks):
    build, rule, tolerance, options = CASES[case]
    gradients, norms = [], []
    for value in (False, True):
        stacks(value)
        model = build()
        before = model.layers[1].self_attn.in_proj_weight.grad[12:24].clone() if case == "not finite" else None
        forces = act(model, rule, strength=0.8, **options)
        gradients.append([parameter.grad for parameter in model.parameters()])
        fields = (*NORMS, "finite", "equal")
        norms.append({name: {f: getattr(forces, f)[i] for f in fields} for i, name in enumerate(forces.names)})
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(*norms, rtol=tolerance, atol=tolerance, equal_nan=True)
    if case == "heads that nearly agree":
        assert min(float(norm["repulsion_norm"]) for norm in norms[1].values()) > 1e-2
    if before is not None:
        after = model.layers[1].self_attn.in_proj_weight.grad
        torch.testing.assert_close(after[12:24], before, rtol=0, atol=0, equal_nan=True)
        assert sum(not bool(norm["finite"]) for norm in norms[1].values()) == 1


def test_more_groups_than_fit_in_one_stack_take_several(stacks, monkeypatch):
    stacks(True)
    whole, model = (with_gradients(packed(4)) for _ in range(2))
    act(whole, SVGD)
    taken = []
    apply = step.apply_to_stack
    monkeypatch.setattr(step, "MOST_STACKED", 5 * 144)
    monkeypatch.setattr(
        step, "apply_to_stack", lambda r, members, *a: taken.append(len(members)) or apply(r, members, *a)
    )
    act(model, SVGD)
    torch.testing.assert_close(*([p.grad for p in own.parameters()] for own in (whole, model)), rtol=1e-12, atol=1e-12)
    assert taken == [5, 5, 2]


def launches(model: nn.Module, rule: Rule) -> Launches:
    """What one optimizer step's `apply` launches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = hw.repel(hw.find_heads(model), rule, optimizer)
    with Launches() as counted:
        handle.apply()
    assert handle.last.finite.all()
    return counted


def test_the_launches_of_a_step_do_not_grow_with_the_layers(stacks):
    stacks(True)
    two, seven = (launches(with_gradients(packed(layers), torch.float32), hw.SVGD(alpha=0.01)) for layers in (2, 7))
    assert two.counts == seven.counts
    # 3 groups per layer; the number is stated in docs/gpu.md
    assert seven.total == 80
    stacks(False)
    few, many = (launches(with_gradients(packed(layers), torch.float32), hw.SVGD(alpha=0.01)) for layers in (2, 7))
    # on views at least one for each group more
    assert many.total - few.total > 3 * (7 - 2)


@tiers("rule", *thin(RULES.values(), 3))
def test_a_step_never_waits_for_the_device(stacks, rule):
    for stacking in (True, False):
        stacks(stacking)
        counted = launches(with_gradients(mixed()), rule)
        assert counted.counts["aten.bmm" if stacking else "aten.addmm_"] > 0
    model = packed(2).to("meta")
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    every = find_groups(hw.find_heads(model), joint=False)
    stacks(True)
    with Launches() as counted:
        forces = apply_rule(rule, every, strength=0.8, scale=torch.empty((), device="meta"))
    assert {getattr(forces, name).device.type for name in NORMS} == {"meta"}
    assert counted.counts["aten._foreach_copy_"] == 1


def test_the_mode_that_counts_notices_a_host_that_waits():
    for waits in (
        lambda: torch.ones(2).sum().item(),
        lambda: bool(torch.ones(())),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.ones(3)[torch.ones(3) > 0],
    ):
        with pytest.raises(AssertionError, match="waits for the device"), Launches():
            waits()


def test_noise_in_a_cuda_graph_is_refused(monkeypatch):
    model = with_gradients(packed(1), torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = hw.repel(hw.find_heads(model), RULES["sgld"], optimizer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(hw.errors.SettingError, match="a CUDA graph would add that of one step again"):
        handle._before_step(handle._attachments[0], None)


HALF = {
    "driving term": (hw.SVGD(alpha=0.3, step_size=8.0), 4e4),
    "repulsion": (hw.SVGD(alpha=hw.Relative(30.0), step_size=4.0, smoothing=False), 1e4),
    "spans": (hw.repulsion.SpanSVGD(step_size=8.0), 4e4),
}


@cases("joint", [False, True])
@cases("stacked", [False, True])
@cases("name", HALF)
def test_forces_that_half_precision_cannot_hold_are_told_and_leave_the_gradient(stacks, name, stacked, joint):
    stacks(stacked)
    rule, size = HALF[name]
    joint = joint and name != "spans"
    model = with_gradients(SeparateAttention(), torch.float16)
    model.k_proj.weight.grad.fill_(size)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    handle = hw.repel(hw.find_heads(model), rule, torch.optim.SGD(model.parameters(), lr=0.1), joint=joint)
    handle.apply()
    assert dict(zip(handle.last.names, handle.last.finite.tolist(), strict=True)) == (
        {"query+key+value": False} if joint else {"query": True, "key": False, "value": True}
    )
    assert str(handle.last).count("forces not finite, gradient unchanged") == 1
    assert torch.equal(model.k_proj.weight.grad, before["k_proj.weight"])
    assert torch.equal(model.q_proj.weight.grad, before["q_proj.weight"]) is joint
    assert model.q_proj.weight.grad.isfinite().all()
