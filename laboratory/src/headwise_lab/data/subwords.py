"""Subwords with one vocabulary for both languages, learned or read from a `tokenizer.json`.

A learned vocabulary is byte-pair encoding (Sennrich et al. 2016) over the bytes of the text: no character is unknown,
and decoding restores the text exactly, in Unicode normalization form C.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headwise.errors import DataError, HeadwiseError, require_integer
from headwise.input_files import read_whole, refuse_panics
from headwise.texts.tokenizer_bounds import REMEDY, require_bounded
from headwise_lab.data.arrays import digest

# the ids that the models use
PADDING, START, END = 0, 1, 2
# merges never join letters with punctuation, so that no text can teach one of these
SPECIAL = ("<pad>", "<s>", "</s>")
ALPHABET = 256
LEAST_OFTEN = 2
LONGEST_WORD = 1_000
# In Chinese this is not a word yet.
LONG_RUN = re.compile(rf"\S{{{LONGEST_WORD + 1}}}|\s{{{LONGEST_WORD + 1}}}")


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """Encodes text as token ids.

    Attributes:
        tokenizer: The tokenizer; a text that spells a special token is text.
        shift: Added to its ids.
    """

    tokenizer: Tokenizer
    shift: int = 0

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, including the special ones."""
        return self.shift + max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every id: uint16 or uint32."""
        return np.dtype(np.uint16 if self.vocabulary_size <= 1 << 16 else np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without start and end."""
        what = "the tokenizer cannot encode a text"
        try:
            with refuse_panics(what, REMEDY):
                encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except HeadwiseError:
            raise
        except Exception as error:
            # tokenizers raises bare Exception, as for a word that a vocabulary without [UNK] does not have
            raise DataError(f"{what} ({str(error)[:200]}); {REMEDY}") from None
        if self.shift == 0:
            return [encoding.ids for encoding in encoded]
        return [[self.shift + id_ for id_ in encoding.ids] for encoding in encoded]

    def to_json(self) -> str:
        """Return the text of its `tokenizer.json`."""
        return self.tokenizer.to_str(pretty=True)


class Subwords(TextEncoder):
    """Encodes and decodes text; id 0 is padding, 1 start and 2 end, whatever the tokenizer's own ids are.

    `shift` is 0 if the tokenizer's first three ids are these, else 3.

    Example:
        >>> subwords = learn_subwords(["a cat and a hat"] * 2, vocabulary_size=262)
        >>> subwords.decode([START, *subwords.encode("a cat </s>"), END, 4])
        'a cat </s>'
    """

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without start and end."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids up to the first end, without special ids."""
        kept: list[int] = []
        for id_ in ids:
            if id_ == END:
                break
            if id_ not in (PADDING, START):
                kept.append(int(id_) - self.shift)
        return self.tokenizer.decode(kept, skip_special_tokens=True)


def learn_subwords(lines: Iterable[str], vocabulary_size: int, *, progress: bool = False) -> Subwords:
    """Return byte-pair encoding learned from lines of both languages; the same for the same lines.

    The vocabulary is the three special ids, the 256 bytes and the merges, most frequent pair first, within words and
    the blank before them, of pairs that occur at least twice. A small text gives fewer than `vocabulary_size`.
    """
    require_integer("vocabulary_size", vocabulary_size, low=len(SPECIAL) + ALPHABET)
    tokenizer = _make_empty()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=LEAST_OFTEN,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress and sys.stderr.isatty(),
    )
    # one that learns cannot be asked for its words
    other = _make_empty()
    tokenizer.train_from_iterator((drop_long_words(line, other) for line in lines), trainer)
    return Subwords(clear_settings(tokenizer))


def drop_long_words(text: str, tokenizer: Tokenizer) -> str:
    """Return a text to learn from without words of over 1,000 characters; it is the same if it has none.

    Learning takes time that grows with the square of a word's length, a minute for one of 200,000 characters.
    """
    if LONG_RUN.search(text) is None:
        return text
    normalized = tokenizer.normalizer.normalize_str(text)
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]
    long = [(start, end) for start, end in spans if end - start > LONGEST_WORD]
    ends = [0, *(end for _, end in long)]
    starts = [*(start for start, _ in long), len(normalized)]
    return " ".join(normalized[one:other] for one, other in zip(ends, starts, strict=True)) if long else text


def read_subwords(path: Path) -> Subwords:
    """Return the subwords of a `tokenizer.json`, learned here or elsewhere.

    A tokenizer from elsewhere keeps its own normalization and its own answer to unknown characters; its ids are moved
    up by 3 to make room for padding, start and end.
    """
    tokenizer = read_tokenizer(path)
    if tokenizer.get_vocab_size(with_added_tokens=True) == 0:
        raise DataError(f"{path} has an empty vocabulary; expected at least one token.")
    ours = tuple(tokenizer.id_to_token(id_) for id_ in (PADDING, START, END)) == SPECIAL
    return Subwords(clear_settings(tokenizer), shift=0 if ours else len(SPECIAL))


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`."""
    content = read_whole(path)
    what = f"{path} is not a tokenizer of Hugging Face tokenizers"
    try:
        with refuse_panics(what, REMEDY):
            tokenizer = Tokenizer.from_buffer(content)
    except HeadwiseError:
        raise
    except Exception as error:
        # tokenizers raises bare Exception for whatever is wrong inside
        raise DataError(f"{what} ({str(error)[:200]}); {REMEDY}") from error
    require_bounded(path, tokenizer)
    return tokenizer


def clear_settings(tokenizer: Tokenizer) -> Tokenizer:
    """Turn off truncation and padding, and encode a text that spells a special token as text; return the tokenizer."""
    # the file cannot keep this
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _make_empty() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def describe_tokenizer(path: Path | None, *learned: int) -> tuple[object, ...]:
    """Return what a prepared text's ids depend on: the given file's digest, or the settings of learning."""
    if path is None:
        return ("learned", *learned)
    # which tokens begin and end a text may be said beside it
    beside = path.with_name("tokenizer_config.json")
    return ("tokenizer", digest("", [path, *([beside] if beside.is_file() else [])]))
