"""Word tables from any spaCy pipeline with a parser, cached on disk.

Not imported by `headwise`: use `from headwise.roles.spacy import Parser`. Needs the extra `spacy`.

An on-disk cache of parses: small integer arrays, keyed by digests of the pipeline and of the text.

Files are written atomically and never changed. Texts that two processes parse at the same time are stored twice.
"""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import spacy
from spacy.language import Language
from spacy.tokens import Doc
from tqdm.auto import tqdm

from headwise.atomic import write_whole
from headwise.errors import DataError, HeadwiseError
from headwise.input_files import read_whole
from headwise.roles.word_table import WordTable

FORMAT = 1
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Parse:
    """The parse of one text.

    Attributes:
        starts: First character of each word.
        ends: Last character of each word plus one.
        heads: Head of each word; the word itself at the root.
        relations: Relation of each word to its head.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]


def digest(*parts: str | bytes) -> bytes:
    """Return a digest of 16 bytes of some texts, in order."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        content = part.encode("utf-8", errors="surrogatepass") if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return found.digest()


class ParseCache:
    """The cached parses of one pipeline, in a subfolder of `folder`.

    Args:
        folder: Folder of the parses of all pipelines; created when the first is written.
        pipeline: Digest of the pipeline.

    Raises:
        DataError: A file there is not a cache file.
    """

    def __init__(self, folder: str | Path, pipeline: bytes) -> None:
        self.folder = Path(folder) / pipeline.hex()
        self._parses: dict[bytes, Parse] = {}
        for path in sorted(self.folder.glob("*.npz")):
            self._parses.update(_read(path))

    def __len__(self) -> int:
        return len(self._parses)

    def get(self, key: bytes) -> Parse | None:
        """Return the parse under a key, or None."""
        return self._parses.get(key)

    def add(self, parses: Mapping[bytes, Parse]) -> None:
        """Store parses in a new file.

        Raises:
            DataError: The file cannot be written.
        """
        new = {key: parse for key, parse in parses.items() if key not in self._parses}
        if not new:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{self.folder} cannot be created ({error.strerror}); choose another folder.") from None
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **_pack(new))
        write_whole(self.folder / f"{secrets.token_hex(8)}.npz", content.getvalue())
        self._parses.update(new)


