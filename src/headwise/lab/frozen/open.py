"""A trained model, frozen, as something that turns lines of a text into states and heads.

Owns which folders there are: of Hugging Face, and of finished runs of each task. What is done with the states is
`encodings`' and `inspect_command`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.errors import DataError
from headwise.heads.find import find_heads
from headwise.lab.data.encoded import Encoded, Row, Span, batched
from headwise.lab.data.subwords import END, SPECIAL
from headwise.lab.experiment import run_folder
from headwise.lab.frozen.folder import frozen_folder
from headwise.lab.frozen.model import Frozen, run_name, through
from headwise.lab.frozen.words import frozen_classifier, frozen_logic, frozen_sentence
from headwise.lab.role_masks.stored import RARITY, ROLES
from headwise.lab.tasks.graph2text.frozen import frozen_graphs
from headwise.lab.tasks.translation.prepare import TOKENIZER
from headwise.lab.tasks.translation.translator import Translator, open_translator
from headwise.lab.training.finished import finished_record
from headwise.lab.training.start import DISCRIMINATOR, MODEL
from headwise.lab.training.trained import read_arm

# Tasks whose encoder reads words, and whose heads may have roles.
CLASSIFIERS = ("classification", "probing")
OTHERS = {"sentence": frozen_sentence, "logic": frozen_logic, "graph2text": frozen_graphs}
# Tasks whose runs keep a folder of Hugging Face.
EXPORTED = {"pretraining": DISCRIMINATOR, "glue": MODEL}


def open_frozen(folder: Path, pipeline: Path | None = None) -> Frozen:
    """Return the model of a folder of Hugging Face, or of a finished run of any task.

    Args:
        folder: The folder.
        pipeline: Where the spaCy pipeline lies that parsed the texts of a run whose heads have roles; None for the
            place where it lay then. Where none parsed it does not count.

    Raises:
        DataError: The folder holds no such model, or what it holds cannot be read.
        LayoutError: The heads of the model cannot be found.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; expected a folder of save_pretrained(), or a finished run.")
    return _run(folder, pipeline) if (folder / run_folder.SETTINGS).is_file() else frozen_folder(folder)


def source_batches(translator: Translator, sentences: Sequence[str]) -> Iterator[Encoded]:
    """Yield sentences as a translator's encoder takes them, in batches of like length."""
    device = next(translator.model.parameters()).device
    return batched([_source(translator, sentence) for sentence in sentences], device)


def _run(folder: Path, pipeline: Path | None) -> Frozen:
    record = run_folder.read_json(folder / run_folder.SETTINGS)
    task = record.get("task") if isinstance(record, dict) else None
    if task == "translation":
        return _translation(folder, pipeline)
    if task not in (*CLASSIFIERS, *OTHERS, *EXPORTED):
        known = ", ".join(("translation", *CLASSIFIERS, *OTHERS, *EXPORTED))
        raise DataError(f"{folder} holds a run of {task or 'no task'}; expected one of {known}.")
    finished_record(folder, task)
    if task in EXPORTED:
        return _exported(folder, EXPORTED[task])
    arm = read_arm(folder, record)
    if arm.model is not None:
        raise DataError(f"{folder} cannot be read: its model {arm.model} has no attention that an arm acts on.")
    if task in CLASSIFIERS:
        return frozen_classifier(folder, record, arm, pipeline)
    return OTHERS[task](folder, record, arm)


def _exported(folder: Path, name: str) -> Frozen:
    if not (folder / name / "config.json").is_file():
        remedy = "; run it with --set keep_model=true" if name == MODEL else ""
        raise DataError(f"{folder} keeps no folder {name!r} with a model and its tokenizer{remedy}.")
    return replace(frozen_folder(folder / name, run_name(folder)), note=f"Of this run the {name} was looked at.")


def _translation(folder: Path, pipeline: Path | None) -> Frozen:
    translator = open_translator(folder, pipeline=pipeline)
    encoder = translator.model.get_encoder()
    kept = (run_folder.WEIGHTS, TOKENIZER, RARITY, ROLES)
    files = tuple(path for path in sorted(folder.iterdir()) if path.name in kept)
    return Frozen(
        run_name(folder),
        encoder,
        find_heads(encoder),
        lambda sentences: source_batches(translator, sentences),
        lambda batch: encoder(**batch.inputs).last_hidden_state,
        lambda batch: _of_encoder(encoder, batch),
        (folder / run_folder.SETTINGS, *files),
        note="Of this run the encoder was looked at.",
        longest=f"{translator.longest} subwords",
    )


def _source(translator: Translator, sentence: str) -> Row:
    subwords = translator.subwords
    encoding = subwords.tokenizer.encode(sentence, add_special_tokens=False)
    ids = [subwords.shift + one for one in encoding.ids][: translator.longest]
    spans: list[Span] = [*encoding.offsets[: translator.longest], None]
    shown = (*(subwords.decode([one]) for one in ids), SPECIAL[END])
    return Row([*ids, END], shown, spans, cut=len(encoding.ids) > len(ids))


def _of_encoder(encoder: Any, batch: Encoded) -> Sequence[Tensor]:
    from transformers import PreTrainedModel

    if isinstance(encoder, PreTrainedModel):
        return encoder(**batch.inputs, output_hidden_states=True).hidden_states
    return through(encoder.layers, lambda: encoder(**batch.inputs).last_hidden_state)
