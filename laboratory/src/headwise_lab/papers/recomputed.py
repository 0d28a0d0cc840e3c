"""A reproduction made again from its record and the numbers of its runs, without training.

A reproduction continued from its record: the runs kept with it are put where they would be, and not done again.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel

from headwise.atomic import new_folder, write_whole
from headwise.errors import DataError, SettingError
from headwise.input_files import encode_json, parse_json, read_whole
from headwise_lab.compare import describe_fixed
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import (
    RESULT,
    SETTINGS,
    first_difference,
    prepare_folder,
    read_json,
    require_same,
    write_json,
)
from headwise_lab.papers.data import ARCHIVES, find_archive, unpack_runs
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.figures import draw_pictures
from headwise_lab.papers.pages import FOLDER, read_records
from headwise_lab.papers.records import Reproduced, name_in_part, tabulate_parts
from headwise_lab.papers.reproduction import Reproduction
from headwise_lab.papers.run import Plan
from headwise_lab.results.evidence import read_evidence
from headwise_lab.results.runs import COMPARISON, TEST
from headwise_lab.tune import BestDraw


def has_runs(path: Path) -> bool:
    """Return whether the runs of a record are kept with it."""
    return find_archive(path).exists()


def find_record(paper: Path, identifier: str, scale: str, *, tuned: bool | None = None) -> Path:
    """Return the record of a reproduction at a scale whose runs are kept, in the folder of a paper's notes.

    `tuned` tells whether its arms were tuned; None for either.

    Raises:
        DataError: There is none, there are several, or a record is damaged.
    """
    records = read_records(paper)
    found = [path for path, record in records.items() if (record.get("id"), record.get("scale")) == (identifier, scale)]
    found = [path for path in found if tuned is None or bool(records[path].get("tuned")) == tuned]
    kept = [path for path in found if has_runs(path)]
    if len(kept) != 1:
        names = ", ".join(path.name for path in kept or found) or "no record"
        there = [f"{record.get('id')} at {record.get('scale')}" for path, record in records.items() if has_runs(path)]
        reason = f"expected one of {', '.join(there)}" if there else "no record has its runs there"
        if found:
            reason = "expected one" if kept else f"none has its runs in {paper / ARCHIVES}"
        raise DataError(f"{paper / FOLDER} holds {names} of {identifier} at scale {scale}; {reason}.")
    return kept[0]


class _Row(BaseModel):
    arm: str
    seeds: list[int]


class _Table(BaseModel):
    rows: list[_Row]
    seeds: list[int]
    missing: list[str]


class _Record(BaseModel):
    """As much of a record as its reproduction is made again from."""

    id: str
    scale: str
    parts: dict[str, str]
    tables: dict[str, _Table]
    missing: list[str]
    left_out: list[str]
    # records that do not say what was asked for have all of it
    asked: list[str] | None = None
    tuned: dict[str, Any] = {}

    @property
    def draws(self) -> dict[str, BestDraw]:
        return {name: BestDraw.from_record(draw) for name, draw in self.tuned.items()}


def _read_record(path: Path) -> _Record:
    """Read a record. Raises DataError: It is damaged."""
    try:
        record = _Record.model_validate(read_json(path))
        _ = record.draws
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).replace("\n", " ")
        raise DataError(f"{path} is not the record of a reproduction ({reason}); make it again.") from None
    return record


def recompute(path: Path, place: Path) -> Reproduced:
    """Return a reproduction from the runs kept with its record, judged by its claims as they are now.

    Its runs are written to an empty folder.

    Raises:
        DataError: The record or its archive is damaged, or its reproduction is not known.
    """
    record = _read_record(path)
    if record.id not in REPRODUCTIONS:
        raise DataError(f"{path} is the record of {record.id}, which is not known; name its file with --tables.")
    reproduction, scale, corpora = REPRODUCTIONS[record.id], record.scale, record.parts
    if record.left_out:
        named = (one.removesuffix(")").partition(" (") for one in record.left_out)
        reproduction = reproduction.without({name: why for name, _, why in named})
    asked = list(corpora) if record.asked is None else record.asked
    reproduction = reproduction if asked == [""] else reproduction.only(asked, scale)
    arms = reproduction.arms_at(scale, named_task(reproduction.task).scales)
    folders = unpack_runs(find_archive(path), place)
    if len(folders) != len(corpora):
        raise DataError(f"{find_archive(path)} has {len(folders)} parts, its record {len(corpora)}; fetch both.")
    places = dict(zip(corpora, folders, strict=True))
    read = {part: read_evidence(folder, arms[part], record.tables[part].seeds) for part, folder in places.items()}
    evidence = {part: found for part, found in read.items() if found is not None}
    tables = tabulate_parts(reproduction, scale, evidence)
    drawn = draw_pictures(reproduction, places, evidence, tables)
    begun = {name_in_part(run, part) for part in corpora for run in record.tables[part].missing}
    absent = tuple(run for run in record.missing if run not in begun)
    return Reproduced(reproduction, scale, corpora, evidence, tables, drawn, tuned=record.draws, absent=absent)


def list_runs(record: Path | None) -> dict[str, set[tuple[str, int]]]:
    """Return the arm and the seed of each run that a record has, by its parts. Raises DataError: It is damaged."""
    tables = {} if record is None else _read_record(record).tables
    return {part: {(row.arm, seed) for row in table.rows for seed in row.seeds} for part, table in tables.items()}


def extend_seeds(
    reproduction: Reproduction,
    scale: str,
    asked: Sequence[str],
    seeds: int,
    kept: Mapping[str, Collection[tuple[str, int]]],
) -> dict[str, int]:
    """Return how many seeds each part takes, so that a record loses no run.

    The reproduction has the parts asked for (none for all) and those of the record, as far as there is data; `kept` are
    the runs that the record has, as of `list_runs`.

    Raises:
        SettingError: There is no data for a part of the record.
    """
    names = [part.name for part in reproduction.parts_at(scale)]
    if lost := [name for name in kept if name not in names]:
        raise SettingError(
            f"the record has {', '.join(lost)}, for which --data holds nothing; expected the data of every part, or "
            "another --record."
        )
    had = {name: 1 + max((seed for _, seed in runs), default=-1) for name, runs in kept.items()}
    return {name: max(had.get(name, 0), seeds if not asked or name in asked else 0) for name in names}


def restore_runs(record: Path, plans: Sequence[Plan]) -> int:
    """Put the runs kept with a record into the folders of a reproduction's comparisons; return how many.

    A run that its comparison has is left as it is, and a part that the record lacks gets none. Weights and texts are in
    no record: an analysis that a run lacks, and that reads them, fails.

    Raises:
        DataError: The record or its archive is damaged, or the data cannot be read.
        SettingError: A folder cannot be written or holds another comparison, or the record is of other sizes, data or
            draws than the comparisons; nothing is copied then.
    """
    found = _read_record(record)
    tuned = {name: draw.arm for name, draw in found.draws.items()}
    with TemporaryDirectory() as place:
        folders = dict(zip(found.parts, unpack_runs(find_archive(record), Path(place)), strict=False))
        kept = [(folders[plan.part.name], plan) for plan in plans if plan.part.name in folders]
        for source, plan in kept:
            _require_same_runs(record, source, tuned, plan)
        return sum(_restore(source, plan.comparison.out) for source, plan in kept)


def _require_same_runs(record: Path, source: Path, tuned: Mapping[str, str], plan: Plan) -> None:
    """Refuse a record whose runs are not those of a plan, or a folder that is not the plan's."""
    kept, asked = read_json(source / COMPARISON), describe_fixed(plan.comparison)
    drawn = {name: draw.arm for name, draw in plan.tuned.items()}
    # a record has the draws of all its parts
    of_part = {name: arm for name, arm in tuned.items() if name in drawn or not drawn}
    old = {name: kept[name] for name in asked if name in kept} | {"tuned": of_part}
    new = {name: asked[name] for name in asked if name in kept} | {"tuned": drawn}
    if (difference := first_difference(old, parse_json(encode_json(new)))) is not None:
        name, had, wanted = difference
        raise SettingError(
            f"the runs of {record} have {name} {had!r}, and {wanted!r} is asked for; expected the record's data, sizes "
            "and --tuned, or no --resume."
        )
    there = plan.comparison.out / COMPARISON
    if there.exists():
        require_same(there, read_json(there) | asked)


def _restore(source: Path, out: Path) -> int:
    """Copy the runs of a comparison that another has not."""
    prepare_folder(out)
    if not (out / COMPARISON).exists():
        for name in (TEST, COMPARISON):
            write_whole(out / name, read_whole(source / name))
    results = [path.relative_to(source) for path in sorted(source.glob(f"*/seed-*/{RESULT}"))]
    missing = [path.parent for path in results if not (out / path).exists()]
    for run in missing:
        prepare_folder((out / run).parent)
        with new_folder(out / run, replaced=None) as whole:
            shutil.copytree(source / run, whole, dirs_exist_ok=True)
            settings = read_json(source / run / RESULT).get("settings")
            if settings is not None:
                # a run of other settings is refused then, as one that was done here is
                write_json(whole / SETTINGS, settings)
    return len(missing)
