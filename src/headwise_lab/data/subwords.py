"""Subwords with one vocabulary for both languages, learned or read from a `tokenizer.json`.

A learned vocabulary is byte-pair encoding (Sennrich et al. 2016) over the bytes of the text: no character is unknown,
and decoding restores the text exactly, in Unicode normalization form C.

Tokenizers of files that others made: how much longer each may make a text, and how long it may take.

A normalizer replaces characters by others, one step after another. W_k(c) is the most characters that one character c
before step k leaves at the end. After all n steps W_n(c) = 1; a step that replaces the text p by s has

    W_k(c) = max(W_(k+1)(c), sum_(x in s) W_(k+1)(x) / len(p))  if c is in p,  else  W_(k+1)(c).
"""

from __future__ import annotations

import base64
import re
import string
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headwise.errors import DataError, HeadwiseError, require_integer
from headwise.input_files import is_file, parse_json, read_whole, refuse_panics
from headwise_lab.data.arrays import digest

REMEDY = "choose another tokenizer."
# Far more than any vocabulary; a model has a vector for each.
MOST_IDS = 1 << 24
# Characters that a character of a text may become: by what its steps could do at worst, and did in a trial.
MOST_GROWTH, MOST_TRIED = 2000, 64
# Characters or tokens that may be added to a text, and its parts that a template may repeat.
MOST_ADDED, MOST_REPEATED = 1 << 13, 16
MOST_PADDED, MOST_NUMBER = 1 << 16, 100_000
TRIED, SECONDS = 256, 2.0
# Of no text a normal form of Unicode has more characters per character.
FORMS, CASES, BYTES = 18, 3, 4
# May match no character at all.
EMPTY = re.compile(r"\\[bBAzZGK]|\(\?[=!<]|[\^$]")
LENGTHS = re.compile(r"len|size|rate")
ODD = "\ufdfa\u00bd\u4e2d\u00e9\u0130"


@dataclass
class Weights:
    """The most characters that each character becomes in the steps that are left.

    Attributes:
        others: Of characters that are not in `known`.
        known: By character.
        added: Characters that are added to a text.
    """

    others: float = 1.0
    known: dict[str, float] = field(default_factory=dict)
    added: float = 0.0

    @property
    def most(self) -> float:
        """Of any character."""
        return max(self.others, *self.known.values()) if self.known else self.others

    def of(self, text: str) -> float:
        """Return the sum over a text."""
        return sum(self.known.get(character, self.others) for character in text)

    def replace(self, characters: str, weight: float) -> None:
        """Put a step before: some characters may become others of this weight."""
        self.known |= {one: max(self.known.get(one, self.others), weight) for one in characters}

    def replace_anywhere(self, weight: float, *, between: bool) -> None:
        """Put a step before, of which any character may become others, and there may be more between any two."""
        more = weight if between else 0.0
        self.known = {one: max(own, weight) + more for one, own in self.known.items()}
        self.others = max(self.others, weight) + more
        self.added += more

    def multiply(self, factor: float) -> None:
        """Put a step before, of which any character may become so many of any others."""
        self.others, self.known = factor * self.most, {}

    def multiply_beyond_ascii(self, factor: float) -> None:
        """Put a step before that leaves ASCII as it is, but for its case."""
        kept = {one: max(self.of(one), self.of(one.lower())) for one in map(chr, range(128))}
        self.others, self.known = factor * self.most, kept


def require_small_numbers(folder: Path) -> None:
    """Refuse files beside a tokenizer with a number that transformers counts to, such as that of extra ids.

    Raises:
        DataError: One is larger than 100,000.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if not is_file(folder / name):
            continue
        try:
            content = parse_json(read_whole(folder / name))
        except ValueError:
            # transformers says what is wrong
            continue
        for key, value in content.items() if isinstance(content, dict) else ():
            wrong = isinstance(value, int | float) and value > MOST_NUMBER and name != "added_tokens.json"
            if wrong and not LENGTHS.search(key):
                raise DataError(f"{folder / name}: {key} is {str(value)[:20]}; expected at most {MOST_NUMBER:,}.")


def require_bounded(place: Path, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that makes a short text long, takes seconds for it, or panics.

    Args:
        place: Where it is from, for the message.
        tokenizer: The tokenizer.

    Raises:
        DataError: As above; the message names the part that does.
    """
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > MOST_IDS:
        raise _fault(place, f"its largest id is {largest:,}, of at most {MOST_IDS:,}")
    part = _describe_part
    steps = list(_flatten(part(tokenizer.normalizer), "normalizers"))
    for name, found in (("normalizer", steps), ("decoder", list(_flatten(part(tokenizer.decoder), "decoders")))):
        weights = weigh(found)
        if not (weights.most <= MOST_GROWTH and weights.added <= MOST_ADDED):
            raise _fault(place, f"its {name} makes {weights.most:.3g} characters of one, and adds {weights.added:.3g}")
    repeated, added = 1, 0
    for step in _flatten(part(tokenizer.post_processor), "processors"):
        tokens = {name: len(one["ids"]) for name, one in (step.get("special_tokens") or {}).items()}
        pieces = [step.get("single") or (), step.get("pair") or ()]
        parts = [[one["Sequence"]["id"] for one in some if "Sequence" in one] for some in pieces]
        repeated *= max(1, *(some.count(side) for some in parts for side in "AB"))
        added += sum(
            tokens.get(one["SpecialToken"]["id"], 1) for some in pieces for one in some if "SpecialToken" in one
        )
    if repeated > MOST_REPEATED or added > MOST_ADDED:
        raise _fault(place, f"its post-processor repeats a text {repeated:,} times, and adds {added:,} tokens")
    padding: Mapping[str, Any] = tokenizer.padding or {}
    longest = max(int(padding.get(name) or 0) for name in ("length", "pad_to_multiple_of"))
    if longest > MOST_PADDED:
        raise _fault(place, f"it pads each text to {longest:,} tokens")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(tokenizer.model, name, None) or "") > MOST_ADDED:
            raise _fault(place, f"its {name} has {len(getattr(tokenizer.model, name)):,} characters")
    with refuse_panics(f"{place} holds a tokenizer that fails on a text", REMEDY):
        _try(place, tokenizer, steps, weigh(steps).added)


