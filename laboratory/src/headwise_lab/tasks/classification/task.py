"""The classification task: the class of a sentence, from six published sets or a given file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.heads.find import find_heads
from headwise.input_files import name_in_errors
from headwise.roles.guide import Guidance, guide
from headwise.roles.idf import IDF, idf
from headwise.roles.word_table import WordTable
from headwise.texts.batching import Encoded, Row, Span, collate_rows
from headwise.texts.frozen import Frozen, read_states
from headwise.texts.labeled_texts import Layout, find_layout, read_labeled
from headwise_lab.data.arrays import stable_key
from headwise_lab.experiment.arm import Guided, require_parses
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.experiment.task import Answers, MaskMaker, name_run
from headwise_lab.frozen.runs import list_files, read_attending_arm, run_encoder
from headwise_lab.models.text_classifiers import DRAWN, SentenceTransformer
from headwise_lab.role_masks.sentences import Donors, RoleMasks
from headwise_lab.role_masks.stored import RARITY, ROLES, list_pipeline_files, read_roles
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES, ClassificationScale
from headwise_lab.texts import words
from headwise_lab.texts.data import END, START, Form, TextData, Texts, load_texts
from headwise_lab.texts.sets import Example, TextSet
from headwise_lab.texts.task import TextTask, make_vectors, restore_classifier

ENCODING = "classification-1"  # changes with anything that changes the words


def _name_text(example: Example, _words: Any) -> tuple[str, str]:
    text = example.texts[0].lower().split()
    return "text", " ".join(words.BRACKETS.get(word, word) for word in text)


FORM = Form(
    words=words.word_tables,
    key=_name_text,
    grouped=False,
    bounded=True,
    left_out=("without_text", "without a text left out"),
    cut="cut to the longest length",
)


def prepare_texts(
    found: TextSet, layout: Layout, scale: ClassificationScale, cache: Path | None, form: str = "", **more: Any
) -> Texts:
    """Return the texts of a set as words, with their parses if the scale names a pipeline.

    `form` is what the set depends on besides its layout and its files; `more` is for `load_texts`.
    """
    inputs = [ENCODING, form, str(layout), str(scale.max_words)]
    files: list[Path] = []
    if scale.pipeline is not None:
        inputs, files = [*inputs, "parsed"], list_pipeline_files(scale.pipeline)
    if scale.embeddings is not None:
        inputs, files = [*inputs, f"vectors {scale.width}"], [*files, scale.embeddings]
    return load_texts(found, FORM, scale, cache, " ".join(filter(None, inputs)), files, **more)


def load_data(place: Path, scale: ClassificationScale, cache: Path | None, *, progress: bool = False) -> TextData:
    """Return the data of a scale.

    Equal texts are in one split: of published splits, training texts that are also in dev or test are left out; other
    splits are cut by a hash of the text. A set without a test split is cut into tenths, or into `scale.folds` parts, of
    which one is test and one is dev.

    Raises:
        DataError: A file is missing or malformed, or a split is empty.
    """
    texts = _load(place, scale, cache, progress=progress)
    with name_in_errors(place):
        splits, dropped = texts.cut_splits(scale.folds, scale.fold)
    return TextData.of(texts, splits, FORM, scale, place, dropped=dropped)


def list_folds(place: Path, scale: ClassificationScale, cache: Path | None) -> tuple[ClassificationScale, ...]:
    """Return the scale of each training of a run: one per fold if the set has no test split."""
    if scale.folds is None or scale.fold is not None:
        return (scale,)
    texts = _load(place, scale, cache)
    if "test" in texts.splits:
        return (scale,)
    scales = tuple(replace(scale, fold=fold) for fold in range(scale.folds))
    for one in scales:
        texts.require_labels(texts.cut_splits(one.folds, one.fold)[0]["train"], place)
    return scales


def _load(place: Path, scale: ClassificationScale, cache: Path | None, *, progress: bool = False) -> Texts:
    layout, paths = find_layout(place)
    found = TextSet.of_lines(layout, read_labeled(layout, paths, scale.columns), paths)
    return prepare_texts(found, layout, scale, cache, " ".join(scale.columns.words()), progress=progress)


class ClassificationTask(TextTask, settings=Path(__file__).with_name("task.toml")):
    """Sentence classification (Wang et al. 2021, section 4.1); see `task.Task` for the methods."""

    name = "classification"
    scales = CLASSIFICATION_SCALES
    network: type[SentenceTransformer] = SentenceTransformer
    drawn = DRAWN

    def load(
        self, folder: Path | None, scale: ClassificationScale, cache: Path | None, *, progress: bool = False
    ) -> TextData:
        """Return the data; see `load_data`."""
        return load_data(self.require_place(folder), scale, cache, progress=progress)

    def find(self, folder: Path, scale: ClassificationScale) -> None:  # noqa: ARG002  any scale reads the same files
        """Refuse a place without a set of texts."""
        find_layout(folder)

    def parts(
        self, folder: Path | None, scale: ClassificationScale, cache: Path | None
    ) -> tuple[ClassificationScale, ...]:
        """Return the scale of each fold."""
        return list_folds(self.require_place(folder), scale, cache)

    def model(self, data: TextData, scale: ClassificationScale) -> SentenceTransformer:
        """Return a Transformer encoder with a classifier."""
        return self.network(make_vectors(data, scale, drawn=self.drawn), len(data.labels), scale)

    def role_masks(self, guided: Guided, data: TextData, scale: ClassificationScale, seed: int) -> MaskMaker:
        """Return a maker of role masks, with the rarity of words in the training split."""
        require_parses(guided, data.texts.heads is not None)
        table, lengths = data.texts.table, data.texts.words[0].lengths
        donors = Donors(table, lengths, data.train.numbers.tolist(), derive_key(seed, "shuffled parse"))
        rarity = idf(data.words(data.train))
        return RoleMasks(guided, table, donors, rarity, num_heads=scale.heads, seed=seed, pipeline=scale.pipeline)

    def baseline(self, name: str, data: TextData, seed: int) -> Answers:
        """Return the answers of the most frequent class, or of a linear model of the words and pairs of words."""
        if name == "counts":
            predicted = self.predict_counts(data, seed)
        else:
            predicted = np.full(len(data.test), np.bincount(data.train.labels).argmax(), dtype=np.int64)
        return Answers(predicted == data.test.labels, predicted)

    def predict_counts(self, data: TextData, seed: int) -> NDArray[np.int64]:
        """Return the classes of test texts by a linear model of the words and pairs of words."""
        # scikit-learn takes seconds to import
        from headwise_lab.models import bag_of_words

        train, test = (data.words(split, lower=True) for split in (data.train, data.test))
        return bag_of_words.counts(train, test, data.train.labels, seed=seed)

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:
        """Return the encoder of a run, with role masks if it has them; see `read_roles`."""
        guided = read_attending_arm(folder, record).find(Guided)
        model, scale, vocabulary = restore_classifier(self, folder, record, ClassificationScale, self.network)
        encoder, encode, most = model.encoder, FORM.encoder(vocabulary), scale.max_words
        heads, run, files = find_heads(encoder), run_encoder(encoder), list_files(folder)
        if guided is not None:
            rarity, parsed_by = read_roles(folder, guided, pipeline)
            scale, files = replace(scale, pipeline=parsed_by), (*files, folder / RARITY, folder / ROLES)
            seed = int(record["seed"])
            run = _mask(run, guide(heads), guided, rarity, num_heads=scale.heads, seed=seed)

        def read(lines: Sequence[str]) -> Iterable[Encoded]:
            rows = []
            for line, table in zip(lines, words.word_tables(lines, scale, None), strict=True):
                kept = table[:most]
                numbers = [START, *encode([word.lower() for word in kept.words]), END]
                shown = tuple(vocabulary[number] for number in numbers)
                # words of another text were separated by white space
                whole = [word.span() for word in re.finditer(r"\S+", line)] if table.text != line else kept.spans or ()
                spans: list[Span] = [None, *whole[: len(kept)], None]
                rows.append(Row(numbers, shown, spans, kept, cut=len(table) > len(kept)))
            return collate_rows(rows, next(encoder.parameters()).device)

        def states(batch: Encoded) -> Sequence[Tensor]:
            layers: Any = encoder.layers
            return read_states(layers, lambda: run(batch))

        return Frozen(name_run(folder), encoder, heads, read, run, states, files, longest=f"{most} words")


def _mask(
    run: Callable[[Encoded], Tensor], guidance: Guidance, guided: Guided, rarity: IDF, *, num_heads: int, seed: int
) -> Callable[[Encoded], Tensor]:
    """Return `run` with the role masks of each batch of lines; a random one depends on the seed and on the words."""
    tables: dict[int, WordTable] = {}
    masks = RoleMasks(guided, tables.__getitem__, tables.__getitem__, rarity, num_heads=num_heads, seed=seed)

    def run_masked(batch: Encoded) -> Tensor:
        assert batch.tables is not None
        numbers = [stable_key("line", *table.words) >> 1 for table in batch.tables]
        tables.update(zip(numbers, batch.tables, strict=True))
        guidance(masks({"tokens": batch.inputs["input_ids"], "numbers": torch.tensor(numbers)}))
        return run(batch)

    return run_masked
