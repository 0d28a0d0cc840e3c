"""Loading the task: splits, ids, the cache, refusals and batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headwise.errors import DataError, SettingError
from headwise_lab.tasks.logic import data as logic_data
from headwise_lab.tasks.logic.data import GENERATOR_SEED, collate, load_logic
from headwise_lab.tasks.logic.formulas import RELATIONS
from headwise_lab.tasks.logic.generator import generate
from headwise_lab.tasks.logic.scales import LOGIC_SCALES

TOY = replace(LOGIC_SCALES["demo"], name="toy", generated_draws=3_000, train_operators=2, test_bins=(1, 2, 3))


def texts(data, split):
    return {
        (
            " ".join(data.vocabulary[i] for i in example["premise"]),
            " ".join(data.vocabulary[i] for i in example["hypothesis"]),
        )
        for example in split
    }


@pytest.fixture
def published(tmp_path):
    """A folder of small files in the published format, with the generator's pairs."""
    folder = tmp_path / "published"
    folder.mkdir()
    for number in range(4):
        pairs = [pair for pair in generate(6_000, seed=3, max_operators=3) if pair.operators == number]
        lines = [f"{pair.relation}\t{pair.premise}\t{pair.hypothesis}\n" for pair in pairs]
        cut = len(lines) // 5
        (folder / f"test{number}").write_text("".join(lines[:cut]))
        (folder / f"train{number}").write_text("".join(lines[cut:]))
    return folder


def test_generated_splits_are_disjoint_and_about_eighty_ten_ten():
    data = load_logic(None, replace(TOY, train_operators=3, test_bins=(0, 1, 2, 3)), None)
    train, dev, test = (texts(data, split) for split in (data.train, data.dev, data.test))
    assert train.isdisjoint(dev)
    assert train.isdisjoint(test)
    assert dev.isdisjoint(test)
    total = len(train) + len(dev) + len(test)
    assert total == sum(1 for _ in generate(3_000, seed=GENERATOR_SEED, max_operators=3))
    assert len(dev) / total == pytest.approx(0.1, abs=0.03)
    assert len(test) / total == pytest.approx(0.1, abs=0.03)


def test_pairs_of_training_with_their_sides_swapped_are_counted(published):
    data = load_logic(None, TOY, None)
    train = texts(data, data.train)
    expected = sum((hypothesis, premise) in train for premise, hypothesis in texts(data, data.test))
    assert 0 < expected == data.swapped < len(data.test)
    assert f"{expected} test pairs are training pairs with their sides swapped" in data.summary()
    with pytest.raises(SettingError, match=r"generated_draws is set, and .*published has pairs"):
        load_logic(published, replace(TOY, name="demo-generated_draws=3000"), None)


def test_more_draws_never_move_a_pair_to_another_split():
    few, many = (load_logic(None, replace(TOY, generated_draws=draws), None) for draws in (2_000, 4_000))
    for name in ("train", "dev", "test"):
        assert texts(few, getattr(few, name)) < texts(many, getattr(many, name))


def test_each_split_holds_its_bins_alone():
    data = load_logic(None, TOY, None)
    assert set(np.unique(data.train.bins)) == {0, 1, 2}
    assert set(np.unique(data.dev.bins)) == set(np.unique(data.test.bins)) == {1, 2, 3}


def test_an_example_decodes_to_the_pair_it_came_from():
    data = load_logic(None, replace(TOY, train_operators=3), None)
    known = {(pair.premise, pair.hypothesis): pair for pair in generate(3_000, seed=GENERATOR_SEED)}
    for split in (data.train, data.dev, data.test):
        for index, example in enumerate(split):
            premise, hypothesis = (
                " ".join(data.vocabulary[i] for i in example[side]) for side in ("premise", "hypothesis")
            )
            pair = known[premise, hypothesis]
            assert data.labels[example["label"]] == pair.relation
            assert split.bins[index] == pair.operators
            assert split.lengths[index] == max(len(premise.split()), len(hypothesis.split()))
    assert data.labels == RELATIONS


def test_files_give_their_test_lines_in_order_and_dev_comes_from_train(published):
    data = load_logic(published, replace(TOY, train_operators=3), None)

    def lines(name):
        return [tuple(line.split("\t")[1:]) for line in (published / name).read_text().splitlines()]

    in_order = [line for number in (1, 2, 3) for line in lines(f"test{number}")]
    decoded = [
        tuple(" ".join(data.vocabulary[i] for i in example[side]) for side in ("premise", "hypothesis"))
        for example in data.test
    ]
    assert decoded == in_order
    train_side = {line for number in (1, 2, 3) for line in lines(f"train{number}")}
    dev = texts(data, data.dev)
    assert dev < train_side
    assert dev.isdisjoint(in_order)
    assert dev.isdisjoint(texts(data, data.train))
    assert len(dev) / len(train_side) == pytest.approx(0.1, abs=0.03)


