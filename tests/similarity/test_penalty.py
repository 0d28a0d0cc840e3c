"""The penalty is the equation on what the heads computed, over valid tokens, and its gradient is right."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from heads.attentions import SeparateAttention
from reference import disagreement as loops


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


@pytest.mark.parametrize(("term", "reads", "loop"), LOOPS, ids=[str(term) for term, *_ in LOOPS])
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
    call(model)
    values = {}
    for name, term in {
        "o": hw.similarity.Output(),
        "s": hw.similarity.Subspace(),
        "sum": 2 * (hw.similarity.Output() + 0.5 * hw.similarity.Subspace()),
    }.items():
        with hw.Disagreement(heads, term) as penalty:
            call(model)
            values[name] = penalty().item()
    assert values["sum"] == pytest.approx(2 * values["o"] + values["s"], rel=1e-12)
    assert str(2 * (hw.similarity.Output() + 0.5 * hw.similarity.Subspace())) == "2 * Output() + 1 * Subspace()"


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
    model(x)
    with pytest.raises(hw.errors.ShapeError, match=r"keep is torch.bool of shape \(2, 4\); expected .*\(2, 5\)"):
        penalty(keep[:, :4])


def test_the_gradient_pushes_outputs_apart():
    torch.manual_seed(2)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = torch.randn(8, 6, 8)
    history = []
    for _ in range(40):
        optimizer.zero_grad()
        model(x)
        loss = penalty()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.2 < history[0]


def test_checkpointing_without_reentry_gives_the_same_gradient_and_with_it_is_refused():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    x = torch.randn(3, 5, 8).double().requires_grad_()
    gradients = []
    for run in (lambda: model(x), lambda: checkpoint(model, x, use_reentrant=False)):
        model.zero_grad()
        (run().square().mean() + penalty()).backward()
        gradients.append(model.self_attn.in_proj_weight.grad.clone())
    torch.testing.assert_close(*gradients)
    checkpoint(model, x, use_reentrant=True)
    with pytest.raises(hw.errors.NotFired, match=r"carries no gradient.*use_reentrant=False"):
        penalty()


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


def test_wrong_terms_and_kinds_are_refused():
    heads = hw.find_heads(transformer())
    with pytest.raises(hw.errors.SettingError, match="term is 'output'"):
        hw.Disagreement(heads, "output")
    with pytest.raises(hw.errors.SettingError, match="term is <class"):
        hw.Disagreement(heads, hw.similarity.Output)
    with pytest.raises(
        hw.errors.SettingError, match="kind of attention is 'encoder'; expected one of cross, decoder, self"
    ):
        hw.Disagreement(heads, hw.similarity.Output(), weights={"encoder": 1.0})
    with pytest.raises(hw.errors.SettingError, match="weight of a term is nan"):
        float("nan") * hw.similarity.Output()


def test_a_term_of_ones_own_reads_something_that_is_captured():
    class Queries:
        reads: ClassVar[str] = "queries"

        def sum_and_count(self, tensor: torch.Tensor, keep: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            return tensor.sum(), tensor.new_tensor(1.0 if keep is None else 2.0)

    heads = hw.find_heads(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    with pytest.raises(hw.errors.SettingError, match=r"reads is 'queries'; expected one of outputs, values, weights"):
        hw.Disagreement(heads, hw.similarity.Output() + Queries())


def test_an_aggregator_swapped_in_later_is_noticed():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    heads = hw.find_heads(model)
    penalty = hw.Disagreement(heads, hw.similarity.Output())
    hw.aggregate(heads, hw.routing.Trunk())
    model(torch.randn(2, 5, 8))
    with pytest.raises(hw.errors.NotFired, match=r"outputs were not computed.* Attach after aggregate\(\)"):
        penalty()


@pytest.mark.parametrize(
    "term",
    [
        hw.similarity.Output(),
        hw.similarity.Subspace(),
        hw.similarity.Position(),
        hw.similarity.PositionSquaredDifference(),
        hw.similarity.Frobenius(),
    ],
)
def test_one_head_a_site_has_nothing_to_disagree_with(term):
    model = nn.TransformerEncoderLayer(16, 1, 32, batch_first=True)
    with pytest.raises(
        hw.errors.LayoutError, match=r"1 sites has one (key/value )?head, which has nothing to disagree"
    ):
        hw.Disagreement(hw.find_heads(model), 0.5 * term)


def test_one_value_head_is_refused_for_values_and_fine_for_outputs():
    heads = hw.find_heads(SeparateAttention(key_value_heads=1))
    with pytest.raises(
        hw.errors.LayoutError,
        match=r"Subspace\(\) compares the values of heads.*one key/value head.*use a term on all heads",
    ):
        hw.Disagreement(heads, hw.similarity.Output() + 0.5 * hw.similarity.Subspace())
    assert repr(hw.Disagreement(heads, hw.similarity.Output())) == "Output() on 1 sites (self 1)"


@pytest.mark.parametrize(
    "term",
    [
        hw.similarity.SpanOverlap("value"),
        hw.similarity.SpanOverlap("key"),
        hw.similarity.GroupedQueries(hw.similarity.CKA(), "across"),
    ],
    ids=str,
)
def test_a_term_on_what_several_heads_share_is_refused_where_there_is_one(term):
    heads = hw.find_heads(SeparateAttention(key_value_heads=1))
    with pytest.raises(hw.errors.LayoutError, match=r"only one head or group.*use a term on all heads"):
        hw.Disagreement(heads, term)
    hw.Disagreement(heads, hw.similarity.SpanOverlap("query"))
    hw.Disagreement(heads, hw.similarity.GroupedQueries(hw.similarity.CKA(), "within"))
    with pytest.raises(hw.errors.LayoutError, match="only one head or group"):
        hw.Disagreement(hw.find_heads(SeparateAttention()), hw.similarity.GroupedQueries(hw.similarity.CKA(), "within"))


def test_sites_with_one_head_beside_others_are_named():
    model = nn.Sequential(SeparateAttention(key_value_heads=2), SeparateAttention(key_value_heads=1))
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Subspace())
    assert str(penalty) == "Subspace() on 2 sites (self 1); with one head: 1"


def test_weights_and_keep_of_another_type_are_refused():
    model = SeparateAttention()
    with pytest.raises(hw.errors.SettingError, match=r"weights is \[0\.5\]; expected a mapping"):
        hw.Disagreement(hw.find_heads(model), hw.similarity.Output(), weights=[0.5])
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    model(torch.randn(2, 3, 12))
    with pytest.raises(hw.errors.ShapeError, match=r"keep is a list; expected a torch\.bool tensor of shape \(2, 3\)"):
        penalty(keep=[[True] * 3] * 2)


def test_a_penalty_of_a_model_that_ran_in_evaluation_alone_says_so():
    model = SeparateAttention().eval()
    run = hw.attach(hw.find_heads(model), hw.Penalize(hw.similarity.Output()))
    with pytest.raises(hw.errors.NotFired, match="after the forward pass, in training mode and with gradients"), run:
        run.loss(model(torch.randn(2, 3, 12)).sum())


@pytest.mark.parametrize("term", [hw.similarity.Output(), hw.similarity.Position(), hw.similarity.MapCosine()], ids=str)
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
    with pytest.raises(hw.errors.SettingError, match="training_only is 1; expected True or False"):
        hw.Disagreement(heads, term, training_only=1)
