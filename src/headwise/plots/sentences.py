"""A sentence with its words shaded by attention, a block for each head (An et al. 2020, Figures 1 and 6 to 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headwise.errors import SettingError, require_range
from headwise.plots.style import GRAY, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In inches: the size of the letters, one of which is LETTER wide in a font where all are; a line; what is around them.
LETTER, LINE, MARGIN, BETWEEN = 0.0836 * 0.9, 0.2, 0.12, 0.14
POINTS = 9.0
LONGEST, NARROWEST = 2000, 1.0


def sentence_heatmap(
    tokens: Sequence[str], weights: Mapping[str, Sequence[float]], *, width: float = 7.6, color: str = "#D55E00"
) -> Figure:
    """Return a text with the attention of each head as the shade behind its words.

    Args:
        tokens: The words, or subwords, as they are to be read.
        weights: For each head, or whatever attends, one weight a token, at least 0. A block's darkest token is its
            largest weight, which is written beside its name: shades compare within a block.
        width: Width of the figure in inches.
        color: The darkest shade.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: There is no token, a row does not have one finite weight of at least 0 a token, the text has more
            than 2000 tokens, or the figure is narrower than an inch.

    Example:
        >>> figure = sentence_heatmap(["a", "fine", "place"], {"head 0": [0.1, 0.7, 0.2], "head 1": [0.5, 0.1, 0.4]})
        >>> [text.get_text() for text in figure.axes[0].texts][:2]
        ['head 0, largest 0.70', 'a']
    """
    if not tokens or len(tokens) > LONGEST or not weights:
        raise SettingError(
            f"{len(tokens)} tokens and {len(weights)} rows of weights were given; expected 1 to {LONGEST}, and a row."
        )
    require_range("width", width, low=NARROWEST)
    weights = {name: [float(weight) for weight in row] for name, row in weights.items()}
    for name, row in weights.items():
        if len(row) != len(tokens) or not all(0 <= weight < float("inf") for weight in row):
            raise SettingError(
                f"the weights of {name} are {len(row)} for {len(tokens)} tokens; expected one a token, finite and at "
                "least 0."
            )
    places, lines = _broken([_shown(token) for token in tokens], int((width - 2 * MARGIN) / LETTER))
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
                _draw_token(
                    axes, MARGIN + start * LETTER, top + (line + 1) * LINE, text, weight / (largest or 1), color
                )
    return figure


def _draw_token(axes: Axes, x: float, y: float, text: str, share: float, color: str) -> None:
    from matplotlib.patches import Rectangle

    wide = (len(text) + 0.5) * LETTER
    axes.add_patch(
        Rectangle((x - 0.25 * LETTER, y), wide, 0.92 * LINE, facecolor=color, alpha=0.85 * share, linewidth=0)
    )
    axes.text(
        x,
        y + LINE / 2,
        text,
        fontsize=POINTS,
        family="DejaVu Sans Mono",
        va="center",
        color="white" if share > 0.85 else "#1c1d1f",
    )


def _shown(token: str) -> str:
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in token) or "\u00b7"


def _broken(tokens: Sequence[str], letters: int) -> tuple[list[tuple[int, int, str]], int]:
    """Return each token with its first column and its line, a token longer than a line cut, and how many lines."""
    places, column, line = [], 0, 0
    for token in tokens:
        text = token if len(token) <= letters else token[: letters - 1] + "\u2026"
        if column and column + len(text) > letters:
            column, line = 0, line + 1
        places.append((column, line, text))
        column += len(text) + 1
    return places, line + 1
