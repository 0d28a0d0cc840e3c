"""A reproduction made again from its record and the numbers of its runs, without training."""

from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.lab.experiment.registry import named_task
from headwise.lab.experiment.run_folder import read_json
from headwise.lab.papers.archive import ARCHIVE, unpack_runs
from headwise.lab.papers.figures import draw_pictures
from headwise.lab.papers.index import REPRODUCTIONS
from headwise.lab.papers.pages import FOLDER, read_records
from headwise.lab.papers.records import Reproduced, name_in_part, tabulate_parts
from headwise.lab.papers.reproduction import Reproduction
from headwise.lab.results.evidence import read_evidence
from headwise.lab.tune import BestDraw


def has_runs(path: Path) -> bool:
    """Return whether the runs of a record are kept beside it."""
    return path.with_suffix(ARCHIVE).exists()


def find_record(paper: Path, identifier: str, scale: str, *, tuned: bool | None = None) -> Path:
    """Return the record of a reproduction at a scale whose runs are kept, in the folder of a paper's notes.

    Args:
        paper: The folder.
        identifier: The id of the reproduction.
        scale: The scale.
        tuned: Whether its arms were tuned; None for either.

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
            reason = "expected one" if kept else f"none has its runs beside it in a {ARCHIVE} file"
        raise DataError(f"{paper / FOLDER} holds {names} of {identifier} at scale {scale}; {reason}.")
    return kept[0]


def recompute(path: Path, place: Path) -> Reproduced:
    """Return a reproduction from the runs kept with its record, judged by its claims as they are now.

    Args:
        path: The record.
        place: An empty folder for its runs.

    Raises:
        DataError: The record or its archive is damaged, or its reproduction is not known.
    """
    record = read_json(path)
    try:
        tuned = {str(name): BestDraw.from_record(one) for name, one in record.get("tuned", {}).items()}
        scale, corpora, left_out = str(record["scale"]), dict(record["parts"]), tuple(record["left_out"])
        # records that do not say what was asked for have all of it
        reproduction = _select(REPRODUCTIONS[record["id"]], scale, list(record.get("asked", corpora)), left_out)
        kept = {part: record["tables"][part] for part in corpora}
        begun = {name_in_part(run, part) for part, table in kept.items() for run in table["missing"]}
        absent = tuple(str(run) for run in record["missing"] if run not in begun)
        seeds = {part: [int(seed) for seed in table["seeds"]] for part, table in kept.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is not the record of a reproduction ({error}); make it again.") from None
    arms = reproduction.arms_at(scale, named_task(reproduction.task).scales)
    evidence, folders = {}, unpack_runs(path.with_suffix(ARCHIVE), place)
    if len(folders) != len(corpora):
        raise DataError(f"{path.with_suffix(ARCHIVE)} has {len(folders)} parts, its record {len(corpora)}; fetch both.")
    for part, folder in zip(corpora, folders, strict=True):
        found = read_evidence(folder, arms[part], seeds[part])
        if found is not None:
            evidence[part] = found
    tables = tabulate_parts(reproduction, scale, evidence)
    drawn = draw_pictures(reproduction, dict(zip(corpora, folders, strict=True)), evidence, tables)
    return Reproduced(reproduction, scale, corpora, evidence, tables, drawn, tuned=tuned, absent=absent)


def _select(reproduction: Reproduction, scale: str, parts: list[str], left_out: tuple[Any, ...]) -> Reproduction:
    if left_out:
        named = (str(one).removesuffix(")").partition(" (") for one in left_out)
        reproduction = reproduction.without({name: why for name, _, why in named})
    return reproduction if parts == [""] else reproduction.only(parts, scale)
