"""Reads the tables and figures of the papers, and our own, from the TOML files beside this one.

Each file declares reproductions by id, and may define:

- `words`: what a name in braces stands for, in any text of the file. Words in braces that are not defined are left, as
  those that depend on the scale (see `reproduction.arm_name`).
- `lists`: rows of words. An entry with `each`, the name of a list or a list of its own, is repeated for each row.

A reproduction with `like` has the keys of another one where it has none of its own, and `words` and `lists` of its own
go before those of its file. Arms of an entry are separated by spaces; `arms = "a b > c d"` compares each of the first
with each of the others. Parts are named, or are a group's, or `"all"`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from headwise.errors import SettingError, require_choice
from headwise.input_files import read_whole
from headwise_lab.papers.claims import Claim, Contrast, Shown, follow_doses, show_step_times
from headwise_lab.papers.reproduction import Column, PaperRow, Part, Published, Reproduction, Size

FOLDER = Path(__file__).parent
SIZES = FOLDER / "sizes.toml"
# in the order in which they are listed
FILES = ("repulsive", "diversify", "guided", "diversity")
ALL = "all"
# A file may name these alone: it is data, which others may have written.
FUNCTIONS = (
    *(f"repulsive.figures:{name}" for name in ("AttentionMaps", "OutputPages", "draw_entropies", "draw_reliabilities")),
    *(f"repulsive.figures:{name}" for name in ("draw_strengths", "draw_training_curves")),
    *(f"repulsive.glue:{name}" for name in ("make_claims", "build_glue_grid")),
    *("guided.roles:draw_role_worth", "diversity.doses:draw_heads", "diversity.doses:draw_doses"),
    *("diversity.shrinking:draw_shrinking", "diversity.shrinking:tabulate_shrinking"),
)
FunctionField = Literal["drawn", "drawn_together", "overview", "made", "summed", "pages"]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _list(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Take one value where a list of values is expected."""
        fields = {field.alias or name: str(field.annotation) for name, field in cls.model_fields.items()}
        return {
            key: [value] if fields.get(key, "").startswith("list[") and isinstance(value, str | dict) else value
            for key, value in given.items()
        }


class _Part(_Entry):
    arms: str
    sizes: str
    scales: list[str] = []
    name: str = ""
    after: str = ""
    corpus: str | None = None
    heads: int | None = None
    folds: int | None = None
    sets: list[str] = []


class _Comparison(_Entry):
    arms: str = ""
    doses: str = ""
    parts: list[str] = Field([""], alias="in")
    against_in: str | None = None
    by: list[str] = [""]
    over: list[str] = []
    bins: tuple[int, int] | None = None
    beyond: tuple[int, int] | None = None
    less: _Comparison | None = None

    @model_validator(mode="after")
    def _compares(self) -> _Comparison:
        if bool(self.doses) == (self.arms.count(" > ") == 1):
            raise ValueError('expected arms = "ARM ... > ARM ...", or doses = "ARM ARM ..."')
        return self


class _Shown(_Entry):
    step_times: str = ""
    number: str = ""
    least: str = ""
    label: str = ""
    arms: str = ""
    parts: list[str] = Field([""], alias="in")
    digits: int = 2
    scale: int = 1


class _Claim(_Entry):
    states: str
    compare: list[str | _Comparison] = []
    parts: list[str] | None = Field(None, alias="in")
    by: list[str] | None = None
    over: list[str] | None = None
    shows: list[_Shown] = []
    tested: bool = True


class _Published(_Entry):
    on: str
    columns: list[str | Column]
    rows: list[list[str]]
    cells: dict[str, list[str | list[str]]] = {}

    @model_validator(mode="after")
    def _fit(self) -> _Published:
        width = len(self.columns)
        if any(len(row) not in ((2,) if self.cells else (2 + width, 3 + width)) for row in self.rows):
            raise ValueError(
                f"expected rows of name, arm, {width} cells and perhaps a part; where there are cells, of two"
            )
        for part, cells in self.cells.items():
            if len(cells) != len(self.rows) or any(
                len([one] if isinstance(one, str) else one) != width for one in cells
            ):
                raise ValueError(f"expected {width} cells for each row in {part}")
        return self


class _Reproduction(_Entry):
    title: str
    source: str
    task: str
    extra: str
    parts: list[_Part]
    claims: list[_Claim] = []
    groups: dict[str, list[str]] = {}
    published: _Published | None = None
    analysis: str = ""
    measures: list[str] = []
    baselines: list[str] = []
    after: str = ""
    folder: str = ""
    partial: bool = False
    functions: dict[FunctionField, str | dict[str, Any]] = {}


_WORDS, _LISTS = TypeAdapter(dict[str, str]), TypeAdapter(dict[str, list[dict[str, str]]])
_TABLES, _ROWS = TypeAdapter(dict[str, Any]), TypeAdapter(list[dict[str, Any]])


