"""The vectors of sentences by a frozen model: the mean state of each layer and of each head, cached on disk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.atomic import hold, name_write_errors, new_folder, require_unchanged, seal
from headwise.errors import DataError
from headwise.heads.capture import Capture
from headwise.heads.taps import Taps
from headwise.input_files import encode_json, parse_json, read_whole
from headwise.texts.batching import Encoded
from headwise.texts.frozen import Frozen
from headwise_lab.data.arrays import digest

PROBED = (
    "expected a folder of Hugging Face, or a run of translation, classification, probing, sentence, pretraining, lm or "
    "glue"
)
FORM = "encodings-2"  # changes with anything that changes the arrays
LAYERS, SHAPES = "layers.npy", "shapes.json"
# Read once to count layers and heads.
TRIAL = "a sentence"

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """What can be read from a model.

    Attributes:
        layers: Number of layers; None if its tokens have no state in each layer, so that only heads can be read.
        heads: Number of heads of each attention, in the order of calls.
    """

    layers: int | None
    heads: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Encodings:
    """Vectors of N sentences.

    Attributes:
        layers: Mean state over the tokens of a sentence, before the first layer and after each, [L + 1, N, d]; None
            if tokens have no state in each layer.
        heads: Mean concatenated output of the heads of each layer before the output projection, [N, H e] each.
        counts: Number of heads H of each layer; () if none was read.
    """

    layers: Array | None
    heads: tuple[Array, ...]
    counts: tuple[int, ...]

    def head(self, layer: int, number: int) -> Array:
        """Return the vectors of one head, [N, e]."""
        size = self.heads[layer].shape[1] // self.counts[layer]
        return self.heads[layer][:, number * size : (number + 1) * size]


def fingerprint(frozen: Frozen) -> str:
    """Return the digest of a model: of all files its states depend on."""
    return digest(" ".join((FORM, *(path.name for path in frozen.files))), frozen.files)


def find_shape(frozen: Frozen) -> Shape:
    """Return what of a model can be read of a sentence, as it answers to one."""
    _require_sentences(frozen)
    with torch.no_grad(), Taps(frozen.heads, outputs=True) as taps:
        (batch,) = frozen.read([TRIAL])
        states = _run_states(frozen, batch)
        heads = tuple(capture.site.num_heads for capture in taps.read())
    return Shape(len(states) - 1 if states else None, heads)


def encodings(
    frozen: Frozen,
    sentences: Sequence[str],
    cache: Path,
    *,
    model: str,
    heads: bool = True,
    advance: Callable[[int], object] = lambda _done: None,
) -> Encodings:
    """Return the vectors of sentences, from the cache if they are there; a damaged cache is rebuilt.

    s = (1/n) sum_t h_t over the n tokens of a sentence, including special tokens; for a head, h_t is its output O_h at
    t, before W_O. A head that pools has one output per sentence, which is its vector.

    Args:
        frozen: The model.
        sentences: The sentences.
        cache: Folder for the arrays, which are memory-mapped.
        model: The model's `fingerprint`.
        heads: Whether the heads are read too.
        advance: Called with the number of sentences encoded since the last call.

    Raises:
        DataError: The cache cannot be written, the model's states are not finite, or it does not read sentences.
        LayoutError: The outputs of the heads cannot be read.
    """
    _require_sentences(frozen)
    place = cache / digest(encode_json([model, heads, list(sentences)]))
    kept = _read_kept(place)
    if kept is not None:
        return kept
    with hold(place, wait=True):
        # another probe may have written the same meanwhile
        if _read_kept(place) is None:
            with new_folder(place, replaced=None) as partial, name_write_errors(cache):
                _write(frozen, sentences, partial, heads=heads, advance=advance)
    kept = _read_kept(place)
    if kept is None:
        raise DataError(f"{place} cannot be read though it was just written; name another folder with --cache.")
    return kept


def _require_sentences(frozen: Frozen) -> None:
    if not frozen.reads_sentences:
        raise DataError(f"{frozen.name} reads no sentences; {PROBED}.")


def _read_kept(place: Path) -> Encodings | None:
    """Return the stored arrays; None if they are missing or damaged."""
    try:
        record = parse_json(read_whole(place / SHAPES))
        require_unchanged(place / SHAPES, record, remedy="delete it.")
        counts = tuple(map(int, record["heads"]))
        layers = np.load(place / LAYERS, mmap_mode="r") if record["layers"] else None
        heads = tuple(np.load(place / _name_file(layer), mmap_mode="r") for layer in range(len(counts)))
    except Exception:
        # whatever numpy raises for a damaged file
        return None
    return Encodings(layers, heads, counts)


def _write(
    frozen: Frozen,
    sentences: Sequence[str],
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
                states = _run_states(frozen, batch)
                captured = [] if taps is None else taps.read()
                if layers is None and states:
                    shape = len(states), len(sentences), states[0].shape[-1]
                    layers = np.lib.format.open_memmap(place / LAYERS, "w+", np.float32, shape)
                if not outputs:
                    counts = [capture.site.num_heads for capture in captured]
                    outputs = [
                        _open_array(place, layer, capture, len(sentences)) for layer, capture in enumerate(captured)
                    ]
                rows = list(batch.places)
                for layer, state in enumerate(states):
                    assert layers is not None  # it was opened with the first states
                    layers[layer, rows] = _average(state, batch)
                for array, capture in zip(outputs, captured, strict=True):
                    assert capture.outputs is not None  # requested above
                    # heads that pool have the same output at every token
                    array[rows] = _average(capture.outputs.flatten(2), batch)
                advance(len(rows))
    finally:
        if taps is not None:
            taps.remove()
    written = [*([] if layers is None else [layers]), *outputs]
    if not all(np.isfinite(array).all() for array in written):
        raise DataError(f"{frozen.name} gave states that are not finite; there is nothing to probe.")
    for array in written:
        array.flush()
    record = {"layers": layers is not None, "heads": counts}
    names = sorted(path.name for path in place.iterdir())
    (place / SHAPES).write_text(encode_json(seal(record, place, names)), encoding="utf-8")


def _run_states(frozen: Frozen, batch: Encoded) -> Sequence[Tensor]:
    """Run the model and return the states of its layers, if any."""
    if frozen.states is not None:
        return frozen.states(batch)
    frozen.run(batch)
    return ()


def _open_array(place: Path, layer: int, capture: Capture, count: int) -> Any:
    assert capture.outputs is not None  # requested by the caller
    shape = count, capture.outputs[0, 0].numel()
    return np.lib.format.open_memmap(place / _name_file(layer), "w+", np.float32, shape)


def _average(states: Tensor, batch: Encoded) -> Array:
    keep = batch.keep.unsqueeze(-1)
    # states at padding may be infinite
    total = states.float().masked_fill(~keep, 0.0).sum(dim=1)
    return (total / keep.sum(dim=1)).cpu().numpy()


def _name_file(layer: int) -> str:
    return f"heads-{layer}.npy"
