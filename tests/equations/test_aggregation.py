from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise.routing.chunked as recompute
from cases import cases
from equations.draws import EVERY, D, E, H, random, seeded, vote_settings
from headwise.routing.algorithms import DistinctCapsules, PerHead, SharedTrunk
from headwise.routing.modules import (
    Chunks,
    EMAggregator,
    EMRouting,
    Residual,
    SimpleAggregator,
    SimpleRouting,
    Trunk,
    build,
    em_routing,
    simple_routing,
    uniform_routing,
)

chunk_settings = st.builds(Chunks, tokens=st.integers(1, 9), routed=st.integers(1, 9))
capsule_counts = st.sampled_from([None, 1, 2, 4, 8])
routings = (
    st.builds(
        SimpleRouting,
        iterations=st.integers(1, 4),
        capsules=capsule_counts,
        softmax_over=st.sampled_from(["capsules", "heads"]),
        votes=vote_settings,
        chunks=chunk_settings,
    )
    | st.builds(
        EMRouting,
        iterations=st.integers(1, 4),
        capsules=capsule_counts,
        activation=st.booleans(),
        votes=vote_settings,
        chunks=chunk_settings,
    )
    | st.builds(Trunk, capsules=capsule_counts, votes=vote_settings, chunks=chunk_settings)
)


def plainly(module, heads: Tensor) -> Tensor:
    """The same aggregation by autograd over the public functions, all tokens at once."""
    votes = module.votes(heads)
    if isinstance(module, SimpleAggregator):
        return simple_routing(votes, module.setting).capsules.flatten(1)
    if isinstance(module, EMAggregator):
        return em_routing(votes, module.setting, module.beta_a, module.beta_mu).capsules.flatten(1)
    return uniform_routing(votes).capsules.flatten(1)


def gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, random(*output.shape, seed=7, dtype=output.dtype))


