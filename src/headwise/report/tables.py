"""Tables of layers and heads, for rich and as plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from headwise.metrics.intervals import Interval
from headwise.report.layer import TERMS, LayerReport

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MINUS = "\N{MINUS SIGN}"
# Number columns that fit side by side in 80 characters.
MAX_COLUMNS = 6
# Columns of the table of layers that are always shown.
SHORT = 7
# The other columns: header and measure.
COLUMNS = {
    "attention JS": "attention_js",
    "output CKA": "output_cka",
    "output cosine": "output_cosine",
    "value cosine": "value_cosine",
    "output distance": "output_distance",
    "query cosine": "query_cosine",
    "key cosine": "key_cosine",
    "V cosine": "value_parameter_cosine",
    "query span": "query_span",
    "key span": "key_span",
    "V span": "value_span",
    "O span": "output_span",
}
# What two reports are compared by after their effective heads, and heads with one another.
COMPARED = {"CKA": "contribution_cka", "attention JS": "attention_js", "output cosine": "output_cosine"}


# What columns say, by the first that is shown of them.
LEGEND = {
    "effective heads": "how many different things the heads of the layer contribute; 1 if all are copies",
    "by variance": "effective heads, each counted by how much it contributes",
    "CKA": "how alike the contributions of two heads are: 0 independent, 1 the same",
    "first token": "how many heads put more than half of their attention on the first token",
    "mean drop": "how much the score falls without one head, on average",
    "largest drop (head)": "the head that costs most, and what",
    "drop": "how much the score falls without the head",
    "95 % interval": "of the drop, over texts",
    "entropy": "how widely a head attends, in nats; 0 is one token",
    "attention JS": "how differently two heads attend, in nats: 0 equally, 0.693 to no token in common",
    "output CKA": "linear CKA of the outputs before W_O; too high on few tokens",
    "output cosine": "cosine of the outputs of two heads for a token",
    "value cosine": "cosine of the values that two heads read",
    "output distance": "distance of the outputs of two heads for a token",
    "query cosine": "cosine of the query, key or value (V) parameters of two heads",
    "query span": "overlap of the subspaces of query, key, value or output (O) parameters; 1 the same",
    "output term": "the similarities of outputs, values and attention that penalties lower (Li et al. 2021)",
}


def explain_columns(header: Sequence[str]) -> list[str]:
    """Return a line on each column that needs one.

    >>> explain_columns(["layer", "CKA"])
    ['CKA: how alike the contributions of two heads are: 0 independent, 1 the same.']
    """
    return [f"{name}: {LEGEND[name]}." for name in header if name in LEGEND]


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number for a table.

    >>> format_number(-0.25), format_number(-0.0001), format_number(None)
    ('\N{MINUS SIGN}0.250', '0.000', '')
    """
    return "" if value is None else f"{value:z.{digits}f}".replace("-", MINUS)


def format_signed(value: float | None, digits: int = 4) -> str:
    """Format a number with its sign.

    >>> format_signed(0.25, 2), format_signed(-0.001, 2)
    ('+0.25', '+0.00')
    """
    return "" if value is None else f"{value:+z.{digits}f}".replace("-", MINUS)


def name_layer(layer: LayerReport) -> str:
    """Return the name of a layer in a table: its index, and its kind unless that is self-attention."""
    return f"{layer.layer}" if layer.kind == "self" else f"{layer.layer} {layer.kind}"


