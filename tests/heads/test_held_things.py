"""What modules hold in addition to attention hinders nothing: empty places, and things that Python does not copy."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases, thin, tiers
from heads.attentions import FusedAttention, SeparateAttention
from heads.families import FAMILIES, found
from heads.own import LensAttention, ListAttention, ThreeLists

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(8))


def leave_places_empty(model: nn.Module) -> nn.Module:
    """The model with places for modules, parameters and buffers in which there is nothing."""
    for module in [*model.modules()]:
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            continue
        for name in ("nothing", "query_nothing", "softmax"):
            module.register_module(name, None)
        module.register_parameter("key_nothing", None)
        module.register_buffer("value_nothing", None)
        module.norms = nn.ModuleList([None, nn.LayerNorm(5)])
        module.named = nn.ModuleDict({"none": None, "list": nn.ModuleList([None])})
        module.emptied = nn.Sequential(nn.Identity())
        module.emptied._modules["0"] = None
    return model


BUILT = {
    "torch": lambda: nn.TransformerEncoderLayer(12, 4, 16, batch_first=True),
    "separate": SeparateAttention,
    "grouped": lambda: SeparateAttention(key_value_heads=2),
    "fused": FusedAttention,
    "list": lambda: ListAttention(12),
    "lists": ThreeLists,
    "parameters": lambda: LensAttention(12),
}


@tiers("name", *thin(BUILT, 4))
def test_empty_places_change_neither_what_is_found_nor_what_is_proved(name: str):
    plain, holed = nn.Sequential(BUILT[name]()).eval(), nn.Sequential(leave_places_empty(BUILT[name]())).eval()
    assert str(hw.find_heads(holed)) == str(hw.find_heads(plain))
    assert hw.verify(hw.find_heads(holed), (X,)) == hw.verify(hw.find_heads(plain), (X,))
    if name not in ("lists", "list"):
        holed.load_state_dict(plain.state_dict(), strict=False)
        for model in (plain, holed):
            hw.prune(hw.find_heads(model), {0: [0, 1]}, inputs=(X,))
        torch.testing.assert_close(holed(X), plain(X))


@pytest.mark.full
@cases("family", FAMILIES)
def test_empty_places_change_nothing_in_any_family(family):
    assert str(hw.find_heads(leave_places_empty(family.build()))) == str(found(family))


def test_an_empty_place_in_a_list_of_heads_is_no_head():
    model = ListAttention(12)
    head = model.heads[1]
    model.heads = nn.ModuleList([*model.heads[:2], None, *model.heads[2:]])
    model.forward = lambda x: model.proj(torch.cat([head(x) for head in model.heads if head is not None], -1))
    (site,) = hw.find_heads(model).sites
    assert site.num_heads == 4
    assert site.parts[1].owner is head.query


class Holder:
    """Something with a state of its own."""

    __slots__ = ("held", "name")

    def __init__(self, held: object) -> None:
        self.held, self.name = held, "cache"


class Refusing(nn.Linear):
    """Cannot be copied at all."""

    def __deepcopy__(self, _memo: dict[int, object]) -> Refusing:
        raise ValueError("there is only one")


def count():
    yield 1


HELD = {
    "a tensor with a graph": lambda graph: graph,
    "such tensors in containers": lambda graph: {"cache": [(graph, graph), deque([graph])]},
    "such a tensor in an object": lambda graph: Holder([graph]),
    "a lock": lambda _graph: threading.Lock(),
    "a lock in an object in a tuple": lambda graph: (Holder(threading.RLock()), graph),
    "a generator": lambda _graph: count(),
    "torch's generator": lambda _graph: torch.Generator(),
    "a function without a name": lambda graph: lambda: graph,
    "a bound method": lambda _graph: threading.Lock().acquire,
    "weak references": lambda graph: [weakref.ref(graph), weakref.proxy(graph), threading.Lock()],
    "a file": lambda _graph: sys.stderr,
    "a module of Python": lambda _graph: sys,
}


@tiers("name", *thin(HELD, 3))
def test_what_cannot_be_copied_hinders_no_proof_and_stays_as_it_is(name: str):
    model = nn.Sequential(SeparateAttention())
    graph = model[0].q_proj.weight * 2.0
    held = HELD[name](graph)
    model[0].held = held
    model[0].register_buffer("memory", graph, persistent=False)
    # an input with a graph, as well
    assert hw.verify(hw.find_heads(model), (nn.Linear(12, 12)(X),)).sites == ("0",)
    assert model[0].held is held
    assert model[0].memory is graph
    assert graph.grad_fn is not None


def test_the_experiments_write_into_nothing_that_the_model_holds():
    class Caching(SeparateAttention):
        def __init__(self) -> None:
            super().__init__()
            self.cache = {"lock": threading.Lock(), "seen": [self.q_proj.weight * 1.0]}

        def forward(self, x: Tensor) -> Tensor:
            self.cache["seen"].append(x)
            return super().forward(x)

    model = Caching()
    assert hw.verify(hw.find_heads(model), (X,)).sites == ("",)
    assert len(model.cache["seen"]) == 1


def test_a_module_that_refuses_to_be_copied_is_named():
    model = nn.Sequential(SeparateAttention())
    model[0].extra = Refusing(2, 2)
    with pytest.raises(
        hw.errors.HeadwiseError, match=r"0\.extra \(Refusing\) refuses to be copied .*there is only one"
    ):
        hw.verify(hw.find_heads(model), (X,))