@given(routings, st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 16]), st.integers(0, 11))
@settings(max_examples=40)
def test_chunks_change_neither_values_nor_gradients(setting, heads, size, width, tokens):
    module = seeded(setting, heads=heads, size=size, width=width).double()
    given_heads = random(tokens, heads * size).requires_grad_()
    inputs = [given_heads, *module.parameters()]
    output, expected = module(given_heads), plainly(module, given_heads)
    torch.testing.assert_close(output, expected)
    if tokens > 0:
        pairs = zip(gradients(output, inputs), gradients(expected, inputs), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@cases("setting", [*EVERY, EMRouting(capsules=2), SimpleRouting(capsules=2)])
def test_gradcheck_accepts_every_aggregator(setting):
    module = seeded(setting).double()
    names = [name for name, _ in module.named_parameters()]

    def function(heads: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (heads,))

    assert torch.autograd.gradcheck(function, (random(3, 8).requires_grad_(), *module.parameters()), fast_mode=True)


@cases("setting", EVERY)
def test_only_the_input_is_kept_for_the_backward_pass(setting):
    module = seeded(setting)
    heads = random(40, 8, dtype=torch.float32).requires_grad_()
    known = {parameter.data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(heads)
    assert sum(kept.values()) <= heads.untyped_storage().nbytes()


@cases("setting", EVERY)
def test_frozen_weights_and_inputs_without_gradient_are_left_alone(setting):
    module = seeded(setting)
    heads = random(5, 8, dtype=torch.float32)
    full = dict(module.named_parameters())
    expected = dict(zip(full, gradients(module(heads), list(full.values())), strict=True))
    for name, parameter in full.items():
        module.requires_grad_(False)
        parameter.requires_grad_(True)
        module(heads).backward(random(5, 8, seed=7, dtype=torch.float32))
        assert [n for n, p in module.named_parameters() if p.grad is not None] == [name]
        torch.testing.assert_close(parameter.grad, expected[name])
        parameter.grad = None
    module.requires_grad_(False)
    heads.requires_grad_()
    module(heads).sum().backward()
    assert heads.grad is not None
    assert all(p.grad is None for p in module.parameters())


@cases("setting", EVERY)
def test_evaluation_and_inference_give_the_training_values(setting):
    module, heads = seeded(setting), random(2, 3, 8, dtype=torch.float32)
    trained = module(heads)
    with torch.no_grad():
        torch.testing.assert_close(module(heads), trained, rtol=0, atol=0)
    with torch.inference_mode():
        assert module.eval()(heads).shape == (2, 3, 8)
    assert trained.shape == (2, 3, 8)


@cases("setting", EVERY)
def test_autocast_computes_votes_in_bfloat16_in_both_passes(setting):
    module, heads = seeded(setting), random(6, 8, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, expected = module(heads), plainly(module, heads)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected.bfloat16())
    inputs = [heads, *module.parameters()]
    grad = random(6, 8, seed=7, dtype=torch.float32).bfloat16()
    ours = torch.autograd.grad(output, inputs, grad)
    theirs = torch.autograd.grad(expected, inputs, grad.to(expected.dtype))
    for parameter, a, b in zip(inputs, ours, theirs, strict=True):
        assert a.dtype == parameter.dtype
        torch.testing.assert_close(a, b, rtol=torch.finfo(torch.bfloat16).eps * 8, atol=5e-2)


def test_a_bfloat16_module_sums_its_gradients_in_float32():
    rough = seeded(Trunk(chunks=Chunks(tokens=1))).bfloat16()
    exact = copy.deepcopy(rough).float()
    heads = random(512, 8, dtype=torch.float32).bfloat16()
    rough(heads).sum().backward()
    exact(heads.float()).sum().backward()
    ours, theirs = rough.votes.vote_bias.grad, exact.votes.vote_bias.grad
    assert ours is not None
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), theirs, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


@cases("setting", [EMRouting(chunks=Chunks(4, 2)), SimpleRouting(chunks=Chunks(4, 2))])
def test_gradient_checkpointing_of_both_kinds_changes_nothing(setting):
    module, heads = seeded(setting), random(5, 8, dtype=torch.float32).requires_grad_()
    expected = gradients(module(heads), [heads])
    for reentrant in (True, False):
        output = torch.utils.checkpoint.checkpoint(module, heads, use_reentrant=reentrant)
        heads.grad = None
        output.backward(random(5, 8, seed=7, dtype=torch.float32))
        torch.testing.assert_close((heads.grad,), expected)


@cases(
    ("setting", "added"),
    [
        (SimpleRouting(votes=SharedTrunk(relu=False)), 2_102_272),
        (EMRouting(activation=False), 2_102_272),
        (EMRouting(), 2_103_296),
        (Trunk(), 2_102_272),
        (EMRouting(activation=False, votes=PerHead()), 2_104_832),
        (EMRouting(activation=False, votes=DistinctCapsules()), 262_144),
    ],
)
def test_the_parameters_added_in_the_place_of_an_output_projection_are_the_papers(setting, added: int):
    with torch.device("meta"):
        new = sum(p.numel() for p in build(setting, 8, 64, 512).parameters())
        old = sum(p.numel() for p in nn.Linear(512, 512).parameters())
    assert new - old == added


def test_a_residual_starts_as_the_projection_and_learns_gamma_first():
    projection = nn.Linear(8, 8)
    module = build(Residual(EMRouting(capsules=4)), H, E, D, projection)
    heads = random(3, 8, dtype=torch.float32)
    assert torch.equal(module(heads), projection(heads))
    module(heads).square().sum().backward()
    assert module.gamma.grad is not None
    assert module.gamma.grad.abs() > 0
    with torch.no_grad():
        module.gamma.fill_(0.5)
    torch.testing.assert_close(module(heads), projection(heads) + 0.5 * module.aggregator(heads))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(heads).dtype == projection(heads).dtype == torch.bfloat16


@pytest.mark.parametrize("setting", [EMRouting(capsules=4), SimpleRouting(capsules=4)], ids=str)
@pytest.mark.parametrize("error", [RuntimeError("no compiler here"), torch.OutOfMemoryError("no memory")], ids=str)
def test_a_compiler_that_fails_leaves_the_plain_values_and_one_log_line(setting, error, monkeypatch, caplog):
    def fail(*_tensors):
        raise error

    monkeypatch.setattr(torch, "compile", lambda _function, **_options: fail)
    recompute.compile_kernel.cache_clear()
    plain, wanted = (seeded(replace(setting, chunks=Chunks(4, 2, compile=c))) for c in (False, True))
    heads = random(5, 8, dtype=torch.float32)
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            wanted(heads)
        recompute.compile_kernel.cache_clear()
        return
    with caplog.at_level(logging.WARNING, logger="headwise"):
        for _ in range(2):
            assert torch.equal(wanted(heads), plain(heads))
    recompute.compile_kernel.cache_clear()
    assert [record.message for record in caplog.records] == [
        "torch.compile failed for routing (RuntimeError: no compiler here); using the plain kernel."
    ]


def test_a_compiled_kernel_sees_few_lengths_none_much_longer_than_the_batch(monkeypatch):
    seen = set()

    def recorded(function, **_options):
        def call(votes, *rest):
            seen.add(len(votes))
            return function(votes, *rest)

        return call

    monkeypatch.setattr(torch, "compile", recorded)
    # a token has 2 x 8 votes: lengths of 64, 16 and 4 tokens are a chunk, its quarter and the fewest
    monkeypatch.setattr(recompute, "MIN_PADDED_VOTES", 64)
    recompute.compile_kernel.cache_clear()
    plain, padded = (seeded(EMRouting(capsules=4, chunks=Chunks(64, 64, compile=c))) for c in (False, True))
    for tokens in (1, 4, 5, 16, 17, 64, 70):
        results = []
        for module in (plain, padded):
            heads = random(tokens, 8, dtype=torch.float32).requires_grad_()
            module(heads).square().sum().backward()
            results.append(heads.grad)
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    recompute.compile_kernel.cache_clear()
    assert seen == {4, 16, 64}


@cases("setting", EVERY)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
@pytest.mark.full
def test_a_model_that_is_compiled_whole_gives_the_plain_values_in_one_graph(setting):
    module, heads = seeded(setting).double(), random(5, 8).requires_grad_()
    whole = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(heads), module(heads))
    torch.testing.assert_close(gradients(whole(heads), [heads]), gradients(module(heads), [heads]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [EMRouting(capsules=4), EMRouting(activation=False), SimpleRouting(), SimpleRouting(softmax_over="heads")],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
def test_a_compiled_chunk_gives_the_plain_values_and_gradients(setting, caplog):
    plain, compiled = (seeded(replace(setting, chunks=Chunks(4, 3, compile=c))).double() for c in (False, True))
    heads = random(9, 8).requires_grad_()
    ours = gradients(compiled(heads), [heads, *compiled.parameters()])
    theirs = gradients(plain(heads), [heads, *plain.parameters()])
    assert not [record for record in caplog.records if record.name.startswith("headwise")]
    torch.testing.assert_close(compiled(heads), plain(heads))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
