"""The measures of a model's heads as plain numbers, saved as JSON and compared with another model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.atomic import write_whole
from headwise.errors import DataError, SettingError
from headwise.input_files import encode_json, parse_json, read_whole
from headwise.metrics.intervals import Interval
from headwise.report.layer import LayerReport, Matrix
from headwise.report.tables import (
    explain_columns,
    format_number,
    format_plain_table,
    make_comparison_rows,
    make_head_rows,
    make_layer_rows,
    make_rich_table,
    make_role_rows,
    name_layer,
    stack_tables,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

# Fewer tokens than this make a caution.
FEW_TOKENS = 1000
FORMAT = "headwise report 1"
ROLES = "The head that attends most to each role (in parentheses: if it attended equally):"


@dataclass(frozen=True)
class Report:
    """Measures of the heads of a model on some inputs.

    Attributes:
        model: Class of the model.
        batches: Number of batches.
        tokens: Number of valid queries; the largest number over modules.
        layers: One entry per attention module.
        score: Name of the score; "" without a score.
        items: Number of scored items.
        whole: Mean score with all heads and its interval over items; None without a score.
        replayed: Whether forward passes without a head were resumed at that head, with identical results.
        roles: Names of the roles.
        notes: What could not be read, and other remarks.
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
        """Write the report as JSON, atomically.

        Raises:
            DataError: The file cannot be written.
        """
        record = {"format": FORMAT, **asdict(self)}
        write_whole(Path(path), (encode_json(record, indent=1) + "\n").encode())

    def compare(self, before: Report) -> Comparison:
        """Compare this report with that of an earlier model, or of another model of the same shape.

        Raises:
            SettingError: The two have different attention modules or numbers of heads.
        """
        return Comparison(before, self)

    @property
    def summary(self) -> str:
        """One sentence on what was measured."""
        modules = f"{len(self.layers)} attention module{'s' if len(self.layers) != 1 else ''}"
        text = f"{self.model}: {sum(layer.heads for layer in self.layers)} heads in {modules}, {self.tokens} "
        # additive attention has one query per text, not one per token
        text += "queries" if all(layer.kind == "pooling" for layer in self.layers) else "tokens"
        if self.whole is not None:
            text += f"; {self.score} {format_number(self.whole.value, 4)} over {self.items} items"
        return f"{text}."

    @property
    def headline(self) -> str:
        """What stands out, in one sentence; with a caution if there are few tokens."""
        said = []
        shares = {layer.effective_heads / layer.heads: layer for layer in self.layers if layer.effective_heads}
        if shares:
            least = shares[min(shares)]
            said.append(
                f"layer {name_layer(least)} is the most redundant: {least.effective_heads:.1f} of {least.heads} "
                "effective heads"
            )
        if any(layer.first for layer in self.layers):
            counted = sum(len(layer.first) for layer in self.layers)
            first = sum(layer.heads_on_first for layer in self.layers)
            said.append(f"{first} of {counted} heads mostly read the first token")
        if self.tokens < FEW_TOKENS and said:
            said.append(f"with only {self.tokens} tokens this may be chance, give {FEW_TOKENS:,} or more")
        text = "; ".join(said)
        return f"{text[:1].upper()}{text[1:]}." if text else ""

    def layer_table(self) -> Group:
        """Return rich tables of everything measured, with one row per layer, and a legend."""
        header, rows = make_layer_rows(self.layers, everything=True)
        return stack_tables(header, rows, title=self.summary, notes=(*explain_columns(header), *self.notes))

    def head_table(self) -> Table:
        """Return a rich table with one row per head."""
        return make_rich_table(*make_head_rows(self.layers, self.roles), title=self.summary)

    def __str__(self) -> str:
        roles = [ROLES, format_plain_table(*make_role_rows(self.layers, self.roles))] if self.roles else []
        header, rows = make_layer_rows(self.layers)
        lines = [self.summary, format_plain_table(header, rows), *explain_columns(header), *roles, *self.notes]
        return "\n".join([*filter(None, [self.headline]), *lines])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        header, rows = make_layer_rows(self.layers)
        layers = make_rich_table(header, rows, title="")
        notes = [Text(line) for line in (*explain_columns(header), *self.notes)]
        # above a narrow table its own title would be as narrow
        roles = [ROLES, stack_tables(*make_role_rows(self.layers, self.roles), title="", columns=3)]
        return Group(Text(f"{self.headline}\n{self.summary}".strip()), layers, *(roles if self.roles else []), *notes)


