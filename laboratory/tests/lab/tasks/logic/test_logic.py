"""Logic: formulas against truth tables written out, the generator, files and splits, and the model of pairs."""

from __future__ import annotations

import functools
import gzip
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cases import cases, find_unrefused
from headwise.errors import DataError, SettingError, ShapeError
from headwise.heads.find import find_heads
from headwise_lab.data.arrays import Ragged, require_files
from headwise_lab.models.encoder import Encoder, EncoderLayer, sinusoids
from headwise_lab.tasks.logic import data as logic_data
from headwise_lab.tasks.logic import generator
from headwise_lab.tasks.logic.data import GENERATOR_SEED, LogicData, LogicSplit, collate, load_logic
from headwise_lab.tasks.logic.formulas import (
    ALL_WORLDS,
    RELATIONS,
    VARIABLE_WORLDS,
    VARIABLES,
    Pair,
    bracket_fault,
    operators,
    read_pairs,
    relation,
    worlds,
)
from headwise_lab.tasks.logic.generator import generate
from headwise_lab.tasks.logic.model import PairClassifier, QueryPooling
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from headwise_lab.tasks.logic.task import LogicTask, counts, token_counts
from lab.published import DATA, needs

PUBLISHED = DATA / "logical_inference" / "propositionallogic"
TOY = replace(LOGIC_SCALES["demo"], name="toy", generated_draws=3_000, train_operators=2, test_bins=(1, 2, 3))
SPLITS, SIDES = ("train", "dev", "test"), ("premise", "hypothesis")
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


def test_relations_and_variables_are_those_worked_by_hand():
    examples = {
        "=": ("( a ( and b ) )", "( b ( and a ) )"),
        "<": ("( a ( and b ) )", "a"),
        ">": ("( a ( or b ) )", "a"),
        "^": ("a", "( not a )"),
        "|": ("( a ( and b ) )", "( not a )"),
        "v": ("( a ( or b ) )", "( not a )"),
        "#": ("a", "b"),
    }
    assert tuple(examples) == RELATIONS == tuple(relation(*map(worlds, sides)) for sides in examples.values())
    for bits in range(64):
        cells = (held if bits >> index & 1 else ~held for index, held in enumerate(VARIABLE_WORLDS))
        assert functools.reduce(int.__and__, cells, ALL_WORLDS) == 1 << bits


def test_what_is_not_one_formula_is_refused():
    wrong = ["", "a b", "( a )", "( and a b )", "( a and b )", "( not a", "a )", "( not ( not ) )", "( a ( not b ) )"]
    wrong.append("g")
    assert not find_unrefused((functools.partial(worlds, one), DataError, "is not one formula") for one in wrong)
    assert bracket_fault(["(", "(", "a"]) == "2 brackets are not closed"


@functools.cache
def draw(number: int, seed: int = 5, **options) -> list[Pair]:
    return list(generate(number, seed=seed, **options))


def test_a_generated_pair_is_what_its_formulas_say():
    pairs = draw(20_000)
    for pair in pairs[:4000]:
        premise, hypothesis = worlds(pair.premise), worlds(pair.hypothesis)
        assert pair.relation == relation(premise, hypothesis)
        assert pair.operators == min(12, max(operators(pair.premise), operators(pair.hypothesis)))
        assert {premise, hypothesis}.isdisjoint({0, ALL_WORLDS})
    used = [{*f"{pair.premise} {pair.hypothesis}".split()} & {*VARIABLES} for pair in pairs]
    assert max(len(names) for names in used) == 4
    assert set().union(*used) == {*VARIABLES}
    assert len({(pair.premise, pair.hypothesis) for pair in pairs}) == len(pairs)
    assert {pair.relation for pair in pairs} == {*RELATIONS}
    assert {pair.operators for pair in pairs} == set(range(13))