def make_layer_rows(layers: Sequence[LayerReport], *, everything: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table with one row per layer: seven columns, or everything that was measured."""

    def format_largest(drops: Sequence[Interval]) -> str:
        value, head = max(((drop.value, -head) for head, drop in enumerate(drops)), default=(None, 0))
        return "" if value is None else f"{format_signed(value)} ({-head})"

    columns = {
        "layer": [name_layer(layer) for layer in layers],
        "heads": [str(layer.heads) for layer in layers],
        "effective heads": [format_number(layer.effective_heads, 2) for layer in layers],
        "CKA": [format_number(layer.mean("contribution_cka")) for layer in layers],
        "first token": [str(layer.heads_on_first) if layer.first else "" for layer in layers],
        "mean drop": [format_signed(layer.drop) for layer in layers],
        "largest drop (head)": [format_largest(layer.drops) for layer in layers],
        "by variance": [format_number(layer.effective_heads_weighted, 2) for layer in layers],
        "entropy": [format_number(fmean(layer.entropy) if layer.entropy else None) for layer in layers],
        **{name: [format_number(layer.mean(measure)) for layer in layers] for name, measure in COLUMNS.items()},
        **{f"{term} term": [format_number(layer.terms.get(term)) for layer in layers] for term in TERMS},
    }
    shown = list(columns) if everything else list(columns)[:SHORT]
    kept = {header: columns[header] for header in shown if any(columns[header])}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def make_head_rows(layers: Sequence[LayerReport], roles: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table with one row per head; columns without values are omitted."""
    rows: list[list[str]] = []
    for layer in layers:
        measured = [*(layer.of_heads(name) for name in COMPARED.values()), layer.entropy]
        for head in range(layer.heads):
            drop = layer.drops[head] if layer.drops else None
            rows.append(
                [
                    name_layer(layer),
                    str(head),
                    *(format_number(values[head] if head < len(values) else None) for values in measured),
                    format_signed(drop.value) if drop else "",
                    f"{format_signed(drop.low)} to {format_signed(drop.high)}" if drop else "",
                    *(_format_role_share(layer, role, head) for role in range(len(roles))),
                ]
            )
    header = ["layer", "head", *COMPARED, "entropy", "drop", "95 % interval", *(f"on {role}" for role in roles)]
    kept = [column for column in range(len(header)) if column < 2 or any(row[column] for row in rows)]
    return [header[column] for column in kept], [[row[column] for column in kept] for row in rows]


def make_role_rows(layers: Sequence[LayerReport], roles: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of the head that plays each role most, one row per layer with roles.

    A cell has the share of that head's attention on the pairs of the role, what equal attention would give, and the
    head.
    """
    rows = []
    for layer in layers:
        if not layer.roles:
            continue
        best = [shares.index(max(shares)) for shares in map(list, layer.roles)]
        cells = (f"{_format_role_share(layer, role, head)}, head {head}" for role, head in enumerate(best))
        rows.append([name_layer(layer), *cells])
    return ["layer", *roles], rows


def make_comparison_rows(
    before: Sequence[LayerReport], after: Sequence[LayerReport], *, drops: bool = True, name: str = "before"
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows comparing two models, of which the first has a `name`; one row per layer."""
    header, rows = ["layer"], [[name_layer(layer)] for layer in after]
    compared: dict[str, Callable[[LayerReport], float | None]] = {
        "effective heads": lambda layer: layer.effective_heads,
        "by variance": lambda layer: layer.effective_heads_weighted,
        **{column: partial(LayerReport.mean, measure=measure) for column, measure in COMPARED.items()},
    }
    for column, read in compared.items():
        pairs = [(read(one), read(other)) for one, other in zip(after, before, strict=True)]
        if all(one is None or other is None for one, other in pairs):
            continue
        header += [column, name, "change"]
        for row, (one, other) in zip(rows, pairs, strict=True):
            change = None if one is None or other is None else one - other
            row += [format_number(one), format_number(other), format_signed(change, 3)]
    if drops and any(layer.drops for layer in (*before, *after)):
        header += ["mean drop", name]
        for row, one, other in zip(rows, after, before, strict=True):
            row += [format_signed(one.drop), format_signed(other.drop)]
    return header, rows


def make_rich_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, notes: Sequence[str] = ()
) -> Table:
    """Make a rich table, with a title above and notes below."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # names from users are text, never markup
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
        # names may be long, numbers are never cut
        table.add_row(*(Text(cell, no_wrap=bool(place)) for place, cell in enumerate(row)))
    return table


def stack_tables(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str,
    notes: Sequence[str] = (),
    columns: int = MAX_COLUMNS,
) -> Group:
    """Make rich tables below one another, each with the first column and so many others."""
    from rich.console import Group

    tables = []
    for start in range(1, len(header), columns):
        rest, last = slice(start, start + columns), start + columns >= len(header)
        tables.append(
            make_rich_table(
                [header[0], *header[rest]],
                [[row[0], *row[rest]] for row in rows],
                title=title if start == 1 else "",
                notes=notes if last else (),
            )
        )
    return Group(*tables)


def format_plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as plain text.

    >>> print(format_plain_table(["layer", "CKA"], [["0", "0.5"]]))
    layer  CKA
        0  0.5
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows])
    return "\n".join(lines)


def _format_role_share(layer: LayerReport, role: int, head: int) -> str:
    if role >= len(layer.roles):
        return ""
    share, chance = layer.roles[role][head], layer.chance[role]
    return f"{100 * share:.0f} % ({100 * chance:.0f} %)"
