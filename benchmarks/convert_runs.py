"""Runs and archives of runs whose arms were recorded as flat keys, written anew as the laboratory reads them now.

    python benchmarks/convert_runs.py PATH ...

Each path is a folder of runs or of records, or an archive of records. What was recorded as {"rule": ...,
"term": ...} is recorded as a list of methods, and all digests become SHA-256. A file is replaced once its new content
is complete; one that is converted already is left as it is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.atomic import FILES, SEAL, seal, write_whole
from headwise.heads.ablation import DropHeads
from headwise.input_files import encode_json, parse_json
from headwise.repulsion.repel import Repel
from headwise.routing.aggregate import Aggregate
from headwise.similarity.penalty import Penalize
from headwise_lab.experiment.arm import Arm, OtherModel, sort_methods
from headwise_lab.experiment.arm_text import record_arm, restore_arm
from headwise_lab.papers.data import pack_files, unpack_runs

PLACE = {"layers": "layers", "kinds": "kinds"}
# Where each field of a method was; the first tells whether the method is on.
KEYS: Mapping[type[Any], Mapping[str, str]] = {
    Repel: {"rule": "rule", **PLACE, "projections": "projections", "grouping": "grouping"},
    Penalize: {
        "term": "term",
        "weight": "penalty_weight",
        "kind_weights": "kind_weights",
        **PLACE,
        "grouping": "penalty_grouping",
    },
    Aggregate: {"setting": "aggregation", "layers": "aggregation_layers", "kinds": "aggregation_kinds"},
    DropHeads: {"rate": "drophead", "start": "drophead_start"},
    OtherModel: {"model": "model"},
}
WHOLE = ("guided", "talking", "gates", "pairs", "wider", "muon", "queries")


def convert_arm(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of an arm as it is made now."""
    if "methods" in record:
        return dict(record)
    methods: list[Any] = []
    for kind, keys in KEYS.items():
        first = next(iter(keys.values()))
        if record.get(first) not in (None, 0.0):
            held = {field: restore_arm(record[key]) for field, key in keys.items() if record.get(key) is not None}
            methods.append(kind(**held))
    for key in WHOLE:
        whole = record.get(key)
        if whole is not None:
            methods.append(restore_arm({**whole, "kind": "MixHeads" if whole["kind"] == "Talk" else whole["kind"]}))
    arm = Arm(
        record["name"],
        sort_methods(methods),
        record.get("learning_rate"),
        record.get("dropout"),
        record.get("control", "plain"),
    )
    return record_arm(arm)


def convert(value: Any) -> Any:
    """Return a record with all arms in it converted."""
    if isinstance(value, list):
        return [convert(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return convert_arm(value) if value.get("kind") == "Arm" else {name: convert(item) for name, item in value.items()}


def convert_folder(folder: Path) -> None:
    """Convert every record below a folder, and its digests: first the settings of runs, whose digest results hold."""
    for path in sorted(folder.rglob("*.json"), key=lambda path: (path.name != "settings.json", path)):
        record = parse_json(path.read_bytes())
        if path.name == SEAL or not isinstance(record, Mapping):
            continue
        changed = convert(record)
        if FILES in record:
            changed = seal(changed, path.parent, record[FILES])
        if changed != record:
            write_whole(path, (encode_json(changed, indent=1, ascii_only=False) + "\n").encode())


def convert_archive(archive: Path) -> None:
    """Convert the runs in an archive."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack_runs(archive, folder)
        convert_folder(folder)
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        write_whole(archive, pack_files(files))


if __name__ == "__main__":
    for given in map(Path, sys.argv[1:]):
        convert_folder(given) if given.is_dir() else convert_archive(given)
