"""Propositional formulas (Bowman et al. 2015): notation, the worlds in which they hold, relations, and published files.

A formula is `x`, `( not X )` or `( L ( op R ) )` with the operator `and` or `or`. A world gives each of the six
variables a truth value; a set of worlds is an integer whose bit w is 1 if world w is in it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headwise.errors import DataError
from headwise.input_files import read_numbered_lines

RELATIONS = ("=", "<", ">", "^", "|", "v", "#")
OPERATORS = ("and", "or", "not")
VARIABLES = ("a", "b", "c", "d", "e", "f")
ALL_WORLDS = (1 << 64) - 1
# bit w of variable i is bit i of w
VARIABLE_WORLDS = tuple(sum(1 << world for world in range(64) if world >> i & 1) for i in range(len(VARIABLES)))


class Pair(NamedTuple):
    """Two formulas and how they relate.

    Attributes:
        relation: One of `RELATIONS`.
        premise: Tokens of the first formula, split by single blanks.
        hypothesis: Tokens of the second.
        operators: The larger number of operators of the two; the pair's bin.
    """

    relation: str
    premise: str
    hypothesis: str
    operators: int


def relation(premise: int, hypothesis: int) -> str:
    """Return the relation of two formulas from their worlds X and Y (MacCartney and Manning 2009).

    `=` X = Y; `<` X inside Y (forward entailment: the premise entails the hypothesis); `>` Y inside X; `^` disjoint
    and exhaustive; `|` disjoint, not exhaustive; `v` exhaustive, not disjoint; `#` none of these. For formulas that
    are neither tautologies nor contradictions exactly one holds.

    >>> relation(0b0011, 0b0111), relation(0b0011, ALL_WORLDS ^ 0b0011)
    ('<', '^')
    """
    if premise == hypothesis:
        return "="
    common = premise & hypothesis
    if common == premise:
        return "<"
    if common == hypothesis:
        return ">"
    exhaustive = premise | hypothesis == ALL_WORLDS
    if common == 0:
        return "^" if exhaustive else "|"
    return "v" if exhaustive else "#"


def operators(formula: str) -> int:
    """Return the number of operators of a formula.

    >>> operators("( a ( and ( not b ) ) )")
    2
    """
    return sum(token in OPERATORS for token in formula.split())


def worlds(formula: str) -> int:
    """Return the set of worlds in which a formula over `VARIABLES` holds.

    Example:
        >>> worlds("( a ( or ( not a ) ) )") == ALL_WORLDS
        True
    """
    # a finished bracket is an integer, or (operator, integer) for the inner half `( op R )` of a pair
    stack: list[str | int | tuple[str, int]] = []
    for token in formula.split():
        if token in VARIABLES:
            stack.append(VARIABLE_WORLDS[VARIABLES.index(token)])
        elif token != ")":
            stack.append(token)
        else:
            stack.append(_reduce(stack, formula))
    if len(stack) != 1 or not isinstance(stack[0], int):
        raise DataError(f"{formula!r} is not one formula; expected x, ( not X ) or ( L ( op R ) ).")
    return stack[0]


def bracket_fault(tokens: list[str]) -> str | None:
    """Return what is wrong with the brackets of a formula, or None; any words may be between them.

    >>> bracket_fault("( a ( and b )".split())
    '1 bracket is not closed'
    """
    depth = 0
    for position, token in enumerate(tokens, start=1):
        depth += (token == "(") - (token == ")")
        if depth < 0:
            return f"the bracket closed at token {position} was never opened"
    if depth:
        return f"{depth} bracket{'s are' if depth > 1 else ' is'} not closed"
    return None


def _reduce(stack: list[str | int | tuple[str, int]], formula: str) -> int | tuple[str, int]:
    if len(stack) >= 3 and stack[-3] == "(":
        left, right = stack[-2:]
        del stack[-3:]
        if left == "not" and isinstance(right, int):
            return ALL_WORLDS ^ right
        if left in ("and", "or") and isinstance(left, str) and isinstance(right, int):
            return left, right
        if isinstance(left, int) and isinstance(right, tuple):
            return left & right[1] if right[0] == "and" else left | right[1]
    raise DataError(f"{formula!r} is not one formula; expected x, ( not X ) or ( L ( op R ) ).")


def read_pairs(path: Path, operators: int) -> Iterator[Pair]:
    """Yield the pairs of one file; any words may be variables and operators."""
    for number, line in read_numbered_lines(path):
        fields = line.split("\t")
        if len(fields) != 3:
            raise DataError(
                f"{path}, line {number}: {len(fields)} tab-separated fields; expected 3: relation, premise, hypothesis."
            )
        label, *sides = fields
        if label not in RELATIONS:
            raise DataError(f"{path}, line {number}: relation {label!r:.60}; expected one of {' '.join(RELATIONS)}.")
        texts = []
        for name, side in zip(("premise", "hypothesis"), sides, strict=True):
            tokens = side.split()
            fault = bracket_fault(tokens) if tokens else "it is empty"
            if fault is not None:
                raise DataError(f"{path}, line {number}: {name} {side!r:.60}: {fault}; correct or drop the line.")
            texts.append(" ".join(tokens))
        yield Pair(label, texts[0], texts[1], operators)
