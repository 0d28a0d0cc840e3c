"""Gates on models already built: what they compute, that they leave nothing behind, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from cases import cases
from heads.attentions import FusedAttention, KeyValueAttention, SeparateAttention
from heads.families import FAMILIES, sweep
from heads.family import Family
from headwise.gating.attach import NAME
from laws.attaching import tensors
from reference.gating import mixture_gates_loop, sigmoid_gates_loop

WIDTH, HEADS, BATCH, LENGTH = 12, 4, 2, 6
SETTINGS = {
    "heads": hw.gating.SigmoidGate(),
    "elements": hw.gating.SigmoidGate("element", scale=1.3),
    "without tokens": hw.gating.SigmoidGate(token=False),
    "mixture": hw.gating.MixtureOfHeads(2, 1),
    "one shared head": hw.gating.MixtureOfHeads(1, 2),
    "random mixture": hw.gating.MixtureOfHeads(1, 2, routing="random"),
}
Run = Callable[[nn.Module, Tensor, Tensor], Tensor]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def torch_attention(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(WIDTH, HEADS, **settings)


def attend(model: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return model(x, context, context)[0]


def attend_to_length_first(model: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    x, context = x.transpose(0, 1), context.transpose(0, 1)
    return model(x, key=context, value=context, need_weights=False)[0].transpose(0, 1)


def attend_by_name(model: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return model(value=context, key=context, query=x)[0]


def attend_to_one(model: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return torch.stack([model(*one)[0] for one in zip(x, context, context, strict=True)])


def attend_to_itself(model: nn.Module, x: Tensor, _context: Tensor) -> Tensor:
    return model(x)


# attentions, and how to run them on queries [B, Q, d] and a context [B, K, d]
ATTENTIONS: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    "torch, cross": (torch_attention(batch_first=True), attend),
    "torch, by name": (torch_attention(batch_first=True), attend_by_name),
    "torch, length first": (torch_attention(), attend_to_length_first),
    "torch, one sequence": (torch_attention(batch_first=True), attend_to_one),
    "separate": (lambda: SeparateAttention(WIDTH, HEADS), attend_to_itself),
    "grouped": (lambda: SeparateAttention(WIDTH, HEADS, key_value_heads=2), attend_to_itself),
    "fused": (lambda: FusedAttention(width=WIDTH, num_heads=HEADS), attend_to_itself),
    "keys and values of a context": (lambda: KeyValueAttention(WIDTH, HEADS), lambda model, x, c: model(x, c)),
}


def build(attention: str) -> tuple[nn.Module, Run]:
    torch.manual_seed(0)
    make, run = ATTENTIONS[attention]
    return make().double().eval(), run


def randomize(model: nn.Module) -> None:
    """Draw all that gates hold, so that none is neutral."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == NAME:
            for seed, tensor in enumerate((*module.parameters(), *module.buffers()), start=20):
                tensor.data.copy_(draw(*tensor.shape, seed=seed))


def compute_gates(gates: Any, x: Tensor, size: int) -> Tensor:
    """The gates of each token by the loops, [B, Q, H * e]."""

    def rows(tensor: Tensor | None, count: int) -> list[list[float]]:
        return torch.zeros(count, WIDTH).tolist() if tensor is None else tensor.tolist()

    setting = gates.setting
    found = []
    for token in x.flatten(0, 1).tolist():
        if isinstance(setting, hw.gating.SigmoidGate):
            weight = rows(gates.weight, len(gates.bias))
            found.append(sigmoid_gates_loop(token, weight, gates.bias.tolist(), setting.scale))
        else:
            fixed = None if gates.fixed is None else gates.fixed.tolist()
            shared, kinds = rows(gates.shared, setting.shared), gates.kinds.tolist()
            found.append(mixture_gates_loop(token, gates.routed.tolist(), shared, kinds, setting.active, fixed))
    held = torch.tensor(found, dtype=torch.float64).unflatten(0, x.shape[:2])
    return held if held.shape[-1] > HEADS else held.repeat_interleave(size, -1)


@cases("attention", ATTENTIONS)
@cases("setting", SETTINGS)
def test_the_heads_of_each_token_are_multiplied_by_gates_that_its_queries_input_chooses(attention: str, setting: str):
    model, run = build(attention)
    heads = hw.find_heads(model)
    x, context = draw(BATCH, LENGTH, WIDTH, seed=1), draw(BATCH, LENGTH - 2, WIDTH, seed=2)
    with torch.no_grad(), hw.Taps(heads, outputs=True) as taps:
        plain = run(model, x, context)
        # in evaluation the newest call is kept: of one sequence alone, the last
        outputs = taps.read()[-1].outputs
    gating = hw.gate_heads(heads, SETTINGS[setting])
    (site,) = heads
    randomize(model)
    expected = site.output_projection.module
    weights = compute_gates(getattr(site.module, NAME), x, site.head_size)
    with torch.no_grad():
        found = run(model, x, context)
        gating.remove()
        read = expected(outputs.flatten(-2) * weights[-len(outputs) :])
        torch.testing.assert_close(found[-len(outputs) :], read, rtol=0.0, atol=1e-13)
        assert not torch.allclose(found, plain, atol=1e-3)
        assert torch.equal(run(model, x, context), plain)
    assert not hasattr(site.module, NAME)


