"""The vectors of sentences by a frozen model: the mean state of each layer and of each head, kept on disk.

Owns the arrays, their place on disk, and what that follows from: the model's files, the sentences and what is read.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.checks import DataError
from headwise.lab.data import digest
from headwise.lab.encoded import Encoded
from headwise.lab.frozen_model import Frozen
from headwise.taps import Capture, Taps

__all__ = ["Encodings", "encodings", "fingerprint"]

PROBED = "expected a folder of Hugging Face, or a run of translation, classification, probing, pretraining or glue"
FORM = "encodings-1"  # changes with anything below that changes the arrays
LAYERS, SHAPES = "layers.npy", "shapes.json"

Array = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Encodings:
    """Vectors of N sentences.

    Attributes:
        layers: Mean state over the tokens of a sentence, before the first layer and after each, [L + 1, N, d].
        heads: Mean output of the heads of each layer before the output projection, side by side, [N, H e] each.
        counts: Heads H of each layer; () where none was read.
    """

    layers: Array
    heads: tuple[Array, ...]
    counts: tuple[int, ...]

    def head(self, layer: int, number: int) -> Array:
        """Return the vectors of one head, [N, e]."""
        size = self.heads[layer].shape[1] // self.counts[layer]
        return self.heads[layer][:, number * size : (number + 1) * size]


def fingerprint(frozen: Frozen) -> str:
    """Return the digest of a model: of all files its states follow from."""
    return digest(" ".join((FORM, *(path.name for path in frozen.files))), frozen.files)


def encodings(
    frozen: Frozen,
    sentences: Sequence[str],
    cache: Path,
    *,
    model: str,
    heads: bool = True,
    advance: Callable[[int], object] = lambda _done: None,
) -> Encodings:
    """Return the vectors of sentences, encoded once for all time while the cache is kept.

    s = (1/n) sum_t h_t over the n real tokens of a sentence, those that the tokenizer adds included; for a head, h_t is
    its output O_h at t, before W_O.

    Args:
        frozen: The model.
        sentences: The sentences.
        cache: Folder for the arrays, which are read from there without being loaded.
        model: The model's `fingerprint`.
        heads: Whether the heads are read too.
        advance: Told how many sentences were encoded since it was last told.

    Raises:
        DataError: The cache cannot be written, the model's states are not finite, or it reads no sentences.
        LayoutError: The outputs of the heads cannot be read.
    """
    if frozen.states is None:
        raise DataError(f"{frozen.name} has no state of each token of a sentence in each layer; {PROBED}.")
    place = cache / digest(json.dumps([model, heads, list(sentences)], ensure_ascii=True))
    if not (place / SHAPES).is_file():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=cache, prefix=".encoding-"))
        except OSError as error:
            raise DataError(f"{cache}: the cache cannot be written ({error.strerror}); name another folder.") from None
        try:
            _write(frozen, sentences, frozen.states, partial, heads=heads, advance=advance)
            # a folder without shapes is what an older interruption left
            shutil.rmtree(place, ignore_errors=True)
            partial.replace(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    counts = tuple(json.loads((place / SHAPES).read_text(encoding="utf-8")))
    kept = tuple(np.load(place / _file(layer), mmap_mode="r") for layer in range(len(counts)))
    return Encodings(np.load(place / LAYERS, mmap_mode="r"), kept, counts)


def _write(
    frozen: Frozen,
    sentences: Sequence[str],
    states_of: Callable[[Encoded], Sequence[Tensor]],
    place: Path,
    *,
    heads: bool,
    advance: Callable[[int], object],
) -> None:
    layers: Any = None
    outputs: list[Any] = []
    counts: list[int] = []
    taps = Taps(frozen.heads, outputs=True) if heads else None
    try:
        with torch.no_grad():
            for batch in frozen.read(sentences):
                states = states_of(batch)
                captured = [] if taps is None else taps.read()
                if layers is None:
                    shape = len(states), len(sentences), states[0].shape[-1]
                    layers = np.lib.format.open_memmap(place / LAYERS, "w+", np.float32, shape)
                    counts = [capture.site.num_heads for capture in captured]
                    outputs = [_opened(place, layer, capture, len(sentences)) for layer, capture in enumerate(captured)]
                rows = list(batch.places)
                for layer, state in enumerate(states):
                    layers[layer, rows] = _mean(state, batch)
                for array, capture in zip(outputs, captured, strict=True):
                    assert capture.outputs is not None  # that is what was asked for
                    array[rows] = _mean(capture.outputs.flatten(2), batch)
                advance(len(rows))
    finally:
        if taps is not None:
            taps.remove()
    if layers is None or not np.isfinite(layers).all():
        raise DataError(f"{frozen.name} gave states that are not finite; there is nothing to probe.")
    for array in (layers, *outputs):
        array.flush()
    (place / SHAPES).write_text(json.dumps(counts), encoding="utf-8")


def _opened(place: Path, layer: int, capture: Capture, count: int) -> Any:
    assert capture.outputs is not None  # that is what was asked for
    shape = count, capture.outputs[0, 0].numel()
    return np.lib.format.open_memmap(place / _file(layer), "w+", np.float32, shape)


def _mean(states: Tensor, batch: Encoded) -> Array:
    keep = batch.keep.unsqueeze(-1)
    # what stands at padding may be anything, an infinity included
    total = states.float().masked_fill(~keep, 0.0).sum(dim=1)
    return (total / keep.sum(dim=1)).cpu().numpy()


def _file(layer: int) -> str:
    return f"heads-{layer}.npy"
