"""A generator of logical inference pairs after the description of Bowman et al. (2015)."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from random import Random
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from headwise.errors import require_integer
from headwise_lab.data.arrays import stable_key
from headwise_lab.tasks.logic.formulas import ALL_WORLDS, VARIABLE_WORLDS, VARIABLES, Pair, relation

LENGTH_BUDGET = 12
BRANCHING = 4 / 9
NEGATION = 1 / 3
LONGEST_BIN = 12
SUBSETS = tuple(combinations(range(len(VARIABLES)), 4))


class Formula(NamedTuple):
    """A drawn formula: its tokens, the worlds in which it holds, its number of operators."""

    text: str
    worlds: int
    operators: int


LEAVES = tuple(Formula(name, held, 0) for name, held in zip(VARIABLES, VARIABLE_WORLDS, strict=True))


def generate(draws: int, *, seed: int, max_operators: int | None = None, progress: bool = False) -> Iterator[Pair]:
    """Yield distinct pairs of formulas with their relation, one after another.

    A draw picks 4 of the 6 variables and two formulas over them. A formula with length budget n > 1 is a pair
    with probability 4/9 (`and` and `or` alike), both sides having the budget n // 2, else a variable; the budget
    starts at 12, and each node is negated with probability 1/3. Draws with a tautology or a contradiction, and
    pairs seen before, are discarded. A pair's bin is the larger number of operators of its sides, at most 12.

    Memory is one integer per distinct pair. The pairs depend on `draws` and `seed` only; `max_operators` filters them.

    Example:
        >>> pair = next(generate(100, seed=4, max_operators=2))
        >>> pair.operators <= 2
        True
    """
    require_integer("draws", draws)
    require_integer("seed", seed)
    if max_operators is not None:
        require_integer("max_operators", max_operators)
    most = LONGEST_BIN if max_operators is None else max_operators
    random = Random(seed).random
    seen: set[int] = set()
    bar = track(range(draws), "generating pairs", console=Console(stderr=True), disable=not progress, update_period=0.5)
    for _ in bar:
        names = SUBSETS[int(random() * len(SUBSETS))]
        premise = _draw(random, names, LENGTH_BUDGET)
        hypothesis = _draw(random, names, LENGTH_BUDGET)
        size = min(max(premise.operators, hypothesis.operators), LONGEST_BIN)
        if size > most or premise.worlds in (0, ALL_WORLDS) or hypothesis.worlds in (0, ALL_WORLDS):
            continue
        key = stable_key(premise.text, hypothesis.text)
        if key in seen:
            continue
        seen.add(key)
        yield Pair(relation(premise.worlds, hypothesis.worlds), premise.text, hypothesis.text, size)


def _draw(random: Callable[[], float], names: Sequence[int], budget: int) -> Formula:
    if budget > 1 and random() < BRANCHING:
        left = _draw(random, names, budget // 2)
        right = _draw(random, names, budget // 2)
        size = left.operators + right.operators + 1
        if random() < 0.5:
            drawn = Formula(f"( {left.text} ( and {right.text} ) )", left.worlds & right.worlds, size)
        else:
            drawn = Formula(f"( {left.text} ( or {right.text} ) )", left.worlds | right.worlds, size)
    else:
        drawn = LEAVES[names[int(random() * len(names))]]
    if random() >= NEGATION:
        return drawn
    return Formula(f"( not {drawn.text} )", ALL_WORLDS ^ drawn.worlds, drawn.operators + 1)