def call(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return tensors(model(**batch))


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


@sweep([family for family in FAMILIES if family.name != "WavLM"])
def test_a_model_of_any_family_is_unchanged_until_its_gates_are_trained_and_after_they_are_removed(family: Family):
    model, batch = family.build(), family.inputs()
    heads = hw.find_heads(model)
    names = [site.name for site in heads]
    # its local attention has the heads of one chunk after another
    heads = heads.where("encoder.*") if family.name == "CANINE" else heads
    [site.expose() for site in heads]  # the fast path sums in another order
    plain, keys = call(model, batch), list(model.state_dict())
    gating = hw.gate_heads(heads, hw.gating.SigmoidGate())
    assert equal(call(model, batch), plain)
    assert sum(NAME in key for key in model.state_dict()) == 2 * len(heads)
    assert [site.name for site in hw.find_heads(model)] == names
    randomize(model)
    gated = call(model, batch)
    assert not equal(gated, plain)
    assert equal(call(copy.deepcopy(model), batch), gated)
    gating.remove()
    assert equal(call(model, batch), plain)
    assert list(model.state_dict()) == keys


def encoder(layers: int = 2, **settings: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **{"dropout": 0.0, "batch_first": True, **settings})
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def test_gates_reach_the_fast_path_of_torch():
    model, x = encoder().eval(), torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        plain = model(x)
        hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
        torch.testing.assert_close(model(x), plain, rtol=0.0, atol=1e-6)
        randomize(model)
        assert not torch.allclose(model(x), plain, atol=1e-3)


@cases("setting", SETTINGS)
def test_an_optimizer_built_afterwards_trains_every_gate(setting: str):
    model = encoder().double()
    x = draw(BATCH, LENGTH, WIDTH)
    gating = hw.gate_heads(hw.find_heads(model), SETTINGS[setting])
    before = {name: value.clone() for name, value in model.state_dict().items() if NAME in name}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss = gating.loss(loss) if isinstance(SETTINGS[setting], hw.gating.MixtureOfHeads) else loss
    loss.backward()
    optimizer.step()
    after = model.state_dict()
    same = [name for name, value in before.items() if torch.equal(after[name], value)]
    # one head that is active has no gate to learn but by its balance; what is random stays
    assert same == [name for name in before if name.endswith(".fixed")]


def test_gates_have_the_dtype_mode_and_names_of_their_place():
    model = encoder().to(torch.bfloat16).eval()
    hw.gate_heads(hw.find_heads(model).layer(1), hw.gating.SigmoidGate("element"))
    held = {name: value for name, value in model.named_parameters() if NAME in name}
    assert {name: (tuple(value.shape), value.dtype) for name, value in held.items()} == {
        "layers.1.self_attn.head_gates.weight": ((WIDTH, WIDTH), torch.bfloat16),
        "layers.1.self_attn.head_gates.bias": ((WIDTH,), torch.bfloat16),
    }
    assert not model.layers[1].self_attn.head_gates.training
    assert model(torch.randn(1, 3, WIDTH, dtype=torch.bfloat16)).dtype == torch.bfloat16
    # under autocast
    with torch.autocast("cpu", torch.bfloat16), hw.Taps(hw.find_heads(model.float()), outputs=True) as taps:
        model(torch.randn(1, 3, WIDTH))
        assert {capture.outputs.dtype for capture in taps.read()} == {torch.bfloat16}


def test_taps_see_what_w_o_gets_whichever_was_attached_first():
    model, x = encoder(1).double().eval(), draw(BATCH, LENGTH, WIDTH)
    heads = hw.find_heads(model)
    first = hw.Taps(heads, outputs=True)
    model(x)
    (plain,) = first.read()
    hw.gate_heads(heads, hw.gating.SigmoidGate())
    randomize(model)
    second = hw.Taps(heads, outputs=True)
    with torch.no_grad():
        model(x)
        (early,), (late,) = first.read(), second.read()
        gates = model.layers[0].self_attn.head_gates(x).weights
    assert torch.equal(early.outputs, late.outputs)
    torch.testing.assert_close(early.outputs, plain.outputs * gates[..., None])
    with torch.no_grad(), hw.ablate(heads, 1):
        model(x)
    (removed,) = second.read()
    assert removed.outputs[:, :, 1].abs().max() == 0.0
    assert torch.equal(removed.outputs[:, :, 2], late.outputs[:, :, 2])


class Checkpointed(nn.Module):
    """Layers whose activations are kept, or computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = encoder(2).double().layers

    def forward(self, x: Tensor, mask: Tensor, reentrant: bool | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, None, mask) if reentrant is None else checkpoint(layer, x, None, mask, use_reentrant=reentrant)
        return x


@cases("reentrant", [False, True])
@cases("setting", ["elements", "mixture"])
def test_activation_checkpoints_compute_the_same_gradients(reentrant: bool, setting: str):
    model = Checkpointed()
    gating = hw.gate_heads(hw.find_heads(model), SETTINGS[setting])
    randomize(model)
    x, mask = draw(BATCH, LENGTH, WIDTH).requires_grad_(), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[1, -2:] = True
    slopes = []
    for how in (None, reentrant):
        loss = model(x, mask, how).square().mean()
        if setting == "mixture" and not reentrant:
            loss = loss + gating.balance()
        model.zero_grad()
        loss.backward()
        slopes.append([parameter.grad for parameter in model.parameters()])
        if setting == "mixture" and not reentrant:
            with pytest.raises(hw.errors.NotFired):  # what is computed again is not counted again
                gating.balance()
    torch.testing.assert_close(*slopes, rtol=0.0, atol=1e-14)
    if setting == "mixture" and reentrant:
        gating.balance()  # of the first
        model(x, mask, reentrant)
        with pytest.raises(hw.errors.NotFired, match="use_reentrant=False"):
            gating.balance()


@pytest.mark.full
@cases(("setting", "training"), [("elements", False), ("mixture", False), ("random mixture", True)])
def test_a_compiled_model_has_its_gates_in_one_graph(setting: str, training: bool):
    torch.compiler.reset()
    model, x = encoder().double().train(training), draw(BATCH, LENGTH, WIDTH)
    gating = hw.gate_heads(hw.find_heads(model), SETTINGS[setting])
    randomize(model)
    balanced = training and "mixture" in setting
    expected = model(x)
    term = gating.balance() if balanced else None
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected, rtol=0.0, atol=1e-13)
        if balanced:
            torch.testing.assert_close(gating.balance(), term, rtol=0.0, atol=1e-13)


@torch._dynamo.config.patch(skip_nnmodule_hook_guards=True)
def test_code_compiled_before_has_the_gates_too():
    torch.compiler.reset()
    model, x = nn.Sequential(SeparateAttention(WIDTH, HEADS)).double().eval(), draw(BATCH, LENGTH, WIDTH)
    heads = hw.find_heads(model)
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x)
    hw.gate_heads(heads, hw.gating.SigmoidGate())
    randomize(model)
    torch.testing.assert_close(compiled(x), model(x), rtol=0.0, atol=1e-13)
    assert not torch.allclose(compiled(x), plain)


def test_a_copy_and_a_pickled_model_keep_gates_of_their_own():
    model, x = encoder(1).double().eval(), draw(BATCH, LENGTH, WIDTH)
    gating = hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    randomize(model)
    kept = io.BytesIO()
    torch.save(model, kept)
    twins: list[Any] = [copy.deepcopy(model), torch.load(io.BytesIO(kept.getvalue()), weights_only=False)]
    expected = model(x)
    gating.remove()
    other = encoder(1).double().eval()
    hw.gate_heads(hw.find_heads(other), hw.gating.SigmoidGate())
    for twin in twins:
        assert torch.equal(twin(x), expected)
        other.load_state_dict(twin.state_dict())
        assert torch.equal(other(x), expected)
    with torch.no_grad():
        twins[0].layers[0].self_attn.head_gates.bias.add_(1.0)
    assert not torch.allclose(twins[0](x), expected)
    assert torch.equal(twins[1](x), expected)


def test_gates_stand_before_an_aggregator_that_was_there(tmp_path: Any):
    model, x = encoder(1).double().eval(), draw(BATCH, LENGTH, WIDTH)
    gating = hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    with pytest.raises(hw.errors.DataError, match=r"no aggregator, and no sizes .*; save it as you would without"):
        hw.save(model, tmp_path)
    hw.aggregate(hw.find_heads(model), hw.routing.Gate())
    with pytest.raises(hw.errors.NotFired, match=r"is now a GatedProjection, set after hw\.gate_heads"):
        model(x)
    gating.remove()
    hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    randomize(model)
    hw.save(model, tmp_path)
    again = encoder(1).double()
    with pytest.raises(hw.errors.DataError, match=r"head_gates.*does not make gates: .*and then hw\.gate_heads"):
        hw.load(tmp_path, again)
    # with both in the model that is loaded into, it comes back
    hw.aggregate(hw.find_heads(again), hw.routing.Gate())
    hw.gate_heads(hw.find_heads(again), hw.gating.SigmoidGate())
    assert torch.equal(hw.load(tmp_path, again)(x), model(x))