@dataclass(frozen=True)
class Comparison:
    """Two reports of models of the same shape.

    Attributes:
        before: The reference.
        after: The report compared with it.
    """

    before: Report
    after: Report

    def __post_init__(self) -> None:
        require_same_shape(*([(layer.site, layer.heads) for layer in one.layers] for one in (self.before, self.after)))

    @property
    def summary(self) -> str:
        """Two sentences on what is compared."""
        return f"{self.after.summary} Compared with {self.before.summary}"

    @property
    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows, one row per layer; drops are included if both reports have the same score."""
        name = "before" if self.before.model == self.after.model else f"in {self.before.model}"
        drops = self.before.score == self.after.score
        return make_comparison_rows(self.before.layers, self.after.layers, drops=drops, name=name)

    def __str__(self) -> str:
        return f"{self.summary}\n{format_plain_table(*self.rows)}"

    def __rich__(self) -> Group:
        return stack_tables(*self.rows, title=self.summary)


def require_same_shape(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]]) -> None:
    """Raise `SettingError` unless two models have the same attention modules, given as (name, number of heads)."""
    if list(before) != list(after):
        odd = next((pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]), None)
        found = f"{odd[0]} and {odd[1]}" if odd else f"{len(before)} and {len(after)} modules"
        raise SettingError(f"the two models differ in shape ({found}); expected the same modules and heads in both.")


def load_report(path: str | Path) -> Report:
    """Load a report that `Report.save` wrote.

    Raises:
        DataError: The file cannot be read, or is not a report.
    """
    path = Path(path)
    try:
        record = parse_json(read_whole(path))
    except ValueError as error:
        raise DataError(f"{path} cannot be read as JSON ({error}); expected a file written by Report.save.") from None
    if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
        raise DataError(f"{path} is not a report of this version; expected a file written by Report.save ({FORMAT!r}).")
    try:
        roles = tuple(map(str, record.pop("roles")))
        layers = tuple(_read_layer(layer, len(roles)) for layer in record.pop("layers"))
        whole = record.pop("whole")
        return Report(
            layers=layers,
            whole=None if whole is None else _read_interval(whole),
            roles=roles,
            notes=tuple(map(str, record.pop("notes"))),
            **record,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} is a damaged report ({type(error).__name__}: {error}); measure again.") from None


def _read_layer(record: dict[str, Any], roles: int) -> LayerReport:
    effective = {name: record.pop(name, None) for name in ("effective_heads", "effective_heads_weighted")}
    layer = LayerReport(
        heads=int(record.pop("heads")),
        pairs={str(measure): _read_matrix(matrix) for measure, matrix in record.pop("pairs").items()},
        terms={str(term): float(value) for term, value in record.pop("terms").items()},
        entropy=tuple(map(float, record.pop("entropy"))),
        first=tuple(map(float, record.pop("first", ()))),
        drops=tuple(map(_read_interval, record.pop("drops"))),
        roles=_read_matrix(record.pop("roles")),
        chance=tuple(map(float, record.pop("chance"))),
        **{name: None if number is None else float(number) for name, number in effective.items()},
        **record,
    )
    square = all(len(row) == len(matrix) <= layer.heads for matrix in layer.pairs.values() for row in matrix)
    listed = all(len(numbers) in (0, layer.heads) for numbers in (layer.entropy, layer.first, layer.drops))
    shared = all(len(row) == layer.heads for row in layer.roles) and len(layer.roles) == len(layer.chance)
    if not (square and listed and shared and len(layer.roles) in (0, roles)):
        raise ValueError(f"the numbers of {layer.site} are not those of {layer.heads} heads and {roles} roles")
    return layer


def _read_interval(record: dict[str, float]) -> Interval:
    return Interval(**{name: float(number) for name, number in record.items()})


def _read_matrix(rows: list[list[float]]) -> Matrix:
    return tuple(tuple(map(float, row)) for row in rows)
