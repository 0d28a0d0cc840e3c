"""Formulas and relations against truth tables written out world by world."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import DataError
from headwise_lab.tasks.logic.formulas import (
    ALL_WORLDS,
    RELATIONS,
    VARIABLE_WORLDS,
    VARIABLES,
    bracket_fault,
    operators,
    relation,
    worlds,
)

WORLDS = [{name: bool(number >> bit & 1) for bit, name in enumerate(VARIABLES)} for number in range(64)]

trees = st.recursive(
    st.sampled_from(VARIABLES),
    lambda below: st.one_of(st.tuples(st.just("not"), below), st.tuples(st.sampled_from(["and", "or"]), below, below)),
    max_leaves=8,
)


def written(tree):
    if isinstance(tree, str):
        return tree
    if tree[0] == "not":
        return f"( not {written(tree[1])} )"
    return f"( {written(tree[1])} ( {tree[0]} {written(tree[2])} ) )"


def holds(tree, world):
    if isinstance(tree, str):
        return world[tree]
    if tree[0] == "not":
        return not holds(tree[1], world)
    sides = [holds(side, world) for side in tree[1:]]
    return all(sides) if tree[0] == "and" else any(sides)


def nodes(tree):
    return 0 if isinstance(tree, str) else 1 + sum(nodes(side) for side in tree[1:])


def related(first, second):
    """The relation by the definitions, from two lists of truth values."""
    pairs = list(zip(first, second, strict=True))
    forward = all(y for x, y in pairs if x)
    reverse = all(x for x, y in pairs if y)
    disjoint = not any(x and y for x, y in pairs)
    exhaustive = all(x or y for x, y in pairs)
    return {
        (True, True, False, False): "=",
        (True, False, False, False): "<",
        (False, True, False, False): ">",
        (False, False, True, True): "^",
        (False, False, True, False): "|",
        (False, False, False, True): "v",
        (False, False, False, False): "#",
    }[(forward, reverse, disjoint, exhaustive)]


@settings(max_examples=100)
@given(trees)
def test_worlds_and_operators_are_those_of_the_tree(tree):
    text = written(tree)
    assert worlds(text) == sum(1 << number for number, world in enumerate(WORLDS) if holds(tree, world))
    assert operators(text) == nodes(tree)
    assert bracket_fault(text.split()) is None


proper = st.integers(1, ALL_WORLDS - 1)


@settings(max_examples=100)
@given(proper, proper, st.sampled_from(["any", "inside", "around", "outside", "complement", "cover", "same"]))
def test_the_relation_is_the_one_the_definitions_give(first, other, kind):
    second = {
        "any": other,
        "inside": first & other,
        "around": first | other,
        "outside": ~first & other & ALL_WORLDS,
        "complement": ~first & ALL_WORLDS,
        "cover": (~first & ALL_WORLDS) | other,
        "same": first,
    }[kind]
    if second in (0, ALL_WORLDS):
        return
    values = [[bool(side >> world & 1) for world in range(64)] for side in (first, second)]
    assert relation(first, second) == related(*values)


def test_each_relation_has_an_example_worked_by_hand():
    examples = {
        "=": ("( a ( and b ) )", "( b ( and a ) )"),
        "<": ("( a ( and b ) )", "a"),
        ">": ("( a ( or b ) )", "a"),
        "^": ("a", "( not a )"),
        "|": ("( a ( and b ) )", "( not a )"),
        "v": ("( a ( or b ) )", "( not a )"),
        "#": ("a", "b"),
    }
    assert tuple(examples) == RELATIONS
    for name, (premise, hypothesis) in examples.items():
        assert relation(worlds(premise), worlds(hypothesis)) == name


def test_variables_are_independent():
    for bits in range(64):
        cell = ALL_WORLDS
        for index, held in enumerate(VARIABLE_WORLDS):
            cell &= held if bits >> index & 1 else ~held
        assert cell == 1 << bits


@pytest.mark.parametrize(
    "formula",
    ["", "a b", "( a )", "( and a b )", "( a and b )", "( not a", "a )", "( not ( not ) )", "( a ( not b ) )", "g"],
)
def test_what_is_not_one_formula_is_refused(formula):
    with pytest.raises(DataError, match="is not one formula"):
        worlds(formula)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("( a", "1 bracket is not closed"),
        ("( ( a", "2 brackets are not closed"),
        ("a ) (", "the bracket closed at token 2 was never opened"),
    ],
)
def test_a_bracket_fault_says_where(text, fault):
    assert bracket_fault(text.split()) == fault
