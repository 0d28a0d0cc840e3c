"""Tokenizers of files that others made: how much longer each may make a text, and how long it may take.

A normalizer replaces characters by others, one step after another. W_k(c) is the most characters that one character c
before step k leaves at the end. After all n steps W_n(c) = 1; a step that replaces the text p by s has

    W_k(c) = max(W_(k+1)(c), sum_(x in s) W_(k+1)(x) / len(p))  if c is in p,  else  W_(k+1)(c).
"""

from __future__ import annotations

import base64
import re
import string
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headwise.errors import DataError
from headwise.input_files import is_file, parse_json, read_whole, refuse_panics

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
    """The most characters that each character becomes in the steps that are left, and the number added to a text."""

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
    """Raise `DataError` for a number beside a tokenizer that transformers counts to, such as one of extra ids."""
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
    """Raise `DataError` for a tokenizer that makes a short text long, takes seconds for it, or panics."""
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > MOST_IDS:
        raise _fault(place, f"its largest id is {largest:,}, of at most {MOST_IDS:,}")
    steps = _list_steps(tokenizer.normalizer, "normalizers")
    for name, found in (("normalizer", steps), ("decoder", _list_steps(tokenizer.decoder, "decoders"))):
        weights = weigh(found)
        if not (weights.most <= MOST_GROWTH and weights.added <= MOST_ADDED):
            raise _fault(place, f"its {name} makes {weights.most:.3g} characters of one, and adds {weights.added:.3g}")
    repeated, added = 1, 0
    for step in _list_steps(tokenizer.post_processor, "processors"):
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
                # the table of SentencePiece: a trie, and texts that end with zero
                content = base64.b64decode(table)
                texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
                weights.multiply(max(1, *(len(text.decode(errors="ignore")) for text in texts)))
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


def _list_steps(part: Any, inner: str) -> list[Mapping[str, Any]]:
    """Return the steps of a part of a tokenizer, also of a sequence of sequences."""
    left, found = [] if part is None else [parse_json(part.__getstate__())], []
    while left:
        step = left.pop(0)
        if step.get("type") == "Sequence":
            left = [*step[inner], *left]
        else:
            found.append(step)
    return found


def _may_be_empty(pattern: str) -> bool:
    try:
        return bool(EMPTY.search(pattern)) or re.search(pattern, "") is not None
    except (re.error, RecursionError, OverflowError):
        return True


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
