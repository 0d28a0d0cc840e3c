"""A sentence with words shaded by attention, one block per head (An et al. 2020, Figures 1 and 6 to 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headwise.errors import SettingError, require_range
from headwise.plots.style import GRAY, drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In inches: width of a letter in a monospace font, height of a line, margins.
LETTER, LINE, MARGIN, BETWEEN = 0.0836 * 0.9, 0.2, 0.12, 0.14
POINTS = 9.0
LONGEST, NARROWEST = 2000, 1.0


def sentence_heatmap(
    tokens: Sequence[str], weights: Mapping[str, Sequence[float]], *, width: float = 7.6, color: str = "#D55E00"
) -> Figure:
    """Return a text with its words shaded by the attention of each head.

    Args:
        tokens: Words or subwords, as displayed.
        weights: Maps the name of a head to one weight per token, at least 0. The darkest token of a block has its
            largest weight, which follows the name: shades are comparable only within a block.
        width: Width of the figure in inches.
        color: The darkest shade.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: There is no token, a head does not have one finite weight of at least 0 per token, the text has
            more than 2000 tokens, or the figure is narrower than one inch.

    Example:
        >>> figure = sentence_heatmap(["a", "fine", "place"], {"head 0": [0.1, 0.7, 0.2], "head 1": [0.5, 0.1, 0.4]})
        >>> [text.get_text() for text in figure.axes[0].texts][:2]
        ['head 0, largest 0.70', 'a']
    """
    if not tokens or len(tokens) > LONGEST or not weights:
        raise SettingError(
            f"{len(tokens)} tokens and {len(weights)} rows of weights were given; expected 1 to {LONGEST} "
            "tokens and at least one row."
        )
    require_range("width", width, low=NARROWEST)
    weights = {name: [float(weight) for weight in row] for name, row in weights.items()}
    for name, row in weights.items():
        if len(row) != len(tokens) or not all(0 <= weight < float("inf") for weight in row):
            raise SettingError(
                f"the weights of {name} are {len(row)} for {len(tokens)} tokens; expected one per token, finite and "
                "at least 0."
            )
    from matplotlib.patches import Rectangle

    places, lines = _break_lines(tokens, int((width - 2 * MARGIN) / LETTER))
    block = (lines + 1) * LINE + BETWEEN
    height = block * len(weights) + 2 * MARGIN
    with drawing(width, height) as figure:
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        for number, (name, row) in enumerate(weights.items()):
            top = MARGIN + number * block
            largest = max(row)
            axes.text(
                MARGIN, top + LINE / 2, f"{name}, largest {largest:.2f}", fontsize=POINTS, color=GRAY, va="center"
            )
            for (start, line, text), weight in zip(places, row, strict=True):
                x, y, share = MARGIN + start * LETTER, top + (line + 1) * LINE, weight / (largest or 1)
                corner, wide = (x - 0.25 * LETTER, y), (len(text) + 0.5) * LETTER
                axes.add_patch(Rectangle(corner, wide, 0.92 * LINE, facecolor=color, alpha=0.85 * share, linewidth=0))
                ink = "white" if share > 0.85 else "#1c1d1f"
                axes.text(x, y + LINE / 2, text, fontsize=POINTS, family="DejaVu Sans Mono", va="center", color=ink)
    return figure


def _break_lines(tokens: Sequence[str], letters: int) -> tuple[list[tuple[int, int, str]], int]:
    """Return the column, line and text of each token, cut to the length of a line, and the number of lines."""
    places, column, line = [], 0, 0
    for token in tokens:
        text = "".join(letter if letter.isprintable() else "\ufffd" for letter in token) or "\u00b7"
        text = text if len(text) <= letters else text[: letters - 1] + "\u2026"
        if column and column + len(text) > letters:
            column, line = 0, line + 1
        places.append((column, line, text))
        column += len(text) + 1
    return places, line + 1
