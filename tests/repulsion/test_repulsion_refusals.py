"""Repulsion that would do nothing, or nonsense, without a word: each is refused in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from heads.wrappers import LoraLinear, wrap
from headwise.errors import HeadwiseError, LayoutError, SettingError, ShapeError
from repulsion.by_hand import RULE, loss_of, model_with_gradients, repelled

Refusal = tuple[Callable[[], object], type[Exception], str]


def sgd(model: nn.Module, **options) -> SGD:
    return SGD(model.parameters(), lr=0.1, **options)


def repel(model: nn.Module, rule=RULE, optimizer=None, *, projections=(), **options):
    heads = hw.find_heads(model)
    chosen = heads.projection(*projections) if projections else heads
    return hw.repel(chosen, rule, sgd(model) if optimizer is None else optimizer, **options)


class Bare(Optimizer):
    """Never calls torch's constructor, so that it fires no hooks."""

    def __init__(self, params) -> None:
        self.param_groups = [{"params": list(params)}]

    def step(self, closure=None):
        """Fire no hooks."""


def changed(change, **sizes) -> SeparateAttention:
    model = model_with_gradients(**sizes)
    with torch.no_grad():
        change(model)
    return model


def spoil(model: nn.Module) -> None:
    model.k_proj.weight[7], model.k_proj.weight[13] = torch.nan, torch.inf


def two_optimizers(model: nn.Module) -> list[SGD]:
    return [sgd(model), SGD([model.q_proj.weight, nn.Parameter(torch.zeros(1))], lr=0.1)]


def of_four(
    message: str, rule: Any = RULE, optimizer: Any = None, *, error: type = SettingError, **options: Any
) -> Refusal:
    """The repulsion of an attention with four heads."""
    sizes = {"key_value_heads": options.pop("key_value_heads")} if "key_value_heads" in options else {}
    return lambda: repel(SeparateAttention(**sizes), rule, optimizer, **options), error, message


def of_one(make: Callable[[SeparateAttention], dict[str, Any]], error: type, message: str) -> Refusal:
    """That of one by optimizers that were made for it."""
    return lambda: repel(model := SeparateAttention(), **make(model)), error, message


