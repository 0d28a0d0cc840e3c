"""The handle of methods without any trainer: moved from model to model, saved, restored, and asked what it did."""

from __future__ import annotations

import json

import pytest
import torch
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import headwise as hw
from cases import cases
from integrations.loops import FIXED, NOISY, PENALTY, RATE, ROUTED, assert_same, build_bert, collate, make_rows


def take_steps(model, optimizer, attached, first: int, last: int) -> None:
    for row in range(first, last):
        loss = model(**collate(make_rows()[2 * row : 2 * row + 2])).loss
        attached.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def start(*methods, seed: int = 4):
    model = build_bert(dropout=0.0).train()
    attached = hw.attached.Attached(methods, seed=seed)
    torch.manual_seed(5)
    attached.build(model)
    attached.build(model)  # a second call leaves it as it is
    optimizer = SGD(model.parameters(), lr=RATE)
    return model, optimizer, attached


@cases("before", [False, True])
def test_a_state_that_went_through_json_goes_on_bit_for_bit(before: bool):
    model, optimizer, attached = start(PENALTY, NOISY, ROUTED)
    attached.attach(model, optimizer)
    attached.of(hw.repulsion.Repulsion)[0].strength = 0.5
    take_steps(model, optimizer, attached, 0, 2)
    state, weights = json.loads(json.dumps(attached.state_dict())), model.state_dict()
    resumed, resumed_optimizer, again = start(PENALTY, NOISY, ROUTED)
    resumed.load_state_dict(weights)
    if before:
        again.load_state_dict(state)
    again.attach(resumed, resumed_optimizer)
    if not before:
        again.load_state_dict(state)
    take_steps(model, optimizer, attached, 2, 4)
    take_steps(resumed, resumed_optimizer, again, 2, 4)
    assert_same(model, resumed)
    assert again.steps == 4


def test_what_was_loaded_for_one_model_does_not_go_to_the_next():
    model, optimizer, attached = start(NOISY)
    attached.load_state_dict({"methods": [{"steps": [9], "turns": [0], "strength": 0.5}]})
    attached.attach(model, optimizer)
    assert (attached.steps, attached.of(hw.repulsion.Repulsion)[0].strength) == (9, 0.5)
    other, others, _ = start()
    attached.attach(other, others)
    assert (attached.steps, attached.of(hw.repulsion.Repulsion)[0].strength) == (0, 1.0)


@cases("state", [{}, {"methods": None}, {"methods": []}, [], {"methods": [{}, {}]}])
def test_a_state_of_something_else_is_refused(state):
    attached = hw.attached.Attached([NOISY])
    with pytest.raises(hw.errors.SettingError, match=r"and 1 are attached; resume with the methods it was saved with"):
        attached.load_state_dict(state)


def test_of_a_state_whose_last_part_is_refused_nothing_is_loaded():
    model, optimizer, attached = start(NOISY, PENALTY)
    attached.attach(model, optimizer)
    before = attached.state_dict()
    good = {"steps": [9], "turns": [0], "strength": 0.5}
    with pytest.raises(hw.errors.SettingError):
        attached.load_state_dict({"methods": [good, 3]})
    assert attached.state_dict() == before


def test_aggregators_that_a_model_built_anew_lacks_are_told():
    model, optimizer, attached = start(ROUTED)
    attached.attach(model, optimizer)
    plain = build_bert()
    with pytest.raises(
        hw.errors.LayoutError, match=r"built anew after the modules of Aggregate were put.*build\(model\)"
    ):
        attached.attach(plain, SGD(plain.parameters(), lr=RATE))


