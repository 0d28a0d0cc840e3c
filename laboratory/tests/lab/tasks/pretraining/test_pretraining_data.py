"""Text of any size as shards of packed rows: what is read and written, how it goes on, and the stream of batches."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases import cases
from headwise.atomic import seal
from headwise.errors import DataError
from headwise_lab.data import documents
from headwise_lab.data.documents import find_files, read_lines, read_pieces
from headwise_lab.packed_text import prepare as preparing
from headwise_lab.packed_text.prepare import prepare_text
from headwise_lab.packed_text.shards import StreamBatches, stack_rows
from headwise_lab.tasks.pretraining.data import PACKING, Packer, draw_masked, number_segments
from headwise_lab.tasks.pretraining.wordpieces import learn_word_pieces, read_word_pieces
from lab.tasks.pretraining.pretraining_toy import document, load_text, open_text, small, write_jsonl


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    prepare_text(PACKING, (write_jsonl(folder / "docs.jsonl.gz", 120),), small(), "f" * 16, folder / "whole")
    return folder / "whole"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_documents_of_both_forms_come_in_pieces_that_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LONGEST", 100)
    texts = [document(n) for n in range(3)]
    (tmp_path / "a.txt").write_text("\n" + "\n\n \n".join(texts) + "\n\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.write("\n".join(json.dumps({"text": text}) for text in [*texts, "  "]) + "\n\n")
    for path in find_files(tmp_path):
        *found, last = read_pieces(path)
        if path.name == "b.jsonl.gz":
            assert last.is_blank
        else:
            found.append(last)
        assert max(len(piece.text) for piece in found) <= 100
        assert [piece.begins for piece in found].count(True) == [piece.ends for piece in found].count(True) == 3
        joined = "".join("\0" * piece.begins + piece.text for piece in found).split("\0")[1:]
        assert [text.split() for text in joined] == [text.split() for text in texts]
    assert [path.name for path in find_files(tmp_path)] == ["a.txt", "b.jsonl.gz"]


def test_a_document_that_is_not_read_to_its_end_does_not_spill_into_the_next(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    found = documents._read_paragraphs(tmp_path / "a.txt")
    assert next(next(found)) == "one"
    assert list(next(found)) == ["three"]


@cases("line", ['{"text": 5}', '{"content": "a"}', "plain words", '["text"]', "[" * 100_000])
def test_a_bad_line_is_named(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=r'a\.jsonl, line 2: expected a JSON object with a document under "text"'):
        list(read_pieces(path))


def test_half_of_a_surrogate_pair_is_named_before_anything_is_made(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "bad \\ud83d emoji"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .* is half of a surrogate pair; take it out"):
        prepare_text(PACKING, (path,), small(), "f" * 16, tmp_path / "made")
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"], "nothing is left of what was refused"


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "two"}\n', encoding="utf-8")
    assert [piece.text for path in find_files(tmp_path) for piece in read_pieces(path)] == ["one", "two"]


def test_text_without_ends_of_lines_takes_no_more_memory_or_time_a_word(tmp_path):
    peaks = []
    for words in (200_000, 1_600_000):
        (tmp_path / "a.txt").write_text("wörd hello " * words, encoding="utf-8")
        tracemalloc.start()
        assert sum(len(piece.text) for piece in read_pieces(tmp_path / "a.txt")) == 11 * words
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@cases("longest", [1, 2, 3, 7, 1000])
def test_parts_of_lines_add_up_to_the_lines_wherever_they_are_cut(longest, tmp_path):
    lines = ["\ufeffaé b", "", " ", "c", "🙂 long one", "last"]
    (tmp_path / "a.txt").write_bytes("\r\n".join(lines).encode())
    found: list[str] = []
    for part in read_lines(tmp_path / "a.txt", longest):
        if part.begins:
            found.append("")
        found[-1] += part.text
    assert [line.rstrip("\r") for line in found] == [lines[0][1:], *lines[1:]]
    (tmp_path / "a.txt").write_bytes(b"fine\nb\xffd")
    with pytest.raises(DataError, match=r"a\.txt, line 2: not UTF-8"):
        list(read_lines(tmp_path / "a.txt", longest))


def test_letters_that_are_words_of_their_own_need_no_second_piece_and_no_more_are_learned_than_asked_for():
    texts = [chr(0x4E00 + number) * (1 + number % 3) for number in range(5000)] + ["the cat sat"] * 9
    words = learn_word_pieces(lambda: texts, 8_000)
    learned = words.tokenizer.get_vocab()
    assert len(learned) <= 8_000
    assert "##\u4e00" not in learned
    assert {"##at", "the"} <= set(learned)
    assert sum(len(one) == 1 for one in learned) == 1_000
    for size in (7, 12, 40):
        assert learn_word_pieces(lambda: texts, size).vocabulary_size <= size
    again = learn_word_pieces(lambda: list(reversed(texts)), 8_000)
    assert again.tokenizer.get_vocab() == learned


def test_shards_that_are_shuffled_together_are_opened_once(prepared, monkeypatch):
    opened: list[str] = []
    load = np.load
    monkeypatch.setattr(np, "load", lambda path, **how: (opened.append(Path(path).name), load(path, **how))[1])
    rows = open_text(prepared).train
    for number in [*range(0, 8 * 20, 7)] * 3:
        rows.ids(number)
    assert len(opened) == len(set(opened)) == 8
    rows.ids(8 * 20 + 1)
    rows.ids(0)
    assert opened[8:] == ["train-00008.npy", "train-00000.npy"]


def test_places_without_text_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no text; expected a file or a folder of files: \.txt"):
        find_files(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        find_files(tmp_path / "none")
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(DataError, match="is of another form"):
        find_files(tmp_path / "a.pdf")


def test_rows_hold_every_token_once_and_no_padding():
    packer, stream, rows = Packer(10, start=1, end=2), [], []
    for number in range(40):
        ids = [10 + (number * 7 + place) % 50 for place in range(1 + number % 13)]
        stream += ids
        rows.append(packer.add(ids[:3], ends=len(ids) <= 3))
        if len(ids) > 3:
            rows.append(packer.add(ids[3:], ends=True))
    made = np.concatenate(rows)
    assert made.shape[1] == 10
    assert (made[:, 0] == 1).all()
    assert (made[:, -1] == 2).all()
    assert (made[:, 1] != 2).all(), "a row never begins with the end of a document"
    kept = made[(made != 1) & (made != 2)].tolist()
    assert kept + [one for one in packer.held if one != 2] == stream
    inside = Packer(10, start=1, end=2).add([9] * 2000, ends=False)
    two = (inside[:, 1:-1] == 2).any(axis=1)
    assert 0.85 < two.mean() < 0.95
    assert (np.argmax(inside[two][:, 1:] == 2, axis=1) == 3).all()
    types = number_segments(inside, end=2)
    assert types[two][:, :5].max() == 0
    assert types[two][:, 5:].min() == 1
    assert types[~two].max() == 0


def test_masks_avoid_special_tokens_and_change_with_draw_and_row():
    row = np.array([1, 5, 6, 2, 7, 8, 9, 2])
    seen = {tuple(draw_masked(row, (1, 2), 3, draw=d, number=n)) for d in range(30) for n in range(2)}
    assert len(seen) > 5
    assert not {0, 3, 7} & {place for places in seen for place in places}
    assert {place for places in seen for place in places} == {1, 2, 4, 5, 6}


def test_a_preparation_stopped_in_the_middle_of_a_file_goes_on_to_the_same_shards(prepared, tmp_path, monkeypatch):
    files, write = find_files(prepared.parent / "docs.jsonl.gz"), preparing._write_array
    assert len(list(prepared.glob("train-*.npy"))) > 8

    def stopping(path, rows):
        if path.name in ("train-00003.npy", "train-00006.npy") and not path.with_suffix(".stop").exists():
            path.with_suffix(".stop").touch()
            raise KeyboardInterrupt
        write(path, rows)

    monkeypatch.setattr(preparing, "_write_array", stopping)
    monkeypatch.setattr(preparing, "BATCH", 5)
    encoded: list[int] = []
    add = preparing._Writer.add
    monkeypatch.setattr(preparing._Writer, "add", lambda self, batch: (encoded.append(len(batch)), add(self, batch))[1])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare_text(PACKING, files, small(), "f" * 16, tmp_path / "again")
        assert not (tmp_path / "again").exists()
    prepare_text(PACKING, files, small(), "f" * 16, tmp_path / "again")
    for left in (tmp_path / "again").glob("*.stop"):
        left.unlink()
    assert content(tmp_path / "again") == content(prepared)
    assert sum(encoded) < 120 + 4 * 5, "what was encoded before is not encoded again"
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


@cases("held", [{}, [], {"total": "x", "pieces": 5}, {"pieces": {}}])
def test_a_state_that_lost_its_digests_is_refused(held, prepared, tmp_path):
    state = tmp_path / f".again-{'f' * 16}" / preparing.STATE
    state.parent.mkdir()
    state.write_text(json.dumps(held))
    with pytest.raises(DataError, match=r"state\.json is not the state of a preparation; delete .*again"):
        prepare_text(PACKING, find_files(prepared.parent / "docs.jsonl.gz"), small(), "f" * 16, tmp_path / "again")


@pytest.mark.full
def test_memory_does_not_grow_with_the_text(tmp_path):
    peaks = []
    words = learn_word_pieces(lambda: [document(n) for n in range(20)], 120)
    (tmp_path / "t.json").write_text(words.to_json())
    for count in (300, 1500):
        files = (write_jsonl(tmp_path / f"{count}.jsonl.gz", count),)
        tracemalloc.start()
        sizes = small(tokenizer=tmp_path / "t.json", shard_bytes=400 * 32)
        prepare_text(PACKING, files, sizes, "f" * 16, tmp_path / str(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def test_a_shard_is_never_larger_than_asked_for(prepared):
    sizes = [len(np.load(path)) for path in sorted(prepared.glob("train-*.npy"))]
    assert set(sizes[:-1]) == {20}
    assert 0 < sizes[-1] <= 20
    assert preparing.TextPreparation().shard_bytes + 1_000 < 15_000_000


def test_every_pass_has_every_row_once_in_another_order():
    batches = StreamBatches([20] * 17 + [7], batch_size=9, steps=100, seed=3)
    seen = [index for batch in batches for index in batch]
    assert all(len(batch) == 9 for batch in batches)
    first, second = seen[:347], seen[347:694]
    assert sorted(one % 347 for one in first) == sorted(one % 347 for one in second) == list(range(347))
    assert [one % 347 for one in first] != [one % 347 for one in second]
    assert {one // 347 for one in second} == {first[0] // 347 + 1}, "a pass has masks of its own"
    other = StreamBatches([20] * 17 + [7], batch_size=9, steps=100, seed=4)
    assert next(iter(other)) != next(iter(batches))


@cases(("round_", "batch"), [(0, 1), (0, 41), (1, 0), (2, 17)])
def test_the_stream_goes_on_in_the_middle_of_a_shard_to_the_same_batch(round_, batch):
    sizes, steps = [20] * 17 + [7], 50
    whole = StreamBatches(sizes, batch_size=9, steps=3 * steps, seed=3)
    late = StreamBatches(sizes, batch_size=9, steps=steps, seed=3)
    late.set_epoch(round_)
    place = round_ * steps + batch
    assert list(islice(whole, place, place + 4)) == list(islice(late, batch, batch + 4))[:4]


def test_an_example_hides_fifteen_percent_and_knows_what_it_hid(prepared):
    data = open_text(prepared)
    assert len(data.train) == sum(data.shards)
    number = 25  # in the second shard
    row = np.load(prepared / "train-00001.npy")[5].astype(np.int64)
    assert np.array_equal(data.train.ids(number), row)
    example = data.train[number + 7 * len(data.train)]
    assert len(example.positions) == round(0.15 * 14) == 2
    restored = example.input_ids.copy()
    assert (restored[example.positions] == data.words.mask).all()
    restored[example.positions] = example.labels
    assert np.array_equal(restored, row)
    again, other = data.train[number + 7 * len(data.train)], data.train[number + 8 * len(data.train)]
    assert np.array_equal(again.positions, example.positions)
    assert not np.array_equal(other.positions, example.positions)
    batch = stack_rows([example, other])
    assert {name: tuple(one.shape) for name, one in batch.items()} == {
        "input_ids": (2, 16),
        "token_type_ids": (2, 16),
        "positions": (2, 2),
        "labels": (2, 2),
    }


def test_held_out_documents_are_in_one_split_alone(prepared):
    data, names = open_text(prepared), {}
    unknown = {data.words.tokenizer.token_to_id("[UNK]")}
    for split in ("train", "dev", "test"):
        rows = getattr(data, split)
        text = data.words.tokenizer.decode([int(i) for n in range(len(rows)) for i in rows.ids(n) if i not in unknown])
        names[split] = {word for word in text.split() if word.startswith("unlikely")}
    assert names["dev"]
    assert names["test"]
    assert not names["train"] & (names["dev"] | names["test"])


def test_the_users_tokenizer_is_taken_and_one_without_masks_is_refused(prepared, tmp_path):
    mine = prepared / "tokenizer.json"
    files = find_files(prepared.parent / "docs.jsonl.gz")
    folder = tmp_path / "mine"
    prepare_text(PACKING, files, small(tokenizer=mine), "a" * 16, folder)
    assert content(folder)["train-00002.npy"] == content(prepared)["train-00002.npy"]
    assert open_text(folder).record["tokenizer"] == "given"
    (tmp_path / "bad.json").write_text(mine.read_text().replace("[MASK]", "[OTHER]"))
    with pytest.raises(DataError, match=r"bad\.json lacks \[MASK\]; expected a tokenizer with"):
        read_word_pieces(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        read_word_pieces(tmp_path / "bad.json")


def write_sealed(folder: Path, record: dict[str, Any]) -> None:
    """Write the record of a prepared folder with the digests of what is there now."""
    (folder / "record.json").write_text(json.dumps(seal(record, folder, record["file_digests"])))


def test_text_too_small_for_its_splits_and_a_damaged_shard_are_refused(prepared, tmp_path):
    (tmp_path / "few.txt").write_text("a few words.\n\nand a few more.\n")
    with pytest.raises(DataError, match=r"few\.txt: of 2 documents the dev split came out empty, .* by a blank line"):
        prepare_text(PACKING, (tmp_path / "few.txt",), small(), "f" * 16, tmp_path / "few")
    data = load_text(prepared.parent / "docs.jsonl.gz", small(), tmp_path / "cache", 3)
    assert len(data.dev) == 3
    shard = data.folder / "train-00001.npy"
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(DataError, match=r"train-00001\.npy was changed .*; prepare the text again"):
        data.train[25]
    kept = json.loads((data.folder / "record.json").read_text())
    for name, value in (("shards", [20, "x"]), ("rows", {}), ("documents", -1), ("corpus", None), ("length", 2**70)):
        write_sealed(data.folder, kept | {name: value})
        with pytest.raises(DataError, match=r"record\.json is not the record of prepared text"):
            open_text(data.folder)
    write_sealed(data.folder, kept | {"format": f"{'g' * 5_000}-1"})
    with pytest.raises(DataError, match=r"was prepared for g{60}; prepare the text for pretraining"):
        open_text(data.folder)
    (data.folder / "record.json").write_text(json.dumps(kept))
    shard.unlink()
    with pytest.raises(DataError, match=r"lacks train-00001\.npy"):
        open_text(data.folder)


def test_a_text_that_spells_a_special_token_is_text():
    words = learn_word_pieces(lambda: ["a mask [MASK] here"] * 3, 60)
    assert words.mask not in words.encode_batch(["a [MASK] here"])[0]