def test_formulas_have_the_shape_of_the_published_generator():
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
    sides = [side for pair in draw(20_000) for side in (pair.premise, pair.hypothesis)]
    assert max(levels(side) for side in sides) == 3
    assert max(side.count("and") + side.count("or") for side in sides) <= 7
    tokens = Counter(" ".join(sides).split())
    assert tokens["and"] / (tokens["and"] + tokens["or"]) == pytest.approx(0.5, abs=0.02)
    draws, random, outer = 20_000, Random(7).random, Counter()
    for _ in range(draws):
        tokens = generator._draw(random, (0, 2, 3, 5), 12).text.split()
        negated = tokens[:2] == ["(", "not"]
        body = tokens[2:-1] if negated else tokens
        outer["negated"] += negated
        outer["pair" if len(body) > 1 else body[0]] += 1
    expected = {"negated": 1 / 3, "pair": 4 / 9} | dict.fromkeys("acdf", 5 / 36)
    for name, share in expected.items():
        spread = (share * (1 - share) / draws) ** 0.5
        assert outer[name] / draws == pytest.approx(share, abs=4 * spread), name


def test_pairs_follow_from_draws_and_seed_and_come_as_a_stream(capsys):
    assert list(generate(500, seed=5)) == draw(500)
    assert draw(500) != draw(500, 6)
    assert draw(20_000)[:200] == draw(2_000)[:200]
    assert draw(20_000, max_operators=3) == [pair for pair in draw(20_000) if pair.operators <= 3]
    assert next(generate(10**12, seed=1)).relation in RELATIONS
    assert capsys.readouterr() == ("", "")
    assert list(generate(500, seed=5, progress=True)) == draw(500)
    output = capsys.readouterr()
    assert output.out == ""
    assert "generating pairs" in output.err


@pytest.mark.full
@needs("logical_inference")
@cases("operator_bin", range(13))
def test_every_published_line_has_our_relation_and_bin(operator_bin):
    lines = 0
    for path in require_files(PUBLISHED, [f"train{operator_bin}", f"test{operator_bin}"]).values():
        for pair in read_pairs(path, operator_bin):
            assert relation(worlds(pair.premise), worlds(pair.hypothesis)) == pair.relation, pair
            assert min(12, max(operators(pair.premise), operators(pair.hypothesis))) == operator_bin, pair
            lines += 1
    assert lines > 0