def test_several_of_a_kind_act_together():
    halves = (
        hw.Penalize(hw.similarity.Output(), weight=0.2, layers=(0,)),
        hw.Penalize(hw.similarity.Output(), weight=0.4, layers=(1,)),
    )
    model, optimizer, attached = start(*halves, FIXED, hw.Repel(FIXED.rule, layers=(1,)))
    attached.attach(model, optimizer)
    loss = model(**collate(make_rows(4))).loss
    added = attached.loss(loss, share=0.5) - loss
    values = [penalty.last for penalty in attached.of(hw.Disagreement)]
    torch.testing.assert_close(added, 0.5 * (0.2 * values[0] + 0.4 * values[1]))
    (loss + added).backward()
    optimizer.step()
    assert [handle.steps for handle in attached.of(hw.repulsion.Repulsion)] == [1, 1]
    metrics = attached.stats()
    ratios = [
        one.last.repulsion_norm.norm() / one.last.driving_norm.norm() for one in attached.of(hw.repulsion.Repulsion)
    ]
    expected = {"similarity": values, "penalty": [0.2 * values[0], 0.4 * values[1]], "force_ratio": ratios}
    assert len(metrics) == 6
    for name, (first, second) in expected.items():
        torch.testing.assert_close((metrics[name], metrics[f"{name}-2"]), (first, second))


def test_relative_penalties_are_shares_of_the_loss_alone_in_any_order():
    methods = [
        hw.Penalize(hw.similarity.Output(), weight=hw.Relative(0.5)),
        hw.Penalize(hw.similarity.CKA(), weight=hw.Relative(0.8)),
    ]
    added: list[torch.Tensor] = []
    strengths: list[list[object]] = []
    for given in (
        methods[:1],
        methods[1:],
        methods,
        methods[::-1],
        [hw.Penalize(hw.similarity.Position(), weight=3.0), *methods],
    ):
        model, optimizer, attached = start(*given)
        attached.attach(model, optimizer)
        loss = model(**collate(make_rows(4))).loss
        added.append(attached.loss(loss) - loss)
        relative = [penalty.relative for penalty in attached.of(hw.Disagreement)]
        strengths.append([one.state_dict()["logarithms"] for one in relative if one is not None])
    first, second = strengths[0] + strengths[1]
    assert strengths[2:] == [[first, second], [second, first], [first, second]]
    torch.testing.assert_close(added[2], added[0] + added[1])
    torch.testing.assert_close(added[3], added[2])


def test_a_weight_of_zero_is_measured_and_leaves_the_loss_alone():
    model, optimizer, attached = start(hw.Penalize(hw.similarity.Output(), weight=0.0))
    attached.attach(model, optimizer)
    loss = model(**collate(make_rows(2))).loss
    assert attached.loss(loss) is loss
    assert attached.stats()["similarity"] > 0.0


def test_a_penalty_that_is_not_attached_is_told_and_printing_says_what_is():
    model, optimizer, attached = start(PENALTY)
    assert str(attached).endswith("not attached yet)")
    with pytest.raises(hw.errors.NotFired, match="the methods are attached to no model; call attach"):
        attached.loss(torch.zeros(()))
    assert attached.stats() == {}
    attached.attach(model, optimizer)
    # nothing measured is nothing logged
    assert attached.stats() == {}
    assert "on 2 sites (self 1)" in str(attached)
    model(**collate(make_rows(2)))
    attached.detach()
    with pytest.raises(hw.errors.NotFired, match="the methods are attached to no model; call attach"):
        attached.loss(torch.zeros(()))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_a_checkpoint_runs_again_was_not_called_for_the_next_loss():
    model, optimizer, attached = start(PENALTY)
    attached.attach(model, optimizer)
    loss = checkpoint(lambda: model(**collate(make_rows(2))).loss, use_reentrant=False)
    attached.loss(loss).backward()
    with pytest.raises(hw.errors.NotFired, match="a model that was not called since the last loss"):
        attached.loss(torch.zeros(()))


