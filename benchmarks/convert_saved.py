"""Folders of `headwise.save` in format 1, of versions before 0.2, written anew in the format that headwise reads now.

    python benchmarks/convert_saved.py FOLDER NEW_FOLDER

Tensors and outputs stay the same to the bit. The old folder is compared with its digests, and is left as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from headwise.atomic import new_folder, require_unchanged, seal
from headwise.errors import DataError
from headwise.input_files import encode_json, find_inside, parse_json, read_whole
from headwise.routing.saved import FORMAT, write_tensors
from headwise.stock_folders import CONFIG, RECORD, REMEDY, require_tensors_alone

TAG = "setting"


def convert(folder: Path, target: Path) -> None:
    """Convert a folder.

    Raises:
        DataError: It is none of format 1, or was changed since it was written; or there is another at the new place.
    """
    path = folder / RECORD
    record = parse_json(read_whole(path))
    if not isinstance(record, dict) or record.get("format") != 1:
        raise DataError(f"{path} is no record of format 1; expected a folder that headwise wrote before version 0.2.")
    require_unchanged(path, record, [*record["files"], CONFIG], remedy=REMEDY)
    tensors: dict[str, torch.Tensor] = {}
    for name in record["files"]:
        file = find_inside(folder, name, RECORD, REMEDY)
        require_tensors_alone(file)
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    model = record["model"] or {}
    stock = {"architectures": [model["class"].rpartition(":")[2]], **model} if model else {}
    written = {"format": FORMAT, "surgeries": list(list_surgeries(record)), "tied": record["tied"]}
    with new_folder(target) as temporary:
        # tensors that share memory cannot be written
        files = write_tensors(
            {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, temporary, 5 * 10**9
        )
        text = encode_json({"model_type": "headwise", **stock}, indent=2)
        (temporary / CONFIG).write_text(text, encoding="utf-8")
        sealed = seal({**written, "weights": files[0]}, temporary, [*files, CONFIG])
        (temporary / RECORD).write_text(encode_json(sealed, indent=2), encoding="utf-8")


def list_surgeries(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what was changed in the model."""
    for name, sizes in record["sizes"].items():
        yield {"do": "resize", "module": name, "sizes": sizes}
    for name, described in record["aggregators"].items():
        yield {"do": "aggregate", "module": name, **described, TAG: convert_setting(described[TAG])}
    for name in record["adopted"]:
        yield {"do": "adopt", "module": name}


def convert_setting(value: Any) -> Any:
    """Return a setting whose fields stood beside the name of its class; one called "setting" had a "_" more."""
    if isinstance(value, list):
        return [convert_setting(item) for item in value]
    if not isinstance(value, dict):
        return value
    held = {key: convert_setting(item) for key, item in value.items() if key != TAG}
    fields = {key.removesuffix("_") if key.rstrip("_") == TAG else key: item for key, item in held.items()}
    return {TAG: value[TAG], "fields": fields}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    try:
        convert(given.folder, given.target)
    except DataError as error:
        parser.error(str(error))
    print(given.target)
