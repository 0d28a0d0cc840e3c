"""Weights of attentions that write their softmax out are read and biased there, exactly, or refused."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headwise as hw
from cases import cases
from heads.calling import NanoGPT
from heads.forwards import slanted
from heads.vision import SwinTransformer, VisionTransformer
from heads.writing import (
    ALIKE,
    CALLED,
    FORMS,
    KEEP,
    TOKENS,
    WRITTEN,
    Called,
    Causal,
    Folded,
    HeadsFirst,
    OfAModule,
    TimeFirst,
    Transposed,
    WithoutOutput,
    Written,
    X,
    build,
    written_out,
)

PADDED = [(form, keep) for form in (*WRITTEN, *CALLED) for keep in (None, KEEP)]


def close(found: Tensor, wanted: Tensor, model: Written) -> None:
    # some write a softmax of single precision
    loose = type(model).__name__ in ("TimeFirst", "Grouped")
    torch.testing.assert_close(found.double(), wanted, rtol=0.0, atol=1e-6 if loose else 1e-12)


def first(returned: Tensor | tuple[Tensor, ...]) -> Tensor:
    return returned if isinstance(returned, Tensor) else returned[0]


def random_bias(seed: int = 4) -> Tensor:
    return torch.randn(len(X), 4, TOKENS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@cases(("form", "keep"), PADDED)
def test_what_every_form_computes_is_that_of_the_definition_and_reading_it_changes_nothing(form, keep: Tensor | None):
    model = build(form)
    called = isinstance(model, Called)
    asked = {"weights": True, "values": True, "mean_weights": True, "outputs": called}
    expected, plain = written_out(model, X, keep), first(model(X, keep))
    close(plain, expected["returned"], model)
    heads = hw.find_heads(model)
    for beside in (False, True):
        with hw.Taps(heads, **asked, beside=beside) as taps:
            for x, real in ((X, keep), (X[:1], None if keep is None else keep[:1]), (X, keep)):
                returned = first(model(x, real))
                (capture,) = taps.read()
                found = expected if len(x) > 1 else written_out(model, x, real)
                close(capture.weights, found["weights"], model)
        close(capture.mean_weights, expected["weights"].mean(1), model)
        close(returned, plain, model)
        assert torch.equal(returned, plain) or (called and not beside)
        if called:
            close(capture.outputs, expected["outputs"], model)
            close(capture.values, model.v_proj(X).unflatten(-1, (-1, 5)), model)
    with hw.Taps(heads, mean_weights=True) as taps:
        assert torch.equal(first(model(X, keep)), plain)
        close(taps.read()[0].mean_weights, expected["weights"].mean(1), model)
    assert "forward" not in vars(model)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@cases(("form", "keep"), PADDED)
def test_a_bias_is_added_before_the_softmax_of_every_form(form, keep: Tensor | None):
    model = build(form)
    bias = random_bias()
    bias[0, 1, 3, 1:] = bias[1, 2, :, 3] = -math.inf
    bias.requires_grad_()
    expected = written_out(model, X, keep, bias)
    heads = hw.find_heads(model)
    with hw.bias_heads(heads, lambda _site, _call: bias) as handle, hw.Taps(heads, weights=True) as taps:
        returned = first(model(X, keep))
        close(taps.read()[0].weights, expected["weights"], model)
    assert list(handle.calls.values()) == [1]
    close(returned, expected["returned"], model)
    own, wanted = (torch.autograd.grad(one.square().sum(), bias)[0] for one in (returned, expected["returned"]))
    close(own.nan_to_num(), wanted.nan_to_num(), model)
    with hw.bias_heads(heads, torch.zeros(1, 4, 1, TOKENS)):
        close(first(model(X, keep)), written_out(model, X, keep)["returned"], model)


@cases("form", FORMS)
def test_a_query_that_a_bias_leaves_no_key_has_weights_of_zero_and_finite_gradients(form):
    model = build(form)
    bias = torch.zeros(len(X), 4, TOKENS, TOKENS, dtype=torch.float64)
    # only keys that are padding
    bias[1, 2, 3, :4] = -math.inf
    expected = written_out(model, X, KEEP, bias)
    with hw.bias_heads(hw.find_heads(model), bias), hw.Taps(hw.find_heads(model), weights=True) as taps:
        returned = first(model(X, KEEP))
        (capture,) = taps.read()
    close(capture.weights, expected["weights"], model)
    assert float(capture.weights[1, 2, 3].detach().abs().max()) == 0.0
    close(returned, expected["returned"], model)
    returned.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@cases(
    "term",
    [
        hw.similarity.Position(),
        hw.similarity.Frobenius(),
        hw.similarity.PositionSquaredDifference(),
        hw.similarity.Position(recompute=True),
    ],
)
@cases("form", FORMS)
def test_penalties_have_the_value_and_gradient_of_the_definition(form, term):
    model = build(form)
    penalty = hw.Disagreement(hw.find_heads(model), term)
    model(X)
    value = penalty()
    weights = written_out(model, X)["weights"]
    own, number = term.sum_and_count(weights.mean(1) if term.reads == "mean_weights" else weights, None)
    close(value, own / number, model)
    weight = model.to_qkv.weight if isinstance(model, OfAModule) else model.q_proj.weight
    found, wanted = (torch.autograd.grad(one, weight)[0] for one in (value, own / number))
    close(found, wanted, model)
    assert float(found.abs().max()) > 1e-5


@cases("form", FORMS)
def test_a_recomputed_forward_has_its_bias_and_dropout_again(form):
    gradients = []
    for recomputed in (False, True):
        model = build(form).train()
        heads = hw.find_heads(model)
        penalty = hw.Disagreement(heads, hw.similarity.Position())
        handle = hw.bias_heads(heads, random_bias())
        torch.manual_seed(5)
        returned = first(checkpoint(model, X, use_reentrant=False) if recomputed else model(X))
        loss = returned.square().sum() + penalty()
        # backward when nothing is attached any more
        handle.remove()
        penalty.remove()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        del returned, loss
        assert "forward" not in vars(model)
    torch.testing.assert_close(*gradients)


@cases("form", [OfAModule, Causal, TimeFirst])
def test_weights_are_read_before_dropout_and_shown_to_be_right_under_it(form):
    model = build(form).train()
    torch.manual_seed(7)
    plain = model(X)
    torch.manual_seed(7)
    with hw.Taps(hw.find_heads(model), weights=True) as taps:
        assert torch.equal(model(X), plain)
        close(taps.read()[0].weights, written_out(model, X)["weights"], model)


@cases("form", WRITTEN)
def test_weights_are_mixed_after_the_softmax_and_scores_are_not_mixed(form):
    model = build(form)
    heads, plain = hw.find_heads(model), first(model(X))
    with pytest.raises(hw.errors.LayoutError, match=r"writes its softmax out.*pass logits=False"):
        hw.mix_heads(heads)
    with hw.mix_heads(heads, logits=False) as mixing, hw.Taps(heads, weights=True) as taps:
        close(first(model(X)), plain.detach(), model)
        matrix = next(iter(mixing.mixers.values())).weights
        torch.nn.init.normal_(matrix, generator=torch.Generator().manual_seed(2))
        returned = first(model(X))
        expected = written_out(model, X)
        close(taps.read()[0].weights, expected["weights"], model)
        weights = torch.einsum("hg,bhqk->bgqk", matrix, expected["weights"])
        outputs = torch.einsum("bgqk,bkge->bqge", weights, expected["values"]).flatten(2)
        close(returned, outputs if form is WithoutOutput else model.o_proj(outputs), model)
    assert torch.equal(first(model(X)), plain)


@cases("form", FORMS)
def test_roles_guide_the_heads_and_a_report_has_their_attention(form):
    model = build(form)
    heads = hw.find_heads(model)
    mask = hw.roles.Roles(hw.roles.Window(1))(hw.roles.WordTable.split("one two three four five six"), num_heads=4)
    with hw.guide(heads, mask), hw.Taps(heads, weights=True) as taps:
        model(X[:1])
        weights = taps.read()[0].weights
    close(weights, written_out(model, X[:1], bias=mask.additive(torch.float64))["weights"], model)
    report = hw.measure(heads, [X], forward=lambda model, x: first(model(x)))
    assert not any("attention weights" in note for note in report.notes)


@pytest.mark.full
@cases("shown", [True, False])
@cases("form", [Written, Folded, OfAModule, Called])
def test_a_compiled_model_is_read_and_biased_in_one_graph_once_a_forward_has_shown_where(form, shown: bool):
    model = build(form)
    heads = hw.find_heads(model)
    with hw.bias_heads(heads, random_bias()), hw.Taps(heads, weights=True) as taps:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=shown)
        with torch.compiler.set_stance("force_eager" if shown else "default"):
            expected = compiled(X)
        taps.read()
        for _ in range(2):
            torch.testing.assert_close(compiled(X), expected)
            close(taps.read()[0].weights, written_out(model, X, bias=random_bias())["weights"], model)
    torch._dynamo.reset()


@cases("tokens", [4, 5, 6])
@cases("what", ["read", "biased"])
@cases("form", ALIKE)
def test_what_only_looks_like_a_softmax_of_scores_is_refused(form, what: str, tokens: int):
    """With as many tokens as heads or as features of a head, shapes alone do not tell."""
    model, x = build(form), X[:, :tokens]
    model.allow = lambda _keep: torch.ones(tokens, tokens, dtype=torch.bool)
    bias = random_bias()[..., :tokens, :tokens]

    def attach() -> None:
        heads = hw.find_heads(model)
        with hw.Taps(heads, weights=True) if what == "read" else hw.bias_heads(heads, bias):
            model(x)

    with pytest.raises(
        hw.errors.HeadwiseError, match=rf"\({form.__name__}\)|misreads {form.__name__}|the bias has shape"
    ):
        attach()
    assert "forward" not in vars(model)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_heads_first_in_the_batch_are_read_where_there_is_one_sequence_and_refused_with_more():
    model = build(HeadsFirst)
    with hw.Taps(hw.find_heads(model), weights=True) as taps:
        model(X[:1])
        q, k, _ = model.project(X[:1])
        torch.testing.assert_close(taps.read()[0].weights, (q @ k.mT).softmax(-1))
        with pytest.raises(hw.errors.LayoutError, match="axes are others"):
            model(X)


@cases(
    ("make", "inputs"),
    [
        (NanoGPT, (2, 6, 12)),
        (partial(VisionTransformer, 24, 3, 2), (2, 3, 8, 8)),
        (partial(SwinTransformer, 16, (2, 4), 2), (2, 3, 8, 8)),
    ],
)
def test_a_switch_away_from_the_fused_kernel_leads_to_the_same_weights_and_biases(make, inputs: tuple[int, ...]):
    torch.manual_seed(0)
    model, x = make().double().eval(), torch.randn(inputs, dtype=torch.float64)
    heads = hw.find_heads(model)

    found = []
    for fused in (True, False):
        for site in heads:
            site.module.flash = site.module.fused_attn = fused
        with hw.bias_heads(heads, slanted), hw.Taps(heads, weights=True) as taps:
            found.append((model(x), *(capture.weights for capture in taps.read())))
        if fused:
            with hw.Taps(heads, weights=True, values=True, outputs=True) as taps:
                model(x)
                for capture in taps.read():
                    rebuilt = torch.einsum("bhqk,bkhe->bqhe", capture.weights, capture.values)
                    torch.testing.assert_close(rebuilt, capture.outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*found)


def test_a_cache_is_read_once_a_forward_without_one_has_shown_where():
    class Cached(Written):
        def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
            q, k, v = self.project(x)
            self.past = torch.stack([k, v]) if past is None else torch.cat([past, torch.stack([k, v])], 3)
            k, v = self.past
            scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~self.allow(None)[-x.shape[1] :], -math.inf)
            return self.o_proj(self.join(scores.softmax(-1) @ v))

    model = build(Cached)
    model.causal = True
    expected = written_out(model, X)["weights"][:, :, 4:]
    model.allow = lambda _keep: torch.ones(4, 4, dtype=torch.bool).tril()
    with hw.Taps(hw.find_heads(model), weights=True) as taps:
        model(X[:, :4])
        del model.allow
        past = model.past
        taps.read()
        model(X[:, 4:], past)
        close(taps.read()[0].weights, expected, model)
    with (
        hw.Taps(hw.find_heads(model), weights=True),
        pytest.raises(hw.errors.LayoutError, match="run a forward without a cache first"),
    ):
        model(X[:, 4:], past)


def test_equal_tokens_show_nothing_where_shapes_are_those_of_several_readings():
    class ByPlace(HeadsFirst):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
            return super().attend(q, k + torch.arange(k.shape[2])[:, None], v)

    for form, message in ((ByPlace, "give other inputs first"), (Causal, None)):
        model, x = build(form), X[:, :1].expand(-1, TOKENS, -1)
        with hw.Taps(hw.find_heads(model), weights=True) as taps:
            if message is None:
                model(x)
                close(taps.read()[0].weights, written_out(model, x)["weights"], model)
            else:
                with pytest.raises(hw.errors.LayoutError, match=message):
                    model(x)


def test_several_softmaxes_of_the_heads_are_refused():
    class Kept(Written):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
            self.sharper = (2.0 * q @ k.mT).softmax(-1)
            return super().attend(q, k, v, allowed)

    model = build(Kept)
    with (
        hw.bias_heads(hw.find_heads(model), random_bias()),
        pytest.raises(hw.errors.LayoutError, match="computes 2 softmaxes of its 4 heads"),
    ):
        model(X)


def test_dropout_in_place_is_refused():
    class InPlace(Written):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
            return F.dropout((q @ k.mT).softmax(-1), 0.5, self.training, inplace=True) @ v

    model = build(InPlace).train()
    with torch.no_grad(), hw.Taps(hw.find_heads(model), weights=True) as taps:
        with pytest.raises(hw.errors.LayoutError, match="inplace=False"):
            model(X)
        model.eval()(X)
        assert taps.read()


def test_a_report_leaves_out_weights_that_cannot_be_shown():
    model = torch.nn.Sequential(build(Written), build(Transposed))
    for part in model:
        part.allow = lambda _keep: torch.ones(4, 4, dtype=torch.bool)
    report = hw.measure(hw.find_heads(model), [X[:, :4]], score=lambda output, _: output.std((1, 2)))
    assert [note for note in report.notes if "attention weights of Transposed" in note]
    assert not [note for note in report.notes if "Written" in note]


class WithSink(Written):
    """One score more, of no token, that is cut off after the softmax, or has a value of zeros."""

    cuts = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~allowed, -math.inf)
        self.seen = F.pad(scores, (0, 1), value=0.5).softmax(-1)
        weights = F.dropout(self.seen, 0.3, self.training)
        return weights[..., :-1] @ v if self.cuts else weights @ F.pad(v, (0, 0, 0, 1))


@cases("training", [False, True])
def test_weights_beside_one_of_no_token_are_read_where_it_is_cut_off_and_have_no_biases(training: bool):
    model = build(WithSink).train(training)
    heads = hw.find_heads(model)
    with hw.Taps(heads, weights=True) as taps, torch.no_grad():
        model(X)
        assert torch.equal(taps.read()[0].weights, model.seen[..., :-1])
    told = pytest.raises(hw.errors.LayoutError, match="biases of its heads cannot be reached; read their weights")
    with told, hw.bias_heads(heads, lambda _site, call: torch.ones(1, 1, 1, call.keys)):
        model(X)


def test_a_score_of_no_token_is_named():
    model = build(WithSink)
    model.cuts = False
    heads = hw.find_heads(model)
    told = pytest.raises(hw.errors.LayoutError, match="one score is of no token, such as a learned sink")
    with told, hw.Taps(heads, weights=True):
        model(X)
    with hw.Taps(heads, outputs=True) as taps:
        model(X)
        assert taps.read()[0].outputs is not None
