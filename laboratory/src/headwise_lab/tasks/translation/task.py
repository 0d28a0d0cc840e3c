"""The translation task: a parallel corpus, an encoder-decoder Transformer, beam search and BLEU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sacrebleu
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import DataError
from headwise.texts.batching import TokenBatches, batch_by_tokens, to_device
from headwise.texts.frozen import Frozen
from headwise_lab.data.arrays import stable_key
from headwise_lab.data.subwords import PADDING
from headwise_lab.experiment.arm import Guided, require_parses
from headwise_lab.experiment.evaluation import count_ngrams, spread_evenly
from headwise_lab.experiment.task import Answers, MaskMaker, Task
from headwise_lab.role_masks.stored import hash_pipeline
from headwise_lab.tasks.translation.corpora import find_files
from headwise_lab.tasks.translation.data import (
    RECORD,
    TOKENIZER,
    TranslationData,
    TranslationExample,
    TranslationSplit,
    collate,
    load_translation,
    open_prepared,
    prepare_translation,
)
from headwise_lab.tasks.translation.files import FORMS, find_corpus
from headwise_lab.tasks.translation.role_masks import PARSED_BY, Sources, learn_masks, make_parser
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES, TranslationScale

PROBED, PROBED_TOKENS = 256, 4_096
BIN = 10
# Parses of the sources, inside the folder of the prepared data.
PARSES = "parses"


class TranslationTask(Task, settings=Path(__file__).with_name("task.toml")):
    """Translation (Vaswani et al. 2017); see `task.Task` for the methods."""

    name = "translation"
    scales = TRANSLATION_SCALES

    def load(
        self, folder: Path | None, scale: TranslationScale, cache: Path | None, *, progress: bool = False
    ) -> ScaledTranslation:
        """Return the data of a place that `find_corpus` reads, or of a folder that was prepared before."""
        if folder is None:
            raise DataError(f"translation needs --data: {FORMS}.")
        if (folder / RECORD).exists():
            return _open_scaled(folder, scale)
        if cache is None:
            raise DataError("translation prepares its data in a cache folder, and none was given.")
        corpus, files = find_corpus(folder)
        data = load_translation(corpus, files, cache=cache, vocabulary_size=scale.vocabulary_size, progress=progress)
        return ScaledTranslation(data, scale)

    def find(self, folder: Path, scale: TranslationScale) -> None:
        """Refuse a place without a corpus."""
        if (folder / RECORD).exists():
            _open_scaled(folder, scale)
        else:
            find_files(*find_corpus(folder))

    def prepare(
        self, folder: Path, scale: TranslationScale, place: Path, *, tokenizer: Path | None, progress: bool = False
    ) -> ScaledTranslation:
        """Write the data of a scale into the folder `place`, which `load` then takes, here or on another machine."""
        if (folder / RECORD).exists():
            raise DataError(f"{folder} is prepared already; give it to headwise compare translation --data.")
        corpus, files = find_corpus(folder)
        size = scale.vocabulary_size
        data = prepare_translation(corpus, files, place, vocabulary_size=size, tokenizer=tokenizer, progress=progress)
        return ScaledTranslation(data, scale)

    def model(self, data: ScaledTranslation, scale: TranslationScale) -> nn.Module:
        """Return our Transformer or Marian."""
        # transformers takes seconds to import, and a command that starts runs may need no model
        from headwise_lab.tasks.translation.model import build_model

        return build_model(scale, data.whole.tokenizer.vocabulary_size)

    def extra_files(self, data: ScaledTranslation) -> dict[str, str]:
        """Return the subwords, which encode the model's inputs."""
        return {TOKENIZER: data.whole.tokenizer.to_json()}

    def role_masks(self, guided: Guided, data: ScaledTranslation, scale: TranslationScale, seed: int) -> MaskMaker:
        """Return the role masks of sources; the words' rarity is that of the training sources."""
        require_parses(guided, scale.pipeline is not None)
        parse = make_parser(scale.pipeline, data.whole.folder / PARSES)
        sources = Sources(data.whole.tokenizer, parse)
        return learn_masks(
            guided, sources, data.train.sources, num_heads=scale.heads, seed=seed, pipeline=scale.pipeline
        )

    def batches(self, data: ScaledTranslation, scale: TranslationScale, seed: int) -> TokenBatches:
        """Return batches of pairs of similar length, by tokens."""
        return TokenBatches(data.train.lengths, tokens=scale.tokens, seed=seed)

    def collate(self, examples: Sequence[TranslationExample]) -> dict[str, Tensor]:
        """Return a padded batch with its mask."""
        batch = collate(examples)
        return {**batch, "attention_mask": (batch["input_ids"] != PADDING).long()}

    def on_dev(self, model: Any, data: ScaledTranslation) -> dict[str, Any]:
        """Return the BLEU of greedy decoding on dev."""
        found = translate_split(model, data.dev, data.whole, beams=1, length_penalty=1.0)
        score = sacrebleu.corpus_bleu(found, [data.references("dev")]).score
        return {"pooled": score / 100}

    def on_test(self, model: Any, data: ScaledTranslation) -> Answers:
        """Return the translations of beam search, and their scores."""
        from headwise_lab.tasks.translation.decoding import negative_log_likelihood

        began = time.monotonic()
        scale = data.scale
        found = translate_split(model, data.test, data.whole, beams=scale.beams, length_penalty=scale.length_penalty)
        answers = _score(found, data.references("test"), seconds=time.monotonic() - began)
        return replace(answers, measures={**answers.measures, "NLL": negative_log_likelihood(model, data.test)})

    def greedy(self, model: Any, data: ScaledTranslation) -> NDArray[np.float64]:
        """Return the statistics of BLEU of each greedy translation of a test source."""
        found = translate_split(model, data.test, data.whole, beams=1, length_penalty=1.0)
        return count_ngrams(found, data.references("test"))

    def losses(self, model: Any, data: ScaledTranslation) -> NDArray[np.float64]:
        """Return the negative log likelihood of each test target, and its tokens."""
        from headwise_lab.tasks.translation.decoding import compute_pair_losses

        return compute_pair_losses(model, data.test)

    def dev_losses(self, model: Any, data: ScaledTranslation) -> Iterator[Tensor]:
        """Yield the mean negative log likelihood of a target's tokens, for pairs of dev."""
        from headwise_lab.tasks.translation.decoding import score_targets

        for batch in _choose_probed(data.dev.lengths):
            sums, tokens = score_targets(model, [data.dev[int(index)] for index in batch])
            yield sums / tokens

    def difficulties(self, data: ScaledTranslation) -> NDArray[np.int64]:
        """Return the number of words of each test source, rounded up to the next ten."""
        words = np.array([len(line.split()) for line in data.sources("test")])
        return np.maximum(BIN, -(-words // BIN) * BIN)

    def references(self, data: ScaledTranslation) -> list[str]:
        """Return the target line of each test source."""
        return data.references("test")

    def probe(self, model: nn.Module, data: ScaledTranslation) -> Iterator[None]:
        """Run the model on dev pairs, one batch per item."""
        from headwise_lab.tasks.translation.decoding import truncate_pairs

        for batch in _choose_probed(data.dev.lengths):
            examples = truncate_pairs(model, [data.dev[int(index)] for index in batch])
            model(**to_device(self.collate(examples), model))
            yield

    def baseline(self, name: str, data: ScaledTranslation, seed: int) -> Answers:  # noqa: ARG002  nothing is drawn
        """Return each source as its own translation."""
        return _score(data.sources("test"), data.references("test"))

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:  # noqa: ARG002  read with the run
        """Return the encoder of a run; heads with roles have them."""
        # the reader takes the model from this file
        from headwise_lab.tasks.translation.translator import open_sources

        return open_sources(folder, pipeline)


class ScaledTranslation:
    """A corpus with its splits cut to a scale's size."""

    def __init__(self, whole: TranslationData, scale: TranslationScale) -> None:
        self.whole, self.scale = whole, scale
        self.train = _take_first(whole.train, scale.train_examples)
        self.dev, self.test = _take_first(whole.dev, scale.dev_examples), _take_first(whole.test, scale.test_examples)

    @property
    def fingerprint(self) -> str:
        """Digest of what the data depends on; the caps are part of the scale's record."""
        if self.scale.pipeline is None:
            return self.whole.fingerprint
        return f"{self.whole.fingerprint}{PARSED_BY}{hash_pipeline(self.scale.pipeline)}"

    def summary(self) -> str:
        """Return the corpus, and for each split its size and how much of it this scale uses."""
        seen = {"train": len(self.train), "dev": len(self.dev), "test": len(self.test)}
        whole = {name: len(split) for name, split in self.whole.splits.items()}
        parts = [f"{size:,} of {name}" for name, size in seen.items() if size < whole[name]]
        cut = f"\nscale {self.scale.name} takes the first {', '.join(parts)}" if parts else ""
        return self.whole.summary() + cut

    def sources(self, split: Literal["dev", "test"]) -> list[str]:
        """Return the source lines of a split."""
        return self.whole.sources(split)[: len(getattr(self, split))]

    def references(self, split: Literal["dev", "test"]) -> list[str]:
        """Return the target lines of a split."""
        return self.whole.references(split)[: len(getattr(self, split))]


def translate_split(
    model: Any, split: TranslationSplit, data: TranslationData, *, beams: int, length_penalty: float
) -> list[str]:
    """Return the translation of each source of a split, in its order; see `decode_sources`."""
    from headwise_lab.tasks.translation.decoding import decode_sources

    return decode_sources(model, split.sources, data.tokenizer, beams=beams, length_penalty=length_penalty)


def _open_scaled(folder: Path, scale: TranslationScale) -> ScaledTranslation:
    data = ScaledTranslation(open_prepared(folder), scale)
    preparation = data.whole.record["preparation"]
    size = preparation["vocabulary_size"]
    if preparation["tokenizer"] == "learned" and size != scale.vocabulary_size:
        raise DataError(
            f"{folder} was prepared with {size:,} subwords but scale {scale.name} has {scale.vocabulary_size:,}; "
            "prepare it for that scale."
        )
    return data


def _score(found: Sequence[str], references: Sequence[str], *, seconds: float | None = None) -> Answers:
    hashes = np.array([stable_key(line) >> 1 for line in found], dtype=np.int64)
    scorers = {"BLEU": sacrebleu.BLEU(), "chrF": sacrebleu.CHRF()}
    measures = {name: scorer.corpus_score(found, [references]).score for name, scorer in scorers.items()}
    if seconds is not None:
        measures["decoding_seconds"] = seconds
    signatures = {name: str(scorer.get_signature()) for name, scorer in scorers.items()}
    return Answers(count_ngrams(found, references), hashes, measures, found, signatures)


def _take_first(split: TranslationSplit, most: int | None) -> TranslationSplit:
    if most is None or most >= len(split):
        return split
    return TranslationSplit(split.sources.first(most), split.targets.first(most))


def _choose_probed(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield some pairs, spread evenly, in batches of so many subwords, or of one pair that has more."""
    chosen = spread_evenly(len(lengths), PROBED)
    for batch in batch_by_tokens(lengths[chosen], tokens=max(PROBED_TOKENS, int(lengths[chosen].max()))):
        yield chosen[batch]
