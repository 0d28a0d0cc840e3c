"""The readers of the graph-to-text task: AGENDA's preprocessed files, and a user's own file of triples.

Mentions of entities in a text, found in time that grows with the words alone (Aho and Corasick 1975).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import DataError
from headwise.input_files import is_file, read_numbered_lines
from headwise_lab.experiment.scale import read_task_file


def find_mentions(words: Sequence[str], entities: Sequence[Sequence[str]]) -> Iterator[str | int]:
    """Yield the words of a text, with the number of an entity in place of its words, the longest that fits.

    >>> list(find_mentions("we use beam search".split(), [["search"], ["beam", "search"]]))
    ['we', 'use', 1]
    """
    mentioned = _find_longest(words, entities)
    place = 0
    while place < len(words):
        number = mentioned[place]
        yield words[place] if number is None else number
        place += 1 if number is None else len(entities[number])


def _find_longest(words: Sequence[str], entities: Sequence[Sequence[str]]) -> list[int | None]:
    """Return for each word of a text the number of the longest entity that begins with it.

    The text is read from its end, and so are the entities: a node is the beginnings of entities read backward, and
    `shorter` leads to the longest of them that is a proper end of the node.
    """
    following: list[dict[str, int]] = [{}]
    longest: list[int | None] = [None]
    for number, entity in enumerate(entities):
        node = 0
        for word in reversed(entity):
            if word not in following[node]:
                following[node][word] = len(following)
                following.append({})
                longest.append(None)
            node = following[node][word]
        longest[node] = number
    shorter = [0] * len(following)

    def step(node: int, word: str) -> int:
        while node and word not in following[node]:
            node = shorter[node]
        return following[node].get(word, 0)

    waiting = list(following[0].values())
    for node in waiting:
        for word, child in following[node].items():
            shorter[child] = step(shorter[node], word)
            if longest[child] is None:
                longest[child] = longest[shorter[child]]
            waiting.append(child)
    node, found = 0, []
    for word in reversed(words):
        node = step(node, word)
        found.append(longest[node])
    return found[::-1]


RELATIONS = "relations.vocab"
AGENDA = read_task_file(Path(__file__).with_name("task.toml"))["files"]
BETWEEN = " ; "
# Python reads no number of thousands of digits.
DIGITS = re.compile("[0-9]{1,9}")
MENTION = re.compile(r"<(\w+)_(\d+)>")
TYPED = re.compile(r"^(.*\S)\s+<(\w+)>$")
WORD = re.compile(r"\w+(?:[-'\u2019]\w+)*|[^\w\s]")
UNTYPED = "entity"
# Bytes of a line: thousands of entities and their text fit.
LONGEST = 1 << 20
FORM = "a title, triples (head | relation | tail ; ...) and a text, with tabs between"
FORM_WITHOUT_TEXT = "a title and triples (head | relation | tail ; ...), with a tab between"


@dataclass(frozen=True)
class Graph:
    """A title, a knowledge graph and the text about them.

    Attributes:
        title: The words of the title.
        entities: The words of each entity.
        types: The type of each entity.
        triples: (head, relation, tail), with entities by number.
        text: The words of the text; a number is a mention of that entity. Empty where there is none.
        line: Its line number, for messages.
    """

    title: tuple[str, ...]
    entities: tuple[tuple[str, ...], ...]
    types: tuple[str, ...]
    triples: tuple[tuple[int, str, int], ...]
    text: tuple[str | int, ...]
    line: int

    @property
    def key(self) -> str:
        """Title and entities, by which splits are kept apart."""
        return " ".join(self.title) + "\t" + "\t".join(sorted(" ".join(entity) for entity in self.entities))

    @property
    def reference(self) -> str:
        """The text as one line, its mentions spelled out."""
        return spell_out(self.text, self.entities)


@dataclass(frozen=True)
class GraphSet:
    """A set of graphs.

    Attributes:
        title: Description of the set.
        splits: Its graphs: of "train", "dev" and "test", of some of them, or all of them under "all".
        paths: Every file that was read.
    """

    title: str
    splits: Mapping[str, Sequence[Graph]]
    paths: tuple[Path, ...]


def read_graphs(place: Path) -> GraphSet:
    """Return the set that a file or folder holds.

    A folder is AGENDA if it holds `relations.vocab`; else it holds the user's own triples as `train`, `test` and
    perhaps `dev`. A file holds the user's own triples.
    """
    if is_file(place):
        return GraphSet("graphs and texts", {"all": read_triples(place)}, (place,))
    if not place.is_dir():
        raise DataError(f"{place} does not exist; expected AGENDA's folder, or a file of triples: {FORM}.")
    relations = next(iter(_find_forms(place, RELATIONS)), None)
    if relations is not None:
        names = [line for _, line in read_numbered_lines(relations) if line.strip()]
        paths = {split: found[0] for split, name in AGENDA.items() if (found := _find_forms(place, name))}
        if "test" not in paths or len(paths) < 2:
            raise DataError(
                f"{place} lacks {AGENDA['test']} or both of {AGENDA['train']} and {AGENDA['dev']}, plain or .gz."
            )
        title = "AGENDA" if "train" in paths else "AGENDA without its training file: its validation file is trained on"
        splits = {split: read_agenda(path, names) for split, path in paths.items()}
        if "train" not in splits:
            splits["train"] = splits.pop("dev")
        return GraphSet(title, splits, (relations, *paths.values()))
    paths = {split: found[0] for split in ("train", "dev", "test") if (found := _find_forms(place, f"{split}.tsv"))}
    if "train" not in paths or "test" not in paths:
        raise DataError(
            f"{place} holds neither AGENDA ({RELATIONS}, {AGENDA['test']}, ...) nor your own train.tsv and test.tsv."
        )
    return GraphSet(
        "graphs and texts", {split: read_triples(path) for split, path in paths.items()}, tuple(paths.values())
    )


def read_agenda(path: Path, relations: Sequence[str]) -> list[Graph]:
    """Return the graphs of a preprocessed file of AGENDA (Koncel-Kedziorski et al. 2019).

    Six fields a line: title; entities; their types; triples `head relation tail` by number; the text, in lower case
    with mentions as `<type_number>`; the order of mention, which is not used.
    """
    return [_parse_agenda(line, relations, path, number) for number, line in _read_rows(path, "AGENDA's six fields")]


def read_triples(path: Path, *, needs_text: bool = True) -> list[Graph]:
    """Return the graphs of a user's own file, each line as `parse_triples` reads it."""
    rows = _read_rows(path, FORM if needs_text else FORM_WITHOUT_TEXT)
    return [parse_triples(line, str(path), number, needs_text=needs_text) for number, line in rows]


