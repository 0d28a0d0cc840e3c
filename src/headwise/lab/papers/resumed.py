"""A reproduction continued from its record: the runs kept with it are put where they would be, and not done again."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from headwise.errors import DataError, SettingError
from headwise.lab.experiment.run_folder import (
    RESULT,
    SETTINGS,
    prepare_folder,
    read_json,
    require_same,
    whole_folder,
    write_json,
)
from headwise.lab.papers.archive import ARCHIVE, unpack_runs
from headwise.lab.papers.reproduction import Reproduction
from headwise.lab.papers.run import Plan
from headwise.lab.results.runs import COMPARISON, TEST

# What makes two runs comparable.
_FIXED = ("task", "scale", "sizes", "data", "primary", "metric", "difficulty")


def count_seeds(record: Path) -> dict[str, int]:
    """Return how many seeds a record has of each of its parts.

    Args:
        record: The record, as `find_record` returns it.

    Raises:
        DataError: The record is damaged.
    """
    try:
        return {str(part): len(table["seeds"]) for part, table in read_json(record)["tables"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{record} is not the record of a reproduction ({error}); make it again.") from None


def extend_seeds(
    reproduction: Reproduction, scale: str, asked: Sequence[str], seeds: int, kept: Mapping[str, int]
) -> dict[str, int]:
    """Return how many seeds each part takes, so that a record loses no run.

    Args:
        reproduction: With the parts asked for and those of the record, as far as there is data.
        scale: One of its scales.
        asked: The parts asked for; none for all.
        seeds: Number of seeds asked for.
        kept: How many seeds the record has of each of its parts.

    Raises:
        SettingError: There is no data for a part of the record.
    """
    names = [part.name for part in reproduction.parts_at(scale)]
    if lost := [name for name in kept if name not in names]:
        raise SettingError(
            f"the record has {', '.join(lost)}, for which --data holds nothing; expected the data of every part, or "
            "another --record."
        )
    return {name: max(kept.get(name, 0), seeds if not asked or name in asked else 0) for name in names}


def restore_runs(record: Path, plans: Sequence[Plan]) -> int:
    """Put the runs kept with a record into the folders of a reproduction's comparisons; return how many.

    A run that its comparison has is left as it is, and a part that the record lacks gets none. Weights and texts are in
    no record: an analysis that a run lacks, and that reads them, fails.

    Args:
        record: The record, as `find_record` returns it.
        plans: The comparisons, as `make_plans` returns them.

    Raises:
        DataError: The record or its archive is damaged.
        SettingError: A folder cannot be written, or the runs in it are of other sizes or data than the record's.
    """
    try:
        parts = list(read_json(record)["parts"])
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{record} is not the record of a reproduction ({error}); make it again.") from None
    restored = 0
    with TemporaryDirectory() as place:
        folders = dict(zip(parts, unpack_runs(record.with_suffix(ARCHIVE), Path(place)), strict=False))
        for plan in plans:
            if plan.part.name in folders:
                restored += _restore(folders[plan.part.name], plan.comparison.out)
    return restored


def _restore(source: Path, out: Path) -> int:
    """Copy the runs of a comparison that another has not."""
    prepare_folder(out)
    if (out / COMPARISON).exists():
        kept, there = read_json(source / COMPARISON), read_json(out / COMPARISON)
        require_same(out / COMPARISON, there | {name: kept[name] for name in _FIXED if name in kept})
    else:
        # read before anything is copied: from here on, other sizes or data are refused
        read_json(source / COMPARISON)
        shutil.copy(source / TEST, out / TEST)
        shutil.copy(source / COMPARISON, out / COMPARISON)
    runs = [path.parent for path in sorted(source.glob(f"*/seed-*/{RESULT}"))]
    missing = [run for run in runs if not (out / run.relative_to(source) / RESULT).exists()]
    for run in missing:
        target = out / run.relative_to(source)
        prepare_folder(target.parent)
        with whole_folder(target) as whole:
            shutil.copytree(run, whole, dirs_exist_ok=True)
            settings = read_json(run / RESULT).get("settings")
            if settings is not None:
                # a run of other settings is refused then, as one that was done here is
                write_json(whole / SETTINGS, settings)
    return len(missing)
