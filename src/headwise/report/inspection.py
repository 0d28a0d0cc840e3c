"""The page of `headwise inspect`: pick a layer, head and sentence; see attention, similarity and removal cost."""

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
from headwise.report.tables import explain_columns, make_head_rows, make_layer_rows, name_layer

# Characters of a sentence in the list to pick from.
MAX_LENGTH = 60
CHANCE = " Share of attention on each role's pairs, with the share of an equally sparse random mask in parentheses."


@dataclass(frozen=True, eq=False)
class Sentence:
    """A sentence: its tokens without padding, and its attention weights in each layer of the report.

    Weights are [H, n, n], or [H, 1, n] with one query per sentence; None where they could not be read.
    """

    tokens: tuple[str, ...]
    weights: tuple[Tensor | None, ...]


def make_inspection_page(
    report: Report,
    sentences: Sequence[Sentence] = (),
    *,
    title: str = "The heads of a model",
    before: Report | None = None,
    settings: str = "",
) -> Page:
    """Make the page of a report, with the weights of sentences, a comparison with `before`, and the command typed.

    Raises:
        SettingError: The weights of a sentence do not fit the report, or `before` is of another shape.

    Example:
        >>> layer = LayerReport("attn", "self", "", 0, 2, {"output_cosine": ((1.0, 0.2), (0.2, 1.0))})
        >>> page = make_inspection_page(Report("Encoder", batches=1, tokens=5, layers=(layer,)))
        >>> "script-src 'sha256-" in page.render()
        True
    """
    page = Page(title)
    page.paragraph(report.headline or report.summary, kind="lead")
    page.paragraph(report.summary, kind="note")
    script, style = (
        resources.files("headwise.report").joinpath(f"inspection_view.{kind}").read_text(encoding="utf-8")
        for kind in ("js", "css")
    )
    page.view("inspection", _make_view_data(report, sentences), script=script, style=style)
    page.heading("Layers")
    _add_layers(page, report, everything=False)
    for note in report.notes:
        page.paragraph(note, kind="note")
    if before is not None:
        page.heading(f"Compared with {before.model}")
        page.paragraph(before.summary)
        page.table(*report.compare(before).rows)
    page.heading("Heads")
    page.table(
        *make_head_rows(report.layers, report.roles),
        caption="Each head compared with the other heads of its layer." + (CHANCE if report.roles else ""),
    )
    page.heading("All measures of the layers")
    _add_layers(page, report, everything=True)
    if settings:
        page.heading("Settings")
        page.code(settings)
    return page


def _add_layers(page: Page, report: Report, *, everything: bool) -> None:
    header, rows = make_layer_rows(report.layers, everything=everything)
    page.table(header, rows, caption="Means over pairs of heads, and over heads.")
    page.paragraph(" ".join(explain_columns(header)), kind="note")


def _make_view_data(report: Report, sentences: Sequence[Sentence]) -> dict[str, Any]:
    measured = {name for layer in report.layers for name in layer.pairs}
    return {
        "score": report.score,
        "roles": list(report.roles),
        "measures": {name: words for name, words in PAIRS.items() if name in measured} or {"none": "nothing"},
        "layers": [
            {
                "name": name_layer(layer),
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
        "sentences": [_make_sentence_data(sentence, report.layers) for sentence in sentences],
    }


def _make_sentence_data(sentence: Sentence, layers: Sequence[LayerReport]) -> dict[str, Any]:
    size = len(sentence.tokens)
    if len(sentence.weights) != len(layers) or not size:
        raise SettingError(
            f"a sentence has {size} tokens and weights of {len(sentence.weights)} layers; expected at least one token "
            f"and an entry for each of {len(layers)}."
        )
    packed = []
    for weights, layer in zip(sentence.weights, layers, strict=True):
        if weights is None:
            packed.append(None)
            continue
        if tuple(weights.shape) not in ((layer.heads, size, size), (layer.heads, 1, size)):
            raise SettingError(
                f"weights of {layer.site or 'the model'} have shape {tuple(weights.shape)}; expected "
                f"{(layer.heads, size, size)}, or {(layer.heads, 1, size)} with one query."
            )
        # steps of 1/255, one byte each
        steps = (weights.detach().cpu().double().clamp(0, 1) * 255).round().byte().numpy()
        packed.append(base64.b64encode(steps.tobytes()).decode("ascii"))
    # tokens may have the space before them
    text = ("" if any(" " in token for token in sentence.tokens) else " ").join(sentence.tokens).strip()
    shown = text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}\N{HORIZONTAL ELLIPSIS}"
    return {"text": shown, "tokens": list(sentence.tokens), "weights": packed}
