"""The repulsion of a whole model in a handful of launches: as an accelerator runs it, on a CPU and without values."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import headwise as hw
from heads.attentions import SeparateAttention
from headwise.repulsion import step
from headwise.repulsion.groups import find_groups
from headwise.repulsion.rules import Rule
from headwise.repulsion.step import apply_rule
from repulsion.launches import Launches

SVGD = hw.SVGD(alpha=0.7, step_size=0.3, prior_precision=0.2, data_size=3.0, inverse_temperature=1.7)
RULES = {
    "svgd": SVGD,
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


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets whether groups are stacked, as they are on a GPU."""
    # small groups are stacked on a CPU too
    monkeypatch.setattr(step, "MOST_CALLED", 0)
    return lambda value: monkeypatch.setattr(step, "stacks_on", lambda _device: value)


def both_ways(
    stacks: Callable[[bool], None], model: nn.Module, rule: Rule, *, joint: bool = False, scale: Tensor | None = None
) -> list[tuple[nn.Module, dict[str, dict[str, Tensor]]]]:
    """The model after a step on views and after one in stacks, and the norms of each group."""
    found = []
    for value in (False, True):
        stacks(value)
        own = copy.deepcopy(model)
        for parameter, before in zip(own.parameters(), model.parameters(), strict=True):
            parameter.grad = before.grad.clone()
        forces = apply_rule(rule, find_groups(hw.find_heads(own), joint=joint), strength=0.8, scale=scale)
        fields = ("driving_norm", "repulsion_norm", "particle_norm", "finite", "equal")
        norms = {name: {f: getattr(forces, f)[i] for f in fields} for i, name in enumerate(forces.names)}
        found.append((own, norms))
    return found


def assert_equal(found: list[tuple[nn.Module, dict[str, dict[str, Tensor]]]], **tolerance: float) -> None:
    (one, norms), (other, other_norms) = found
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **tolerance, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}")
    assert norms.keys() == other_norms.keys()
    torch.testing.assert_close(norms, other_norms, **tolerance, equal_nan=True)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_step_in_stacks_equals_one_on_views(stacks, rule):
    assert_equal(both_ways(stacks, with_gradients(mixed()), rule), rtol=1e-12, atol=1e-12)


def test_so_it_does_for_joint_particles_and_scaled_gradients(stacks):
    scale = torch.tensor(64.0, dtype=torch.float64)
    assert_equal(both_ways(stacks, with_gradients(packed(4)), SVGD, joint=True, scale=scale), rtol=1e-12, atol=1e-12)
    relative = RULES["relative"]
    assert_equal(both_ways(stacks, with_gradients(packed(4)), relative, scale=scale), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_so_it_does_in_fewer_digits(stacks, dtype, tolerance):
    assert_equal(both_ways(stacks, with_gradients(mixed(), dtype), SVGD), rtol=tolerance, atol=tolerance)


def test_heads_that_nearly_agree_keep_what_tells_them_apart(stacks):
    model = with_gradients(packed(2))
    with torch.no_grad():
        for layer in model.layers:
            weight = layer.self_attn.in_proj_weight.view(3, 3, 4, 12)
            weight.copy_(weight[:, :1] + 1e-7 * weight)
    found = both_ways(stacks, model, hw.SVGD(alpha=1e3, step_size=0.3))
    assert_equal(found, rtol=1e-6, atol=1e-6)
    pushed = [norm["repulsion_norm"] for norm in found[1][1].values()]
    assert min(pushed) > 1e-2


def test_what_is_not_finite_is_left_alone_and_the_others_are_not(stacks):
    model = with_gradients(packed(3))
    model.layers[1].self_attn.in_proj_weight.grad[14, 2] = float("nan")
    before = model.layers[1].self_attn.in_proj_weight.grad.clone()
    found = both_ways(stacks, model, SVGD)
    assert_equal(found, rtol=1e-12, atol=1e-12)
    after = found[1][0].layers[1].self_attn.in_proj_weight.grad
    assert torch.equal(after[12:24].nan_to_num(7.0), before[12:24].nan_to_num(7.0))
    assert not torch.equal(after[:12], before[:12])


def test_more_groups_than_fit_in_one_stack_take_several(stacks, monkeypatch):
    model = with_gradients(packed(4))
    taken = []
    apply = step.apply_to_stack
    monkeypatch.setattr(step, "MOST_STACKED", 5 * 144)
    monkeypatch.setattr(
        step, "apply_to_stack", lambda r, members, *a: taken.append(len(members)) or apply(r, members, *a)
    )
    assert_equal(both_ways(stacks, model, SVGD), rtol=1e-12, atol=1e-12)
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


@pytest.mark.parametrize("stacking", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_step_never_waits_for_the_device(stacks, rule, stacking):
    stacks(stacking)
    counted = launches(with_gradients(mixed(), torch.float32), rule)
    assert counted.counts["aten.bmm" if stacking else "aten.addmm_"] > 0


def test_the_mode_that_counts_notices_a_host_that_waits():
    for waits in (
        lambda: torch.ones(2).sum().item(),
        lambda: bool(torch.ones(())),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.ones(3)[torch.ones(3) > 0],
    ):
        with pytest.raises(AssertionError, match="waits for the device"), Launches():
            waits()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_step_on_a_device_without_values_stays_there(rule):
    model = packed(2).to("meta")
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    every = find_groups(hw.find_heads(model), joint=False)
    with Launches() as counted:
        forces = apply_rule(rule, every, strength=0.8, scale=torch.empty((), device="meta"))
    assert {getattr(forces, f).device.type for f in ("driving_norm", "repulsion_norm", "particle_norm")} == {"meta"}
    assert counted.counts["aten._foreach_copy_"] == 1


def test_noise_in_a_cuda_graph_is_refused(monkeypatch):
    model = with_gradients(packed(1), torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = hw.repel(hw.find_heads(model), RULES["sgld"], optimizer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(hw.errors.SettingError, match="a CUDA graph would add that of one step again"):
        handle._before_step(handle._attachments[0], None)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("rule", "size"),
    [
        (hw.SVGD(alpha=0.3, step_size=8.0), 4e4),
        (hw.SVGD(alpha=hw.Relative(30.0), step_size=4.0, smoothing=False), 1e4),
    ],
    ids=["driving term", "repulsion"],
)
def test_forces_that_half_precision_cannot_hold_are_told_and_leave_the_gradient(stacks, rule, size, stacked, joint):
    stacks(stacked)
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
