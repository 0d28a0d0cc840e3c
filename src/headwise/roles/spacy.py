"""Word tables from any spaCy pipeline with a parser, cached on disk.

Not imported by `headwise`: use `from headwise.roles.spacy import Parser`. Needs the extra `spacy`.
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import spacy
from spacy.language import Language
from spacy.tokens import Doc
from tqdm.auto import tqdm

from headwise.errors import DataError
from headwise.roles.spacy_cache import Parse, ParseCache, digest
from headwise.roles.word_table import WordTable

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
