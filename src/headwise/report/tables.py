"""Layers as tables: for a terminal by rich, and as plain text.

Owns columns, headers and the writing of numbers. rich is imported inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.metrics.intervals import Interval
from headwise.report.layer import TERMS, LayerReport

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MINUS = "\N{MINUS SIGN}"
# Columns of numbers that stand beside one another in a terminal of 80 letters.
ABREAST = 7
# Columns of the table of layers: header and measure.
COLUMNS = {
    "output cosine": "output_cosine",
    "CKA": "output_cka",
    "attention JS": "attention_js",
    "value cosine": "value_cosine",
    "output distance": "output_distance",
    "query cosine": "query_cosine",
    "key cosine": "key_cosine",
    "V cosine": "value_parameter_cosine",
}
COMPARED = {"output cosine": "output_cosine", "CKA": "output_cka", "attention JS": "attention_js"}


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as tables write it.

    >>> number(-0.25), number(-0.0001), number(None)
    ('\N{MINUS SIGN}0.250', '0.000', '')
    """
    return "" if value is None else f"{value:z.{digits}f}".replace("-", MINUS)


def signed(value: float | None, digits: int = 4) -> str:
    """Return a number with its sign.

    >>> signed(0.25, 2), signed(-0.001, 2)
    ('+0.25', '+0.00')
    """
    return "" if value is None else f"{value:+z.{digits}f}".replace("-", MINUS)


def layer_name(layer: LayerReport) -> str:
    """Return what a layer is called beside others: its number, and its kind where that is not plain self-attention."""
    return f"{layer.layer}" if layer.kind == "self" else f"{layer.layer} {layer.kind}"


def layer_rows(layers: Sequence[LayerReport]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table with a row a layer; columns that nothing was measured for are left out."""
    columns: dict[str, list[str]] = {"layer": [layer_name(layer) for layer in layers]}
    columns["heads"] = [str(layer.heads) for layer in layers]
    columns["mean drop"] = [signed(layer.drop) for layer in layers]
    columns["largest drop (head)"] = [_largest(layer.drops) for layer in layers]
    columns["entropy"] = [number(_mean(layer.entropy)) for layer in layers]
    for header, measure in COLUMNS.items():
        columns[header] = [number(layer.mean(measure)) for layer in layers]
    for term in TERMS:
        columns[f"{term} term"] = [number(layer.terms.get(term)) for layer in layers]
    kept = {header: cells for header, cells in columns.items() if any(cells)}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def head_rows(layers: Sequence[LayerReport], roles: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table with a row a head."""
    rows: list[list[str]] = []
    for layer in layers:
        cosine, cka, js = (layer.of_heads(name) for name in ("output_cosine", "output_cka", "attention_js"))
        for head in range(layer.heads):
            drop = layer.drops[head] if layer.drops else None
            interval = f"{signed(drop.low)} to {signed(drop.high)}" if drop else ""
            measured = [number(_at(values, head)) for values in (cosine, cka, js, layer.entropy)]
            rows.append(
                [layer_name(layer), str(head), *measured, signed(drop.value) if drop else "", interval]
                + [_role(layer, role, head) for role in range(len(roles))]
            )
    header = ["layer", "head", "output cosine", "CKA", "attention JS", "entropy", "drop", "95 % interval"]
    header += [f"on {role}" for role in roles]
    kept = [column for column in range(len(header)) if column < 2 or any(row[column] for row in rows)]
    return [header[column] for column in kept], [[row[column] for column in kept] for row in rows]


def comparison_rows(
    before: Sequence[LayerReport], after: Sequence[LayerReport], *, drops: bool = True
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of two models beside one another: after, before and the change, a row a layer."""
    header, rows = ["layer"], [[layer_name(layer)] for layer in after]
    for name, measure in COMPARED.items():
        pairs = [(one.mean(measure), other.mean(measure)) for one, other in zip(after, before, strict=True)]
        if all(one is None or other is None for one, other in pairs):
            continue
        header += [name, "before", "change"]
        for row, (one, other) in zip(rows, pairs, strict=True):
            change = None if one is None or other is None else one - other
            row += [number(one), number(other), signed(change, 3)]
    if drops and any(layer.drops for layer in (*before, *after)):
        header += ["mean drop", "before"]
        for row, one, other in zip(rows, after, before, strict=True):
            row += [signed(one.drop), signed(other.drop)]
    return header, rows


def rich_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, notes: Sequence[str] = ()) -> Table:
    """Return header and rows for rich, with a title above and notes below."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # what a user named is text, never markup
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        caption=Text("\n".join(notes)) if notes else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for place, name in enumerate(header):
        table.add_column(Text(name), justify="right" if place else "left")
    for row in rows:
        table.add_row(*(Text(cell, no_wrap=True) for cell in row))
    return table


def stacked(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, notes: Sequence[str] = ()) -> Group:
    """Return header and rows for rich in tables below one another, each with the first column and no more than fits."""
    from rich.console import Group

    parts = [range(start, min(start + ABREAST, len(header))) for start in range(1, len(header), ABREAST)]
    tables = []
    for number, part in enumerate(parts):
        columns = [0, *part]
        own = [[row[column] for column in columns] for row in rows]
        last = number == len(parts) - 1
        tables.append(
            rich_table(
                [header[column] for column in columns],
                own,
                title=title if not number else "",
                notes=notes if last else (),
            )
        )
    return Group(*tables)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return header and rows as lines of text.

    >>> print(plain_table(["layer", "CKA"], [["0", "0.5"]]))
    layer  CKA
        0  0.5
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows])
    return "\n".join(lines)


def _largest(drops: Sequence[Interval]) -> str:
    if not drops:
        return ""
    head = max(range(len(drops)), key=lambda place: drops[place].value)
    return f"{signed(drops[head].value)} ({head})"


def _role(layer: LayerReport, role: int, head: int) -> str:
    if role >= len(layer.roles):
        return ""
    share, chance = layer.roles[role][head], layer.chance[role]
    return f"{100 * share:.0f} % ({100 * chance:.0f} %)"


def _at(values: Sequence[float], place: int) -> float | None:
    return values[place] if place < len(values) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
