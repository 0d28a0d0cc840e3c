"""The generated pairs: their relation, their shape and their order."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from headwise.errors import SettingError
from headwise_lab.tasks.logic import generator
from headwise_lab.tasks.logic.formulas import ALL_WORLDS, RELATIONS, VARIABLES, operators, relation, worlds
from headwise_lab.tasks.logic.generator import generate

PAIRS = list(generate(20_000, seed=5))
SIDES = [side for pair in PAIRS for side in (pair.premise, pair.hypothesis)]


def test_the_relation_and_bin_follow_from_the_written_formulas():
    for pair in PAIRS[:4000]:
        premise, hypothesis = worlds(pair.premise), worlds(pair.hypothesis)
        assert pair.relation == relation(premise, hypothesis)
        assert pair.operators == min(12, max(operators(pair.premise), operators(pair.hypothesis)))
        assert {premise, hypothesis}.isdisjoint({0, ALL_WORLDS})


def test_a_pair_draws_on_four_variables_and_all_six_occur():
    used = [{*f"{pair.premise} {pair.hypothesis}".split()} & {*VARIABLES} for pair in PAIRS]
    assert max(len(names) for names in used) == 4
    assert set().union(*used) == {*VARIABLES}


def test_pairs_are_distinct():
    assert len({(pair.premise, pair.hypothesis) for pair in PAIRS}) == len(PAIRS)


def test_every_relation_and_every_bin_occurs():
    assert {pair.relation for pair in PAIRS} == {*RELATIONS}
    assert {pair.operators for pair in PAIRS} == set(range(13))


def test_the_budget_of_twelve_allows_three_levels_of_pairs():
    def levels(side):
        depth = deepest = 0
        opened = []
        for token, following in zip(side.split(), side.split()[1:], strict=False):
            if token == "(":
                opened.append(following in ("and", "or"))
                depth += opened[-1]
            elif token == ")":
                depth -= opened.pop()
            deepest = max(deepest, depth)
        return deepest

    # only the right-hand side of a pair lies inside its `( op R )`, so this counts the deepest chain to the right
    assert max(levels(side) for side in SIDES) == 3
    assert max(side.count("and") + side.count("or") for side in SIDES) <= 7


def test_a_formula_is_a_pair_four_times_in_nine_and_negated_once_in_three():
    draws = 20_000
    random = Random(7).random
    outer = Counter()
    for _ in range(draws):
        tokens = generator._draw(random, (0, 2, 3, 5), 12).text.split()
        negated = tokens[:2] == ["(", "not"]
        body = tokens[2:-1] if negated else tokens
        outer["negated"] += negated
        outer["pair"] += len(body) > 1
        if len(body) == 1:
            outer[body[0]] += 1
    expected = {"negated": 1 / 3, "pair": 4 / 9} | dict.fromkeys("acdf", 5 / 36)
    for name, share in expected.items():
        spread = (share * (1 - share) / draws) ** 0.5
        assert outer[name] / draws == pytest.approx(share, abs=4 * spread), name


def test_both_operators_are_alike():
    tokens = Counter(" ".join(SIDES).split())
    assert tokens["and"] / (tokens["and"] + tokens["or"]) == pytest.approx(0.5, abs=0.02)


def test_the_same_seed_gives_the_same_pairs_and_another_seed_others():
    assert list(generate(500, seed=5)) == list(generate(500, seed=5))
    assert list(generate(500, seed=5)) != list(generate(500, seed=6))


def test_more_draws_continue_the_sequence():
    assert list(generate(20_000, seed=5))[:200] == list(generate(2_000, seed=5))[:200]


def test_the_limit_on_operators_only_filters():
    assert list(generate(20_000, seed=5, max_operators=3)) == [pair for pair in PAIRS if pair.operators <= 3]


def test_pairs_come_as_a_stream():
    assert next(generate(10**12, seed=1)).relation in RELATIONS


def test_the_bar_goes_to_stderr_and_only_when_asked(capsys):
    quiet = list(generate(300, seed=2))
    assert capsys.readouterr() == ("", "")
    assert list(generate(300, seed=2, progress=True)) == quiet
    output = capsys.readouterr()
    assert output.out == ""
    assert "generating pairs" in output.err


def test_negative_numbers_are_refused():
    with pytest.raises(SettingError, match="draws is -1"):
        next(generate(-1, seed=0))
    with pytest.raises(SettingError, match="seed is -1"):
        next(generate(1, seed=-1))
