"""What was measured of the heads of a model: plain numbers, saved as JSON, compared with those of another model.

Owns the record and its file. Measuring is `measurement`'s, tables are `report_tables`'. Must not know models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.atomic import write_whole
from headwise.errors import DataError, SettingError
from headwise.metrics.intervals import Interval
from headwise.report.layer import LayerReport, Matrix
from headwise.report.tables import comparison_rows, head_rows, layer_rows, number, plain_table, rich_table, stacked

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

FORMAT = "headwise report 1"


@dataclass(frozen=True)
class Report:
    """What the heads of a model do, on some text or pictures.

    Attributes:
        model: Class of the model.
        batches: Number of batches it was measured on.
        tokens: Number of valid queries, the most any module had.
        layers: One entry an attention module.
        score: Name of the score; "" where none was given.
        items: Number of scored items.
        whole: Mean score with all heads, and its interval over items; None where none was given.
        replayed: Whether a forward without a head began at that head; the numbers are those of whole forwards.
        roles: Names of the roles.
        notes: What could not be read, or was done otherwise than one might expect.
    """

    model: str
    batches: int
    tokens: int
    layers: tuple[LayerReport, ...]
    score: str = ""
    items: int = 0
    whole: Interval | None = None
    replayed: bool = False
    roles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, the whole file or nothing.

        Raises:
            DataError: The file cannot be written.
        """
        record = {"format": FORMAT, **asdict(self)}
        write_whole(Path(path), (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())

    def compare(self, before: Report) -> Comparison:
        """Return this report beside that of the model before, or of another model of the same shape.

        Raises:
            SettingError: The two do not have the same attention modules with as many heads.
        """
        return Comparison(before, self)

    @property
    def summary(self) -> str:
        """What the report is of, in a sentence."""
        modules = f"{len(self.layers)} attention module{'s' if len(self.layers) != 1 else ''}"
        said = f"{self.model}: {sum(layer.heads for layer in self.layers)} heads in {modules}, {self.tokens} "
        # attention with one query a text has no queries at tokens
        said += "queries" if all(layer.kind == "pooling" for layer in self.layers) else "tokens"
        if self.whole is not None:
            said += f"; {self.score} {number(self.whole.value, 4)} over {self.items} items"
        return f"{said}."

    def head_table(self) -> Table:
        """Return a table with a row a head, for rich."""
        return rich_table(*head_rows(self.layers, self.roles), title=self.summary)

    def __str__(self) -> str:
        return "\n".join([self.summary, plain_table(*layer_rows(self.layers)), *self.notes])

    def __rich__(self) -> Group:
        return stacked(*layer_rows(self.layers), title=self.summary, notes=self.notes)


@dataclass(frozen=True)
class Comparison:
    """Two reports of models of one shape.

    Attributes:
        before: The one compared with.
        after: The one looked at.
    """

    before: Report
    after: Report

    def __post_init__(self) -> None:
        require_same_shape(*([(layer.site, layer.heads) for layer in one.layers] for one in (self.before, self.after)))

    @property
    def summary(self) -> str:
        """What is compared, in two sentences."""
        return f"{self.after.summary} Before: {self.before.summary}"

    @property
    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows, a row a layer; drops of two different scores do not stand beside one another."""
        return comparison_rows(self.before.layers, self.after.layers, drops=self.before.score == self.after.score)

    def __str__(self) -> str:
        return f"{self.summary}\n{plain_table(*self.rows)}"

    def __rich__(self) -> Group:
        return stacked(*self.rows, title=self.summary)


def require_same_shape(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]]) -> None:
    """Raise `SettingError` unless two models have the same sites with as many heads.

    Args:
        before: Name and number of heads of each site of the one compared with.
        after: Those of the one looked at.
    """
    if list(before) != list(after):
        odd = next((pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]), None)
        told = f"{odd[0]} and {odd[1]}" if odd else f"{len(before)} and {len(after)} modules"
        raise SettingError(f"the two models differ in shape ({told}); expected the same modules and heads in both.")


def load_report(path: str | Path) -> Report:
    """Return the report that `Report.save` wrote.

    Raises:
        DataError: The file cannot be read, or holds no report.
    """
    path = Path(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}); expected what Report.save wrote.") from None
    if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
        raise DataError(f"{path} is no report of this version; expected what Report.save wrote ({FORMAT!r}).")
    try:
        layers = tuple(_layer(layer) for layer in record.pop("layers"))
        whole = record.pop("whole")
        return Report(
            layers=layers,
            whole=None if whole is None else Interval(**whole),
            roles=tuple(record.pop("roles")),
            notes=tuple(record.pop("notes")),
            **record,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is a damaged report ({type(error).__name__}: {error}); measure again.") from None


def _layer(record: dict[str, Any]) -> LayerReport:
    pairs = {str(measure): _matrix(matrix) for measure, matrix in record.pop("pairs").items()}
    return LayerReport(
        pairs=pairs,
        terms={str(term): float(value) for term, value in record.pop("terms").items()},
        entropy=tuple(map(float, record.pop("entropy"))),
        drops=tuple(Interval(**drop) for drop in record.pop("drops")),
        roles=_matrix(record.pop("roles")),
        chance=tuple(map(float, record.pop("chance"))),
        **record,
    )


def _matrix(rows: list[list[float]]) -> Matrix:
    return tuple(tuple(map(float, row)) for row in rows)
