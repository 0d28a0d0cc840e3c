"""Read word tables from CoNLL-U, the format of Universal Dependencies treebanks and of many parsers."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headwise.errors import DataError
from headwise.roles.word_table import WordTable

FIELDS = 10


@dataclass
class _Sentence:
    """The lines of a sentence read so far."""

    words: list[str] = field(default_factory=list)
    heads: list[int | None] = field(default_factory=list)
    relations: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    # surface tokens: first word, last word, form, and whether a space follows
    tokens: list[tuple[int, int, str, bool]] = field(default_factory=list)


def read_conllu(path: str | Path) -> list[WordTable]:
    """Read the sentences of a CoNLL-U file.

    Words are the syntactic words with their heads and relations; a root is its own head. The text is built from the
    tokens and SpaceAfter=No. The words of a multiword token all get its characters, unless they concatenate to it. A
    file without heads ("_") gives tables without a parse.

    Args:
        path: The file, UTF-8, plain or gzipped (.gz).

    Raises:
        DataError: The file cannot be read or a line is malformed; the message names file and line.

    Example:
        >>> import tempfile
        >>> lines = ["1 Good good ADJ _ _ 2 amod _ _", "2 film film NOUN _ _ 0 root _ SpaceAfter=No"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "one.conllu")
        ...     _ = path.write_text(chr(10).join(lines).replace(" ", chr(9)), encoding="utf-8")
        ...     read_conllu(path)[0].heads
        (1, 1)
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path} cannot be read (it is not UTF-8); expected a CoNLL-U file.") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "it is not a complete gzip file"
        raise DataError(f"{path} cannot be read ({reason}); expected a CoNLL-U file.") from None
    tables = [_build_table(path, sentence) for sentence in _read_sentences(path, text)]
    if not tables:
        raise DataError(
            f"{path} holds no sentence; expected CoNLL-U: ten columns, and an empty line after each sentence."
        )
    return tables


def _read_sentences(path: Path, text: str) -> Iterator[_Sentence]:
    sentence = _Sentence()
    # only line feeds end lines: a form may contain other characters at which str.splitlines splits
    for number, ended in enumerate(text.split("\n"), start=1):
        line = ended.rstrip("\r")
        if line.startswith("#"):
            continue
        if line.strip():
            _add_line(path, number, line, sentence)
        elif sentence.words:
            yield sentence
            sentence = _Sentence()
    if sentence.words:
        yield sentence


def _add_line(path: Path, number: int, line: str, sentence: _Sentence) -> None:
    columns = line.split("\t")
    if len(columns) != FIELDS:
        raise DataError(f"{path}:{number}: {len(columns)} columns separated by tabs; expected {FIELDS}.")
    identifier, form, head, relation, space = columns[0], columns[1], columns[6], columns[7], columns[9]
    if not form:
        raise DataError(f"{path}:{number}: the form is empty.")
    spaced = "SpaceAfter=No" not in space.split("|")
    if "." in identifier:
        # an empty node is not in the text
        return
    first, dash, last = identifier.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise DataError(
            f"{path}:{number}: the identifier is {identifier!r}; expected a number, such as 3, or 3-4 or 5.1."
        )
    expected = len(sentence.words) + 1
    if int(first) != expected or (dash and int(last) < int(first)):
        raise DataError(f"{path}:{number}: the identifier is {identifier!r}; expected the word {expected}.")
    if dash:
        sentence.tokens.append((int(first) - 1, int(last) - 1, form, spaced))
        return
    if head != "_" and not head.isdecimal():
        raise DataError(f"{path}:{number}: the head is {head!r}; expected the number of a word, or 0 at the root.")
    if not sentence.tokens or sentence.tokens[-1][1] < len(sentence.words):
        sentence.tokens.append((len(sentence.words), len(sentence.words), form, spaced))
    sentence.words.append(form)
    sentence.heads.append(None if head == "_" else int(head))
    sentence.relations.append(relation)
    sentence.lines.append(number)


def _build_table(path: Path, sentence: _Sentence) -> WordTable:
    count = len(sentence.words)
    heads = []
    for word, (head, number) in enumerate(zip(sentence.heads, sentence.lines, strict=True)):
        if head is not None and head > count:
            raise DataError(f"{path}:{number}: the head is {head}; expected at most {count}, the number of words.")
        heads.append(word if head == 0 else None if head is None else head - 1)
    if sentence.tokens[-1][1] >= count:
        raise DataError(
            f"{path}:{sentence.lines[-1]}: a multiword token ends at word {sentence.tokens[-1][1] + 1}; expected at "
            f"most {count}, the number of words."
        )
    text, spans = _join_tokens(sentence)
    without = [number for head, number in zip(heads, sentence.lines, strict=True) if head is None]
    if without and len(without) < count:
        raise DataError(f"{path}:{without[0]}: the head is missing; expected one, as for other words of the sentence.")
    if without:
        return WordTable(sentence.words, text=text, spans=spans)
    known = [head for head in heads if head is not None]
    return WordTable(sentence.words, known, sentence.relations, text=text, spans=spans)


def _join_tokens(sentence: _Sentence) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of the tokens and the span of each word in it."""
    text, spans = "", []
    for first, last, form, spaced in sentence.tokens:
        words = sentence.words[first : last + 1]
        start = len(text)
        if "".join(words) == form:
            for word in words:
                spans.append((start, start + len(word)))
                start += len(word)
        else:
            spans += [(start, start + len(form))] * len(words)
        text += form + (" " if spaced else "")
    return text.rstrip(" "), spans