def parse_triples(line: str, name: str, number: int, *, needs_text: bool = True) -> Graph:
    r"""Return the graph of a line of a user's own: a title, triples and a text, with tabs between.

    Triples are written `head | relation | tail`, with ` ; ` between them; an entity without a triple is given alone.
    An entity may be followed by its type in angle brackets, as in `beam search <method>`. Mentions are found in the
    text: the words of an entity, the longest first. Everything is lower-cased but the relations' names.
    Without `needs_text` the third field may be absent; `name` and `number` locate the line in messages.

    Example:
        >>> parse_triples("Fast\tlda <method> | for | text", "mine.tsv", 1, needs_text=False).types
        ('method', 'entity')
    """
    allowed, form = ((3,), FORM) if needs_text else ((2, 3), FORM_WITHOUT_TEXT)
    fields = _split_fields(line, allowed, form, name, number)
    where = f"{name}, line {number}"
    types: dict[tuple[str, ...], str] = {}
    edges = []

    def entity(text: str) -> tuple[str, ...]:
        typed = TYPED.match(text.strip())
        words = tuple(WORD.findall((typed[1] if typed else text).lower()))
        if not words:
            raise DataError(f"{where}: an entity is empty; expected {FORM}.")
        if typed or words not in types:
            types[words] = typed[2].lower() if typed else UNTYPED
        return words

    for triple in fields[1].split(";"):
        parts = triple.split("|")
        if len(parts) not in (1, 3) or not all(part.strip() for part in parts):
            raise DataError(f"{where}: {triple.strip()[:60]!r}; expected head | relation | tail, or one entity alone.")
        if len(parts) == 1:
            entity(parts[0])
        else:
            edges.append((entity(parts[0]), parts[1].strip(), entity(parts[2])))
    entities = list(types)
    text = tuple(find_mentions(WORD.findall(fields[2].lower()), entities)) if len(fields) > 2 else ()
    if needs_text and not text:
        raise DataError(f"{where}: the text is empty; fill it in or drop the line.")
    number_of = {words: place for place, words in enumerate(entities)}
    numbered = tuple((number_of[head], relation, number_of[tail]) for head, relation, tail in edges)
    return Graph(tuple(WORD.findall(fields[0].lower())), tuple(entities), tuple(types.values()), numbered, text, number)