def weigh(steps: list[Mapping[str, Any]]) -> Weights:
    """Return the most characters that the steps of a normalizer or decoder make of each.

    >>> weigh([{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 3).most
    8.0
    """
    weights = Weights()
    for step in reversed(steps):
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
                weights.replace(old, weights.of(new) / len(old))
            case {"type": "Replace", "pattern": pattern, "content": str(new)}:
                weights.replace_anywhere(weights.of(new), between=_may_be_empty(str(pattern.get("Regex", ""))))
            case {"type": "Prepend", "prepend": str(new)}:
                weights.added += weights.of(new)
            case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
                weights.multiply(_find_longest(table))
            case {"type": "NFC" | "NFD" | "NFKC" | "NFKD"}:
                weights.multiply_beyond_ascii(FORMS)
            case {"type": "Lowercase"}:
                weights.multiply_beyond_ascii(CASES)
            case {"type": "BertNormalizer"}:
                # each Chinese character gets blanks around it
                weights.multiply_beyond_ascii(CASES + 2)
            case {"type": "Strip" | "StripAccents" | "Nmt" | "Fuse" | "ByteFallback"}:
                weights.others = max(weights.others, weights.of(" "))
            case _:
                weights.multiply(BYTES)
    return weights


def _fault(place: Path, found: str) -> DataError:
    return DataError(f"{place} holds a tokenizer that could fill the memory: {found}; {REMEDY}")


def _describe_part(part: Any) -> Any:
    """Return what a part of a tokenizer is made of, as JSON data."""
    return {} if part is None else parse_json(part.__getstate__())


def _flatten(part: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part, also of a sequence of sequences."""
    if part.get("type") == "Sequence":
        for one in part[inner]:
            yield from _flatten(one, inner)
    elif part:
        yield part


def _may_be_empty(pattern: str) -> bool:
    try:
        return bool(EMPTY.search(pattern)) or re.search(pattern, "") is not None
    except (re.error, RecursionError, OverflowError):
        return True


def _find_longest(table: str) -> int:
    """Return the length of the longest text in a table of SentencePiece: a trie, and texts that end with zero."""
    content = base64.b64decode(table)
    texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="ignore")) for text in texts))


def _try(place: Path, tokenizer: Tokenizer, steps: list[Mapping[str, Any]], added: float) -> None:
    """Refuse a tokenizer by what it does with short texts: of its own patterns, and of one character repeated."""
    patterns = [step.get("pattern") or {} for step in steps]
    own = {pattern["String"] for pattern in patterns if pattern.get("String")}
    for text in [*sorted(own, key=len)[:200], *string.printable, *ODD]:
        if tokenizer.normalizer is None:
            break
        tried = (text * TRIED)[: max(TRIED, len(text))]
        made = tokenizer.normalizer.normalize_str(tried)
        if len(made) > MOST_TRIED * len(tried) + added:
            raise _fault(place, f"its normalizer makes {len(made):,} characters of {len(tried):,}")
    for character in "aA0 .\n":
        start = time.process_time()
        # a vocabulary may lack these characters
        with suppress(Exception):
            tokenizer.encode_batch([character * 64 + "\0"])
        taken = time.process_time() - start
        if taken > SECONDS:
            raise _fault(place, f"it takes {taken:.1f} seconds for 65 characters")


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
        """Return the ids of each text, without start and end.

        Raises:
            DataError: The tokenizer has no answer to a word it does not know.
        """
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

    Args:
        lines: Text of the training split.
        vocabulary_size: Number of ids, at least 259.
        progress: Whether to show a bar on stderr if that is a terminal.

    Raises:
        SettingError: The vocabulary has no room for the bytes.
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

    Args:
        text: The text.
        tokenizer: Tells what a word is.
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

    Raises:
        DataError: The file cannot be read or is no tokenizer.
    """
    tokenizer = read_tokenizer(path)
    if tokenizer.get_vocab_size(with_added_tokens=True) == 0:
        raise DataError(f"{path} has an empty vocabulary; expected at least one token.")
    ours = tuple(tokenizer.id_to_token(id_) for id_ in (PADDING, START, END)) == SPECIAL
    return Subwords(clear_settings(tokenizer), shift=0 if ours else len(SPECIAL))


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`.

    Raises:
        DataError: The file cannot be read or is no tokenizer.
    """
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
