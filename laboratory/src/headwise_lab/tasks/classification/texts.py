"""The texts of a classification set as words, with their labels and, where a pipeline is named, their parses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise.roles.word_table import WordTable
from headwise.texts.labeled_texts import LabeledText, Layout, find_layout, read_labeled
from headwise_lab.data.arrays import Ragged, cache_arrays, digest, pack_words, stable_key, unpack_words
from headwise_lab.data.word_vectors import pack_vectors, unpack_vectors
from headwise_lab.role_masks.stored import list_pipeline_files
from headwise_lab.tasks.classification.scales import ClassificationScale

ENCODING = "classification-1"  # changes with anything below that changes the arrays
PARSES = "parses"
# Punctuation attached to words, and separated from them as in tokenized text.
ATTACHED, APART = re.compile(r"\w[,.;?!](?=\s|$)"), re.compile(r"(?<!\S)[,.;?!](?=\s|$)")
# The Penn Treebank's brackets: SST has them in its sentences and not in its phrases.
BRACKETS = {"-lrb-": "(", "-rrb-": ")", "-lsb-": "[", "-rsb-": "]", "-lcb-": "{", "-rcb-": "}"}


@dataclass(frozen=True, eq=False)
class Texts:
    """All texts of a set, file by file.

    Attributes:
        layout: Which file is which split.
        files: First and last text, exclusive, of each file, by the layout's names.
        labels: The label of each class, in order.
        classes: Class of each text, int64 [N].
        keys: A hash of each text in lower case, int64 [N].
        types: The distinct words, as written.
        words: Words of each text, as indices into `types`.
        heads: Index of each word's head in its text; None without a pipeline.
        relations: Relation of each word to its head, as indices into `relation_names`; None without a pipeline.
        relation_names: The distinct relations.
        vectors: Vectors of words in lower case, if a file of them was named.
        left_out: Number of lines without a text, which are left out.
        cut: Number of texts longer than the scale allows, which are truncated.
        fingerprint: 16 hexadecimal digits of everything the texts depend on.
    """

    layout: Layout
    files: Mapping[str, tuple[int, int]]
    labels: tuple[str, ...]
    classes: NDArray[np.int64]
    keys: NDArray[np.int64]
    types: tuple[str, ...]
    words: Ragged
    heads: Ragged | None
    relations: Ragged | None
    relation_names: tuple[str, ...]
    vectors: Mapping[str, NDArray[np.float32]]
    left_out: int
    cut: int
    fingerprint: str

    def table(self, number: int) -> WordTable:
        """Return the words of a text with their parse, if there is one."""
        words = [self.types[word] for word in self.words[number]]
        if self.heads is None or self.relations is None:
            return WordTable(words)
        relations = [self.relation_names[relation] for relation in self.relations[number]]
        return WordTable(words, heads=self.heads[number], relations=relations)

    @cached_property
    def lower(self) -> tuple[str, ...]:
        """The words in lower case, one a type."""
        return tuple(word.lower() for word in self.types)


def load_texts(place: Path, scale: ClassificationScale, cache: Path | None, *, progress: bool = False) -> Texts:
    """Return the texts of a folder or a file.

    If the punctuation is separated from words, as in the published sets, words are separated by blanks; else they are
    those of the pipeline, or without one, runs of letters and digits, and single punctuation marks.

    Args:
        place: Folder of `labeled_texts.LAYOUTS`, or one file.
        scale: The maximum length, and which pipeline and word vectors to use.
        cache: Folder for the arrays and for the parses; None keeps nothing.
        progress: Whether parsing shows a bar.

    Raises:
        DataError: A file is missing or malformed, or a class has no training text.
    """
    layout, paths = find_layout(place)
    read = read_labeled(layout, paths, scale.columns)
    return prepare_texts(layout, paths, read, scale, cache, form=" ".join(scale.columns.words()), progress=progress)


def prepare_texts(
    layout: Layout,
    paths: Mapping[str, Path],
    read: Mapping[str, Sequence[LabeledText]],
    scale: ClassificationScale,
    cache: Path | None,
    *,
    form: str = "",
    labels: tuple[str, ...] | None = None,
    progress: bool = False,
) -> Texts:
    """Return the texts of lines; see `load_texts`.

    Args:
        layout: Which name is which split.
        paths: The file of each name.
        read: The lines of each name.
        scale: The maximum length, and which pipeline and word vectors to use.
        cache: Folder for the arrays and for the parses; None keeps nothing.
        form: What else the lines depend on.
        labels: The labels; None for those of the training file, which must have all of them.
        progress: Whether parsing shows a bar.

    Raises:
        DataError: A class has no training text.
    """
    kept = {name: [one for one in lines if one.text] for name, lines in read.items()}
    labels = _list_labels(layout, kept, paths) if labels is None else labels
    inputs = " ".join(filter(None, (ENCODING, form, str(layout), str(scale.max_words))))
    extra: list[Path] = []
    if scale.pipeline is not None:
        inputs, extra = f"{inputs} parsed", list_pipeline_files(scale.pipeline)
    if scale.embeddings is not None:
        inputs, extra = f"{inputs} vectors {scale.width}", [*extra, scale.embeddings]
    fingerprint = digest(inputs, [*dict.fromkeys(paths.values()), *extra])
    stored = cache_arrays(
        cache, f"classification-{fingerprint}", lambda: _encode(kept, labels, scale, cache, progress=progress)
    )
    return _decode(stored, layout, labels, sum(map(len, read.values())) - len(stored["classes"]), fingerprint)


def is_tokenized(texts: Sequence[str]) -> bool:
    """Return whether punctuation is mostly separated from words, as in tokenized texts.

    >>> is_tokenized(["fine , thanks ."]), is_tokenized(["Fine, thanks."]), is_tokenized(["fine"])
    (True, False, True)
    """
    attached = sum(len(ATTACHED.findall(text)) for text in texts)
    return attached <= sum(len(APART.findall(text)) for text in texts)


def word_tables(
    texts: Sequence[str], scale: ClassificationScale, cache: Path | None, *, progress: bool = False
) -> list[WordTable]:
    """Return the words of texts as in `load_texts`, with their parses if the scale names a pipeline.

    Args:
        texts: The texts; all together decide whether they are tokenized.
        scale: The pipeline, and the number of words per text to parse.
        cache: Folder for the parses; None keeps none.
        progress: Whether parsing shows a bar.
    """
    apart = is_tokenized(texts)
    words = [[BRACKETS.get(word.lower(), word) for word in text.split()] for text in texts] if apart else []
    if scale.pipeline is None:
        return [WordTable(one) for one in words] if apart else [WordTable.split(text) for text in texts]
    # spaCy takes seconds to import
    from headwise.roles.spacy import Parser

    parse = Parser(str(scale.pipeline), cache=None if cache is None else cache / PARSES, progress=progress)
    # words beyond the limit need no parse
    return parse([one[: scale.max_words + 1] for one in words] if apart else list(texts))


def _list_labels(
    layout: Layout, kept: Mapping[str, Sequence[LabeledText]], paths: Mapping[str, Path]
) -> tuple[str, ...]:
    labels = tuple(sorted({one.label for one in kept[layout.train]}))
    for name, lines in kept.items():
        strange = next((one for one in lines if one.label not in labels), None)
        if strange is not None:
            raise DataError(
                f"{paths[name]}, line {strange.line}: label {strange.label!r:.60} does not occur in "
                f"{paths[layout.train].name}; expected one of {', '.join(labels[:8]):.200}."
            )
    return labels


def _encode(
    kept: Mapping[str, Sequence[LabeledText]],
    labels: Sequence[str],
    scale: ClassificationScale,
    cache: Path | None,
    *,
    progress: bool,
) -> dict[str, NDArray]:
    lines = [one for file in kept.values() for one in file]
    whole = word_tables([one.text for one in lines], scale, cache, progress=progress)
    tables = [table[: scale.max_words] for table in whole]
    types = sorted({word for table in tables for word in table.words})
    place = {word: index for index, word in enumerate(types)}
    arrays: dict[str, NDArray] = {
        "files": np.cumsum([len(file) for file in kept.values()]),
        "classes": np.array([labels.index(one.label) for one in lines], dtype=np.int64),
        "keys": np.array([stable_key("text", _normalize(one.text)) >> 1 for one in lines], dtype=np.int64),
        "types": pack_words(types),
        "cut": np.array(sum(len(table) > scale.max_words for table in whole)),
    }
    arrays |= Ragged.of([[place[word] for word in table.words] for table in tables]).pack("words")
    if scale.pipeline is not None:
        names = sorted({relation for table in tables for relation in table.relations or ()})
        ids = {name: index for index, name in enumerate(names)}
        arrays |= Ragged.of([list(table.heads or ()) for table in tables]).pack("heads")
        arrays |= Ragged.of([[ids[name] for name in table.relations or ()] for table in tables]).pack("relations")
        arrays["relation_names"] = pack_words(names)
    if scale.embeddings is not None:
        arrays |= pack_vectors(scale.embeddings, {word.lower() for word in types}, scale.width)
    return arrays


def _normalize(text: str) -> str:
    return " ".join(BRACKETS.get(word, word) for word in text.lower().split())


def _decode(
    stored: Mapping[str, NDArray], layout: Layout, labels: tuple[str, ...], left_out: int, fingerprint: str
) -> Texts:
    ends, parsed = stored["files"].tolist(), "relation_names" in stored
    return Texts(
        layout=layout,
        files=dict(zip(layout.names, zip([0, *ends], ends, strict=False), strict=True)),
        labels=labels,
        classes=stored["classes"],
        keys=stored["keys"],
        types=unpack_words(stored["types"]),
        words=Ragged.unpack(stored, "words"),
        heads=Ragged.unpack(stored, "heads") if parsed else None,
        relations=Ragged.unpack(stored, "relations") if parsed else None,
        relation_names=unpack_words(stored["relation_names"]) if parsed else (),
        vectors=unpack_vectors(stored),
        left_out=left_out,
        cut=int(stored["cut"]),
        fingerprint=fingerprint,
    )
