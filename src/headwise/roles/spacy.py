"""Word tables from any spaCy pipeline with a parser, cached on disk.

Not imported by `headwise`: use `from headwise.roles.spacy import Parser`. Needs the extra `spacy`.

The cache is a folder for each digest of a pipeline, with spaCy's own files (`DocBin`). They are written atomically and
never changed. Texts that two processes parse at the same time are stored twice.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import spacy
from spacy.language import Language
from spacy.tokens import Doc, DocBin
from tqdm.auto import tqdm

from headwise.atomic import write_whole
from headwise.errors import DataError, HeadwiseError
from headwise.input_files import read_whole
from headwise.roles.word_table import WordTable

# Under this name a document holds the key of its text.
KEY = "headwise"


class Parse(NamedTuple):
    """The parse of one text: the span of each word, its head (itself at the root), and the relation to it."""

    spans: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]


def digest(*parts: str | bytes) -> bytes:
    """Return a digest of 16 bytes of some texts, in order."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part.encode("utf-8", errors="surrogatepass") if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return found.digest()


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
        DataError: The pipeline does not exist or has no parser, or a file of the cache is damaged.

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
        self.folder = None if cache is None else Path(cache) / self.digest.hex()
        for path in () if self.folder is None else sorted(self.folder.glob("*.spacy")):
            self._kept.update(self._read(path))

    def __call__(self, texts: Sequence[str | Sequence[str]]) -> list[WordTable]:
        """Return the word table of each text, in order.

        Args:
            texts: Texts, or lists of words to be used as they are.

        Raises:
            DataError: An item is neither, a word is empty, a text is not valid Unicode, or the cache cannot be written.
        """
        if isinstance(texts, str):
            raise DataError(f"the text {texts[:40]!r} was given; expected a list of texts.")
        given = [_check(index, text) for index, text in enumerate(texts)]
        keys = [_make_key(text) for text in given]
        self._parse({key: text for key, text in zip(keys, given, strict=True) if key not in self._kept})
        return [_build_table(text, self._kept[key]) for key, text in zip(keys, given, strict=True)]

    def forget(self) -> None:
        """Clear the parses in memory that are not on disk."""
        if self.folder is None:
            self._kept.clear()

    def _parse(self, texts: dict[bytes, str | tuple[str, ...]]) -> None:
        todo = list(texts.items())
        with tqdm(
            total=len(todo), desc="parsing", unit="text", disable=None if self.progress and todo else True
        ) as bar:
            for start in range(0, len(todo), TEXTS_A_FILE):
                part = todo[start : start + TEXTS_A_FILE]
                parses, docs = {}, DocBin(["HEAD", "DEP"], store_user_data=True)
                made = self.nlp.pipe((self._make_doc(text) for _, text in part), batch_size=BATCH)
                for (key, _), doc in zip(part, made, strict=True):
                    parses[key] = _read_parse(doc)
                    if self.folder is not None:
                        doc.user_data = {KEY: key}
                        docs.add(doc)
                    bar.update()
                if self.folder is not None:
                    self._write(self.folder, docs)
                self._kept.update(parses)

    def _write(self, folder: Path, docs: DocBin) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder} cannot be created ({error.strerror}); choose another folder.") from None
        write_whole(folder / f"{secrets.token_hex(8)}.spacy", docs.to_bytes())

    def _read(self, path: Path) -> dict[bytes, Parse]:
        try:
            docs = DocBin(store_user_data=True).from_bytes(read_whole(path))
            return {bytes(doc.user_data[KEY]): _read_parse(doc) for doc in docs.get_docs(self.nlp.vocab)}
        except HeadwiseError:
            raise
        except Exception as error:
            # compressed files and arrays have many ways to fail
            raise DataError(f"{path} is not a file of parses ({str(error)[:200]}); delete it to parse again.") from None

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
    if not isinstance(text, Iterable):
        raise DataError(f"text {index} is a {type(text).__name__}; expected a text or its words.")
    words = (text,) if isinstance(text, str) else tuple(text)
    if not isinstance(text, str) and not all(isinstance(word, str) and word.strip() for word in words):
        raise DataError(
            f"text {index} has a word that is empty or not a string; expected words of at least one character."
        )
    joined = " ".join(words)
    try:
        joined.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text {index} holds half a character ({joined[error.start]!r} at {error.start}), which spaCy refuses; "
            "decode it with errors='replace'."
        ) from None
    return text if isinstance(text, str) else words


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
    spans = tuple((token.idx, token.idx + len(token)) for token in kept)
    return Parse(spans, tuple(heads), tuple(token.dep_ for token in kept))


def _build_table(text: str | tuple[str, ...], parse: Parse) -> WordTable:
    joined = text if isinstance(text, str) else " ".join(text)
    words = [joined[start:end] for start, end in parse.spans]
    return WordTable(words, parse.heads, parse.relations, text=joined, spans=parse.spans)
