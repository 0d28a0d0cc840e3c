"""Role masks of the source side: aligned with subwords, kept during beam search, and the same after a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from cases import cases
from headwise.errors import DataError, SettingError
from headwise.heads.taps import Taps
from headwise.roles.word_table import WordTable, words_of_tokens
from headwise_lab.data.arrays import Ragged
from headwise_lab.data.subwords import END, Subwords, learn_subwords
from headwise_lab.experiment.arm import Guided
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.tasks.translation import task as translation_module
from headwise_lab.tasks.translation.role_masks import SourceMasks, Sources, learn_masks
from headwise_lab.tasks.translation.task import TranslationTask
from headwise_lab.training.attach import attach_arm
from lab.tasks.translation import translation_toy
from lab.tasks.translation.translation_toy import WORDS, parse_without_spacy, write_toy_corpus

TASK = TranslationTask()
SIZES = {"heads": 4, "encoder_layers": 2, "vocabulary_size": 280, "averaged": 1, "beams": 3, "test_examples": 10}
TOY = dataclasses.replace(translation_toy.TOY, **SIZES, train_examples=60)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = {**WORDS, ",": ","}
    return write_toy_corpus(tmp_path_factory.mktemp("corpus"), words=words, sizes=(90, 12, 12), longest=12)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parse_without_spacy(monkeypatch)


def subwords() -> Subwords:
    return learn_subwords(["the unlikely dog runs , fast ."] * 3, vocabulary_size=268)


def encoded(text: str, of: Subwords) -> list[int]:
    return [*of.encode(text), END]


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for place, row in zip(ids, rows, strict=True):
        place[: len(row)] = torch.tensor(row)
    return ids, ids != 0


def words_of(row: list[int], of: Subwords) -> torch.Tensor:
    """The number of each token's word, where blanks stand between words; the end is a word of its own."""
    words, place = [], -1
    for piece in [of.tokenizer.decode([id_ - of.shift]) for id_ in row[:-1]]:
        place += piece.startswith(" ") or place < 0
        words.append(place)
    return torch.tensor([*words, place + 1])


def test_the_subwords_of_a_word_share_its_rows_and_columns_and_the_end_is_a_special_token():
    tokens, text = subwords(), "the unlikely dog , it ran"
    row = encoded(text, tokens)
    sources = Sources(tokens, lambda texts: [WordTable.split(one) for one in texts])
    made = learn_masks(Guided(roles=("separator", "window")), sources, Ragged.of([row]), num_heads=3, seed=4)
    ids, real = padded([row])
    mask = made({"input_ids": ids, "attention_mask": real})
    number = words_of(row, tokens)
    assert len(number) > len(set(number.tolist()))
    assert torch.equal(mask.roles[0, 1], (number[:, None] - number[None, :]).abs() <= 1)
    columns = (number == text.split().index(",")) | (number == number[-1])
    assert torch.equal(mask.roles[0, 0], columns.expand(len(row), -1))
    assert (mask.names, mask.heads, mask.num_heads) == (("separator", "window"), (0, 1), 3)


def test_what_a_source_gets_does_not_depend_on_its_batch_and_padding_is_left_out():
    tokens = subwords()
    rows = [encoded(text, tokens) for text in ("the dog runs , fast .", "a dog", "unlikely , the dog runs fast , fast")]
    guided = Guided(roles=("separator", "window"), random=("window",))

    def made() -> SourceMasks:
        sources = Sources(tokens, lambda texts: [WordTable.split(text) for text in texts])
        return learn_masks(guided, sources, Ragged.of(rows), num_heads=2, seed=4)

    one, other = made(), made()
    ids, real = padded(rows)
    together = one({"input_ids": ids, "attention_mask": real}).roles
    for place in (2, 0, 1):
        alone_ids, alone_real = padded([rows[place]])
        alone = other({"input_ids": alone_ids, "attention_mask": alone_real}).roles
        size = alone.shape[-1]
        assert torch.equal(together[place, :, :size, :size], alone[0])
        assert not together[place, :, :, size:].any()


def test_ids_that_do_not_come_back_from_their_text_are_refused():
    tokens = subwords()
    # a merged pair taken apart reads the same and is encoded otherwise
    whole = encoded("the dog", tokens)
    apart = [*(id_ for letter in "the" for id_ in tokens.encode(letter)), *tokens.encode(" dog"), END]
    assert apart != whole
    assert tokens.decode(apart) == tokens.decode(whole)
    sources = Sources(tokens, lambda texts: [WordTable.split(text) for text in texts])
    made = learn_masks(Guided(roles=("window",)), sources, Ragged.of([whole]), num_heads=2, seed=4)
    ids, real = padded([apart])
    with pytest.raises(DataError, match="the subwords of 'the dog' do not come back from their text"):
        made({"input_ids": ids, "attention_mask": real})


