"""Penalties where several processes train a model together.

Similarities per query and of parameters equal one process with the whole batch. Those of sets of tokens are of each
call: processes that divide a batch equal one process that is called with each part.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import headwise as hw
from distributed.engines import ENGINES, TOKENS, as_it_is, batch, gathered, made, own
from distributed.processes import Processes

# a process imports torch for seconds
pytestmark = pytest.mark.full
RATE, STEPS, PARTS = 0.05, 2, 2
PER_QUERY = {
    "squared cosine": hw.similarity.SquaredCosine(),
    "span": hw.similarity.SpanOverlap(),
    "map": hw.similarity.MapCosine(),
}
OF_SETS = {
    "cka": hw.similarity.CKA(),
    "cka of contributions": hw.similarity.CKA(of="contributions"),
    "hsic": hw.similarity.HSIC(),
    "correlation": hw.similarity.CrossCorrelation(),
    "determinant": hw.similarity.LogDeterminant(),
}
# of which each part of the batch has as many tokens, so that nothing has to be counted across
EVEN = {"output and subspace": hw.similarity.Output() + 0.5 * hw.similarity.Subspace()}
DIVIDED = ("DDP", "FSDP2 rows", "FSDP2 columns")


def padding(step: int, name: str) -> Tensor:
    """True where a token is padding; the parts have different numbers of real tokens, but for an even term."""
    lengths = torch.tensor([TOKENS - 2, TOKENS, TOKENS - 1, TOKENS - 3]).repeat(3).sort().values
    lengths = torch.tensor([TOKENS - 2, TOKENS, TOKENS - 1]).repeat(4) if name in EVEN else lengths
    return torch.arange(TOKENS) >= lengths.roll(step)[:, None]


def train(engine: str, name: str, *, parts: int = 1, first: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters after training with a penalty on each process's examples, or alone on `parts` of them in turn.

    It is attached before the model is divided if `first`. The last penalty is returned too.
    """
    term, model = (PER_QUERY | OF_SETS | EVEN)[name], made()
    divided = engine in DIVIDED
    across = dist.group.WORLD if divided and name not in EVEN else None
    penalty = hw.Disagreement(hw.find_heads(model), term, across=across) if first else None
    model = ENGINES.get(engine, as_it_is)(model)
    penalty = penalty or hw.Disagreement(hw.find_heads(model), term, across=across)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        mask = own(padding(step, name)) if divided else padding(step, name)
        optimizer.zero_grad()
        losses = [
            (model(x, key_padding_mask=m) - 1.0).square().mean()
            for x, m in zip(batch(engine, step).chunk(parts), mask.chunk(parts), strict=True)
        ]
        (torch.stack(losses).mean() + 0.7 * penalty(keep=None if parts > 1 else ~mask)).backward()
        optimizer.step()
    assert penalty.last is not None
    return gathered(model), penalty.last


def assert_as_one(engine: str, name: str, parts: int, first: bool = False) -> None:
    (alone, expected_last), plain = train("alone", name, parts=parts, first=first), made().state_dict()
    together, last = train(engine, name, first=first)
    if name in EVEN:
        dist.all_reduce(last)
        torch.testing.assert_close(last / dist.get_world_size(), expected_last)
    for key, expected in alone.items():
        torch.testing.assert_close(together[key], expected, rtol=0.0, atol=1e-9, msg=lambda t, n=key: f"{n}: {t}")
    assert any((alone[key] - plain[key]).abs().max() > 1e-3 for key in alone)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_penalty_equals_that_of_one_process(two: Processes, engine: str):
    for name in (*EVEN, *PER_QUERY):
        two.run(assert_as_one, engine, name, 1)
    # attached before the model is divided
    two.run(assert_as_one, engine, *EVEN, 1, True)
    for name in OF_SETS:
        # divided heads are compared whole; divided batches equal one process that is called with each part
        two.run(assert_as_one, engine, name, PARTS if engine in DIVIDED else 1)
