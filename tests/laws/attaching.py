"""Attaching to a model, and comparing what it computes with what it computed before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

Call = Callable[[Any], Any]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# training; evaluation, where torch has a fast path; evaluation with gradients, as for saliency
MODES = ("train", "eval", "gradients")
# in units of the dtype's eps
TOLERANCE = {torch.float32: 30, torch.float64: 30, torch.bfloat16: 8}


@dataclass(frozen=True)
class Method:
    """Something to attach.

    Attributes:
        attach: Attaches it to heads for the length of a block, and checks at its end what it read; `call` runs the
            model for a method that does so itself.
        reads: What it needs of the heads; "groups" are query heads that share their key and value, "output weights"
            the W_O of each head.
        exact: Whether the attention stays as it is, to the bit. Otherwise it is computed with explicit weights.
    """

    attach: Callable[[hw.Heads, Call], AbstractContextManager[None]]
    reads: tuple[str, ...] = ()
    exact: bool = True


def penalty(term: Any, *reads: str, exact: bool = True) -> Method:
    @contextmanager
    def attach(heads: hw.Heads, _call: Call) -> Iterator[None]:
        with hw.Disagreement(heads, term) as handle:
            yield
            value = handle()
            assert value.isfinite(), f"the penalty is {value}"
            if value.requires_grad:
                learned = [p for p in heads.model.parameters() if p.requires_grad]
                for slope in torch.autograd.grad(value, learned, allow_unused=True, materialize_grads=True):
                    assert slope.isfinite().all(), "the gradient of the penalty is not finite"

    return Method(attach, reads, exact)


def taps(*reads: str, beside: bool = False) -> Method:
    @contextmanager
    def attach(heads: hw.Heads, _call: Call) -> Iterator[None]:
        with hw.Taps(heads, **dict.fromkeys(reads, True), beside=beside) as handle:
            yield
            for capture in handle.read():
                for name in reads:
                    tensor = getattr(capture, name)
                    assert tensor.isfinite().all(), f"{name} of {capture.site.label} are not finite"
                    # sinks take a share of each row
                    if name == "weights" and not hasattr(capture.site.module, "sinks"):
                        rows = tensor.double().sum(-1)
                        least = torch.finfo(torch.float32 if tensor.dtype == torch.float64 else tensor.dtype).eps
                        near = (rows - 1.0).abs() < tensor.shape[-1] * least
                        assert (near | (rows == 0.0)).all(), "rows of weights sum to neither 1 nor 0"

    return Method(attach, reads, beside or "weights" not in reads)


@contextmanager
def repelled(heads: hw.Heads, _call: Call) -> Iterator[None]:
    optimizer = torch.optim.SGD(heads.model.parameters(), lr=0.1)
    repulsion = hw.repel(heads, hw.SVGD(), optimizer)
    yield
    repulsion.remove()


@contextmanager
def ranked(heads: hw.Heads, call: Call) -> Iterator[None]:
    hw.importance(heads, lambda: float(first(call(heads.model)).nan_to_num().float().std()))
    yield


@contextmanager
def measured(heads: hw.Heads, call: Call) -> Iterator[None]:
    report = hw.measure(heads, [0], forward=lambda model, _: call(model))
    assert report.tokens > 0
    yield


@contextmanager
def steered_before(heads: hw.Heads, call: Call) -> Iterator[None]:
    """What changes a model by design leaves nothing behind."""
    with torch.no_grad(), hw.bias_heads(heads, lambda _site, one: torch.randn(1, one.heads, 1, one.keys)):
        call(heads.model)
    yield


@contextmanager
def ablated_before(heads: hw.Heads, call: Call) -> Iterator[None]:
    """Likewise."""
    with torch.no_grad(), hw.ablate(heads, 1):
        call(heads.model)
    yield


METHODS = {
    "Output": penalty(hw.similarity.Output(), "outputs"),
    "Subspace": penalty(hw.similarity.Subspace(), "values"),
    "Position": penalty(hw.similarity.Position(), "weights", exact=False),
    "Position recomputed": penalty(hw.similarity.Position(recompute=True), "mean_weights"),
    "PositionSquaredDifference": penalty(hw.similarity.PositionSquaredDifference(), "weights", exact=False),
    "Frobenius": penalty(hw.similarity.Frobenius(), "weights", exact=False),
    "SquaredCosine": penalty(hw.similarity.SquaredCosine(), "outputs"),
    "CKA": penalty(hw.similarity.CKA(), "outputs"),
    "HSIC": penalty(hw.similarity.HSIC(), "outputs"),
    "CrossCorrelation": penalty(hw.similarity.CrossCorrelation(), "outputs"),
    "LogDeterminant": penalty(hw.similarity.LogDeterminant(), "outputs"),
    "SpanOverlap": penalty(hw.similarity.SpanOverlap(), "parameters"),
    "MapCosine": penalty(hw.similarity.MapCosine(), "parameters", "output weights"),
    "GroupedQueries": penalty(hw.similarity.GroupedQueries(hw.similarity.CKA()), "outputs", "groups"),
    "GroupedQueries across": penalty(
        hw.similarity.GroupedQueries(hw.similarity.Output(), "across"), "outputs", "groups"
    ),
    "GroupedQueries of weights": penalty(
        hw.similarity.GroupedQueries(hw.similarity.Position()), "weights", "groups", exact=False
    ),
    "a sum of terms": penalty(hw.similarity.Output() + 0.3 * hw.similarity.Frobenius(), "weights", exact=False),
    "outputs": taps("outputs"),
    "values": taps("values"),
    "weights": taps("weights"),
    "mean weights": taps("mean_weights"),
    "weights beside": taps("weights", beside=True),
    "everything": taps("outputs", "values", "weights", "mean_weights"),
    "everything beside": taps("outputs", "values", "weights", "mean_weights", beside=True),
    "repel": Method(repelled),
    "importance": Method(ranked, ("outputs",)),
    "measure": Method(measured),
    "bias_heads, removed": Method(steered_before, ("weights",)),
    "ablate, removed": Method(ablated_before, ("outputs",)),
}


def first(returned: Any) -> Tensor:
    return tensors(returned)[0]


def tensors(returned: Any) -> list[Tensor]:
    """All floating tensors that a model returned."""
    if isinstance(returned, Tensor):
        return [returned] if returned.is_floating_point() else []
    values = returned.values() if hasattr(returned, "values") else returned
    return [tensor for value in values if isinstance(value, Tensor | tuple) for tensor in tensors(value)]


def compute(model: nn.Module, call: Call, mode: str) -> list[Tensor]:
    """What a model returns, and the gradients of its parameters, the same at each call."""
    model.train(mode == "train")
    torch.manual_seed(3)  # of dropout
    with torch.set_grad_enabled(mode != "eval"):
        returned = tensors(call(model))
    if mode == "eval":
        return returned
    # far from the sum, whose gradient through a norm is zero
    products = [tensor * torch.linspace(-1.0, 2.0, tensor.numel()).view_as(tensor) for tensor in returned]
    loss = torch.stack([product.sum() for product in products]).sum()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    slopes = torch.autograd.grad(loss, learned, retain_graph=True, allow_unused=True, materialize_grads=True)
    return [*returned, *slopes]


def changes(
    stock: nn.Module, call: Call, mode: str, methods: dict[str, Method], eager: nn.Module | None = None
) -> Iterator[str]:
    """Yield a line for each number that a method changes beyond rounding; nothing where the law holds.

    Where a method reads weights, the fused kernel gives way to one that writes them out. Both sum the same numbers in
    another order, so that an entry, a sum of some hundred products, differs by some tens of roundings at most: of the
    largest entry, since those that cancel carry its rounding. In bfloat16 sums are kept in float32, and what is rounded
    are scores, weights, heads and each of about a dozen results behind them, by at most half an eps each.

    Args:
        stock: The model as it is without headwise.
        call: Runs it.
        mode: One of `MODES`.
        methods: What is attached.
        eager: The same model with its own attention written out. Its distance from `stock` is allowed twice on top:
            that of scores which no scale keeps small.
    """
    expected = compute(copy.deepcopy(stock), call, mode)
    slack = [0.0] * len(expected)
    if eager is not None:
        slack = [2 * _distance(one, other) for one, other in zip(expected, compute(eager, call, mode), strict=True)]
    rounded = [
        TOLERANCE[tensor.dtype]
        * torch.finfo(tensor.dtype).eps
        * max(1.0, float(tensor.detach().nan_to_num().abs().max()))
        + more
        for tensor, more in zip(expected, slack, strict=True)
    ]
    adopted = copy.deepcopy(stock)
    with hw.find_heads(adopted).exposed():
        kept = compute(adopted, call, mode)
    # torch lays the output of its attention out otherwise, so that a dropout behind it draws other entries
    draws = mode == "train" and any(isinstance(m, nn.TransformerEncoderLayer) and m.dropout.p for m in stock.modules())
    if not draws:
        yield from _compare("finding the heads", kept, expected, rounded)
    if any(tensor.isnan().any() for tensor in kept):
        return  # the model computes NaN by itself
    for name, method in methods.items():
        model = copy.deepcopy(stock)
        heads = hw.find_heads(model)
        try:
            with method.attach(heads, call):
                found = compute(model, call, mode)
        except AssertionError as error:
            yield f"{name}: {error}"
            continue
        lines = list(_compare(name, found, kept, [0.0] * len(kept) if method.exact else rounded))
        # where nothing is read in a call the model computes as it did before, in that order of roundings
        if lines and method.exact and not list(_compare(name, found, expected, [0.0] * len(kept))):
            continue
        yield from lines


def _compare(name: str, found: list[Tensor], expected: list[Tensor], allowed: list[float]) -> Iterator[str]:
    for number, (one, other, most) in enumerate(zip(found, expected, allowed, strict=True)):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        apart = _distance(one, other)
        # a NaN is in no order
        if not apart <= most:
            yield f"{name}: tensor {number} differs by {apart:.2g}, at most {most:.2g} expected"


def _distance(one: Tensor, other: Tensor) -> float:
    # where the model itself computes NaN there is nothing to keep
    kept = ~other.isnan()
    apart = one.detach()[kept].double() - other.detach()[kept].double()
    return float(apart.abs().max()) if apart.numel() else 0.0
