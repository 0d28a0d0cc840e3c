"""What makes no roles, words, masks or batches is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headwise as hw
from cases import cases
from heads.families import BY_NAME
from headwise.errors import DataError, LayoutError, MaskError, SettingError
from headwise.masks.flex import FlexMask
from headwise.roles import IDF, HeadMask, RoleCollator, Roles, WordTable, align, idf
from headwise.roles.word_table import tokens_as_words
from roles.guided import encoder, random_mask
from roles.test_roles import SENTENCE
from roles.tokenizers_for_tests import fast_tokenizer, tokenizer_of

WORDS = ["a", "b"]
TABLE = WordTable(["a", "film"])
ENCODED = tokenizer_of("WordPiece").encode("a longer text of words")
PAIR = tokenizer_of("WordPiece").encode("so", "so")
PASSED = fast_tokenizer("WordPiece")([SENTENCE.text])
ALIGNED = align([SENTENCE], PASSED, length=70)
WINDOW = Roles(hw.roles.Window())
BOTH = Roles(hw.roles.Separator(), hw.roles.Window(3))
FALSE = torch.zeros(1, 2, 3, 3, dtype=torch.bool)
KEEP, PLACES = torch.ones(1, 3, dtype=torch.bool), torch.arange(3)[None]
EXAMPLES = [{"text": text, "label": 0} for text in ("The plot is thin, but well acted!", "No.")]
Cases = list[tuple[Callable[[], object], type[Exception], str]]


def find(found: Any) -> Callable[[], object]:
    return lambda: Roles(hw.roles.Role("mine", lambda _: found))(WordTable(list("abc")), num_heads=1)


def table(*columns: Any, **given: Any) -> Callable[[], object]:
    return lambda: WordTable(*columns, **given)


def window(tables: Any, **given: Any) -> Callable[[], object]:
    return lambda: WINDOW(tables, num_heads=1, **given)


def mask(**given: Any) -> Callable[[], object]:
    return lambda: HeadMask(**{"roles": FALSE, **given})


def tabled(**given: Any) -> Callable[[], object]:
    settings = {"num_heads": 4, "columns": {1: KEEP}, "windows": {2: 1}, "pairs": {}, **given}
    return lambda: FlexMask.from_tables(KEEP, PLACES, PLACES, **settings)


def collate(examples: Any = EXAMPLES, *, roles: Roles = BOTH, **given: Any) -> Callable[[], object]:
    return lambda: RoleCollator(roles, given.pop("tokenizer", fast_tokenizer("WordPiece")), 3, **given)(examples)


def left(features: list[dict]) -> dict:
    width = max(len(one["input_ids"]) for one in features)
    names = ("input_ids", "attention_mask")
    return {n: torch.tensor([[0] * (width - len(one[n])) + one[n] for one in features]) for n in names}


def longer(features: list[dict]) -> dict:
    ids, keep = (torch.ones(len(features), size, dtype=torch.long) for size in (30, 31))
    return {"input_ids": ids, "attention_mask": keep}


def guide(given: Any) -> Callable[[], object]:
    def call() -> None:
        model = encoder().eval()
        with torch.no_grad(), hw.guide(hw.find_heads(model), given):
            model(torch.randn(2, 5, 12))

    return call


def guide_kinds(name: str, *kinds: str) -> Callable[[], object]:
    def call() -> None:
        heads = hw.find_heads(BY_NAME[name].build())
        hw.guide(heads.kind(*kinds) if kinds else heads)

    return call


FOUND: Cases = [
    (find([3]), SettingError, "found word 3 in a sentence of 3 words"),
    (find([-1]), SettingError, "found word -1"),
    (find([(0, 3)]), SettingError, "found word 3"),
    (find([(0, -1)]), SettingError, "found word -1"),
    (find([(0, 1, 2)]), SettingError, "expected words, or pairs"),
    (find([0, (1, 2)]), SettingError, "expected words, or pairs"),
    (find(["a"]), SettingError, "expected words, or pairs"),
    (find([True]), SettingError, "expected words, or pairs"),
    (find([1.0]), SettingError, "expected words, or pairs"),
    (find(None), SettingError, "the role 'mine' found None; expected words, or pairs"),
    (find(3), SettingError, "the role 'mine' found 3; expected words, or pairs"),
]
ROLES: Cases = [
    (Roles, SettingError, "given no role"),
    (lambda: Roles("window"), SettingError, "not a role; expected"),
    (lambda: Roles(hw.roles.Window), SettingError, "not a role; expected"),
    (lambda: Roles(hw.roles.Rare(), idf={}), SettingError, "idf is a dict"),
    (lambda: hw.roles.Window(4), SettingError, "expected an odd number"),
    (lambda: hw.roles.Rare(share=0.0), SettingError, "share is 0"),
    (lambda: hw.roles.Separator(""), SettingError, "marks is ''"),
    (lambda: hw.roles.Major("nsubj"), SettingError, "relations is 'nsubj'"),
    (lambda: hw.roles.Major(["nsubj"]), SettingError, r"relations is \['nsubj'\]; expected a tuple"),
    (lambda: Roles(hw.roles.Rare())(TABLE, num_heads=1), SettingError, r"pass Roles\(..., idf="),
    (lambda: Roles(hw.roles.Dependency())(TABLE, num_heads=1), DataError, "'a film' has no parse"),
    (window([TABLE, WordTable([])]), DataError, "sentence 1 has neither words nor special tokens"),
    (window([TABLE], length=1), SettingError, r"sentence 0 has 2 tokens; expected at most 1: cut it with table\[:n\]"),
    (lambda: BOTH(TABLE, num_heads=1), MaskError, "expected 2 different heads of 0 to 0"),
    (window([]), DataError, "called with no sentence; expected at least one word table"),
    (window(["A film."]), DataError, r"row 0 is 'A film.'; expected a word table .* WordTable.split"),
    (window([SENTENCE, ["A", "film"]]), DataError, r"row 1 is \['A', 'film'\]; expected a word table"),
    (window([()]), DataError, r"row 0 is \(\); expected a word table"),
    (window([None]), DataError, "row 0 is None; expected a word table"),
    (window(SENTENCE, before=-1), SettingError, r"expected an integer of at least 0"),
    (window(SENTENCE, after=-1), SettingError, r"expected an integer of at least 0"),
    (window(SENTENCE, before=1.5), SettingError, r"expected an integer of at least 0"),
]
SQUARE = "expected 2 different heads of 0 to"
# By both forms of a mask.
BY_BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"encoding": PASSED, "before": 1}, SettingError, "before is 1 and after is 0, and the encoding has its own"),
    ({"encoding": ALIGNED, "after": 2}, SettingError, "before is 0 and after is 2, and the encoding has its own"),
    ({"encoding": ALIGNED, "length": 80}, SettingError, "length is 80 and the alignment has 70 tokens; pass length=80"),
    ({"heads": (0, 7)}, MaskError, rf"heads is \(0, 7\) for 2 roles; {SQUARE} 6"),
    ({"heads": (3,)}, MaskError, r"heads is \(3,\) for 2 roles"),
    ({"heads": (3, 0, 1)}, MaskError, r"heads is \(3, 0, 1\) for 2 roles"),
    ({"heads": (2, 2)}, MaskError, "2 different heads"),
    ({"empty": "nothing"}, SettingError, "empty is 'nothing'; expected one of regular, self"),
    ({"num_heads": 2.5}, SettingError, "num_heads is 2.5; expected an integer"),
    ({"num_heads": -3}, SettingError, "num_heads is -3; expected an integer"),
    ({"num_heads": 1}, MaskError, f"{SQUARE} 0"),
]
FORMS: Cases = [
    (lambda make=make, given=given: make(SENTENCE, **{"num_heads": 7, **given}), error, message)
    for given, error, message in BY_BOTH
    for make in (BOTH, BOTH.for_flex)
]
INDEXED = r"indexed by 0; expected a slice: table\[:1\] is a table of its first word, table.words\[0\] that word"
TABLES: Cases = [
    (table("a text"), DataError, "WordTable.split"),
    (table(["a", ""]), DataError, "word 1 is ''"),
    (table(WORDS, heads=[0]), DataError, r"heads has 1 entries for 2 words \('a b'\)"),
    (table(WORDS, heads=[0, 2]), DataError, r"head of word 1 \('b'\) is 2; expected 0 to 1"),
    (table(["b", "a"], text="a b"), DataError, r"word 1 \('a'\) is not in the text after character 3"),
    (table(["a"], text="a", spans=[(0, 2)]), DataError, "characters 0 to 2 of a text of 1"),
    (table(WORDS, text="a b", spans=[(2, 3), (0, 1)]), DataError, "expected spans in the order"),
    (table(WORDS, [1.0, 1.0], WORDS), DataError, r"heads is \(.*expected the index of a word for each word"),
    (table(WORDS, ["1", "1"], WORDS), DataError, r"heads is \(.*expected the index of a word for each word"),
    (table(WORDS, [None, 1], WORDS), DataError, r"heads is \(.*expected the index of a word for each word"),
    (lambda: TABLE[::2], SettingError, "by 2"),
    (lambda: TABLE[0], SettingError, INDEXED),
    (lambda: list(TABLE), SettingError, INDEXED),
    (lambda: align([TABLE], {"input_ids": [[1]]}), DataError, "without character offsets"),
    (lambda: align([TABLE] * 2, [ENCODED]), DataError, "1 encoded texts were given for 2 word tables"),
    (lambda: align([WordTable(["a"])], [ENCODED]), DataError, "reach character 22 of a text of 1"),
    (
        lambda: align([WordTable.split("a longer text of words")], [ENCODED], length=3),
        SettingError,
        r"sentence 0 has \d+ tokens; expected at most 3",
    ),
    (lambda: align([WordTable.split("so")], [PAIR]), DataError, "pair of word tables"),
    (lambda: tokens_as_words([(TABLE, TABLE)]), DataError, "is a pair of texts"),
    (lambda: idf([]), DataError, "no document"),
    (lambda: idf([["a"], "a film"]), DataError, "document 1 is the text 'a film'"),
    (lambda: idf([["a", 3]]), DataError, "document 0 holds 3; expected words"),
    (lambda: IDF.load("absent.json"), DataError, "cannot be read"),
    (lambda: idf([["an", "\ud83d"]]).save("idf.json"), DataError, r"holds '\\ud83d', half of a surrogate pair; take"),
]
MASKS: Cases = [
    (mask(roles=torch.zeros(1, 2, 3, 3)), MaskError, r"torch.float32.*mask == 0"),
    (mask(roles=FALSE[0, 0]), MaskError, r"shape \(3, 3\)"),
    (mask(roles=torch.zeros(1, 2, 4, 3, dtype=torch.bool)), MaskError, r"\(1, 2, 4, 3\)"),
    (mask(num_heads=1), MaskError, "2 different heads of 0 to 0"),
    (mask(num_heads=4, heads=(3, 4)), MaskError, r"\(3, 4\).*0 to 3"),
    (mask(heads=(1, 1)), MaskError, r"\(1, 1\)"),
    (mask(names=("a", "a")), MaskError, "one distinct name per role"),
    (mask(keep=torch.ones(2, 3, dtype=torch.int64)), MaskError, "keep is a tensor of torch.int64"),
    (mask(keep=torch.ones(2, 4).bool()), MaskError, r"keep has shape \(2, 4\); expected \(sentences, 3\)"),
    (mask(roles=FALSE.expand(3, -1, -1, -1), keep=torch.ones(2, 3).bool()), MaskError, r"\(3, 3\)"),
    (mask(empty="nothing"), SettingError, "regular, self"),
    (lambda: HeadMask(FALSE).for_sdpa(torch.int64), MaskError, "int64"),
    (lambda: HeadMask(FALSE).padded(2), MaskError, "padded to 2"),
    (lambda: HeadMask(FALSE)[1], IndexError, "sentence 1 of a mask of 1"),
    (lambda: HeadMask.concatenate([]), MaskError, "no mask"),
    (tabled(windows={4: 1}), MaskError, r"heads \[1, 4\]; expected different heads of 0 to 3"),
    (tabled(empty="nothing"), SettingError, "empty is 'nothing'"),
    (tabled(num_heads=3.0), SettingError, "num_heads is 3.0"),
]
COLLATED: Cases = [
    (collate([{"text": "a"}, {"label": 1}]), DataError, r"example 1 has label; .*remove_unused_columns=False"),
    (collate([{"text": None}]), DataError, r"example 0 its 'text' is a NoneType"),
    (collate(tokenizer=SimpleNamespace(is_fast=False)), DataError, "SimpleNamespace is not a fast tokenizer"),
    (collate(roles=Roles(hw.roles.Dependency())), DataError, "has no parse"),
    (collate([]), DataError, "given no example"),
    (collate([{"text": "a", "label": "good"}]), DataError, r"'label' cannot become a tensor \('good', ...\); expected"),
    (collate([{"text": "a", "id": "x7"}]), DataError, r"'id' cannot become .* receives every column except the text"),
    (collate([{"text": "a", "label": None}]), DataError, "column 'label' cannot become a tensor"),
    (collate([{"text": "a", "tags": [1]}, {"text": "b", "tags": [1, 2]}]), DataError, "column 'tags' cannot become"),
    (collate([{"text": "a", "label": 1}, {"text": "b"}]), DataError, "example 1 has no 'label' but example 0 does"),
    # with two special tokens the tokenizer would cut nothing and say nothing
    (collate(max_length=1), SettingError, r"max_length is 1 and the tokenizer made \d+ tokens"),
    (collate(max_length=0), SettingError, "max_length is"),
    (collate(max_length="8"), SettingError, "max_length is"),
    (collate(parse="en_core_web_sm"), SettingError, r"parse is 'en_core_web_sm'; .*Parser\(pipeline\)"),
    (collate(text=("a", "b", "c")), SettingError, r"text is \('a', 'b', 'c'\); expected"),
    (collate(parse=lambda _: [TABLE]), DataError, "parse gave 1 word tables for 2 texts"),
    (collate(parse=lambda texts: [*map(str.split, texts)]), DataError, r"row 0 is \(\['The', .*expected a word table"),
    (collate(longest=4), DataError, r"example 0 has \d+ tokens and the model takes 4; truncate texts"),
    (collate(collator=left), DataError, r"attention_mask of example 1 is .* padded on the right as the tokenizer does"),
    (collate(collator=longer), DataError, r"attention_mask is \(2, 31\) and the input_ids are \(2, 30\)"),
]
GUIDED: Cases = [
    (guide(random_mask(2, 4, 5)), MaskError, r"for 4 heads and layers.0.self_attn has 3; build it with num_heads=3"),
    (guide(torch.ones(2, 3, 5, 5)), MaskError, "the mask is a Tensor; expected a HeadMask"),
    (guide(random_mask(2, 3, 4)), MaskError, "the mask has 4 tokens and this call 5 queries and 5 keys"),
    (guide(random_mask(2, 3, 6)), MaskError, "the mask has 6 tokens and this call 5"),
    (guide(random_mask(1, 3, 5)), MaskError, "the mask has 1 sentences and the batch 2"),
    (guide(random_mask(4, 3, 5)), MaskError, "the mask has 4 sentences and the batch 2"),
    (guide_kinds("BART"), LayoutError, r"choose with heads.kind\('self'\)"),
    (guide_kinds("BART", "cross"), LayoutError, r"choose with heads.kind\('self'\)"),
    (guide_kinds("BART", "self", "decoder"), LayoutError, r"choose with heads.kind\('self'\)"),
    (guide_kinds("WavLM"), LayoutError, "are reached in"),
]


@cases(("call", "error", "message"), [*FOUND, *ROLES, *FORMS, *TABLES, *MASKS, *COLLATED, *GUIDED])
def test_what_makes_no_sense_is_refused(
    call: Callable[[], object], error: type, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        call()
    assert not list(tmp_path.iterdir())