def test_a_cap_takes_a_nested_choice_from_all_bins_alike(published):
    small, large = (
        load_logic(published, replace(TOY, train_examples=cap, dev_examples=cap // 4), None) for cap in (40, 80)
    )
    assert (len(small.train), len(large.train), len(small.dev), len(large.dev)) == (40, 80, 10, 20)
    assert texts(small, small.train) < texts(large, large.train)
    assert texts(small, small.dev) < texts(large, large.dev)
    whole = load_logic(published, TOY, None).train
    assert large.train.bins.mean() == pytest.approx(whole.bins.mean(), abs=0.2)


def test_a_token_training_lacks_is_unknown(published):
    (published / "test1").write_text("#\t( not zebra )\ta\n")
    data = load_logic(published, TOY, None)
    assert "zebra" not in data.vocabulary
    assert data.vocabulary[data.test[0]["premise"][2]] == "<unk>"


def test_a_cached_load_equals_the_first_and_makes_nothing(tmp_path, monkeypatch):
    first = load_logic(None, TOY, tmp_path)
    monkeypatch.setattr(logic_data, "generate", None)
    second = load_logic(None, TOY, tmp_path)
    assert second.fingerprint == first.fingerprint
    assert second.vocabulary == first.vocabulary
    for name in ("train", "dev", "test"):
        assert list(getattr(first, name)) == list(getattr(second, name))
        assert getattr(first, name).bins.tolist() == getattr(second, name).bins.tolist()
    assert [path.name for path in tmp_path.iterdir()] == [f"logic-{first.fingerprint}.npz"]


def test_a_damaged_cache_is_made_anew(tmp_path):
    first = load_logic(None, TOY, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"not an archive"):
        path.write_bytes(damaged)
        assert list(load_logic(None, TOY, tmp_path).test) == list(first.test)
        assert path.read_bytes() == whole


def test_an_interrupted_write_leaves_no_cache_behind(tmp_path, monkeypatch):
    def interrupted(*_arguments, **_names):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_logic(None, TOY, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the cache cannot be written"):
        load_logic(None, TOY, tmp_path / "file")


@pytest.mark.parametrize(
    "changed",
    [
        {"generated_draws": 3_001},
        {"train_operators": 3},
        {"test_bins": (1, 2)},
        {"train_examples": 50},
        {"dev_examples": 5},
    ],
)
def test_the_fingerprint_changes_with_what_the_data_follows_from(changed):
    assert load_logic(None, replace(TOY, **changed), None).fingerprint != load_logic(None, TOY, None).fingerprint


def test_the_fingerprint_does_not_change_with_the_model_but_with_the_files(published):
    before = load_logic(published, TOY, None).fingerprint
    assert load_logic(published, replace(TOY, width=64, learning_rate=0.5), None).fingerprint == before
    with (published / "train1").open("a") as stream:
        stream.write("#\ta\tb\n")
    assert load_logic(published, TOY, None).fingerprint != before


def test_a_missing_folder_is_refused_with_what_was_expected(tmp_path):
    with pytest.raises(
        DataError, match=r"does not exist; expected a folder with train0, train1, train2 ... test3, plain or .gz"
    ):
        load_logic(tmp_path / "none", TOY, None)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file; expected a folder"):
        load_logic(tmp_path / "file", TOY, None)


def test_missing_files_are_refused_by_name(published):
    (published / "test2").unlink()
    (published / "train0").unlink()
    with pytest.raises(DataError, match="lacks train0, test2; expected each"):
        load_logic(published, TOY, None)


def test_a_folder_one_level_too_high_is_told_where_the_files_are(published):
    with pytest.raises(DataError, match=f"They seem to be in {published}"):
        load_logic(published.parent, TOY, None)


def test_both_forms_of_one_file_are_refused(published):
    (published / "test2.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"both test2 and test2\.gz"):
        load_logic(published, TOY, None)


def test_a_split_without_pairs_is_refused(published):
    for number in (1, 2, 3):
        (published / f"test{number}").write_text("")
    with pytest.raises(DataError, match="the test split of scale toy holds no pair"):
        load_logic(published, TOY, None)


def test_a_batch_is_padded_with_zeros_to_its_longest_side():
    data = load_logic(None, TOY, None)
    examples = [data.train[index] for index in (0, 3, 7, -1)]
    batch = collate(examples)
    for side in ("premise", "hypothesis"):
        assert batch[side].shape == (4, max(len(example[side]) for example in examples))
        assert [[token for token in row if token] for row in batch[side].tolist()] == [e[side] for e in examples]
    assert batch["labels"].tolist() == [example["label"] for example in examples]


def test_an_empty_batch_or_side_is_refused():
    with pytest.raises(DataError, match="no examples"):
        collate([])
    with pytest.raises(DataError, match="hypothesis 0 of the batch has no tokens"):
        collate([{"premise": [4], "hypothesis": [], "label": 0}])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"width": 0}, "width is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"train_operators": 13}, "train_operators is 13"),
        ({"test_bins": ()}, r"test_bins is \(\)"),
        ({"test_bins": (2, 1)}, r"test_bins is \(2, 1\)"),
        ({"test_bins": (1, 13)}, "test_bins is 13"),
        ({"train_examples": 0}, "train_examples is 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
    ],
)
def test_a_scale_outside_its_range_is_refused(changed, message):
    with pytest.raises(SettingError, match=message):
        replace(TOY, **changed)


def test_the_named_scales_are_those_of_the_papers_protocol():
    assert set(LOGIC_SCALES) == {"demo", "cpu", "paper"}
    assert all(name == scale.name for name, scale in LOGIC_SCALES.items())
    for name in ("cpu", "paper"):
        assert (LOGIC_SCALES[name].train_operators, LOGIC_SCALES[name].test_bins) == (6, tuple(range(1, 13)))