def _pack(parses: Mapping[bytes, Parse]) -> dict[str, np.ndarray]:
    labels = sorted({relation for parse in parses.values() for relation in parse.relations})
    number = {label: index for index, label in enumerate(labels)}
    every = list(parses.values())
    return {
        "format": np.array(FORMAT),
        "keys": np.frombuffer(b"".join(parses), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
        "counts": _shrink([len(parse.heads) for parse in every]),
        # differences are small numbers, positions are not
        "starts": _shrink(b - a for parse in every for a, b in pairwise((0, *parse.starts))),
        "lengths": _shrink(e - s for parse in every for s, e in zip(parse.starts, parse.ends, strict=True)),
        "heads": _shrink(head - word for parse in every for word, head in enumerate(parse.heads)),
        "relations": _shrink(number[relation] for parse in every for relation in parse.relations),
        "labels": np.array(labels, dtype=np.str_),
    }


def _shrink(numbers: Iterable[int]) -> np.ndarray:
    """Return integers as an array of the smallest type that holds them."""
    flat = list(numbers)
    low, high = min(flat, default=0), max(flat, default=0)
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return np.array(flat, dtype=kind)
    return np.array(flat, dtype=np.int64)


def _read(path: Path) -> dict[bytes, Parse]:
    try:
        with np.load(io.BytesIO(read_whole(path)), allow_pickle=False) as file:
            content = {name: file[name] for name in file.files}
        if int(content["format"]) != FORMAT:
            raise DataError(f"{path} has format {int(content['format'])}; this version of headwise reads {FORMAT}.")
        return _unpack(content)
    except HeadwiseError:
        raise
    except Exception as error:
        # zip files and numpy have many ways to fail
        raise DataError(f"{path} is not a file of parses ({str(error)[:200]}); delete it to parse again.") from None


def _unpack(content: Mapping[str, np.ndarray]) -> dict[bytes, Parse]:
    labels = content["labels"].tolist()
    relations = [labels[index] for index in content["relations"].tolist()]
    steps, lengths, heads = (content[name].tolist() for name in ("starts", "lengths", "heads"))
    found, begin = {}, 0
    for key, count in zip(content["keys"], content["counts"].tolist(), strict=True):
        end = begin + count
        starts = np.cumsum(steps[begin:end]).tolist() if count else []
        found[key.tobytes()] = Parse(
            tuple(starts),
            tuple(start + length for start, length in zip(starts, lengths[begin:end], strict=True)),
            tuple(word + offset for word, offset in enumerate(heads[begin:end])),
            tuple(relations[begin:end]),
        )
        begin = end
    if begin != len(heads):
        raise ValueError(f"{len(heads)} words for {begin}")
    return found


# Number of texts per cache file; an interrupted run keeps the files written so far.
TEXTS_A_FILE = 20_000
BATCH = 256


class Parser:
    """Parse texts with a spaCy pipeline; called with texts, it returns their word tables.

    White space tokens of spaCy are dropped. Parses are cached in memory, and in the folder `cache` by the digests of
    the pipeline and of each text, so that processes and runs share them.

    Args:
        pipeline: A folder, the name of an installed package, or a loaded pipeline.
        cache: Folder of the parses. Default: no cache on disk.
        one_sentence: Whether each text is one sentence; otherwise the pipeline finds sentences, each with a root.
        progress: Whether a progress bar is shown on a terminal.

    Raises:
        DataError: The pipeline does not exist or has no parser.

    Example:
        >>> # parse = Parser("en_core_web_sm", cache="parses")
        >>> # parse(["A great film."])[0].relations -> ("det", "amod", "ROOT", "punct")
    """

    def __init__(
        self,
        pipeline: str | Path | Language,
        cache: str | Path | None = None,
        *,
        one_sentence: bool = True,
        progress: bool = True,
    ) -> None:
        self.nlp, identity = _load(pipeline)
        if not ({"parser", "experimental_biaffine_parser"} & set(self.nlp.pipe_names)):
            raise DataError(
                f"the pipeline {self.nlp.meta.get('name', '')!r} has "
                f"{', '.join(self.nlp.pipe_names) or 'no component'}; expected one with a parser."
            )
        self.one_sentence, self.progress = one_sentence, progress
        self.digest = digest(identity, version("spacy"), str(one_sentence))
        self._kept: dict[bytes, Parse] = {}
        self.cache = None if cache is None else ParseCache(cache, self.digest)

    def __call__(self, texts: Sequence[str | Sequence[str]]) -> list[WordTable]:
        """Return the word table of each text, in order.

        Args:
            texts: Texts, or lists of words to be used as they are.

        Raises:
            DataError: An item is neither, a word is empty, or a text is not valid Unicode.
        """
        if isinstance(texts, str):
            raise DataError(f"the text {texts[:40]!r} was given; expected a list of texts.")
        given = [_check(index, text) for index, text in enumerate(texts)]
        keys = [_make_key(text) for text in given]
        missing = {key: text for key, text in zip(keys, given, strict=True) if self._look_up(key) is None}
        self._parse(missing)
        return [_build_table(text, self._look_up(key)) for key, text in zip(keys, given, strict=True)]

    def forget(self) -> None:
        """Clear the parses in memory; those on disk are kept."""
        self._kept.clear()

    def _look_up(self, key: bytes) -> Parse | None:
        return self._kept.get(key) if self.cache is None else self.cache.get(key)

    def _parse(self, texts: dict[bytes, str | tuple[str, ...]]) -> None:
        todo = list(texts.items())
        if not todo:
            return
        with tqdm(total=len(todo), desc="parsing", unit="text", disable=None if self.progress else True) as bar:
            for start in range(0, len(todo), TEXTS_A_FILE):
                part = todo[start : start + TEXTS_A_FILE]
                parses = {}
                docs = self.nlp.pipe((self._make_doc(text) for _, text in part), batch_size=BATCH)
                for (key, _), doc in zip(part, docs, strict=True):
                    parses[key] = _read_parse(doc)
                    bar.update()
                if self.cache is None:
                    self._kept.update(parses)
                else:
                    self.cache.add(parses)

    def _make_doc(self, text: str | tuple[str, ...]) -> Doc:
        if isinstance(text, str) and len(text) > self.nlp.max_length:
            raise DataError(
                f"a text of {len(text):,} characters is longer than the pipeline allows ({self.nlp.max_length:,}): "
                f"{text[:40]!r}; split it."
            )
        doc = self.nlp.make_doc(text) if isinstance(text, str) else Doc(self.nlp.vocab, words=list(text))
        if self.one_sentence:
            for token in doc:
                token.is_sent_start = token.i == 0
        return doc


def _load(pipeline: str | Path | Language) -> tuple[Language, bytes]:
    """Return a pipeline and bytes that identify it."""
    if isinstance(pipeline, Language):
        # its strings grow with every text and do not affect parses
        return pipeline, pipeline.to_bytes(exclude=["vocab"]) + pipeline.vocab.to_bytes(exclude=["strings"])
    try:
        nlp = spacy.load(pipeline)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"no spaCy pipeline could be loaded from {str(pipeline)!r} ({reason}); expected a folder or the name "
            "of an installed package, such as en_core_web_sm."
        ) from None
    # a loaded pipeline has a folder
    return nlp, digest(*_read_contents(Path(str(nlp.path))))


def _read_contents(folder: Path) -> Iterator[str | bytes]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix()
            yield path.read_bytes()


def _check(index: int, text: Any) -> str | tuple[str, ...]:
    if isinstance(text, str):
        _require_unicode(index, text)
        return text
    if isinstance(text, Iterable):
        words = tuple(text)
        if all(isinstance(word, str) and word.strip() for word in words):
            _require_unicode(index, " ".join(words))
            return words
        raise DataError(
            f"text {index} has a word that is empty or not a string; expected words of at least one character."
        )
    raise DataError(f"text {index} is a {type(text).__name__}; expected a text or its words.")


def _require_unicode(index: int, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text {index} holds half a character ({text[error.start]!r} at {error.start}), which spaCy refuses; "
            "decode it with errors='replace'."
        ) from None


def _make_key(text: str | tuple[str, ...]) -> bytes:
    return digest("text", text) if isinstance(text, str) else digest("words", *text)


def _read_parse(doc: Doc) -> Parse:
    """Return the parse without white space tokens; a child of such a token becomes a child of its head."""
    kept = [token for token in doc if not token.is_space]
    number = {token.i: index for index, token in enumerate(kept)}
    heads = []
    for index, token in enumerate(kept):
        head = token.head
        while head.i not in number and head.head.i != head.i:
            head = head.head
        heads.append(number.get(head.i, index))
    return Parse(
        tuple(token.idx for token in kept),
        tuple(token.idx + len(token) for token in kept),
        tuple(heads),
        tuple(token.dep_ for token in kept),
    )


def _build_table(text: str | tuple[str, ...], parse: Parse | None) -> WordTable:
    assert parse is not None
    joined = text if isinstance(text, str) else " ".join(text)
    spans = tuple(zip(parse.starts, parse.ends, strict=True))
    words = [joined[start:end] for start, end in spans]
    return WordTable(words, parse.heads, parse.relations, text=joined, spans=spans)
