"""Ragged arrays and their cache, cuts into parts, files of documents, and batches by length and by tokens."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from cases import cases, find_unrefused
from headwise.errors import DataError, SettingError, ShapeError
from headwise.texts.batching import LengthBatches, TokenBatches, batch_by_length, batch_by_tokens
from headwise_lab.data.arrays import Ragged, cache_arrays, read_arrays
from headwise_lab.data.documents import find_files, read_pieces
from headwise_lab.data.splits import assign_parts, drop_shared, split_by_hash


def test_a_cache_that_lost_its_list_with_an_array_is_made_again_and_a_file_of_version_0_1_is_read(tmp_path: Path):
    made = {"tokens": np.arange(5), "labels": np.arange(3.0)}
    np.savez(tmp_path / "data.npz", tokens=made["tokens"])
    assert list(read_arrays(tmp_path / "data.npz")) == ["tokens"]
    with pytest.raises(DataError, match=r"data\.npz is damaged \(ValueError: it does not list its arrays\)"):
        read_arrays(tmp_path / "data.npz", listed=True)
    assert list(cache_arrays(tmp_path, "data", lambda: made)) == ["tokens", "labels"]
    assert list(cache_arrays(tmp_path, "data", dict)) == ["tokens", "labels"]


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 300), max_size=6), max_size=12))
def test_packed_sequences_come_back_as_they_went_in(sequences):
    packed = Ragged.of(sequences)
    assert [packed[index] for index in range(len(packed))] == sequences
    assert packed.lengths.tolist() == [len(sequence) for sequence in sequences]
    fits = all(token < 256 for sequence in sequences for token in sequence)
    assert packed.values.dtype == (np.uint8 if fits else np.int32)


def test_packed_sequences_end_where_they_end():
    packed = Ragged.of([[1], [2, 3]])
    assert packed[-1] == [2, 3]
    with pytest.raises(IndexError):
        packed[2]
    with pytest.raises(ShapeError, match="offsets"):
        Ragged(packed.values, packed.offsets[:-1])


TEXTS = st.lists(st.text(alphabet="abc", min_size=0, max_size=3), min_size=3, max_size=60)


@given(TEXTS, st.integers(2, 6), st.randoms(use_true_random=False))
def test_equal_texts_are_in_one_part_wherever_they_stand_and_parts_are_as_equal_as_they_can_be(texts, count, draw):
    if len(set(texts)) < count:
        with pytest.raises(DataError, match="different texts cannot be cut into"):
            assign_parts(texts, count)
        return
    found = assign_parts(texts, count)
    assert len({*zip(texts, found.tolist(), strict=True)}) == len(set(texts))
    sizes = np.bincount(found, minlength=count)
    assert len(sizes) == count
    assert sizes.min() >= 1
    assert sizes.max() <= len(texts) / count + max(Counter(texts).values()) + count
    order = list(range(len(texts)))
    draw.shuffle(order)
    assert assign_parts([texts[i] for i in order], count).tolist() == found[order].tolist()


def test_a_cut_gives_each_text_to_one_split_and_dev_is_the_next_test():
    texts = [str(number % 37) for number in range(90)]
    for fold in range(4):
        found = split_by_hash(texts, count=4, fold=fold)
        assert sorted(np.concatenate([*found.values()]).tolist()) == list(range(90))
        assert found["dev"].tolist() == split_by_hash(texts, count=4, fold=(fold + 1) % 4)["test"].tolist()
    # what stands in a later split too is left out of the earlier
    found = drop_shared({"train": ["a", "b", "c", "a"], "dev": ["b", "d"], "test": ["d", "c", "e"]})
    assert {name: places.tolist() for name, places in found.items()} == {"train": [0, 3], "dev": [0], "test": [0, 1, 2]}


def test_endings_in_capitals_are_read_as_others(tmp_path: Path):
    (tmp_path / "A.TXT").write_text("one\n\ntwo\n")
    (tmp_path / "B.JSONL").write_text('{"text": "three"}\n')
    found = find_files(tmp_path)
    assert [find_files(path) for path in found] == [(path,) for path in found]
    assert [piece.text for path in found for piece in read_pieces(path)] == ["one", "two", "three"]


LENGTHS = np.random.default_rng(3).lognormal(3.0, 0.5, size=(2_003, 2)).astype(int) + 1
TOKENS = 400
MAKE = {
    "length": lambda seed: LengthBatches(LENGTHS.max(axis=1), batch_size=16, seed=seed),
    "tokens": lambda seed: TokenBatches(LENGTHS, tokens=TOKENS, seed=seed),
}
sequences = st.lists(st.integers(1, 30), min_size=1, max_size=80)


def order(kind, seed, epoch):
    sampler = MAKE[kind](seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def flat(batches):
    return [index for batch in batches for index in batch]


@settings(max_examples=50)
@given(sequences, st.integers(1, 9), st.integers(1, 5), st.integers(0, 10**6), st.integers(0, 50))
def test_every_example_occurs_once_and_only_the_last_batch_is_short(lengths, batch_size, window, seed, epoch):
    sampler = LengthBatches(lengths, batch_size=batch_size, seed=seed, window=window)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    assert all(len(batch) == batch_size for batch in batches[:-1])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=80),
    st.integers(30, 90),
    st.none() | st.integers(1, 5),
    st.integers(0, 10**6),
    st.integers(0, 50),
)
def test_every_example_occurs_once_and_no_batch_exceeds_its_bounds(lengths, tokens, examples, seed, epoch):
    sampler = TokenBatches(lengths, tokens=tokens, seed=seed, examples=examples)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    sides = np.array(lengths)
    for batch in batches:
        assert len(batch) * sides[batch].max() <= tokens
        assert len(batch) <= (examples or len(lengths))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 70), st.integers(1, 9))
def test_a_batch_ends_only_where_the_next_example_would_not_fit(lengths, tokens, examples):
    ordered = sorted(lengths)
    position = 0
    for batch in batch_by_tokens(lengths, tokens=tokens, examples=examples):
        assert sorted(lengths[index] for index in batch) == ordered[position : position + len(batch)]
        position += len(batch)
        if position < len(ordered) and len(batch) < examples:
            assert (len(batch) + 1) * ordered[position] > tokens
    assert position == len(ordered)


@cases("kind", MAKE)
def test_the_order_follows_from_seed_and_epoch_alone_and_epochs_have_other_batches(kind):
    first = order(kind, 4, 2)
    np.random.default_rng(0).random()
    assert order(kind, 4, 2) == first
    assert first not in (order(kind, 4, 3), order(kind, 5, 2), order(kind, 2, 4))
    epochs = [order(kind, 4, epoch) for epoch in range(3)]
    assert len({len(batches) for batches in epochs}) == 1
    contents = [{frozenset(batch) for batch in batches} for batches in epochs]
    assert len(contents[0] & contents[1]) < len(contents[0]) / 2


def test_batches_pad_little_and_are_mixed():
    longest = LENGTHS.max(axis=1)

    def waste(batches):
        return sum(max(longest[b]) * len(b) - longest[b].sum() for b in batches) / longest.sum()

    windowed = list(LengthBatches(longest, batch_size=16, seed=1))
    assert waste(windowed) < 0.1 < 0.3 < waste(list(LengthBatches(longest, batch_size=16, seed=1, window=1)))
    full = order("tokens", 4, 1)
    for side in (0, 1):
        padded = sum(len(batch) * LENGTHS[batch, side].max() for batch in full)
        assert padded < 1.23 * LENGTHS[:, side].sum()
    assert len(full) < 1.35 * longest.sum() / TOKENS
    for batches in (windowed, full):
        means = [LENGTHS[batch].mean() for batch in batches]
        assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4
    # examples of one length are mixed from the whole data
    same = [7] * 1_000
    for batches in (LengthBatches(same, batch_size=10, seed=2, window=5), TokenBatches(same, tokens=70, seed=2)):
        assert min(max(batch) - min(batch) for batch in batches) > 200


@cases("kind", MAKE)
def test_accelerate_sets_the_epoch_resumes_in_the_middle_and_shares_an_epoch(kind):
    def prepared():
        loader = DataLoader(range(len(LENGTHS)), batch_sampler=MAKE[kind](4), collate_fn=list)
        return prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=False)

    one = prepared()
    one.set_epoch(3)
    whole = list(one)
    assert whole == order(kind, 4, 3)
    rest = skip_first_batches(prepared(), 20)
    rest.set_epoch(3)
    # the Trainer reaches the wrapped sampler itself; accelerate's own set_epoch does not
    rest.batch_sampler.batch_sampler.set_epoch(3)
    assert list(rest) == whole[20:]
    shards = [list(BatchSamplerShard(MAKE[kind](4), 2, index, even_batches=False)) for index in range(2)]
    assert abs(len(shards[0]) - len(shards[1])) <= 1
    assert sorted(flat(shards[0] + shards[1])) == list(range(len(LENGTHS)))


def test_half_a_million_examples_are_planned_and_ordered_in_no_time():
    lengths = np.random.default_rng(0).integers(1, 100, size=(500_000, 2))
    began = time.process_time()
    next(iter(TokenBatches(lengths, tokens=4096, seed=1)))
    # about 0.15 s; a loop over examples takes several seconds
    assert time.process_time() - began < 1.5


def test_sorted_batches_cover_all_from_short_to_long():
    longest = [LENGTHS[batch].max() for batch in batch_by_tokens(LENGTHS, tokens=TOKENS)]
    assert longest == sorted(longest)
    batches = batch_by_length(LENGTHS[:, 0], 64)
    assert sorted(flat(batches)) == list(range(len(LENGTHS)))
    assert (np.diff(LENGTHS[flat(batches), 0]) >= 0).all()
    assert [len(batch) for batch in batches] == [64] * 31 + [19]


def test_bad_settings_are_refused():
    assert not find_unrefused(
        [
            (lambda: LengthBatches([1], batch_size=0, seed=0), SettingError, "batch_size is 0"),
            (lambda: LengthBatches([1], batch_size=1, seed=0, window=0), SettingError, "window is 0"),
            (lambda: LengthBatches([1], batch_size=1, seed=0).set_epoch(-1), SettingError, "epoch is -1"),
            (lambda: LengthBatches([], batch_size=1, seed=0), DataError, "no examples"),
            (lambda: TokenBatches([1], tokens=0, seed=0), SettingError, "tokens is 0"),
            (lambda: TokenBatches([1], tokens=1, seed=0, examples=0), SettingError, "examples is 0"),
            (lambda: TokenBatches([1], tokens=1, seed=-1), SettingError, "seed is -1"),
            (lambda: TokenBatches([1], tokens=1, seed=0).set_epoch(-1), SettingError, "epoch is -1"),
            (lambda: TokenBatches([[3, 4], [2, 9]], tokens=8, seed=0), SettingError, "tokens is 8 but example 1 has 9"),
            (lambda: TokenBatches([], tokens=1, seed=0), DataError, "no examples"),
        ]
    )