NO_VALUES = r"q_proj\.weight is on the meta device and has no values"
NOT_FINITE = r"^k_proj\.weight holds NaN or infinity in key heads \[1, 2\] of 4; repulsion needs finite heads"
ONE_HEAD = (
    r"^no particle group has more than one particle \(key: 1, value: 1\), and one head has nothing to be repelled "
    r"from; choose heads\.projection\('query'\), with 4 heads per layer\.$"
)
SPANS, FUNCTIONS = hw.repulsion.SpanSVGD, hw.repulsion.FunctionSVGD
REFUSALS: list[Refusal] = [
    of_four("expected a particle rule", hw.SVGD),
    of_four("joint is 'no'; expected True or False", joint="no"),
    of_four("every is 0", every=0),
    of_four(r"every is 2\.5", every=2.5),
    of_four("when is 'now'; expected one of step, man", when="now"),
    of_four("noise is 'no'; expected one of step, ap", noise="no"),
    of_four("seed is -1", seed=-1),
    of_four("optimizer is str", RULE, "adam"),
    of_four("optimizer is list", RULE, []),
    of_four("SpanSVGD compares the spans of one projection, which cannot be joined", SPANS(), joint=True),
    of_four("FunctionSVGD compares products .*, which cannot be joined; leave joint out", FUNCTIONS(), joint=True),
    of_four("make no product; select query and key", FUNCTIONS(), error=LayoutError, projections=("key",)),
    of_four(r"asks for 5 effective heads, and .* has 4", hw.SVGD(alpha=hw.Target(5.0))),
    of_four("4 query heads and 2 key/value heads cannot be joined", key_value_heads=2, joint=True),
    of_four("4 query heads share 2 key/value heads", FUNCTIONS(), key_value_heads=2),
    *(
        of_four(ONE_HEAD, rule, error=LayoutError, key_value_heads=1, projections=("key", "value"))
        for rule in (RULE, hw.SVGD(alpha=0.0), hw.repulsion.CosinePenalty(alpha=0.3))
    ),
    of_one(lambda m: {"optimizer": sgd(m, maximize=True)}, SettingError, "maximize=True"),
    of_one(
        lambda m: {"optimizer": Bare(m.parameters())}, SettingError, r"Bare does not call torch\.optim\.Optimizer\.__in"
    ),
    of_one(
        lambda m: {"optimizer": two_optimizers(m)}, SettingError, "query: its parameters are held by 2 of the 2 optim"
    ),
    of_one(
        lambda m: {"optimizer": SGD([m.q_proj.weight, m.k_proj.weight], lr=0.1)},
        LayoutError,
        "value: its parameters are not held by the optimizer",
    ),
    (lambda: hw.Repel(RULE, grouping="inside"), SettingError, "grouping is 'inside'"),
    (lambda: hw.Repel(RULE, projections="query"), SettingError, "projections is 'query'"),
    (lambda: hw.Repel(RULE, projections=("output",)), SettingError, "projections is 'output'"),
    (
        lambda: repel(changed(lambda m: m.k_proj.weight.requires_grad_(False))),
        LayoutError,
        r"k_proj\.weight does not require a gradient",
    ),
    (lambda: repel(changed(spoil)), HeadwiseError, NOT_FINITE),
    (
        lambda: repel(changed(lambda m: m.v_proj.weight[5:10].zero_()), hw.SVGD(kernel=hw.kernels.NormalizedRBF())),
        ShapeError,
        r"value: heads \[1\] of 4 are zero",
    ),
    (lambda: repel(SeparateAttention().to("meta")), LayoutError, NO_VALUES),
    (lambda: hw.repulsion.jitter(hw.find_heads(SeparateAttention().to("meta")), 0.1), LayoutError, NO_VALUES),
    (lambda: hw.repulsion.jitter(hw.find_heads(SeparateAttention()), 0.0), SettingError, "scale is 0.0"),
    (
        lambda: repel(SeparateAttention(num_heads=1, key_value_heads=1), joint=True),
        LayoutError,
        r"\(query\+key\+value: 1\).*; select an attention with more heads\.$",
    ),
    (
        lambda: repel(nn.MultiheadAttention(16, 2, kdim=3, vdim=8), SPANS()),
        SettingError,
        "the heads of key have 8 features of 3 inputs, so that each spans all of",
    ),
]