def parse_file(
    text: str, sizes: Mapping[str, Any], name: str = "the text", taken: Collection[str] = ()
) -> dict[str, Reproduction]:
    """Return the reproductions that a TOML file declares, by id.

    Args:
        text: The file.
        sizes: Sizes by name, as in `sizes.toml`.
        name: What errors call the file.
        taken: Ids that it may not have.

    Raises:
        SettingError: It is not TOML, an id is taken, a key is missing, unknown or of another type, or an entry names
            sizes, a list, a part, a function or a reproduction that is not there.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{name} is not TOML: {error}.") from None
    given = {"words": raw.pop("words", {}), "lists": raw.pop("lists", {})}
    found = {}
    for identifier in raw:
        if identifier in taken or not re.fullmatch(r"[\w.-]+/[\w.-]+", identifier):
            raise SettingError(f"{name} has the table {identifier!r}; expected an id of its own, as mine/table-1.")
        try:
            entry = _inherit(raw, identifier, ())
            shared = {key: entry.pop(key) for key in ("arms", "sizes", "scales") if key in entry}
            entry["parts"] = [{**shared, **part} for part in _ROWS.validate_python(entry.get("parts", [{}]))]
            words = _WORDS.validate_python({**given["words"], **entry.pop("words", {})})
            lists = _LISTS.validate_python({**given["lists"], **entry.pop("lists", {})})
            entry = _expand(entry, words, lists)
            found[identifier] = _Builder(identifier, _Reproduction.model_validate(entry), sizes).build()
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            said = f"{first['msg']}; given {first['input']!r:.80}"
            raise SettingError(f"{name}, {identifier}, {place}: {said}.") from None
        except KeyError as error:
            raise SettingError(f"{name}, {identifier}: {error} is not defined.") from None
        except SettingError as error:
            raise SettingError(f"{name}, {identifier}: {error}") from None
    return found


def _inherit(raw: Mapping[str, Any], identifier: str, heirs: tuple[str, ...]) -> dict[str, Any]:
    entry = dict(_TABLES.validate_python(raw[identifier]))
    parent = entry.pop("like", None)
    if parent in (identifier, *heirs):
        raise SettingError(f"{identifier} is like {parent}, which is like it; give one of them keys of its own.")
    return entry if parent is None else {**_inherit(raw, parent, (identifier, *heirs)), **entry}


def _expand(value: Any, words: Mapping[str, str], lists: Mapping[str, Any]) -> Any:
    """Return a value with words replaced, and entries with `each` repeated."""
    if isinstance(value, str):
        for _ in range(3):  # words may hold words
            for word, meaning in words.items():
                value = value.replace(f"{{{word}}}", meaning)
        return value
    if isinstance(value, dict):
        if "each" in value:  # one entry where a list is expected
            return _expand([value], words, lists)
        return {key: _expand(inner, words, lists) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    found = []
    for inner in value:
        rows = _list_rows(inner, lists)
        left = {key: one for key, one in inner.items() if key != "each"} if isinstance(inner, dict) else inner
        found += [_expand(left, {**words, **row}, lists) for row in rows]
    return found


def _list_rows(value: Any, lists: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the rows that an entry is repeated for; one without words where it is not repeated."""
    each = value.get("each") if isinstance(value, dict) else None
    return (
        [{}]
        if each is None
        else lists[each]
        if isinstance(each, str)
        else _LISTS.validate_python({"each": each})["each"]
    )


