"""A finished run of the translation task that translates lines of text.

A finished run of translation, frozen: its encoder, which reads sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from headwise.errors import require_integer
from headwise.heads.find import find_heads
from headwise.texts.batching import Encoded, Row, Span, collate_rows
from headwise.texts.frozen import Frozen, read_states
from headwise_lab.data.line_streams import LONGEST_LINE, TextLine, answer_lines
from headwise_lab.data.subwords import END, SPECIAL, Subwords, read_subwords
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm import Guided
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.task import name_run
from headwise_lab.role_masks.stored import RARITY, ROLES
from headwise_lab.tasks.translation.data import TOKENIZER
from headwise_lab.tasks.translation.decoding import decode_sources, find_max_source_length
from headwise_lab.tasks.translation.model import build_model
from headwise_lab.tasks.translation.role_masks import SourceMasks, read_masks
from headwise_lab.tasks.translation.scales import TranslationScale
from headwise_lab.training.trained import (
    build_run_model,
    read_arm,
    read_finished,
    read_scale,
    require_kept_file,
    restore_run,
)

TASK = "translation"


@dataclass(frozen=True, eq=False)
class Translator:
    """A trained model with its subwords."""

    model: Any
    subwords: Subwords
    scale: TranslationScale
    batch: int = 32
    masks: SourceMasks | None = None

    @property
    def parsed(self) -> bool:
        """Whether its sources are parsed, for role masks."""
        return self.masks is not None and self.masks.masks.pipeline is not None

    @property
    def longest(self) -> int:
        """Maximum number of subwords of a line; longer lines are truncated."""
        return find_max_source_length(self.model) - 1

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the subwords of each line, without an end."""
        return self.subwords.encode_batch(lines)

    def translate(self, sources: Sequence[list[int]]) -> list[str]:
        """Return the translation of each encoded line, in their order; that of a line without subwords is empty."""
        nonempty = [index for index, ids in enumerate(sources) if ids]
        found = decode_sources(
            self.model,
            [[*sources[index], END] for index in nonempty],
            self.subwords,
            beams=self.scale.beams,
            length_penalty=self.scale.length_penalty,
            examples=self.batch,
        )
        if self.masks is not None:
            # a stream may be longer than memory
            self.masks.forget()
        lines = [""] * len(sources)
        for index, line in zip(nonempty, found, strict=True):
            lines[index] = line
        return lines


def open_translator(
    folder: Path,
    *,
    beams: int | None = None,
    length_penalty: float | None = None,
    batch: int = 32,
    pipeline: Path | None = None,
) -> Translator:
    """Return the translator of a finished run."""
    record = read_finished(folder, TASK)
    scale, arm = read_scale(folder, record, TranslationScale), read_arm(folder, record)
    require_integer("batch", batch, low=1)
    given = {"beams": beams, "length_penalty": length_penalty}
    scale = replace(scale, **{name: value for name, value in given.items() if value is not None})
    for name in (run_folder.WEIGHTS, TOKENIZER):
        require_kept_file(folder, name)
    subwords = read_subwords(folder / TOKENIZER)
    seed, masks = int(record["seed"]), None
    guided = arm.find(Guided)
    if guided is not None:
        masks = read_masks(folder, guided, subwords, pipeline, num_heads=scale.heads, seed=seed)
    model = build_run_model(folder, lambda: build_model(scale, subwords.vocabulary_size))
    restore_run(folder, arm, model, named_task(TASK), seed=seed, masks=masks)
    return Translator(model, subwords, scale, batch, masks)


def translate_lines(
    translator: Translator,
    lines: Iterable[TextLine],
    output: IO[bytes],
    *,
    window: int,
    warn: Callable[[str], None] = lambda _sentence: None,
    done: Callable[[int], None] = lambda _lines: None,
) -> None:
    """Write the translation of each line in order, as one line; that of a blank line is empty.

    `warn` is called with a sentence about each line that is truncated, `done` as in `answer_lines`.
    """

    def translate(held: list[TextLine]) -> list[str]:
        sources = translator.encode([line.text.strip() for line in held])
        for line, source in zip(held, sources, strict=True):
            if line.cut or len(source) > translator.longest:
                warn(_describe_cut(line, len(source), translator.longest))
        return translator.translate([source[: translator.longest] for source in sources])

    answer_lines(lines, translate, output, window=window, done=done)


def _describe_cut(line: TextLine, subwords: int, longest: int) -> str:
    size = f"over {LONGEST_LINE:,} bytes" if line.cut else f"{subwords:,} subwords"
    kept = min(subwords, longest)
    return f"line {line.number} has {size}; its first {kept:,} subwords are translated: give one sentence a line."


def open_sources(folder: Path, pipeline: Path | None) -> Frozen:
    """Return the encoder of a run of translation; heads with roles have them."""
    translator = open_translator(folder, pipeline=pipeline)
    encoder = translator.model.get_encoder()
    device = next(encoder.parameters()).device
    kept = (run_folder.WEIGHTS, TOKENIZER, RARITY, ROLES)
    files = tuple(path for path in sorted(folder.iterdir()) if path.name in kept)
    return Frozen(
        name_run(folder),
        encoder,
        find_heads(encoder),
        lambda sentences: collate_rows([_encode(translator, sentence) for sentence in sentences], device),
        lambda batch: encoder(**batch.inputs).last_hidden_state,
        lambda batch: _read_encoder(encoder, batch),
        (folder / run_folder.SETTINGS, *files),
        note="Of this run the encoder was looked at.",
        longest=f"{translator.longest} subwords",
    )


def _encode(translator: Translator, sentence: str) -> Row:
    subwords = translator.subwords
    encoding = subwords.tokenizer.encode(sentence, add_special_tokens=False)
    ids = [subwords.shift + one for one in encoding.ids][: translator.longest]
    spans: list[Span] = [*encoding.offsets[: translator.longest], None]
    shown = (*(subwords.decode([one]) for one in ids), SPECIAL[END])
    return Row([*ids, END], shown, spans, cut=len(encoding.ids) > len(ids))


def _read_encoder(encoder: Any, batch: Encoded) -> Sequence[Tensor]:
    from transformers import PreTrainedModel

    if isinstance(encoder, PreTrainedModel):
        return encoder(**batch.inputs, output_hidden_states=True).hidden_states
    return read_states(encoder.layers, lambda: encoder(**batch.inputs).last_hidden_state)
