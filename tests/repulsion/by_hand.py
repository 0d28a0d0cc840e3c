"""The rule written into the gradients by hand, in double precision: what every loop with repulsion must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import headwise as hw
from heads.attentions import SeparateAttention
from headwise.repulsion.rules import Rule, update

RULE = hw.SVGD(alpha=0.7, step_size=0.3, prior_precision=0.2, data_size=3.0, inverse_temperature=1.7)

# A training loop that calls `repel` on its optimizer once and `edit` wherever a user would change gradients by hand.
Loop = Callable[[nn.Module, Callable[[Optimizer | list[Optimizer]], None], Callable[[], None]], None]


def model_with_gradients(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes) -> SeparateAttention:
    torch.manual_seed(seed)
    model = SeparateAttention(**sizes).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


# a compiled loop would trace how heads are found
@torch.compiler.disable
def expected_gradients(model: nn.Module, rule: Rule, strength: float = 1.0) -> dict[str, Tensor]:
    """Every parameter's gradient after the rule, computed apart in float64."""
    expected = {name: parameter.grad.double().clone() for name, parameter in model.named_parameters()}
    for head_slice in hw.find_heads(model).slices():
        particles = head_slice.of(head_slice.parameter.detach()).double().flatten(1)
        gradients = head_slice.of(head_slice.parameter.grad).double().flatten(1)
        forces = update(rule, particles, gradients)
        shape = head_slice.of(head_slice.parameter).shape
        head_slice.of(expected[head_slice.name]).copy_((forces.driving - strength * forces.repulsion).view(shape))
    return expected


def repel_by_hand(model: nn.Module, rule: Rule = RULE) -> None:
    """Write the rule's gradients into the model's."""
    for (_, parameter), gradient in zip(
        model.named_parameters(), expected_gradients(model, rule).values(), strict=True
    ):
        parameter.grad.copy_(gradient)


def batch(step: int, model: nn.Module) -> Tensor:
    """The batch of one step, the same for every run."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, 6, 12, generator=generator).to(next(model.parameters()).dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of one step."""
    return (model(batch(step, model)) - 1.0).square().mean()


def run(
    model: nn.Module,
    optimizer: Optimizer,
    edit: Callable[[], None] = lambda: None,
    *,
    steps: int = 4,
    closure: Literal["", "given", "keyword"] = "",
    set_to_none: bool = True,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Steps of a training loop; `before` comes between the backward pass and `edit`, `after` after the step."""
    for step in range(steps):

        def forward_and_backward(step: int = step) -> Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model, step)
            loss.backward()
            before()
            edit()
            return loss

        if not closure:
            forward_and_backward()
            optimizer.step()
        else:
            given = {"closure": forward_and_backward} if closure == "keyword" else {}
            loss = optimizer.step(**given) if given else optimizer.step(forward_and_backward)
            assert loss.requires_grad
        after()


def trained(loop: Loop, how: str, dtype: torch.dtype = torch.float64, rule: Rule = RULE) -> dict[str, Tensor]:
    """Parameters after a loop: "plain", with repulsion written in "by hand", or by `hw.repel`."""
    torch.manual_seed(0)
    model = SeparateAttention().to(dtype)
    made: list[hw.repulsion.Repulsion] = []

    def repel(optimizer: Optimizer | list[Optimizer]) -> None:
        if how == "repelled":
            made.append(hw.repel(hw.find_heads(model), rule, optimizer))

    loop(model, repel, lambda: repel_by_hand(model, rule) if how == "by hand" else None)
    for handle in made:
        handle.check()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor], rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Assert that every parameter has the gradient that is expected."""
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), expected[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def repelled(rule: Rule = RULE, *, lr: float = 0.0, dtype: torch.dtype = torch.float32, **sizes):
    """A model with gradients, an optimizer, and the handle of a repulsion."""
    options = {name: sizes.pop(name) for name in ("when", "noise", "joint", "seed") if name in sizes}
    model = model_with_gradients(dtype=dtype, **sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, hw.repel(hw.find_heads(model), rule, optimizer, **options)


def assert_as_by_hand(loop: Loop, dtype: torch.dtype = torch.float64, **tolerance: float) -> None:
    """Assert that `hw.repel` did in a loop what hands do, and that hands did something."""
    plain, by_hand, repelled = (trained(loop, how, dtype) for how in ("plain", "by hand", "repelled"))
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        assert not torch.allclose(plain[name], by_hand[name], rtol=1e-3, atol=1e-3), f"{name} was not repelled"
    for name, expected in by_hand.items():
        torch.testing.assert_close(repelled[name], expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