@cases(("call", "error", "message"), REFUSALS)
def test_what_cannot_be_repelled_is_refused(call: Callable[[], object], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()


def test_what_is_refused_as_a_whole_is_accepted_in_part():
    model = model_with_gradients()
    both = two_optimizers(model)
    assert repel(model, RULE, both, projections=("key", "value"))
    assert repel(model, RULE, [both[0], both[0]], projections=("query",))
    assert repel(SeparateAttention(key_value_heads=1), projections=("query",))
    assert repel(nn.MultiheadAttention(16, 2, kdim=3, vdim=8), SPANS(), projections=("query", "value"))
    assert repel(changed(lambda m: m.v_proj.weight[5:10].zero_()), hw.SVGD())


def test_jitter_of_heads_that_are_not_finite_changes_nothing():
    model = changed(spoil)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(HeadwiseError, match=NOT_FINITE):
        hw.repulsion.jitter(hw.find_heads(model), 0.5)
    assert all(torch.equal(before[n].nan_to_num(5.0), p.nan_to_num(5.0)) for n, p in model.state_dict().items())


@cases("value", [float("nan"), float("inf"), -1.0, "a", None, True, torch.tensor(1.0), lambda _: 1.0])
def test_a_strength_that_is_no_number_from_zero_is_refused_when_assigned(value):
    *_, handle = repelled()
    with pytest.raises(SettingError, match=r"^strength is .*; expected a finite number in \[0, inf\]\.$"):
        handle.strength = value
    assert handle.strength == 1.0


@cases(
    ("state", "message"),
    [
        (None, "the state holds a NoneType; expected steps, turns, strength"),
        ({}, "the state holds nothing; expected"),
        ({"steps": [1], "turns": [0]}, "the state holds steps, turns; expected steps, turns, strength"),
        ({"state": {}, "param_groups": []}, "the state holds state, param_groups; expected"),
        ({"steps": [4], "turns": [0], "strength": float("nan")}, "strength is nan"),
        ({"steps": 4, "turns": [0], "strength": 1.0}, r"steps=4 and turns=\[0\]; expected lists of 1"),
        ({"steps": [1, 2], "turns": [0, 1], "strength": 1.0}, r"turns=\[0, 1\]; expected lists of 1"),
        ({"steps": [4], "turns": [-1], "strength": 2.0}, "turns is -1; expected an integer of at least 0"),
        ({"steps": ["4"], "turns": [0], "strength": 2.0}, "steps is '4'; expected an integer of at least 0"),
    ],
)
def test_a_state_of_something_else_changes_nothing(state, message):
    _, optimizer, handle = repelled()
    optimizer.step()
    before = handle.state_dict()
    with pytest.raises(SettingError, match=message):
        handle.load_state_dict(state)
    assert handle.state_dict() == before


def test_a_sparse_gradient_is_refused_before_any_is_changed():
    model, optimizer, _ = repelled()
    model.v_proj.weight.grad = model.v_proj.weight.grad.to_sparse()
    before = model.q_proj.weight.grad.clone()
    with pytest.raises(LayoutError, match=r"v_proj\.weight has a sparse gradient; repulsion needs a dense"):
        optimizer.step()
    assert torch.equal(model.q_proj.weight.grad, before)


def replace_parameter(model: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def overwrite_parameters(model: nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


ANOTHER = r"q_proj\.weight is another tensor than when hw\.repel was called"


@cases(
    ("change", "message"),
    [
        (lambda m: wrap(m, "v_proj"), r"v_proj\.weight .* a LoraLinear has taken its place"),
        (lambda m: setattr(m, "v_proj", nn.Linear(12, 20)), r"v_proj\.weight .* a Linear has taken its place"),
        (
            lambda m: nn.utils.parametrizations.weight_norm(m.v_proj),
            r"v_proj\.weight is no longer a parameter of ParametrizedLinear: it was replaced",
        ),
        (replace_parameter, ANOTHER),
        (overwrite_parameters, ANOTHER),
    ],
)
def test_a_model_changed_after_repel_is_told_by_step_apply_and_check(change, message):
    model, optimizer, handle = repelled(lr=0.1)
    optimizer.step()
    change(model)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    for act in (optimizer.step, handle.apply, handle.check):
        with pytest.raises(LayoutError, match=message):
            act()


def test_check_tells_of_a_wrapper_whose_base_still_trains():
    model, optimizer, handle = repelled(lr=0.1)
    optimizer.step()
    model.v_proj = LoraLinear(model.v_proj)
    model.v_proj.base_layer.requires_grad_(True)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(LayoutError, match=r"v_proj\.weight is not where the model calls it anymore"):
        handle.check()


def test_a_wrapped_optimizer_is_unwrapped():
    model = model_with_gradients()
    inner = sgd(model)
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(original_optimizer=inner))
    handle = hw.repel(hw.find_heads(model), RULE, [wrapped])
    inner.step()
    assert handle.steps == 1
    assert str(handle) == f"{RULE} on 3 particle groups of 4 heads, before each step of SGD"


def test_the_same_heads_are_not_repelled_twice_until_removed():
    models = nn.ModuleList([model_with_gradients(), model_with_gradients(seed=1)])
    optimizer = sgd(models)
    handles = [repel(model, RULE, optimizer) for model in models]
    for found in (hw.find_heads(models), hw.find_heads(models[0]).projection("key")):
        with pytest.raises(SettingError, match="repelled by this optimizer already"):
            hw.repel(found, RULE, optimizer)
    for handle in handles:
        handle.remove()
    repel(models, RULE, optimizer)
