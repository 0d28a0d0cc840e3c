"""The recorder keeps the calls of its own thread, in order, and leaves modules as they were."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.heads.record import clone, keep, record, record_sites, restored, returning, watching

X = torch.ones(1, 2)


class Nested(nn.Module):
    """Calls a module inside another, writes into what the first returned, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(2, 2), nn.Sequential(nn.Tanh()), False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        output = self.second(hidden)
        with torch.no_grad():
            hidden.zero_()
        if self.fails:
            raise ValueError("it fails")
        return output


def test_calls_are_recorded_in_the_order_in_which_they_begin_and_tell_what_is_inside_what():
    model = Nested()
    with record([model.second[0], model.second, model.first], inputs=keep) as calls:
        model(X)
        model(X)
    assert [call.module for call in calls] == 2 * [model.first, model.second, model.second[0]]
    first, outer, inner = calls[:3]
    assert first.start < first.end < outer.start < inner.start < inner.end < outer.end
    assert outer.output is None
    assert inner.given is outer.given


def test_what_is_cloned_stays_where_a_forward_writes_into_it():
    model = Nested()
    with record([model.first], outputs=clone) as cloned, record([model.first], outputs=keep) as kept:
        model(X)
    assert torch.equal(cloned[0].output, model.first(X))
    assert not kept[0].output.any()


def test_a_forward_that_fails_leaves_a_call_without_an_end_and_no_hook():
    model = Nested()
    model.fails = True
    with pytest.raises(ValueError, match="it fails"), record([model, model.first]) as calls:
        model(X)
    assert [call.end >= 0 for call in calls] == [False, True]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_calls_of_other_threads_are_neither_recorded_nor_changed():
    model, returned = nn.Linear(2, 2), []
    with record([model]) as calls, watching(after=[(model, lambda *_: torch.zeros(2))]):
        thread = threading.Thread(target=lambda: returned.append(model(X)))
        thread.start()
        thread.join()
        assert not model(X).any()
    assert len(calls) == 1
    assert torch.equal(returned[0], model(X))


def test_recorded_outputs_are_returned_from_the_first_calls_of_each_forward_on():
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    model[0].forward = own = lambda x: x + 1.0
    with returning(model, {model[0]: [torch.zeros(2)]}):
        assert [float(model(X).sum()) for _ in range(2)] == [0.0, 0.0]
        # alone, after the first call of the last forward
        assert torch.equal(model[0](X), X + 1.0)
    assert model[0].forward is own
    assert torch.equal(model(X), X + 1.0)


def test_weights_are_put_back_at_the_end_of_a_block_that_fails_too():
    weight = torch.ones(3)
    with pytest.raises(RuntimeError), restored([weight], value=0.0):
        weight.copy_(torch.zeros(4) if not weight.any() else weight)
    assert weight.all()


def test_a_call_is_made_again_in_the_precision_its_module_has_by_then_and_cannot_write_into_what_was_kept():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    (site,) = hw.find_heads(model)
    (call,) = record_sites(model, [site], lambda: model(x))
    site.module.double()
    assert call.dtype == torch.float64
    assert call.again()[0].dtype == torch.float64
    x.zero_()
    assert call.given.any()
