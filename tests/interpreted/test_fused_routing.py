"""Routing by Triton's programs against the plain form: in Triton's interpreter, which runs them on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from headwise.routing import em_triton, triton_tiles
from headwise.routing.algorithms import EMKernel, SimpleKernel, em_forward, em_schedule, simple_forward
from headwise.routing.fused import FusedKernel, fuse_kernel, runs_on
from headwise.routing.modules import Chunks, EMRouting, SimpleRouting, build

FLOOR = 1e-6
EM = EMKernel(em_schedule(3, 1.0, 3.0), FLOOR)


@pytest.fixture
def undisturbed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The test fails where the fused form was left for the plain one."""
    with caplog.at_level(logging.WARNING):
        yield
    # the records of a fixture's own end would be others
    assert not caplog.get_records("call")


def problem(heads: int, capsules: int, size: int, *, active: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    votes = torch.randn(3, heads, capsules, size, generator=generator, dtype=torch.float64)
    betas = list(0.7 * torch.randn(2, capsules, generator=generator, dtype=torch.float64)) if active else []
    return [votes.to(dtype), *(beta.to(torch.promote_types(dtype, torch.float32)) for beta in betas)]


@pytest.fixture(params=[1024, 16])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes of a tile: all that a token has, and some of them."""
    monkeypatch.setattr(triton_tiles, "TILE_VOTES", request.param)


def everything(kernel: EMKernel | SimpleKernel | FusedKernel, votes: Tensor, *betas: Tensor) -> list[Tensor]:
    """Capsules and all gradients for a gradient of the capsules that is not the same everywhere."""
    capsules = kernel.forward(votes, *betas)
    grad = torch.linspace(-1.3, 2.1, capsules.numel(), dtype=torch.float64).view(capsules.shape).to(votes.dtype)
    into = torch.empty_like(votes)
    return [capsules, into, *kernel.gradient(votes, grad, into, *betas)]


# heads, capsules, size, iterations
SHAPES = [
    (3, 6, 2, 3),
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((4, 10, 1, 4), (5, 7, 3, 1), (8, 8, 4, 2))),
]


@pytest.mark.parametrize("active", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("heads", "capsules", "size", "iterations"), SHAPES)
@pytest.mark.usefixtures("undisturbed", "tiles")
def test_it_equals_the_plain_form(heads, capsules, size, iterations, active):
    plain = EMKernel(em_schedule(iterations, 0.8, 2.9), FLOOR)
    tensors = problem(heads, capsules, size, active=active)
    for fast, slow in zip(everything(FusedKernel(plain), *tensors), everything(plain, *tensors), strict=True):
        # the settings reach the programs in float32
        torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("over_capsules", [True, False])
@pytest.mark.parametrize(("heads", "capsules", "size", "iterations"), SHAPES)
@pytest.mark.usefixtures("undisturbed", "tiles")
def test_simple_routing_equals_its_plain_form(heads, capsules, size, iterations, over_capsules):
    plain = SimpleKernel(iterations, over_capsules, 0.8)
    votes = problem(heads, capsules, size, active=False)
    if over_capsules and iterations > 1:
        # a sum of weights below the floor passes no gradient, and one above does
        received = simple_forward(*votes, iterations, True, 0.8)[1].sum(1)
        assert (received < 0.8).any()
        assert (received > 0.8).any()
    for fast, slow in zip(everything(FusedKernel(plain), *votes), everything(plain, *votes), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "plain",
    [SimpleKernel(3, True, 2**-20), SimpleKernel(3, False, 2**-20), EMKernel((0.75, 1.5, 2.25), 2**-20)],
    ids=str,
)
@pytest.mark.usefixtures("undisturbed")
def test_float64_is_routed_in_float64(plain):
    # settings that float32 holds, and numbers of heads, capsules and dimensions whose quotients it does not
    tensors = problem(3, 7, 3, active=isinstance(plain, EMKernel))
    for fast, slow in zip(everything(FusedKernel(plain), *tensors), everything(plain, *tensors), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "plain",
    [SimpleKernel(3, False, FLOOR), EM, pytest.param(SimpleKernel(3, True, FLOOR), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.usefixtures("undisturbed")
def test_any_precision_and_layout_is_read_by_few_programs(plain, dtype, monkeypatch):
    monkeypatch.setattr(triton_tiles, "MAX_PROGRAMS", 2)
    votes, *betas = problem(4, 6, 2, active=isinstance(plain, EMKernel), dtype=dtype)
    rough = dtype == torch.bfloat16
    # half precision is read as it is and routed in float32
    wanted = everything(plain, votes.float() if rough else votes, *betas)
    for seen in (votes.transpose(0, 1).contiguous().transpose(0, 1), votes.mT.contiguous().mT):
        found = everything(FusedKernel(plain), seen, *betas)
        assert found[0].dtype == found[1].dtype == dtype
        for number, (fast, slow) in enumerate(zip(found, wanted, strict=True)):
            tolerance = (2e-2 if number else 1e-2) if rough else 1e-6
            torch.testing.assert_close(fast, slow.to(fast.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.usefixtures("undisturbed")
def test_variances_and_sums_below_their_floor(size):
    plain = EMKernel(em_schedule(3, 1.0, 3.0), FLOOR)
    votes, *betas = problem(4, 6, size, active=True)
    # all heads nearly agree on one capsule, and lie so far apart in another that none is assigned to it
    votes[:, :, 1] = votes[:, :1, 1] + 3e-4 * votes[:, :, 1]
    votes[:, :, 4] *= 1e7
    tensors = [votes, *betas]
    states = em_forward(votes, *betas, plain.schedule, FLOOR)[1]
    assert (states[-1].spread < FLOOR).any()
    assert (states[-1].total < FLOOR).any()
    for fast, slow in zip(everything(FusedKernel(plain), *tensors), everything(plain, *tensors), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("routing", [EMRouting, SimpleRouting])
@pytest.mark.usefixtures("undisturbed")
def test_an_aggregator_takes_it_and_gives_the_same(monkeypatch, routing):
    torch.manual_seed(3)
    setting = routing(capsules=4, iterations=2, chunks=Chunks(tokens=4, routed=3))
    aggregator = build(setting, num_heads=2, head_size=4, width=8).double()
    heads = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    fuse_kernel.cache_clear()
    fast = outputs(aggregator, heads)
    assert fuse_kernel.cache_info().misses == 1
    monkeypatch.delenv("TRITON_INTERPRET")
    slow = outputs(aggregator, heads)
    assert fuse_kernel.cache_info().hits + fuse_kernel.cache_info().misses < 4
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def outputs(aggregator: torch.nn.Module, heads: Tensor) -> list[Tensor]:
    output = aggregator(heads)
    loss = (output * torch.linspace(-1.0, 1.7, output.numel(), dtype=output.dtype).view_as(output)).sum()
    return [output, *torch.autograd.grad(loss, [heads, *aggregator.parameters()])]


def test_it_runs_on_a_gpu_or_in_the_interpreter_alone(monkeypatch):
    assert runs_on(torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not runs_on(torch.device("cpu"))
    assert runs_on(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("launch_forward", 1.01, "from the plain kernel on votes"),
        ("launch_forward", None, "no such instruction"),
        ("launch_forward", float("nan"), "differs by nan from the plain kernel"),
        ("launch_backward", float("nan"), "differs by nan from the plain kernel"),
    ],
)
def test_what_differs_or_fails_is_told_once_and_left(name, damage, message, monkeypatch, caplog):
    fused, launch = FusedKernel(EM), getattr(em_triton, name)

    def damaged(*arguments):
        if damage is None:
            raise RuntimeError("no such instruction")
        found = launch(*arguments)
        # what is written: capsules, or the gradient of the votes
        arguments[-1][0] *= damage
        return found

    monkeypatch.setattr(em_triton, name, damaged)
    votes, *betas = problem(3, 6, 2, active=True)
    for _ in range(2):
        torch.testing.assert_close(fused.forward(votes, *betas), EM.forward(votes, *betas), rtol=0, atol=0)
    [said] = caplog.messages
    assert "using the plain kernel" in said
    assert message in said


@pytest.mark.usefixtures("undisturbed")
def test_votes_that_are_not_finite_take_the_plain_kernel_and_decide_nothing():
    plain = EMKernel(em_schedule(2, 1.0, 3.0), FLOOR)
    fused = FusedKernel(plain)
    votes, *betas = problem(3, 6, 2, active=True)
    for wrong in (float("nan"), float("inf")):
        damaged, damaged_betas = votes.clone(), [beta.clone() for beta in betas]
        damaged[1, 2, 3, 0] = damaged_betas[1][4] = wrong
        for given in ([damaged, *betas], [votes, *damaged_betas]):
            for fast, slow in zip(everything(fused, *given), everything(plain, *given), strict=True):
                torch.testing.assert_close(fast, slow, rtol=0, atol=0, equal_nan=True)
    assert not fused._trusted
    everything(fused, votes, *betas)
    assert list(fused._trusted.values()) == [True]


def test_votes_that_fit_no_tile_take_the_plain_kernel_which_is_told_once(caplog: pytest.LogCaptureFixture):
    kernel = EMKernel(em_schedule(2, 1.0, 2.0), FLOOR)
    # 17 heads of 129 numbers are rounded up to 32 of 256
    votes = torch.randn(2, 17, 3, 129, dtype=torch.float64)
    fused = FusedKernel(kernel)
    for _ in range(2):
        torch.testing.assert_close(fused.forward(votes), kernel.forward(votes), rtol=0, atol=0)
    [said] = caplog.messages
    assert "EMKernel on votes of shape (17, 3, 129)" in said
    assert "a capsule of 17 heads and 129 numbers is 8192 numbers" in said
    assert "using the plain kernel" in said


def test_programs_have_less_scratch_than_it_may_take(monkeypatch):
    votes = torch.empty(7, 2, 2, 2)
    assert triton_tiles.make_scratch(votes, 10).shape == (7, 10)
    monkeypatch.setattr(triton_tiles, "MAX_SCRATCH", 35)
    assert triton_tiles.make_scratch(votes, 10).shape == (3, 10)
    assert triton_tiles.make_scratch(votes, 100).shape == (1, 100)