def test_a_source_that_was_cut_keeps_its_words_though_the_cut_is_inside_one():
    tokens, text = learn_subwords(["the ünlikely dög runs , fast ."] * 3, vocabulary_size=268), "the ünlikely dög ünlik"
    row = encoded(text, tokens)
    sources = Sources(tokens, lambda texts: [WordTable.split(one) for one in texts])

    def words(ids: list[int]) -> tuple[list[tuple[int, int]], int]:
        (number,) = sources.numbers([ids])
        pieces, table = sources.pieces(number), sources.table(number)
        assert len(pieces.offsets) == len(pieces.special_tokens_mask) == len(ids)
        return words_of_tokens(pieces.offsets[:-1], table.spans), len(table)

    whole, count = words(row)
    assert count == 4
    others = 0
    for size in range(1, len(row)):
        cut = [*row[:size], END]
        found, there = words(cut)
        # of a word that is cut in its first character nothing can be read, and it stands for the one before
        assert found == [(min(first, there - 1), min(last, there - 1)) for first, last in whole[:size]]
        assert there >= whole[size - 1][1]
        others += encoded(tokens.decode(cut), tokens) != cut
    assert others > 1


@pytest.mark.full
@cases("model", ["seq2seq", "marian"])
def test_each_source_of_a_beam_search_has_its_own_masks(model, corpus, cache):
    scale = dataclasses.replace(TOY, model=model)
    data = TASK.load(corpus, scale, cache)
    network, methods = attach_arm(TASK, parse_arm("guided:roles=separator/rare/window,drop=rare"), data, scale, seed=2)
    sites, tokens, read = methods.heads.kind("self"), data.whole.tokenizer, []
    hook = network.get_encoder().register_forward_pre_hook(
        lambda _m, _given, named: read.append(named["input_ids"]), with_kwargs=True
    )
    with Taps(sites, weights=True) as taps, methods.evaluating(network):
        translation_module.translate_split(network, data.test, data.whole, beams=3, length_penalty=1.0)
        captures = taps.read()
    hook.remove()
    (ids,) = read
    assert [len(capture.weights) for capture in captures] == [len(data.test)] * 2
    assert len({int(row.count_nonzero()) for row in ids}) > 3
    for place, row in enumerate(ids):
        source = row[row != 0].tolist()
        number = words_of(source, tokens)
        comma = [tokens.tokenizer.decode([id_ - tokens.shift]).strip() == "," for id_ in source[:-1]]
        columns = torch.tensor([*comma, True]).expand(len(source), -1)
        near = (number[:, None] - number[None, :]).abs() <= 1
        free = torch.ones_like(near)
        expected = torch.stack([columns, free, near, free])
        for capture in captures:
            seen = capture.weights[place] > 0
            assert torch.equal(seen[:, : len(source), : len(source)], expected)
            assert not seen[:, : len(source), len(source) :].any()


@pytest.mark.full
@cases("model", ["seq2seq", "marian"])
def test_the_masks_act_in_the_encoder_whenever_a_source_is_read(model, corpus, cache):
    scale = dataclasses.replace(TOY, model=model)
    data = TASK.load(corpus, scale, cache)
    arms = {name: attach_arm(TASK, parse_arm(name), data, scale, seed=2) for name in ("plain", "guided:roles=window")}
    batch = TASK.collate([data.train[place] for place in range(5)])
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    states = {}
    for name, (network, methods) in arms.items():
        seen = []
        handle = network.get_encoder().register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out[0]))
        with methods.evaluating(network):
            network(**batch)
            # unseen sources too have masks, made when they come
            found = translation_module.translate_split(network, data.test, data.whole, beams=3, length_penalty=1.0)
            network.generate(**source, num_beams=1, max_new_tokens=2)
        handle.remove()
        states[name] = seen
        assert len(found) == 10
    plain, guided = arms["plain"][0], arms["guided:roles=window"][0]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), guided.parameters(), strict=True))
    real = batch["attention_mask"].bool()
    for call in (0, -1):
        assert (states["plain"][call] - states["guided:roles=window"][call])[real].abs().max() > 1e-4
    torch.testing.assert_close(states["guided:roles=window"][0][real], states["guided:roles=window"][-1][real])


def test_roles_that_do_not_fit_are_refused(corpus, cache):
    data = TASK.load(corpus, TOY, cache)
    with pytest.raises(DataError, match="the roles dependency, major need parses"):
        attach_arm(TASK, parse_arm("guided"), data, TOY, seed=0)
    parsed_toy = dataclasses.replace(TOY, pipeline=corpus)
    with pytest.raises(SettingError, match="5 roles and 4 heads; expected a head for each role"):
        attach_arm(TASK, parse_arm("guided"), TASK.load(corpus, parsed_toy, cache), parsed_toy, seed=0)
