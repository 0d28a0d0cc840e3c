"""A finished run of translation, frozen: its encoder, which reads sources."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.heads.find import find_heads
from headwise.lab.data.encoded import Encoded, Row, Span, collate_rows
from headwise.lab.data.subwords import END, SPECIAL
from headwise.lab.experiment import run_folder
from headwise.lab.experiment.frozen import Frozen, name_run, read_states
from headwise.lab.role_masks.stored import RARITY, ROLES
from headwise.lab.tasks.translation.prepare import TOKENIZER
from headwise.lab.tasks.translation.translator import Translator, open_translator


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
