"""Read word tables from CoNLL-U, the format of Universal Dependencies treebanks and of many parsers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from headwise.errors import DataError
from headwise.input_files import read_numbered_lines
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
        DataError: The file cannot be read, a line is malformed, or heads do not make a tree with one root; the message
            names file and line.

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
    tables = [_build_table(path, sentence) for sentence in _read_sentences(path)]
    if not tables:
        raise DataError(
            f"{path} holds no sentence; expected CoNLL-U: ten columns, and an empty line after each sentence."
        )
    return tables


def _read_sentences(path: Path) -> Iterator[_Sentence]:
    sentence = _Sentence()
    for number, line in read_numbered_lines(path):
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
        raise DataError(f"{path}:{number}: the form is empty; expected a word in the second column.")
    spaced = "SpaceAfter=No" not in space.split("|")
    if "." in identifier:
        # an empty node is not in the text
        return
    one, dash, other = identifier.partition("-")
    first, last = _parse_number(one), _parse_number(other) if dash else 0
    if first is None or last is None:
        raise DataError(
            f"{path}:{number}: the identifier is {identifier[:60]!r}; expected a number, such as 3, or 3-4 or 5.1."
        )
    count = len(sentence.words)
    inside = bool(sentence.tokens) and sentence.tokens[-1][1] >= count
    if first != count + 1 or (dash and (last < first or inside)):
        raise DataError(f"{path}:{number}: the identifier is {identifier!r}; expected the word {count + 1}.")
    if dash:
        sentence.tokens.append((first - 1, last - 1, form, spaced))
        return
    place = None if head == "_" else _parse_number(head)
    if place is None and head != "_":
        raise DataError(f"{path}:{number}: the head is {head[:60]!r}; expected the number of a word, or 0 at the root.")
    if not inside:
        sentence.tokens.append((count, count, form, spaced))
    sentence.words.append(form)
    sentence.heads.append(place)
    sentence.relations.append(relation)
    sentence.lines.append(number)


def _parse_number(text: str) -> int | None:
    """Return a number of at most nine digits, far more than words in a sentence; None for anything else."""
    return int(text) if text.isdecimal() and len(text) <= 9 else None


def _build_table(path: Path, sentence: _Sentence) -> WordTable:
    count = len(sentence.words)
    heads = []
    for word, (head, number) in enumerate(zip(sentence.heads, sentence.lines, strict=True)):
        if head is not None and head > count:
            raise DataError(f"{path}:{number}: the head is {head}; expected at most {count}, the number of words.")
        if head == word + 1:
            raise DataError(f"{path}:{number}: the word is its own head; expected another word, or 0 at the root.")
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
    _require_tree(path, known, sentence.lines)
    return WordTable(sentence.words, known, sentence.relations, text=text, spans=spans)


def _require_tree(path: Path, heads: list[int], lines: list[int]) -> None:
    """Refuse heads without a root, with several roots or with a cycle; a root is its own head."""
    roots = [word for word, head in enumerate(heads) if word == head]
    if len(roots) > 1:
        raise DataError(
            f"{path}:{lines[roots[1]]}: a second root of the sentence, after that of line {lines[roots[0]]}; expected "
            "one word with head 0."
        )
    if not roots:
        raise DataError(f"{path}:{lines[0]}: the sentence has no root; expected one word with head 0.")
    try:
        TopologicalSorter({word: (head,) for word, head in enumerate(heads) if word != head}).prepare()
    except CycleError as error:
        number = min(lines[word] for word in error.args[1])
        raise DataError(
            f"{path}:{number}: the heads of the sentence go in a circle; expected a tree that leads from each word to "
            "the root."
        ) from None


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
    return text[:-1] if sentence.tokens[-1][3] else text, spans
