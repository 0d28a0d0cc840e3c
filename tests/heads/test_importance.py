"""First-order importance is the mean absolute derivative of each item's loss by a gate on each head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from heads.calling import EinsumAttention
from heads.families import BY_NAME
from heads.forwards import checkpoint_activations, results

Losses = Callable[[], Tensor]
STEP = 1e-4


def first_order(heads: hw.Heads, losses: Callable[[], Any]) -> dict[str, Tensor]:
    return hw.importance(heads, losses, method="first_order").drops


@contextmanager
def scaled(site: hw.heads.Site, head: int, factor: float) -> Iterator[None]:
    """Have W_O get one head times a factor: by its columns, or what takes its place by its input."""
    if site.output is not None and site.output.owner is site.output_projection.module:
        own = site.output.of(site.output.parameter.data)[head]
        before = own.clone()
        own.mul_(factor)
        try:
            yield
        finally:
            own.copy_(before)
        return
    size = site.head_size

    def scale(_module: nn.Module, args: tuple) -> Tensor:
        joined = args[0].clone()
        joined[..., head * size : (head + 1) * size] *= factor
        return joined

    handle = site.output_projection.module.register_forward_pre_hook(scale)
    yield
    handle.remove()


@torch.no_grad()
def by_differences(heads: hw.Heads, losses: Losses) -> dict[str, Tensor]:
    """The same from two evaluations of each head, a little above and below its gate of 1."""
    found = {}
    for site in heads:
        site.expose()
        slopes = []
        for head in range(site.num_heads):
            ends = []
            for factor in (1 + STEP, 1 - STEP):
                with scaled(site, head, factor):
                    ends.append(losses())
            slopes.append(((ends[0] - ends[1]) / (2 * STEP)).abs().mean())
        found[site.name or "(model)"] = torch.stack(slopes)
    return found


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-8) -> None:
    assert found.keys() == expected.keys()
    for name, drops in found.items():
        torch.testing.assert_close(drops, expected[name], atol=atol, rtol=1e-6)
        assert bool((drops >= 0).all())
    assert any(float(drops.max()) > 100 * atol for drops in found.values())


def losses_of(model: nn.Module, inputs: dict[str, Tensor], keep: Tensor | None = None) -> Losses:
    """For each item its own mean over its real tokens, with a sign of its own."""

    def losses() -> Tensor:
        output = results(model, inputs)[0].flatten(2)
        each = (output * torch.linspace(-1, 2, output.shape[-1], dtype=output.dtype)).sin().mean(-1)
        real = torch.ones_like(each) if keep is None else keep.to(each.dtype)
        signs = torch.tensor([1.0, -2.0, 3.0], dtype=each.dtype)[: len(each)]
        return signs * (each * real).sum(1) / real.sum(1)

    return losses


# smooth, and double precision throughout: norms of Llama and T5 compute in single
@cases("name", ["BERT", "ALBERT", "GPT-2"])
def test_first_order_is_the_slope_of_each_items_loss(name: str):
    family = BY_NAME[name]
    model, inputs = family.build().double().eval(), family.inputs(padded=family.maskable)
    heads, losses = hw.find_heads(model), losses_of(model, inputs)
    result = hw.importance(heads, losses, method="first_order")
    require_close(result.drops, by_differences(heads, losses))
    assert result.baseline == pytest.approx(float(losses().detach().mean()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_is_the_slope_in_an_encoder_decoder_and_with_grouped_queries():
    torch.manual_seed(0)
    source, target = (torch.randn(3, tokens, 12, dtype=torch.float64) for tokens in (6, 5))
    pair = nn.Transformer(12, 4, 2, 1, 16, activation="gelu", batch_first=True).double().eval()
    heads, losses = hw.find_heads(pair), losses_of(pair, {"src": source, "tgt": target})
    require_close(first_order(heads, losses), by_differences(heads, losses))
    grouped = nn.Sequential(SeparateAttention(key_value_heads=2), SeparateAttention(key_value_heads=1)).double()
    heads = hw.find_heads(grouped)
    assert [len(drops) for drops in first_order(heads, losses_of_stack(grouped, source)).values()] == [4, 4]
    losses = losses_of_stack(grouped, source)
    require_close(first_order(heads, losses), by_differences(heads, losses))


@cases("setting", [hw.routing.SimpleRouting(capsules=4), hw.routing.Gate(), hw.routing.Residual(hw.routing.Trunk())])
def test_aggregated_heads_have_their_gates_before_the_aggregator(setting: Any):
    torch.manual_seed(0)
    model = nn.Sequential(SeparateAttention(), SeparateAttention(key_value_heads=2)).double().eval()
    heads = hw.find_heads(model)
    hw.aggregate(heads, setting)
    losses = losses_of_stack(model, torch.randn(3, 6, 12, dtype=torch.float64))
    require_close(first_order(heads, losses), by_differences(heads, losses))


def test_heads_that_pass_through_no_module_have_their_gates_at_the_call():
    torch.manual_seed(0)
    model = EinsumAttention().double()
    x = torch.randn(3, 6, 12, dtype=torch.float64)
    row = hw.layouts.FusedParameter("mine", fused=("w_qkv",), axes="p d h e", output=("w_o",), output_axes="h e d")
    losses, slopes = losses_of_stack(model, x), []
    heads = hw.find_heads(model, row)
    found = first_order(heads, losses)
    checkpointed = losses_of_stack(lambda x: checkpoint(model, x, use_reentrant=False), x)
    require_close(first_order(heads, checkpointed), found)
    with torch.no_grad():
        for own in model.w_o.data:
            ends = []
            for factor in (1 + STEP, (1 - STEP) / (1 + STEP), 1 / (1 - STEP)):
                own.mul_(factor)
                ends.append(losses())
            slopes.append(((ends[0] - ends[1]) / (2 * STEP)).abs().mean())
    require_close(found, {"(model)": torch.stack(slopes)})


def losses_of_stack(model: Callable[[Tensor], Tensor], x: Tensor) -> Losses:
    return lambda: model(x).cos().mean((1, 2)) * torch.tensor([1.0, -2.0, 3.0], dtype=x.dtype)[: len(x)]


def test_the_default_device_is_of_no_concern():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double().eval()
    heads, x = hw.find_heads(model), torch.randn(3, 5, 8, dtype=torch.float64)
    expected = first_order(heads, lambda: model(x)[..., 0].square().sum(1))
    with torch.device("meta"):
        require_close(first_order(heads, lambda: model(x)[..., 0].square().sum(1)), expected)


def test_all_rows_of_a_call_are_those_of_a_single_item():
    torch.manual_seed(0)
    model = SeparateAttention().double()
    x = torch.randn(2, 6, 12, dtype=torch.float64)

    def in_windows(item: Tensor) -> Tensor:
        return model(item.view(3, 2, 12)).cos().sum().view(1)

    heads = hw.find_heads(model)
    found = first_order(heads, lambda: (in_windows(item) for item in x))
    require_close(found, by_differences(heads, lambda: torch.cat([in_windows(item) for item in x])))
    with pytest.raises(
        hw.errors.ShapeError, match=r"computed 6 rows in a call, and there are 2 losses.*one item at a time"
    ):
        first_order(heads, lambda: model(x.view(6, 2, 12)).view(2, -1).sum(1))


@pytest.mark.full
def test_frozen_checkpointed_and_compiled_models_give_the_same():
    family = BY_NAME["BERT"]
    model, inputs = family.build().eval(), family.inputs()
    heads, losses = hw.find_heads(model), losses_of(model, inputs)
    expected = first_order(heads, losses)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    results(compiled, inputs)
    require_close(first_order(hw.find_heads(compiled), losses_of(compiled, inputs)), expected, atol=1e-6)
    checkpoint_activations(model, reentrant=False)
    require_close(first_order(heads, losses_of(model.train().eval(), inputs)), expected, atol=1e-6)
    model.requires_grad_(False)
    require_close(first_order(heads, losses), expected, atol=1e-6)


def test_what_is_no_loss_of_items_is_refused():
    torch.manual_seed(0)
    model, x = SeparateAttention(), torch.randn(2, 6, 12)
    heads = hw.find_heads(model)
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: model(x).mean(), hw.errors.ShapeError, r"gave a tensor of torch.float32, \[\] as losses"),
        (lambda: [model(x).mean((1, 2)), 0.5], hw.errors.ShapeError, "gave 0.5 as losses"),
        (lambda: 0.5, hw.errors.SettingError, r"returned a float; method=\"first_order\" expects the losses"),
        (list, hw.errors.NotFired, "score gave no item"),
        (lambda: model(x).mean((1, 2)).detach(), hw.errors.NotFired, "losses carry no gradient"),
        (lambda: model(x).mean((1, 2)).log() * float("nan"), hw.errors.HeadwiseError, "a loss is not finite"),
        (lambda: torch.ones(2, requires_grad=True), hw.errors.NotFired, "depend on no head of 1 of 1 sites"),
        (
            lambda: model(x).detach().mean((1, 2)) * torch.ones(1, requires_grad=True),
            hw.errors.NotFired,
            "depend on no head",
        ),
        (torch.no_grad()(lambda: model(x).mean((1, 2))), hw.errors.NotFired, "ran without gradients"),
    ]
    for score, error, told in wrong:
        with pytest.raises(error, match=told):
            hw.importance(heads, score, method="first_order")
        assert not model.o_proj._forward_pre_hooks
    with pytest.raises(hw.errors.SettingError, match="method is 'taylor'"):
        hw.importance(heads, lambda: 1.0, method="taylor")


def test_what_is_no_score_is_refused():
    torch.manual_seed(0)
    model, x = SeparateAttention(), torch.randn(2, 6, 12)
    heads = hw.find_heads(model)
    calls = iter([0.5, float("nan")])
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: None, hw.errors.SettingError, "score returned a NoneType; .* expects one number"),
        (lambda: model(x), hw.errors.SettingError, r"score returned a tensor of shape \(2, 6, 12\)"),
        (lambda: model(x).mean((1, 2)).tolist(), hw.errors.SettingError, "score returned a list"),
        (lambda: model(x).mean() * float("inf"), hw.errors.HeadwiseError, "score returned -?inf"),
        (lambda: model(x).mean().item() * 0 + next(calls), hw.errors.HeadwiseError, "score returned nan"),
    ]
    for score, error, told in wrong:
        with pytest.raises(error, match=told):
            hw.importance(heads, score)
        assert not model.o_proj._forward_pre_hooks
    for method in ("exact", "first_order"):
        with pytest.raises(hw.errors.SettingError, match="score is a float; expected a function"):
            hw.importance(heads, 0.5, method=method)
    assert hw.importance(heads, lambda: model(x).std()[None]).baseline > 0


def test_heads_divided_over_processes_are_refused(monkeypatch: pytest.MonkeyPatch):
    heads = hw.find_heads(SeparateAttention())
    monkeypatch.setattr(hw.heads.Site, "divided", property(lambda _site: True))
    with pytest.raises(hw.errors.LayoutError, match="under tensor parallelism no process computes"):
        first_order(heads, lambda: torch.ones(2))


def test_it_is_printed_with_what_it_is():
    many = {f"layers.{i}": torch.tensor([0.25, -0.5]) for i in range(60)}
    assert "drop without each head" in str(hw.heads.Importance(1.0, many))
    assert "-0.5000" in str(hw.heads.Importance(1.0, many))
    lines = str(hw.heads.Importance(1.0, many, "first_order")).splitlines()
    assert lines[0] == "mean loss of the whole model 1; E |dL/dxi| of each head:"
    assert len(lines) == 40
    assert lines[20] == "... 22 more sites ..."