class _Builder:
    """Builds one reproduction from its entry."""

    def __init__(self, identifier: str, entry: _Reproduction, sizes: Mapping[str, Any]) -> None:
        self.identifier, self.entry, self.sizes = identifier, entry, sizes
        self.groups = {ALL: [part.name for part in entry.parts], **entry.groups}

    def build(self) -> Reproduction:
        entry = self.entry
        functions = {field: _resolve(function) for field, function in entry.functions.items()}
        claims = tuple(self._claim(claim) for claim in entry.claims)
        known = [part.name for part in entry.parts]
        for part in (part for claim in claims for one in (*claim.contrasts, *claim.shown) for part in one.parts):
            require_choice("part", part, known)
        given = entry.model_dump(include={"title", "source", "task", "extra", "analysis", "after", "folder", "partial"})
        return Reproduction(
            id=self.identifier,
            parts=tuple(Part(_split(part.arms), self._size(part), part.name, part.after) for part in entry.parts),
            claims=functions["made"](tuple(self.groups[ALL])) if "made" in functions else claims,
            published=None if entry.published is None else _publish(entry.published),
            measures=tuple(entry.measures),
            baselines=tuple(entry.baselines),
            groups={name: tuple(parts) for name, parts in entry.groups.items()},
            **given,
            **functions,
        )

    def _size(self, part: _Part) -> dict[str, Size]:
        words = {"corpus": part.corpus} if part.corpus else {}
        found = {}
        for scale, raw in self.sizes[part.sizes].items():
            if not part.scales or scale in part.scales:
                own = {name: value for name in ("heads", "folds") if (value := getattr(part, name)) is not None}
                size = {**_expand(raw, words, {}), **own}
                found[scale] = Size(**{**size, "sets": (*size.get("sets", ()), *part.sets)})
        return found

    def _name_parts(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(part for name in names for part in self.groups.get(name, [name]))

    def _claim(self, claim: _Claim) -> Claim:
        shared = {"in": claim.parts, "by": claim.by, "over": claim.over}
        shared = {key: value for key, value in shared.items() if value is not None}
        contrasts: list[Contrast] = []
        for one in claim.compare:
            comparison = _Comparison.model_validate({"arms": one, **shared}) if isinstance(one, str) else one
            contrasts += self._contrasts(comparison)
        shown = tuple(found for one in claim.shows for found in self._show(one))
        return Claim(claim.states, tuple(contrasts), shown, claim.tested)

    def _contrasts(self, one: _Comparison) -> list[Contrast]:
        """Return every contrast of a comparison: by part, by measure, each arm with each it is set against."""
        places = [(part, measure or None) for part in self._name_parts(one.parts) for measure in one.by]
        if one.doses:
            return [follow_doses(_split(one.doses), part, measure) for part, measure in places]
        more: dict[str, Any] = {"bins": one.bins, "beyond": one.beyond, "against_part": one.against_in}
        more["over"] = self._name_parts(one.over)
        more["less"] = None if one.less is None else self._contrasts(one.less)[0]
        ahead, behind = map(_split, one.arms.split(" > "))
        return [
            Contrast(arm, against, part=part, measure=measure, **more)
            for part, measure in places
            for arm in ahead
            for against in behind
        ]

    def _show(self, one: _Shown) -> list[Shown]:
        parts = self._name_parts(one.parts)
        if one.least:
            return [Shown(one.least, (arm,), parts, least=True) for arm in _split(one.arms)]
        if one.step_times:
            return [show_step_times(_split(one.step_times), part) for part in parts]
        return [Shown(one.number, _split(one.arms), (part,), one.label, one.digits, one.scale) for part in parts]


def _split(arms: str) -> tuple[str, ...]:
    """Return the arms of a text, with each alternative.

    >>> _split("plain em:kinds=<self|cross>")
    ('plain', 'em:kinds=self', 'em:kinds=cross')
    """
    return tuple(found for arm in arms.split() for found in _choose(arm))


def _choose(arm: str) -> list[str]:
    found = re.search(r"<([^<>]*)>", arm)
    if found is None:
        return [arm]
    return [one for word in found[1].split("|") for one in _choose(arm[: found.start()] + word + arm[found.end() :])]


def _publish(given: _Published) -> Published:
    """Build a paper's numbers: rows of name, arm, cells and perhaps a part, or of name and arm with cells by part."""
    columns = tuple(Column(one) if isinstance(one, str) else one for one in given.columns)
    rows = [
        PaperRow(name, arm, tuple(cells[: len(columns)]), "".join(cells[len(columns) :]))
        for name, arm, *cells in given.rows
        if cells
    ]
    for part, by_row in given.cells.items():
        for (name, arm), cells in zip(given.rows, by_row, strict=True):
            rows.append(PaperRow(name, arm, (cells,) if isinstance(cells, str) else tuple(cells), part))
    return Published(given.on, columns, tuple(rows))


def _resolve(function: str | Mapping[str, Any]) -> Any:
    """Return one of `FUNCTIONS`, or what the one named by `call` returns for the other keys."""
    given = {"call": function} if isinstance(function, str) else dict(function)
    name = given.pop("call")
    require_choice("function", name, FUNCTIONS)
    found = resolve_name(f"headwise_lab.papers.{name}")
    if isinstance(function, str):
        return found
    try:
        return found(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})
    except TypeError as error:
        raise SettingError(f"function {name} cannot be called ({error}).") from None


def read_file(path: Path, taken: Collection[str] = ()) -> dict[str, Reproduction]:
    """Return the reproductions that a TOML file declares; see `parse_file`. Raises DataError: It cannot be read."""
    sizes = tomllib.loads(SIZES.read_text(encoding="utf-8"))
    return parse_file(read_whole(path).decode("utf-8", errors="replace"), sizes, path.name, taken)


# Every table and figure of the papers that can be run, and our own, by its id.
REPRODUCTIONS = {name: one for file in FILES for name, one in read_file(FOLDER / f"{file}.toml").items()}
