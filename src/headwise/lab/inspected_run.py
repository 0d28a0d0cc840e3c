"""A finished run of the laboratory as something to inspect: its encoder, with the run's own subwords.

Owns what of a run is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from headwise.checks import DataError
from headwise.lab import runs
from headwise.lab.batches import length_sorted
from headwise.lab.inspected import BATCH, Encoded, Inspected
from headwise.lab.tasks.subwords import END, PADDING, SPECIAL
from headwise.lab.translator import Translator, open_translator
from headwise.layouts import find_heads

__all__ = ["inspected_run", "source_batches"]


def inspected_run(folder: Path, sentences: Sequence[str]) -> Inspected:
    """Return the encoder of a finished run of the task translation with the sentences as its subwords.

    Raises:
        DataError: The run is not finished, or is of another task.
    """
    record = runs.read_json(folder / runs.SETTINGS)
    task = record.get("task") if isinstance(record, dict) else None
    if task != "translation":
        raise DataError(
            f"{folder} holds a run of {task or 'no task'}, whose text goes in as the task's own tokens; inspect takes "
            "runs of translation and folders of Hugging Face, and hw.measure any model."
        )
    translator = open_translator(folder)
    encoder = translator.model.get_encoder()
    return Inspected(
        f"{folder.resolve().parent.name}-{folder.resolve().name}",
        encoder,
        find_heads(encoder),
        tuple(source_batches(translator, sentences)),
        "Of this run the encoder was looked at.",
    )


def source_batches(translator: Translator, sentences: Sequence[str]) -> Iterator[Encoded]:
    """Yield sentences as a translator's encoder takes them, in batches of like length."""
    device = next(translator.model.parameters()).device
    ids = [[*line[: translator.longest], END] for line in translator.encode(sentences)]
    for number, chosen in enumerate(length_sorted([len(line) for line in ids], BATCH)):
        width = max(len(ids[place]) for place in chosen)
        padded = torch.tensor([ids[place] + [PADDING] * (width - len(ids[place])) for place in chosen], device=device)
        lengths = torch.tensor([len(ids[place]) for place in chosen], device=device)
        keep = torch.arange(width, device=device) < lengths[:, None]
        tokens = tuple(
            tuple(SPECIAL[END] if one == END else translator.subwords.decode([one]) for one in ids[place])
            for place in chosen
        )
        yield Encoded(number, tuple(chosen), {"input_ids": padded, "attention_mask": keep}, keep, tokens)
