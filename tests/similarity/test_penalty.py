"""The penalty is the equation on what the heads computed, over valid tokens, and its gradient is right."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases, tiers
from heads.attentions import SeparateAttention
from headwise.similarity import terms
from reference import disagreement as loops
from repulsion.lora_by_hand import base_weight, lora_layers, product_of


def transformer() -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(8, 2, 2, 1, 16, dropout=0.0, batch_first=True).double()


def call(model, source_length=6, target_length=4):
    generator = torch.Generator().manual_seed(7)
    source = torch.randn(2, source_length, 8, generator=generator, dtype=torch.float64)
    target = torch.randn(2, target_length, 8, generator=generator, dtype=torch.float64)
    source_padding = torch.arange(source_length).expand(2, -1) >= torch.tensor([[source_length - 2], [source_length]])
    target_padding = torch.arange(target_length).expand(2, -1) >= torch.tensor([[target_length], [target_length - 1]])
    return model(
        source,
        target,
        src_key_padding_mask=source_padding,
        memory_key_padding_mask=source_padding,
        tgt_key_padding_mask=target_padding,
    )


LOOPS = [
    (hw.similarity.Output(), "outputs", loops.output_similarity),
    (hw.similarity.Subspace(), "values", loops.subspace_similarity),
    (hw.similarity.Position(), "weights", loops.position_similarity),
    (hw.similarity.PositionSquaredDifference(), "weights", loops.position_squared_difference),
    (
        hw.similarity.Frobenius(),
        "weights",
        lambda a, keep: loops.frobenius_penalty(a.transpose(1, 2).flatten(0, 1), keep.flatten()),
    ),
]


@cases(("term", "reads", "loop"), LOOPS)
def test_the_penalty_is_the_weighted_mean_over_layers_of_each_kind(term, reads, loop):
    model = transformer()
    heads = hw.find_heads(model)
    with hw.Taps(heads, **{reads: True}) as taps:
        call(model)
        captures = taps.read()
    weights = {"self": 0.7, "cross": 1.3}
    expected = 0.0
    for kind in ("self", "decoder", "cross"):
        values = [
            float(loop(getattr(c, reads).detach(), c.key_keep if reads == "values" else c.query_keep))
            for c in captures
            if c.site.kind == kind
        ]
        expected += weights.get(kind, 1.0) * sum(values) / len(values)
    penalty = hw.Disagreement(heads, 0.4 * term, weights=weights)
    call(model)
    assert penalty().item() == pytest.approx(0.4 * expected, rel=1e-10)


def test_several_calls_are_pooled_token_by_token():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    heads = hw.find_heads(model)
    short, long = torch.randn(1, 2, 8).double(), torch.randn(3, 7, 8).double()
    separately = []
    penalty = hw.Disagreement(heads, hw.similarity.Output())
    for x in (short, long):
        model(x)
        separately.append(penalty())
    model(short)
    model(long)
    expected = (2 * separately[0] + 21 * separately[1]) / 23
    torch.testing.assert_close(penalty(), expected)


def test_terms_add_and_multiply():
    model = transformer()
    heads = hw.find_heads(model).kind("self")
    parts = (hw.similarity.Output(), hw.similarity.Subspace(), hw.similarity.CKA(), hw.similarity.SpanOverlap())
    values = []
    for term in (*parts, 2 * (parts[0] + 0.5 * parts[1]) + parts[2] + 0.25 * parts[3]):
        with hw.Disagreement(heads, term) as penalty:
            call(model)
            values.append(penalty().item())
    assert values[4] == pytest.approx(2 * values[0] + values[1] + values[2] + 0.25 * values[3], rel=1e-12)
    assert str(2 * (parts[0] + 0.5 * parts[1])) == "2 * Output() + 1 * Subspace()"


def test_keep_overrides_the_padding_the_attention_received():
    model = SeparateAttention().double()
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    x = torch.randn(2, 5, 12).double()
    model(x[:, :3])
    expected = penalty()
    keep = torch.tensor([[True, True, True, False, False]] * 2)
    padded = x.clone()
    padded[:, 3:] = 50.0
    # the mask reaches the attention, the keep reaches the penalty
    model(padded, key_padding_mask=~keep)
    torch.testing.assert_close(penalty(keep), expected)
    for wrong, given in ((keep[:, :4], r"torch.bool of shape \(2, 4\)"), (keep.tolist(), "a list")):
        model(x)
        with pytest.raises(hw.errors.ShapeError, match=rf"keep is {given}; expected a torch\.bool .*\(2, 5\)"):
            penalty(wrong)


@pytest.mark.full
def test_a_compiled_model_has_the_same_penalty_and_is_compiled_once():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    x = torch.randn(3, 5, 8).double()
    model(x)
    expected = penalty()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    graphs = []
    for _ in range(4):
        loss = compiled(x).square().mean()
        found = penalty()
        (loss + found).backward()
        torch.testing.assert_close(found, expected)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[1:] == [graphs[1]] * 3


class Queries:
    reads: ClassVar[str] = "queries"

    def sum_and_count(self, tensor: torch.Tensor, keep: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor.sum(), tensor.new_tensor(1.0 if keep is None else 2.0)


SHARED = SeparateAttention(key_value_heads=1)
WITHIN, ACROSS = (hw.similarity.GroupedQueries(hw.similarity.CKA(), how) for how in ("within", "across"))
ONE_HEAD = r"1 sites has one (key/value )?head, which has nothing to disagree"
PAPERS = (hw.similarity.Position(), hw.similarity.PositionSquaredDifference(), hw.similarity.Frobenius())
REFUSED = [
    (transformer(), "output", {}, hw.errors.SettingError, "term is 'output'"),
    (transformer(), hw.similarity.Output, {}, hw.errors.SettingError, "term is <class"),
    (
        transformer(),
        hw.similarity.Output(),
        {"weights": {"encoder": 1.0}},
        hw.errors.SettingError,
        "kind of attention is 'encoder'; expected one of cross, decoder, self",
    ),
    (SHARED, hw.similarity.Output(), {"weights": [0.5]}, hw.errors.SettingError, r"weights is \[0\.5\]; .* a mapping"),
    (SHARED, hw.similarity.Output(), {"training_only": 1}, hw.errors.SettingError, "training_only is 1; expected True"),
    (
        transformer(),
        hw.similarity.Output() + Queries(),
        {},
        hw.errors.SettingError,
        r"reads is 'queries'; expected one of outputs, values, weights",
    ),
    *(
        (nn.MultiheadAttention(16, 1), 0.5 * term, {}, hw.errors.LayoutError, ONE_HEAD)
        for term in (hw.similarity.Output(), hw.similarity.Subspace(), hw.similarity.CKA(), *PAPERS)
    ),
    (
        SHARED,
        hw.similarity.Output() + 0.5 * hw.similarity.Subspace(),
        {},
        hw.errors.LayoutError,
        r"Subspace\(\) compares the values of heads.*one key/value head.*use a term on all heads",
    ),
    *(
        (SHARED, term, {}, hw.errors.LayoutError, "only one head or group.*use a term on all heads")
        for term in (hw.similarity.SpanOverlap("value"), hw.similarity.SpanOverlap("key"), ACROSS)
    ),
    (SeparateAttention(), WITHIN, {}, hw.errors.LayoutError, "only one head or group"),
]


@cases(("model", "term", "settings", "error", "message"), REFUSED)
def test_wrong_terms_kinds_and_heads_are_refused(model, term, settings, error, message):
    with pytest.raises(error, match=message):
        hw.Disagreement(hw.find_heads(model), term, **settings)


def test_weights_of_terms_are_numbers_and_sites_with_one_head_are_named():
    with pytest.raises(hw.errors.SettingError, match="weight of a term is nan"):
        float("nan") * hw.similarity.Output()
    heads = hw.find_heads(SHARED)
    for term in (hw.similarity.SpanOverlap("query"), WITHIN):
        hw.Disagreement(heads, term).remove()
    assert repr(hw.Disagreement(heads, hw.similarity.Output())) == "Output() on 1 sites (self 1)"
    model = nn.Sequential(SeparateAttention(key_value_heads=2), SeparateAttention(key_value_heads=1))
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Subspace())
    assert str(penalty) == "Subspace() on 2 sites (self 1); with one head: 1"


def test_a_penalty_of_a_model_that_ran_in_evaluation_alone_says_so():
    model = SeparateAttention().eval()
    run = hw.attach(hw.find_heads(model), hw.Penalize(hw.similarity.Output()))
    with pytest.raises(hw.errors.NotFired, match="after the forward pass, in training mode and with gradients"), run:
        run.loss(model(torch.randn(2, 3, 12)).sum())


@cases("term", [hw.similarity.Output(), hw.similarity.Position(), hw.similarity.MapCosine()])
def test_a_penalty_for_training_alone_is_0_in_evaluation_and_the_same_in_training(term):
    model, x = SeparateAttention(), torch.randn(3, 5, 12)
    heads = hw.find_heads(model)
    if term == hw.similarity.Position():
        model = nn.MultiheadAttention(12, 3, batch_first=True)
        heads = hw.find_heads(model)
    run = (lambda: model(x, x, x)) if isinstance(model, nn.MultiheadAttention) else (lambda: model(x))
    penalty, always = hw.Disagreement(heads, term, training_only=True), hw.Disagreement(heads, term)
    run()
    assert penalty().item() == pytest.approx(always().item())
    model.eval()
    run()
    assert always().item() > 0.0
    assert penalty().item() == 0.0
    model.train()
    with torch.no_grad():
        run()
        assert penalty().item() == 0.0
    run()  # what evaluation computed does not enter
    run()
    first, second = penalty(), always()
    assert first.item() == pytest.approx(second.item())
    assert first.requires_grad


# Pooled attentions


TERMS = {
    "output": hw.similarity.Output(),
    "subspace": hw.similarity.Subspace(),
    "position": hw.similarity.Position(),
    "recomputed": hw.similarity.Position(recompute=True),
    "sum": hw.similarity.Output() + 0.5 * hw.similarity.Subspace() + 2 * hw.similarity.Position(),
}


def penalized_pooled(monkeypatch: pytest.MonkeyPatch, most: int, term: object, *, padded: bool, relative: bool) -> list:
    """Return the penalty and all gradients, with stacks of tensors of at most this many numbers."""
    monkeypatch.setattr(terms, "MOST_ON_CPU", most)
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 3, 3, 8, dropout=0.0, batch_first=True).double()
    strength = hw.Relative(0.3) if relative else None
    penalty = hw.Disagreement(hw.find_heads(model), term, weights={"decoder": 0.5, "cross": 0.25}, strength=strength)
    source, target = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 4, 16, dtype=torch.float64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    out = model(source, target, src_key_padding_mask=mask, memory_key_padding_mask=mask)
    loss = out.square().mean()
    total = penalty.loss(loss) if relative else loss + penalty()
    total.backward()
    return [total.detach(), penalty.last, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore:.*nested_tensor.*:UserWarning")
@cases("relative", [False, True])
@tiers("padded", [True], [False])
@cases("term", TERMS)
def test_pooled_and_one_by_one_agree(term: str, padded: bool, relative: bool, monkeypatch: pytest.MonkeyPatch):
    found = penalized_pooled(monkeypatch, 2**16, TERMS[term], padded=padded, relative=relative)
    expected = penalized_pooled(monkeypatch, 0, TERMS[term], padded=padded, relative=relative)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


def test_attentions_of_one_shape_are_stacked_and_others_are_not():
    term, ones = hw.similarity.Output(), torch.ones(2, 3, 4, 5)
    keep = torch.ones(2, 3, dtype=torch.bool)
    sums, counts = terms.measure_together(term, [ones, ones], [keep, ~keep])
    assert sums.tolist() == [pytest.approx(6.0), 0.0]
    assert counts.tolist() == [6, 0]
    for tensors, keeps in (
        ([ones], [None]),
        ([ones, ones[:1]], [None, None]),
        ([ones, ones], [keep, None]),
        ([ones, ones], [None, keep]),
        ([ones, ones.double()], [None, None]),
        ([torch.ones(2, 2**13, 4, 5)] * 2, [None, None]),
    ):
        assert terms.measure_together(term, tensors, keeps) is None
    assert terms.measure_together(hw.similarity.CKA(), [ones, ones], [None, None]) is None


def test_attaching_walks_through_the_model_as_often_for_many_layers_as_for_few(monkeypatch: pytest.MonkeyPatch):
    """The modules passed per layer are then a constant."""
    passed = []
    walk = nn.Module.named_modules

    def counted(self: nn.Module, *given: object, **named: object):
        for found in walk(self, *given, **named):
            passed.append(1)
            yield found

    def count(layers: int) -> int:
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        heads = hw.find_heads(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False))
        passed.clear()
        hw.Disagreement(heads, hw.similarity.Output())
        return len(passed)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    few, many = count(4), count(32)
    assert many < 9 * few


# Under LoRA


peft = pytest.importorskip("peft")

X = torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def adapted() -> nn.Module:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(SeparateAttention(), config).double()


def penalize(model: nn.Module, heads: hw.Heads, term) -> Tensor:
    penalty = hw.Disagreement(heads, term)
    model(X)
    return penalty()


@cases(
    "term",
    [
        hw.similarity.SpanOverlap(),
        hw.similarity.SpanOverlap("query"),
        hw.similarity.SpanOverlap("output"),
        hw.similarity.MapCosine(),
        hw.similarity.CKA(of="contributions"),
    ],
)
def test_a_penalty_on_parameters_is_that_of_the_effective_weights(term):
    model = adapted()
    heads = hw.find_heads(model)
    found = penalize(model, heads, term)
    found.backward()

    plain = SeparateAttention().double()
    weights: dict[str, Tensor] = {}
    for name, layer in lora_layers(model).items():
        weights[f"{name.rpartition('.')[2]}.weight"] = base_weight(layer) + product_of(layer)
    for name, parameter in model.named_parameters():
        place = name.replace("base_layer.", "").removeprefix("base_model.model.")
        if "lora_" not in name and place not in weights:
            weights[place] = parameter.detach()
    plain.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    expected = penalize(plain, hw.find_heads(plain), term)
    torch.testing.assert_close(found, expected)
    expected.backward()
    assert float(found.detach()) > 0.005

    for name, layer in lora_layers(model).items():
        force = plain.get_submodule(name.rpartition(".")[2]).weight.grad
        factors = {key: getattr(layer, key)["default"].weight for key in ("lora_A", "lora_B")}
        if force is None:
            assert all(factor.grad is None for factor in factors.values())
            continue
        exact = torch.autograd.grad(product_of(layer), list(factors.values()), force)
        for factor, gradient in zip(factors.values(), exact, strict=True):
            torch.testing.assert_close(factor.grad, gradient)


def test_a_penalty_on_parameters_of_which_none_is_trained_is_refused():
    config = peft.LoraConfig(r=3, target_modules=["q_proj"])
    model = peft.get_peft_model(SeparateAttention(), config)
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.SpanOverlap("value"))
    with pytest.raises(hw.errors.NotFired, match=r"no parameter that SpanOverlap.*target_modules"):
        penalty()
    with torch.no_grad():
        assert penalty() > 0
