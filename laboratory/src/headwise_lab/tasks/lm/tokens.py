"""The tokenizer of a language model: learned byte pairs or the user's, and the bytes each of its tokens stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from headwise.errors import DataError
from headwise.input_files import encode_json, parse_json
from headwise_lab.data.subwords import END, START, TextEncoder, clear_settings, learn_subwords, read_tokenizer
from headwise_lab.experiment.run_folder import read_json

# What a tokenizer may call the tokens around a document, where nothing next to it says so.
STARTS = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "[CLS]")
ENDS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "<|im_end|>", "[SEP]")
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# SentencePiece's blank
BLANK = "\u2581"


@dataclass(frozen=True, eq=False)
class TextTokens(TextEncoder):
    """Turns text into token ids, with the tokens around a document.

    Attributes:
        start: Id of the token that each document begins with.
        end: Id of the token that each ends with; `start` where the tokenizer has one token for both.

    Example:
        >>> words = learn_tokens(lambda: ["the cat sat on the mat"] * 2, 300)
        >>> words.decode(words.encode_batch(["the cat"])[0]), (words.start, words.end)
        ('the cat', (1, 2))
    """

    start: int = START
    end: int = END

    @property
    def names(self) -> tuple[str, str]:
        """The tokens of start and end."""
        return str(self.tokenizer.id_to_token(self.start)), str(self.tokenizer.id_to_token(self.end))

    @property
    def special(self) -> tuple[int, ...]:
        """Ids that stand for no text."""
        added = self.tokenizer.get_added_tokens_decoder()
        return tuple(sorted({self.start, self.end, *(number for number, token in added.items() if token.special)}))

    @cached_property
    def bytes(self) -> NDArray[np.int64]:
        """Bytes of text that each id stands for, int64 [V]; 0 for special ones.

        Exact for tokenizers of bytes and of SentencePiece; for others, the bytes of the token decoded alone.
        """
        found = np.zeros(self.vocabulary_size, dtype=np.int64)
        count = _choose_counter(self.tokenizer)
        for token, number in self.tokenizer.get_vocab(with_added_tokens=True).items():
            found[number] = count(token, number)
        found[list(self.special)] = 0
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special ones."""
        return self.tokenizer.decode([int(one) for one in ids], skip_special_tokens=True)

    def files(self, length: int) -> dict[str, str]:
        """Return the files by which `transformers.AutoTokenizer` knows it, name to text."""
        start, end = self.names
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
            "bos_token": start,
            "eos_token": end,
            "pad_token": end,
            "clean_up_tokenization_spaces": False,
            "model_max_length": length,
        }
        return {
            "tokenizer.json": self.to_json(),
            "tokenizer_config.json": encode_json(settings, indent=1) + "\n",
        }


def learn_tokens(texts: Callable[[], Iterable[str]], vocabulary_size: int, *, progress: bool = False) -> TextTokens:
    """Return byte-pair encoding learned from texts; see `learn_subwords`."""
    return _finish(learn_subwords(texts(), vocabulary_size, progress=progress).tokenizer, START, END)


def read_tokens(path: Path) -> TextTokens:
    """Return the tokenizer of a `tokenizer.json`, or of a folder that holds one.

    Which tokens start and end a document is what `tokenizer_config.json` next to it says, else what a tokenizer written
    here says itself, else the first of the usual names that it has.
    """
    path = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = read_tokenizer(path)
    names = _read_config(path.with_name("tokenizer_config.json")) or _read_own(tokenizer) or (None, None)
    names = names if any(names) else (_find(tokenizer, STARTS), _find(tokenizer, ENDS))
    start, end = (None if name is None else tokenizer.token_to_id(name) for name in names)
    known = end if start is None else start
    if known is None:
        raise DataError(
            f"{path} has no token that starts or ends a document; expected bos_token or eos_token in a "
            f"tokenizer_config.json next to it, or one of {', '.join(STARTS + ENDS)}."
        )
    return _finish(tokenizer, known if start is None else start, known if end is None else end)


def _finish(tokenizer: Tokenizer, start: int, end: int) -> TextTokens:
    """Return the tokenizer with a template that says what documents begin and end with."""
    first, last = (str(tokenizer.id_to_token(number)) for number in (start, end))
    clear_settings(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A",
        pair=f"{first} $A {last} {first} $B",
        special_tokens=list({first: start, last: end}.items()),
    )
    return TextTokens(tokenizer, start=start, end=end)


def _read_own(tokenizer: Tokenizer) -> tuple[str | None, str | None] | None:
    """Return what the template of `_finish` says; None where there is another."""
    template = parse_json(tokenizer.to_str()).get("post_processor") or {}
    pair = template.get("pair") if template.get("type") == "TemplateProcessing" else None
    names = [piece["SpecialToken"]["id"] for piece in pair or () if "SpecialToken" in piece]
    return (names[0], names[1]) if len(names) == 3 and names[0] == names[2] else None


def _read_config(path: Path) -> tuple[str | None, str | None] | None:
    """Return bos_token and eos_token of a tokenizer_config.json; None where there is no such file or it has neither."""
    if not path.is_file():
        return None
    config = read_json(path)
    found = [config.get(name) if isinstance(config, dict) else None for name in ("bos_token", "eos_token")]
    names = [token.get("content") if isinstance(token, dict) else token for token in found]
    start, end = (name if isinstance(name, str) else None for name in names)
    return (start, end) if start or end else None


def _find(tokenizer: Tokenizer, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if tokenizer.token_to_id(name) is not None), None)


def _choose_counter(tokenizer: Tokenizer) -> Callable[[str, int], int]:
    description: dict[str, Any] = parse_json(tokenizer.to_str())
    parts = encode_json([description.get("decoder"), description.get("pre_tokenizer")])
    if '"ByteLevel"' in parts:
        return lambda token, _: len(token)
    if BLANK in parts or "Metaspace" in parts or "\\u2581" in parts:
        return lambda token, _: 1 if BYTE.fullmatch(token) else len(token.replace(BLANK, " ").encode())
    return lambda _, number: len(tokenizer.decode([number]).encode())
