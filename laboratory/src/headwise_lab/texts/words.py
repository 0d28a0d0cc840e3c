"""Texts as words: separated by blanks, by a pipeline with a parser, or by spaCy's English tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache as keep
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.roles.word_table import WordTable

if TYPE_CHECKING:
    from spacy.tokenizer import Tokenizer

PARSES = "parses"
# Punctuation attached to words, and separated from them as in tokenized text.
ATTACHED, APART = re.compile(r"\w[,.;?!](?=\s|$)"), re.compile(r"(?<!\S)[,.;?!](?=\s|$)")
# The Penn Treebank's brackets: SST has them in its sentences and not in its phrases.
BRACKETS = {"-lrb-": "(", "-rrb-": ")", "-lsb-": "[", "-rsb-": "]", "-lcb-": "{", "-rcb-": "}"}
LONG_WORD = re.compile(r"\S{1001,}")
# Characters of its parts.
PART = 100


def is_tokenized(texts: Sequence[str]) -> bool:
    """Return whether punctuation is mostly separated from words, as in tokenized texts.

    >>> is_tokenized(["fine , thanks ."]), is_tokenized(["Fine, thanks."]), is_tokenized(["fine"])
    (True, False, True)
    """
    attached = sum(len(ATTACHED.findall(text)) for text in texts)
    return attached <= sum(len(APART.findall(text)) for text in texts)


def word_tables(texts: Sequence[str], scale: Any, cache: Path | None, *, progress: bool = False) -> list[WordTable]:
    """Return the words of texts, with their parses if the scale names a pipeline.

    If the punctuation is separated from words, as in the published sets, words are separated by blanks; else they are
    those of the pipeline, or without one, runs of letters and digits, and single punctuation marks.

    The texts together decide which. Parses are kept in the cache, if one is given.
    """
    apart = is_tokenized(texts)
    words = [[BRACKETS.get(word.lower(), word) for word in text.split()] for text in texts] if apart else []
    if scale.pipeline is None:
        return [WordTable(one) for one in words] if apart else [WordTable.split(text) for text in texts]
    # spaCy takes seconds to import
    from headwise.roles.spacy import Parser

    parse = Parser(str(scale.pipeline), cache=None if cache is None else cache / PARSES, progress=progress)
    # words beyond the limit need no parse
    return parse([one[: scale.max_words + 1] for one in words] if apart else list(texts))


def tokenize(texts: Sequence[str], *, progress: bool = False) -> Iterator[list[str]]:
    """Yield the words of each text in lower case, split by spaCy's blank English tokenizer, without white space.

    >>> list(tokenize(["Didn't like  it."]))
    [['did', "n't", 'like', 'it', '.']]
    """
    for words in locate_words(texts, progress=progress):
        yield [word for word, _ in words]


def locate_words(texts: Sequence[str], *, progress: bool = False) -> Iterator[list[tuple[str, tuple[int, int]]]]:
    """Yield the words of each text as `tokenize` does, each with its first character and the one after its last.

    Raises:
        HeadwiseError: spaCy is not installed.

    >>> list(locate_words(["No  way!"]))
    [[('no', (0, 2)), ('way', (4, 7)), ('!', (7, 8))]]
    """
    from tqdm.auto import tqdm

    tokenizer = _make_tokenizer()
    for text in tqdm(texts, desc="cutting texts into words", unit="text", disable=None if progress else True):
        found = ((start + token.idx, token) for start, part in _cut_long_words(text) for token in tokenizer(part))
        yield [(token.lower_, (start, start + len(token))) for start, token in found if not token.is_space]


def find_spacy() -> str:
    """Return the version of spaCy.

    Raises:
        HeadwiseError: It is not installed.
    """
    try:
        return version("spacy")
    except PackageNotFoundError:
        raise HeadwiseError(
            "texts are cut into words by spaCy's tokenizer, and spaCy is not installed; install headwise[spacy]."
        ) from None


def _cut_long_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield a text in parts, each with its first character; it is one part if it has no word of over 1,000 characters.

    spaCy's tokenizer takes minutes for 100,000 brackets in a row, and has not a word of so many characters.
    """
    place = 0
    for word in LONG_WORD.finditer(text):
        yield place, text[place : word.start()]
        place = word.end()
        yield from ((start, text[start : min(start + PART, place)]) for start in range(word.start(), place, PART))
    yield place, text[place:]


# takes a tenth of a second, and `locate_words` may be called for every line
@keep
def _make_tokenizer() -> Tokenizer:
    find_spacy()
    # spaCy takes seconds to import, and is an extra
    import spacy

    return spacy.blank("en").tokenizer
