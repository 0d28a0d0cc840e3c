"""One self-contained page on the heads of a model: pick layer, head and sentence; see weights, similarity and worth.

Owns what is on the page and the data of its view. Must not know models: it is made from a report and from sentences
with their attention weights. The view's script and style stand beside this file.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from torch import Tensor

from headwise.errors import SettingError
from headwise.report.html import Page
from headwise.report.layer import PAIRS, LayerReport
from headwise.report.report import Report
from headwise.report.tables import head_rows, layer_name, layer_rows

# Letters of a sentence in the list a reader picks from.
SHOWN = 60
CHANCE = " Share of attention on each role's pairs, and in brackets what a random mask as sparse gets."


@dataclass(frozen=True, eq=False)
class Sentence:
    """A sentence to look at.

    Attributes:
        tokens: Its tokens as they are to be read, without padding.
        weights: For each layer of the report its attention weights [H, n, n], or [H, 1, n] where a sentence has one
            query; None where they could not be read.
    """

    tokens: tuple[str, ...]
    weights: tuple[Tensor | None, ...]


def inspection_page(
    report: Report,
    sentences: Sequence[Sentence] = (),
    *,
    title: str = "The heads of a model",
    before: Report | None = None,
    settings: str = "",
) -> Page:
    """Return the page of a report.

    Args:
        report: What was measured.
        sentences: Sentences whose weights a reader can look at.
        title: Title of the page.
        before: The report of another model of the same shape, shown beside it.
        settings: The command or settings it was made with.

    Raises:
        SettingError: The weights of a sentence do not fit the report, or `before` is of another shape.

    Example:
        >>> layer = LayerReport("attn", "self", "", 0, 2, {"output_cosine": ((1.0, 0.2), (0.2, 1.0))})
        >>> page = inspection_page(Report("Encoder", batches=1, tokens=5, layers=(layer,)))
        >>> "script-src 'sha256-" in page.render()
        True
    """
    page = Page(title)
    page.paragraph(report.summary, kind="lead")
    page.view(
        "inspection",
        _data(report, sentences),
        script=_beside("inspection_view.js"),
        style=_beside("inspection_view.css"),
    )
    page.heading("Layers")
    page.table(*layer_rows(report.layers), caption="Means over pairs of heads, and over heads.")
    if before is not None:
        report.compare(before)
        page.heading("Beside the other model")
        page.paragraph(f"Before: {before.summary}")
        page.table(*report.compare(before).rows)
    page.heading("Heads")
    page.table(
        *head_rows(report.layers, report.roles),
        caption="Each head against the others of its layer." + (CHANCE if report.roles else ""),
    )
    for note in report.notes:
        page.paragraph(note, kind="note")
    if settings:
        page.heading("Settings")
        page.code(settings)
    return page


def _data(report: Report, sentences: Sequence[Sentence]) -> dict[str, Any]:
    """Return what the view's script reads."""
    measured = {name for layer in report.layers for name in layer.pairs}
    return {
        "score": report.score,
        "roles": list(report.roles),
        "measures": {name: words for name, words in PAIRS.items() if name in measured} or {"none": "nothing"},
        "layers": [
            {
                "name": layer_name(layer),
                "heads": layer.heads,
                "pairs": {
                    name: [[round(value, 5) for value in row] for row in rows] for name, rows in layer.pairs.items()
                },
                "drops": [[drop.value, drop.low, drop.high] for drop in layer.drops],
                "roles": [list(row) for row in layer.roles],
                "chance": list(layer.chance),
            }
            for layer in report.layers
        ],
        "sentences": [_sentence(sentence, report.layers) for sentence in sentences],
    }


def _sentence(sentence: Sentence, layers: Sequence[LayerReport]) -> dict[str, Any]:
    size = len(sentence.tokens)
    if len(sentence.weights) != len(layers) or not size:
        raise SettingError(
            f"a sentence has {size} tokens and weights of {len(sentence.weights)} layers; expected a token or more and "
            f"an entry for each of {len(layers)}."
        )
    for weights, layer in zip(sentence.weights, layers, strict=True):
        if weights is not None and tuple(weights.shape) not in ((layer.heads, size, size), (layer.heads, 1, size)):
            raise SettingError(
                f"weights of {layer.site or 'the model'} have shape {tuple(weights.shape)}; expected "
                f"{(layer.heads, size, size)}, or {(layer.heads, 1, size)} of one query."
            )
    text = " ".join(sentence.tokens)
    return {
        "text": text if len(text) <= SHOWN else f"{text[:SHOWN]}\N{HORIZONTAL ELLIPSIS}",
        "tokens": list(sentence.tokens),
        "weights": [None if weights is None else _packed(weights) for weights in sentence.weights],
    }


def _packed(weights: Tensor) -> str:
    """Return weights in steps of 1/255, one byte each, as base64."""
    steps = (weights.detach().cpu().double().clamp(0, 1) * 255).round().int().flatten()
    return base64.b64encode(bytes(steps.tolist())).decode("ascii")


def _beside(name: str) -> str:
    return resources.files("headwise.report").joinpath(name).read_text(encoding="utf-8")
