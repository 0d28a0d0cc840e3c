"""The handle of methods without any trainer: moved from model to model, saved, restored, and asked what it did."""

from __future__ import annotations

import json

import pytest
import torch
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.integrations import Aggregate, Attached, Penalize, Repel
from integrations.loops import FIXED, NOISY, PENALTY, RATE, ROUTED, assert_same, build_bert, collate, make_rows


def take_steps(model, optimizer, attached, first: int, last: int) -> None:
    for row in range(first, last):
        loss = model(**collate(make_rows()[2 * row : 2 * row + 2])).loss
        attached.add_penalty(loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def start(*methods, seed: int = 4):
    model = build_bert(dropout=0.0).train()
    attached = Attached(methods, seed=seed)
    torch.manual_seed(5)
    attached.aggregate(model)
    attached.aggregate(model)  # a second call leaves it as it is
    optimizer = SGD(model.parameters(), lr=RATE)
    return model, optimizer, attached


@pytest.mark.parametrize("before", [False, True], ids=["loaded after attach", "loaded before attach"])
def test_a_state_that_went_through_json_goes_on_bit_for_bit(before: bool):
    model, optimizer, attached = start(PENALTY, NOISY, ROUTED)
    attached.attach(model, optimizer)
    attached.repulsions[0].strength = 0.5
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
    attached.load_state_dict({"repulsions": [{"steps": [9], "turns": [0], "strength": 0.5}], "penalties": []})
    attached.attach(model, optimizer)
    assert (attached.steps, attached.repulsions[0].strength) == (9, 0.5)
    other, others, _ = start()
    attached.attach(other, others)
    assert (attached.steps, attached.repulsions[0].strength) == (0, 1.0)


@pytest.mark.parametrize("state", [{}, {"repulsions": None}, {"repulsions": []}, [], {"repulsions": [{}, {}]}])
def test_a_state_of_something_else_is_refused(state):
    attached = Attached([NOISY])
    with pytest.raises(hw.SettingError, match=r"and 1 are attached; resume with the methods it was saved with"):
        attached.load_state_dict(state)


def test_of_a_state_whose_last_part_is_refused_nothing_is_loaded():
    model, optimizer, attached = start(PENALTY, NOISY)
    attached.attach(model, optimizer)
    before = attached.state_dict()
    good = {"steps": [9], "turns": [0], "strength": 0.5}
    with pytest.raises(hw.SettingError):
        attached.load_state_dict({"repulsions": [good], "penalties": [3]})
    assert attached.state_dict() == before


def test_aggregators_that_a_model_built_anew_lacks_are_told():
    model, optimizer, attached = start(ROUTED)
    attached.attach(model, optimizer)
    plain = build_bert()
    with pytest.raises(hw.LayoutError, match=r"has no aggregator: the model was built anew after aggregate\(model\)"):
        attached.attach(plain, SGD(plain.parameters(), lr=RATE))


def test_several_of_a_kind_act_together():
    halves = (Penalize(hw.Output(), weight=0.2, layers=(0,)), Penalize(hw.Output(), weight=0.4, layers=(1,)))
    model, optimizer, attached = start(*halves, FIXED, Repel(FIXED.rule, layers=(1,)))
    attached.attach(model, optimizer)
    loss = model(**collate(make_rows(4))).loss
    added = attached.add_penalty(loss, share=0.5) - loss
    values = [penalty.last for penalty in attached.penalties]
    torch.testing.assert_close(added, 0.5 * (0.2 * values[0] + 0.4 * values[1]))
    (loss + added).backward()
    optimizer.step()
    assert [handle.steps for handle in attached.repulsions] == [1, 1]
    metrics = attached.read_metrics()
    torch.testing.assert_close(metrics["similarity"], (values[0] + values[1]) / 2)
    torch.testing.assert_close(metrics["penalty"], 0.2 * values[0] + 0.4 * values[1])
    forces = [handle.last for handle in attached.repulsions]
    repelling = torch.cat([one.repulsion_norm for one in forces]).norm()
    torch.testing.assert_close(
        metrics["force_ratio"], repelling / torch.cat([one.driving_norm for one in forces]).norm()
    )


def test_relative_penalties_are_shares_of_the_loss_alone_in_any_order():
    methods = [Penalize(hw.Output(), weight=hw.Relative(0.5)), Penalize(hw.CKA(), weight=hw.Relative(0.8))]
    added: list[torch.Tensor] = []
    strengths: list[list[object]] = []
    for given in (methods[:1], methods[1:], methods, methods[::-1], [Penalize(hw.Position(), weight=3.0), *methods]):
        model, optimizer, attached = start(*given)
        attached.attach(model, optimizer)
        loss = model(**collate(make_rows(4))).loss
        added.append(attached.add_penalty(loss) - loss)
        relative = [penalty.relative for penalty in attached.penalties]
        strengths.append([one.state_dict()["logarithms"] for one in relative if one is not None])
    first, second = strengths[0] + strengths[1]
    assert strengths[2:] == [[first, second], [second, first], [first, second]]
    torch.testing.assert_close(added[2], added[0] + added[1])
    torch.testing.assert_close(added[3], added[2])


def test_a_weight_of_zero_is_measured_and_leaves_the_loss_alone():
    model, optimizer, attached = start(Penalize(hw.Output(), weight=0.0))
    attached.attach(model, optimizer)
    loss = model(**collate(make_rows(2))).loss
    assert attached.add_penalty(loss) is loss
    assert attached.read_metrics()["similarity"] > 0.0


def test_nothing_measured_is_nothing_logged():
    model, optimizer, attached = start(PENALTY, NOISY)
    assert attached.read_metrics() == {}
    attached.attach(model, optimizer)
    assert attached.read_metrics() == {}
    take_steps(model, optimizer, attached, 0, 1)
    assert set(attached.read_metrics()) == {"penalty", "similarity", "force_ratio"}


def test_a_penalty_that_is_not_attached_is_told_and_printing_says_what_is():
    model, optimizer, attached = start(PENALTY)
    assert str(attached).endswith("not attached yet")
    with pytest.raises(hw.NotFired, match="the penalty is attached to no model; call attach"):
        attached.add_penalty(torch.zeros(()))
    attached.attach(model, optimizer)
    assert "on 2 sites (self 1)" in str(attached)
    model(**collate(make_rows(2)))
    attached.detach()
    with pytest.raises(hw.NotFired, match="the penalty is attached to no model; call attach"):
        attached.add_penalty(torch.zeros(()))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_a_checkpoint_runs_again_was_not_called_for_the_next_loss():
    model, optimizer, attached = start(PENALTY)
    attached.attach(model, optimizer)
    loss = checkpoint(lambda: model(**collate(make_rows(2))).loss, use_reentrant=False)
    attached.add_penalty(loss).backward()
    with pytest.raises(hw.NotFired, match="a model that was not called since the last loss"):
        attached.add_penalty(torch.zeros(()))


@pytest.mark.parametrize("method", [Repel(hw.SVGD(), layers=(7,)), Penalize(hw.Output(), weight=0.1, layers=(7,))])
def test_methods_of_which_one_cannot_be_attached_leave_nothing_behind(method):
    model, optimizer, attached = start(PENALTY, NOISY, method)
    with pytest.raises(hw.LayoutError, match="7"):
        attached.attach(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert (attached.penalties, attached.repulsions) == ((), ())


def test_aggregators_of_which_one_cannot_be_put_in_leave_the_model_as_it_was():
    attached = Attached([Aggregate(hw.Trunk(), layers=(0,)), Aggregate(hw.Trunk(), layers=(7,))])
    model = build_bert()
    before = [type(module) for module in model.modules()]
    with pytest.raises(hw.LayoutError, match="7"):
        attached.aggregate(model)
    assert [type(module) for module in model.modules()] == before


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
    for term in (hw.CKA(), hw.Position(recompute=True), hw.Subspace()):
        model, optimizer, attached = start(Penalize(term, weight=0.3))
        attached.attach(model, optimizer)
        for _ in range(2):
            with pytest.raises(hw.NotFired, match=r"without gradients for this loss.*GradCache.*without a cache"):
                attached.add_penalty(compute_cached(model, rows, 2))
        # the next loss that is none is penalized as ever
        loss = model(**collate(rows)).loss
        assert attached.add_penalty(loss) > loss
        alone = hw.Disagreement(hw.find_heads(model), term)
        cached = compute_cached(model, rows, 2)
        with pytest.raises(hw.NotFired, match="GradCache"):
            alone.add_to(cached)
    model, optimizer, attached = start(Penalize(hw.SpanOverlap(), weight=0.3))
    attached.attach(model, optimizer)
    attached.add_penalty(compute_cached(model, rows, 2)).backward()
    (0.3 * hw.Disagreement(hw.find_heads(plain), hw.SpanOverlap())()).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=name)