@cases(
    "methods",
    [
        (PENALTY, NOISY, hw.Repel(hw.SVGD(), layers=(7,))),
        (PENALTY, NOISY, hw.Penalize(hw.similarity.Output(), weight=0.1, layers=(7,))),
        (hw.Aggregate(hw.routing.Trunk(), layers=(0,)), hw.Aggregate(hw.routing.Trunk(), layers=(7,))),
    ],
)
def test_methods_of_which_one_cannot_be_attached_leave_nothing_behind(methods):
    model, attached = build_bert(), hw.attached.Attached(methods)
    optimizer, before = SGD(model.parameters(), lr=RATE), [type(module) for module in model.modules()]

    def place() -> None:
        attached.build(model)
        attached.attach(model, optimizer)

    with pytest.raises(hw.errors.LayoutError, match="7"):
        place()
    assert [type(module) for module in model.modules()] == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert (attached.of(hw.Disagreement), attached.of(hw.repulsion.Repulsion)) == ((), ())


def compute_cached(model, rows: list, size: int) -> torch.Tensor:
    """The loss of a batch as GradCache computes it: its gradients wait for the backward pass, where the model runs."""

    def embed(part: list) -> torch.Tensor:
        return model.bert(**{k: v for k, v in collate(part).items() if k != "labels"}).pooler_output

    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    with torch.no_grad():
        embedded = [embed(part) for part in parts]
    leaves = [one.detach().requires_grad_() for one in embedded]
    joined = torch.cat(leaves)
    whole = (joined @ joined.mT).logsumexp(-1).mean()
    whole.backward()

    def run_again(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            for part, leaf in zip(parts, leaves, strict=True):
                (embed(part) * leaf.grad * gradient).sum().backward()

    loss = whole.detach().requires_grad_()
    loss.register_hook(run_again)
    return loss


def test_a_penalty_on_what_a_cached_loss_computes_later_is_refused_and_one_on_parameters_counts_once():
    rows = make_rows()[:4]
    plain, _, _ = start()
    compute_cached(plain, rows, 2).backward()
    for term in (hw.similarity.CKA(), hw.similarity.Position(recompute=True), hw.similarity.Subspace()):
        model, optimizer, attached = start(hw.Penalize(term, weight=0.3))
        attached.attach(model, optimizer)
        for _ in range(2):
            with pytest.raises(
                hw.errors.NotFired, match=r"without gradients for this loss.*GradCache.*without a cache"
            ):
                attached.loss(compute_cached(model, rows, 2))
        # the next loss that is none is penalized as ever
        loss = model(**collate(rows)).loss
        assert attached.loss(loss) > loss
        alone = hw.Disagreement(hw.find_heads(model), term)
        cached = compute_cached(model, rows, 2)
        with pytest.raises(hw.errors.NotFired, match="GradCache"):
            alone.loss(cached)
    model, optimizer, attached = start(hw.Penalize(hw.similarity.SpanOverlap(), weight=0.3))
    attached.attach(model, optimizer)
    attached.loss(compute_cached(model, rows, 2)).backward()
    (0.3 * hw.Disagreement(hw.find_heads(plain), hw.similarity.SpanOverlap())()).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_what_acts_in_steps_waits_for_an_optimizer_that_holds_the_new_parameters_and_goes_on_under_the_next():
    model = build_bert(dropout=0.0).train()
    early = SGD(model.parameters(), lr=RATE)
    run = hw.attach(hw.find_heads(model), NOISY, hw.GateHeads(hw.gating.SigmoidGate()))
    with pytest.raises(hw.errors.NotFired, match=r"Repel.* is not attached; call attach\(model, optimizer\)"):
        run.check()
    with pytest.raises(hw.errors.LayoutError, match=r"does not hold .* that GateHeads has put into the model"):
        run.attach(model, early)
    run.load_state_dict({"methods": [{"steps": [9], "turns": [0], "strength": 0.5}, {}]})
    run.attach(model, SGD(model.parameters(), lr=RATE))
    assert (run.steps, run.of(hw.repulsion.Repulsion)[0].strength) == (9, 0.5)
    optimizer = SGD(model.parameters(), lr=RATE)
    run.attach(model, optimizer)
    assert (run.steps, run.of(hw.repulsion.Repulsion)[0].strength) == (9, 0.5)
    take_steps(model, optimizer, run, 0, 1)
    run.check(optimizer)
    run.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not any("head_gates" in name for name, _ in model.named_modules())