def spell_out(text: Sequence[str | int], entities: Sequence[Sequence[str]]) -> str:
    """Return a text as one line with the words of each entity in place of its number.

    >>> spell_out(["we", "use", 0, "."], [["beam", "search"]])
    'we use beam search .'
    """
    return " ".join(word if isinstance(word, str) else " ".join(entities[word]) for word in text)


def _parse_agenda(line: str, relations: Sequence[str], path: Path, number: int) -> Graph:
    where = f"{path}, line {number}"
    title, entities, types, triples, text, _ = _split_fields(line, (6,), "AGENDA's six", str(path), number)
    phrases = tuple(tuple(one.lower().split()) for one in entities.split(BETWEEN))
    kinds = tuple(one.strip("<>") for one in types.split())
    if not all(phrases):
        raise DataError(f"{where}: an entity is empty; expected entities with '{BETWEEN}' between them.")
    if len(kinds) != len(phrases):
        raise DataError(f"{where}: {len(phrases)} entities and {len(kinds)} types; expected one type an entity.")
    edges = []
    for triple in triples.split(BETWEEN) if triples.strip() else ():
        parts = triple.split()
        if len(parts) != 3 or not all(DIGITS.fullmatch(part) for part in parts):
            raise DataError(f"{where}: triple {triple[:60]!r}; expected three numbers, head, relation, tail.")
        head, relation, tail = map(int, parts)
        if not (head < len(phrases) and tail < len(phrases) and relation < len(relations)):
            raise DataError(
                f"{where}: triple {triple[:60]!r}; expected entities below {len(phrases)} and a relation below "
                f"{len(relations)}, those of {RELATIONS}."
            )
        edges.append((head, relations[relation], tail))
    words: list[str | int] = []
    for word in text.lower().split():
        mention = MENTION.fullmatch(word)
        if mention is None:
            words.append(word)
            continue
        place = int(mention[2]) if DIGITS.fullmatch(mention[2]) else len(phrases)
        if place >= len(phrases) or mention[1] != kinds[place]:
            raise DataError(f"{where}: the text mentions {word[:60]}; expected the number and type of an entity.")
        words.append(place)
    if not words:
        raise DataError(f"{where}: the text is empty; fill it in or drop the line.")
    return Graph(tuple(title.lower().split()), phrases, kinds, tuple(edges), tuple(words), number)


def _split_fields(line: str, allowed: Sequence[int], expected: str, name: str, number: int) -> list[str]:
    fields = line.split("\t")
    if len(fields) not in allowed:
        raise DataError(f"{name}, line {number}: {len(fields)} field{'s' * (len(fields) != 1)}; expected {expected}.")
    return fields


def _read_rows(path: Path, expected: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is not blank."""
    empty = True
    for number, text in read_numbered_lines(path, LONGEST):
        if text.strip():
            empty = False
            yield number, text
    if empty:
        raise DataError(f"{path} has no lines; expected {expected} in each.")


def _find_forms(folder: Path, name: str) -> list[Path]:
    return [path for path in (folder / name, folder / f"{name}.gz") if is_file(path)]
