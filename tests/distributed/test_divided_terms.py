"""Similarities that tricks do not fool, where several processes train a model together.

Those per query and those of parameters equal one process with the whole batch. Those of sets of tokens are of each
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
DIVIDED = ("DDP", "FSDP2 rows", "FSDP2 columns")


def padding(step: int) -> Tensor:
    """True where a token is padding; the parts have different numbers of real tokens."""
    lengths = torch.tensor([TOKENS - 2, TOKENS, TOKENS - 1, TOKENS - 3]).repeat(3)
    return torch.arange(TOKENS) >= lengths.sort().values.roll(step)[:, None]


def train(engine: str, name: str, *, parts: int = 1) -> dict[str, Tensor]:
    """Parameters after training with a penalty on each process's examples, or alone on `parts` of them in turn."""
    term = (PER_QUERY | OF_SETS)[name]
    model = ENGINES.get(engine, as_it_is)(made())
    divided = engine in DIVIDED
    penalty = hw.Disagreement(hw.find_heads(model), term, across=dist.group.WORLD if divided else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        mask = own(padding(step)) if divided else padding(step)
        optimizer.zero_grad()
        losses = [
            (model(x, key_padding_mask=m) - 1.0).square().mean()
            for x, m in zip(batch(engine, step).chunk(parts), mask.chunk(parts), strict=True)
        ]
        (torch.stack(losses).mean() + 0.7 * penalty(keep=None if parts > 1 else ~mask)).backward()
        optimizer.step()
    return gathered(model)


def assert_as_one(engine: str, name: str, parts: int) -> None:
    alone, plain = train("alone", name, parts=parts), made().state_dict()
    together = train(engine, name)
    for key, expected in alone.items():
        torch.testing.assert_close(together[key], expected, rtol=0.0, atol=1e-9, msg=lambda t, n=key: f"{n}: {t}")
    assert any((alone[key] - plain[key]).abs().max() > 1e-3 for key in alone)


@pytest.mark.parametrize("name", PER_QUERY)
@pytest.mark.parametrize("engine", ENGINES)
def test_similarities_per_query_and_of_parameters_equal_one_process(two: Processes, engine: str, name: str):
    two.run(assert_as_one, engine, name, 1)


@pytest.mark.parametrize("name", OF_SETS)
@pytest.mark.parametrize("engine", DIVIDED)
def test_similarities_of_sets_of_tokens_equal_one_process_that_is_called_with_each_part(
    two: Processes, engine: str, name: str
):
    two.run(assert_as_one, engine, name, PARTS)


@pytest.mark.parametrize("name", OF_SETS)
def test_divided_heads_are_compared_whole(two: Processes, name: str):
    two.run(assert_as_one, "tensor parallel", name, 1)