def test_a_file_is_read_plain_or_gzipped_whatever_its_words_and_line_ends(tmp_path):
    content = "<\t( x ( xor y ) )\tz\r\n#\tété\t( no  x )\n".encode()
    for name, written_as in (("train2", content), ("train2.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(written_as)
        found = list(read_pairs(tmp_path / name, 2))
        assert found == [Pair("<", "( x ( xor y ) )", "z", 2), Pair("#", "été", "( no x )", 2)]


def test_a_malformed_line_is_refused_by_file_number_and_fault(tmp_path):
    cases, good = [], b"#\ta\tb\n"
    whole = gzip.compress(good * 1000)
    for number, (name, content, fault) in enumerate(
        (
            *(
                ("train1", good + line.encode() + b"\n", f"line 2: .*{fault}")
                for line, fault in (
                    ("=\ta", "2 tab-separated fields; expected 3"),
                    ("= a b", "1 tab-separated fields; expected 3"),
                    ("", "1 tab-separated fields; expected 3"),
                    ("=\ta\tb\tc", "4 tab-separated fields; expected 3"),
                    ("~\ta\tb", r"relation '~'; expected one of = < > \^ \| v #"),
                    ("=\t \tb", "premise ' ': it is empty"),
                    ("=\ta\t", "hypothesis '': it is empty"),
                    ("=\t( a ( and b )\tb", r"premise '\( a \( and b \)': 1 bracket is not closed"),
                    ("=\ta\tb )", r"hypothesis 'b \)': the bracket closed at token 2 was never opened"),
                )
            ),
            ("train1", good + b"#\t\xff\tb\n", "line 2: not UTF-8"),
            ("train1.gz", whole[:-9], "cannot be read"),
            ("train1.gz", good, "cannot be read"),
        )
    ):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        path.write_bytes(content)
        cases.append((lambda path=path: list(read_pairs(path, 1)), DataError, f"{path}.*{fault}"))
    assert not find_unrefused(cases)


@functools.cache
def load(folder: Path | None = None, **changes) -> LogicData:
    return load_logic(folder, replace(TOY, **changes), None)


def decode(data, split):
    """The pairs of a split, in its order."""
    return [tuple(" ".join(data.vocabulary[i] for i in one[side]) for side in SIDES) for one in split]


@pytest.fixture
def published(tmp_path):
    """A folder of small files in the published format, with the generator's pairs."""
    folder = tmp_path / "published"
    folder.mkdir()
    for number in range(4):
        pairs = [pair for pair in draw(6_000, 3, max_operators=3) if pair.operators == number]
        lines = [f"{pair.relation}\t{pair.premise}\t{pair.hypothesis}\n" for pair in pairs]
        cut = len(lines) // 5
        (folder / f"test{number}").write_text("".join(lines[:cut]))
        (folder / f"train{number}").write_text("".join(lines[cut:]))
    return folder


def test_generated_splits_are_disjoint_hold_their_bins_and_decode_to_their_pairs():
    data = load(train_operators=3, test_bins=(0, 1, 2, 3))
    parts = [decode(data, getattr(data, name)) for name in SPLITS]
    total = sum(map(len, parts))
    assert len({pair for part in parts for pair in part}) == total
    assert total == sum(1 for _ in generate(3_000, seed=GENERATOR_SEED, max_operators=3))
    assert [len(part) / total for part in parts[1:]] == pytest.approx([0.1, 0.1], abs=0.03)
    known = {(pair.premise, pair.hypothesis): pair for pair in draw(3_000, GENERATOR_SEED)}
    for name, pairs in zip(SPLITS, parts, strict=True):
        split = getattr(data, name)
        found = [known[pair] for pair in pairs]
        assert [data.labels[one["label"]] for one in split] == [pair.relation for pair in found]
        assert split.bins.tolist() == [pair.operators for pair in found]
        assert split.lengths.tolist() == [max(len(side.split()) for side in pair) for pair in pairs]
    assert data.labels == RELATIONS
    few, many = load(generated_draws=2_000), load(generated_draws=4_000)
    for name in SPLITS:
        assert {*decode(few, getattr(few, name))} < {*decode(many, getattr(many, name))}
    assert [set(getattr(few, name).bins) for name in SPLITS] == [{0, 1, 2}, {1, 2, 3}, {1, 2, 3}]


def test_pairs_of_training_with_their_sides_swapped_are_counted():
    data = load()
    train = {*decode(data, data.train)}
    expected = sum((hypothesis, premise) in train for premise, hypothesis in decode(data, data.test))
    assert 0 < expected == data.swapped < len(data.test)
    assert f"{expected} test pairs are training pairs with their sides swapped" in data.summary()


def test_files_give_their_test_lines_in_order_and_dev_comes_from_train(published):
    def lines(kind):
        names = [f"{kind}{number}" for number in (1, 2, 3)]
        return [tuple(line.split("\t")[1:]) for name in names for line in (published / name).read_text().splitlines()]

    data = load(published, train_operators=3)
    assert decode(data, data.test) == lines("test")
    dev = {*decode(data, data.dev)}
    assert dev < {*lines("train")}
    assert dev.isdisjoint([*lines("test"), *decode(data, data.train)])
    assert len(dev) / len({*lines("train")}) == pytest.approx(0.1, abs=0.03)
    small, large = (load(published, train_examples=cap, dev_examples=cap // 4) for cap in (40, 80))
    assert (len(small.train), len(large.train), len(small.dev), len(large.dev)) == (40, 80, 10, 20)
    for name in ("train", "dev"):
        assert {*decode(small, getattr(small, name))} < {*decode(large, getattr(large, name))}
    assert large.train.bins.mean() == pytest.approx(load(published).train.bins.mean(), abs=0.2)
    (published / "test1").write_text("#\t( not zebra )\ta\n")
    data = load_logic(published, TOY, None)
    assert "zebra" not in data.vocabulary
    assert data.vocabulary[data.test[0]["premise"][2]] == "<unk>"


def test_a_cached_load_equals_the_first_and_a_damaged_cache_is_made_anew(tmp_path, monkeypatch):
    first = load_logic(None, TOY, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == f"logic-{first.fingerprint}.npz"
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"not an archive"):
        path.write_bytes(damaged)
        assert list(load_logic(None, TOY, tmp_path).test) == list(first.test)
        assert path.read_bytes() == whole
    monkeypatch.setattr(logic_data, "generate", None)
    second = load_logic(None, TOY, tmp_path)
    assert (second.fingerprint, second.vocabulary) == (first.fingerprint, first.vocabulary)
    for name in SPLITS:
        assert list(getattr(first, name)) == list(getattr(second, name))
        assert getattr(first, name).bins.tolist() == getattr(second, name).bins.tolist()


def test_an_interrupted_write_leaves_no_cache_behind(tmp_path, monkeypatch):
    def interrupted(*_arguments, **_names):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_logic(None, TOY, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_fingerprint_changes_with_what_the_data_follows_from_alone(published):
    changes = {
        "generated_draws": 3_001,
        "train_operators": 3,
        "test_bins": (1, 2),
        "train_examples": 50,
        "dev_examples": 5,
    }
    found = [load().fingerprint, *(load(**{name: value}).fingerprint for name, value in changes.items())]
    assert len({*found}) == len(found)
    before = load_logic(published, TOY, None).fingerprint
    assert load_logic(published, replace(TOY, width=64, learning_rate=0.5), None).fingerprint == before
    with (published / "train1").open("a") as stream:
        stream.write("#\ta\tb\n")
    assert load_logic(published, TOY, None).fingerprint not in (before, *found)


def test_bad_folders_are_refused(published, tmp_path):
    (tmp_path / "file").write_text("")
    expected = r"expected a folder with train0, train1, train2 ... test3, plain or .gz"
    named = replace(TOY, name="demo-generated_draws=3000")
    assert not find_unrefused(
        [
            (lambda: load_logic(None, TOY, tmp_path / "file"), DataError, "the cache cannot be written"),
            (lambda: load_logic(published, named, None), SettingError, r"generated_draws is set, and .*published has"),
            (lambda: load_logic(tmp_path / "none", TOY, None), DataError, f"does not exist; {expected}"),
            (lambda: load_logic(tmp_path / "file", TOY, None), DataError, "is a file; expected a folder"),
            (lambda: load_logic(tmp_path, TOY, None), DataError, f"They seem to be in {published}"),
        ]
    )
    (published / "test2.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"both test2 and test2\.gz"):
        load_logic(published, TOY, None)
    for name in ("test2", "test2.gz", "train0"):
        (published / name).unlink()
    with pytest.raises(DataError, match="lacks train0, test2; expected each"):
        load_logic(published, TOY, None)
    for name in ("train0", "test1", "test2", "test3"):
        (published / name).write_text("")
    with pytest.raises(DataError, match="the test split of scale toy holds no pair"):
        load_logic(published, TOY, None)


def test_a_batch_is_padded_with_zeros_to_its_longest_side():
    data = load()
    examples = [data.train[index] for index in (0, 3, 7, -1)]
    batch = collate(examples)
    for side in SIDES:
        assert batch[side].shape == (4, max(len(example[side]) for example in examples))
        assert [[token for token in row if token] for row in batch[side].tolist()] == [e[side] for e in examples]
    assert batch["labels"].tolist() == [example["label"] for example in examples]
    empty = {"premise": [4], "hypothesis": [], "label": 0}
    assert not find_unrefused(
        [
            (lambda: collate([]), DataError, "no examples"),
            (lambda: collate([empty]), DataError, "hypothesis 0 of the batch has no tokens"),
        ]
    )


def part(split, order):
    sides = [Ragged.of([side[int(i)] for i in order]) for side in (split.premises, split.hypotheses)]
    return LogicSplit(*sides, split.labels[order], split.bins[order])


@pytest.mark.full
def test_the_baselines_answer_in_test_order_and_counts_beats_majority():
    data = load(generated_draws=5_000, train_operators=3)
    common = LogicTask().baseline("majority", data, 0).predicted
    assert len(common) == len(data.test)
    assert {data.labels[label] for label in common} == {"#"}
    predicted = counts(data.train, data.test, len(data.vocabulary), seed=3)
    assert (predicted == data.test.labels).mean() > (common == data.test.labels).mean()
    order = np.arange(len(data.test))[::-1]
    assert np.array_equal(counts(data.train, part(data.test, order), len(data.vocabulary), seed=3), predicted[order])


def test_counts_tell_the_sides_apart_but_not_the_order_of_tokens():
    rows = token_counts(Ragged.of([[4, 2, 4], [2, 4, 4], []]), 6)
    assert rows.tolist() == [[0, 0, 1, 0, 2, 0], [0, 0, 1, 0, 2, 0], [0, 0, 0, 0, 0, 0]]
    train = load(generated_draws=5_000, train_operators=3).train
    # swapping the sides turns `<` into `>`: the two can only be told apart by which side a count is of
    directed = np.flatnonzero((train.labels == 1) | (train.labels == 2))
    chosen = part(train, directed)
    swapped = replace(chosen, premises=chosen.hypotheses, hypotheses=chosen.premises)
    predicted = [counts(chosen, split, 13, seed=0) for split in (chosen, swapped)]
    assert (predicted[0] != predicted[1]).mean() > 0.5


def test_settings_outside_their_range_are_refused():
    cases = [
        ({"width": 0}, "width is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"train_operators": 13}, "train_operators is 13"),
        ({"test_bins": ()}, r"test_bins is \(\)"),
        ({"test_bins": (2, 1)}, r"test_bins is \(2, 1\)"),
        ({"test_bins": (1, 13)}, "test_bins is 13"),
        ({"train_examples": 0}, "train_examples is 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
    ]
    train = load().train
    assert not find_unrefused(
        [
            *((functools.partial(replace, TOY, **changed), SettingError, message) for changed, message in cases),
            (lambda: next(generate(-1, seed=0)), SettingError, "draws is -1"),
            (lambda: next(generate(1, seed=-1)), SettingError, "seed is -1"),
            (lambda: counts(train, train, 13, seed=-1), SettingError, "seed is -1"),
        ]
    )
    for name in ("cpu", "paper"):
        assert (LOGIC_SCALES[name].train_operators, LOGIC_SCALES[name].test_bins) == (6, tuple(range(1, 13)))


SMALL = replace(LOGIC_SCALES["demo"], width=8, heads=2, layers=3, classifier_width=16)
POST = replace(SMALL, norm_first=False)
PREMISE = torch.tensor([[4, 5, 6, 7], [8, 3, 0, 0]])
HYPOTHESIS = torch.tensor([[2, 9, 0], [5, 4, 3]])


def built(scale, seed=0):
    torch.manual_seed(seed)
    return PairClassifier(11, 7, scale).eval()


@settings(max_examples=20)
@given(
    norm_first=st.booleans(),
    heads=st.sampled_from([1, 2, 4]),
    queries=st.integers(1, 3),
    layers=st.integers(1, 3),
    more=st.integers(1, 5),
    swap=st.booleans(),
)
def test_padding_does_not_change_the_logits(norm_first, heads, queries, layers, more, swap):
    model = built(replace(SMALL, norm_first=norm_first, heads=heads, queries=queries, layers=layers))
    longer, other = (HYPOTHESIS, PREMISE) if swap else (PREMISE, HYPOTHESIS)
    padded = nn.functional.pad(longer, (0, more))
    logits = model(longer, other)["logits"]
    torch.testing.assert_close(model(padded, other)["logits"], logits, atol=1e-6, rtol=1e-6)
    alone = torch.cat([model(longer[i : i + 1], other[i : i + 1])["logits"] for i in range(2)])
    torch.testing.assert_close(alone, logits, atol=1e-6, rtol=1e-6)


@cases("scale", [SMALL, POST])
def test_order_and_sides_do_change_the_logits(scale):
    model = built(scale)
    logits = model(PREMISE, HYPOTHESIS)["logits"]
    for other in (model(PREMISE[:, [1, 0, 2, 3]], HYPOTHESIS), model(HYPOTHESIS, PREMISE)):
        assert (other["logits"] - logits).abs().amax(dim=1).min() > 1e-4


@cases("norm_first", [True, False])
def test_a_layer_is_its_equation(norm_first):
    torch.manual_seed(1)
    layer = EncoderLayer(6, heads=3, norm_first=norm_first, dropout=0.4).double().eval()
    for norm in (layer.attention_norm, layer.feed_forward_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    padding = torch.tensor([[False, False, False, True]])

    def attended(states):
        q, k, v = (states @ w.T for w in layer.attention.in_proj_weight.chunk(3))
        heads = []
        for h in range(3):
            part = slice(2 * h, 2 * h + 2)
            scores = q[0, :, part] @ k[0, :, part].T / math.sqrt(2)
            scores[:, 3] = -math.inf
            heads.append(scores.softmax(dim=1) @ v[0, :, part])
        return (torch.cat(heads, dim=1) @ layer.attention.out_proj.weight.T)[None]

    def normalized(states, norm):
        centered = states - states.mean(dim=2, keepdim=True)
        return centered / (centered.square().mean(dim=2, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias

    def transformed(states):
        inner, outer = layer.feed_forward[0], layer.feed_forward[2]
        return (states @ inner.weight.T + inner.bias).clamp_min(0) @ outer.weight.T + outer.bias

    if norm_first:
        y = x + attended(normalized(x, layer.attention_norm))
        z = y + transformed(normalized(y, layer.feed_forward_norm))
    else:
        y = normalized(x + attended(x), layer.attention_norm)
        z = normalized(y + transformed(y), layer.feed_forward_norm)
    torch.testing.assert_close(layer(x, padding), z)


def test_dropout_acts_on_the_feed_forward_output_alone():
    layer = EncoderLayer(6, heads=3, norm_first=True, dropout=0.5)
    assert layer.attention.dropout == 0.0
    assert [type(module).__name__ for module in layer.feed_forward] == ["Linear", "ReLU", "Linear", "Dropout"]
    assert layer.feed_forward[0].out_features == 12
    with torch.no_grad():
        for parameter in layer.feed_forward.parameters():
            parameter.zero_()
    x, padding = torch.randn(2, 5, 6), torch.zeros(2, 5, dtype=torch.bool)
    assert torch.equal(layer.train()(x, padding), layer(x, padding))


def test_attention_has_no_biases():
    assert not [name for name, _ in built(SMALL).named_parameters() if "attention." in name and "bias" in name]


def test_positions_are_sines_and_cosines_of_slower_and_slower_rates():
    encodings = sinusoids(9, 6, like=torch.zeros(()))
    for t in range(9):
        for i in range(3):
            angle = t / 1000 ** (2 * i / 6)
            assert encodings[t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert encodings[t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_the_heads_found_are_the_encoders_and_the_pooling_stands_apart():
    model = built(SMALL)
    heads = find_heads(model.encoder)
    assert len(heads) == 3
    assert all("pooling" not in name for name, _ in model.encoder.named_modules())
    assert len(find_heads(model)) == 4


def test_pooling_is_as_many_vectors_as_queries_whatever_the_heads():
    padding = torch.zeros(3, 5, dtype=torch.bool)
    for queries in (1, 3):
        for heads in (1, 4):
            assert QueryPooling(8, heads=heads, queries=queries)(torch.randn(3, 5, 8), padding).shape == (
                3,
                8 * queries,
            )


def test_every_module_with_own_parameters_can_be_drawn_anew():
    model = built(SMALL)
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            assert hasattr(module, "reset_parameters") or hasattr(module, "_reset_parameters"), type(module)
    before = model.pooling.queries.detach().clone()
    model.pooling.reset_parameters()
    assert not torch.equal(model.pooling.queries, before)
    assert model.pooling.queries.std() > 0.5


def test_the_classifier_keeps_the_size_of_its_signal():
    torch.manual_seed(3)
    model = PairClassifier(11, 7, replace(SMALL, classifier_width=256))
    hidden = torch.randn(500, model.classifier[0].in_features)
    for module in model.classifier[:4]:
        hidden = module(hidden)
        assert not isinstance(module, nn.Linear) or not module.bias.any()
    # E[relu(x)^2] = 1/2 and each layer doubles it, so a mean square of 1 comes out as 1
    assert hidden.square().mean().item() == pytest.approx(1.0, abs=0.25)


@cases("scale", [SMALL, POST])
def test_the_loss_is_the_mean_cross_entropy_and_reaches_every_parameter(scale):
    model = built(scale).train()
    labels = torch.tensor([3, 6])
    output = model(PREMISE, HYPOTHESIS, labels)
    picked = output["logits"].log_softmax(dim=1)[range(2), labels]
    torch.testing.assert_close(output["loss"], -picked.mean())
    assert "loss" not in model(PREMISE, HYPOTHESIS)
    output["loss"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert not model.encoder.embedding.weight[0].any()


def test_one_batch_can_be_learned():
    model = built(SMALL).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        loss = model(PREMISE, HYPOTHESIS, torch.tensor([0, 6]))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_a_row_of_padding_alone_keeps_one_position_and_stays_finite():
    model = built(SMALL)
    received = []
    model.pooling.register_forward_pre_hook(lambda _module, inputs: received.append(inputs[1]))
    logits = model(torch.zeros_like(PREMISE), HYPOTHESIS)["logits"]
    assert logits.isfinite().all()
    assert (~received[0]).sum(dim=1).tolist() == [1, 1, 2, 3]


def test_the_paper_scale_has_the_papers_size():
    model = PairClassifier(13, 7, LOGIC_SCALES["paper"])
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == 1.65


@cases(
    ("premise", "hypothesis"),
    [((4,), (2, 4)), ((2, 4), (3, 4)), ((2, 0), (2, 3)), ((0, 3), (0, 3)), ((2, 3, 1), (2, 3))],
)
def test_sides_that_do_not_fit_are_refused(premise, hypothesis):
    sides = [torch.ones(shape, dtype=torch.int64) for shape in (premise, hypothesis)]
    with pytest.raises(ShapeError, match=r"expected \(B, L\) and \(B, L'\)"):
        built(SMALL)(*sides)


@cases(
    ("changed", "message"),
    [
        ({"width": 7, "heads": 1}, "width is 7 with 1 heads"),
        ({"heads": 3}, "width is 8 with 3 heads"),
        ({"layers": 0}, "layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed, message):
    sizes = {"width": 8, "layers": 1, "heads": 2, "norm_first": True, "dropout": 0.0} | changed
    with pytest.raises(SettingError, match=message):
        Encoder(9, **sizes)


def test_one_label_or_no_query_is_refused():
    with pytest.raises(SettingError, match="num_labels is 1"):
        PairClassifier(9, 1, SMALL)
    with pytest.raises(SettingError, match="queries is 0"):
        QueryPooling(8, heads=2, queries=0)
