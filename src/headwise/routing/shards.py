"""The tensors of a model in sharded files, where tied tensors are stored once and listed by name."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import DataError, SettingError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _find_tensors(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """Return module, attribute and tensor of each parameter and buffer by name, tied ones under all their names."""
    return {
        f"{prefix}.{name}" if prefix else name: (module, name, tensor)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    }


def collect_tensors(model: nn.Module, given: Mapping[str, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to write by name, and for each other name the one that it is tied to.

    Args:
        model: The model.
        given: Tensors that replace the model's, by name.

    Raises:
        DataError: A tensor is sharded or on the meta device.
    """
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, (_, _, own) in _find_tensors(model).items():
        if id(own) in first:
            tied[name] = first[id(own)]
            continue
        first[id(own)] = name
        tensors[name] = own
    if given is not None:
        names = {name: [name] for name in tensors}
        for alias, name in tied.items():
            names[name].append(alias)
        for name, aliases in names.items():
            found = next((given[alias] for alias in aliases if alias in given), None)
            tensors[name] = tensors[name] if found is None else found
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            raise DataError(
                f"{name} is a {type(tensor).__name__} on {tensor.device}; expected a full tensor: gather it and pass "
                "state_dict=."
            )
        # torch.save would write the whole storage of a view
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        tensors[name] = tensor.detach() if whole else tensor.detach().clone()
    return tensors, tied


def split_into_shards(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Return the names of the tensors of each file, at most `limit` bytes unless one tensor alone is larger."""
    shards, filled = [[]], 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def load_tensors(model: nn.Module, source: Path, files: Mapping[str, list[str]], tied: Mapping[str, str]) -> None:
    """Load the tensors of a folder into a model, tied ones under all their names.

    Raises:
        DataError: A file is missing, or the tensors do not match those of the model.
    """
    slots = _find_tensors(model)
    filled: dict[str, Tensor] = {}
    for file, names in files.items():
        path = source / Path(file).name
        if not path.is_file():
            raise DataError(f"{path} is missing: the folder was copied or saved incompletely.")
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        filled |= {name: tensors[name] for name in names}
    missing, unknown = sorted(slots.keys() - filled.keys() - tied.keys()), sorted(filled.keys() - slots.keys())
    if missing or unknown:
        raise DataError(
            f"{source} does not fit {type(model).__name__}: {missing[:4]} ({len(missing)}) are missing and "
            f"{unknown[:4]} ({len(unknown)}) are not in the model; pass a model of the same structure."
        )
    for name, tensor in filled.items():
        _, _, own = slots[name]
        if own.shape != tensor.shape:
            raise DataError(f"{name} has shape {tuple(tensor.shape)} in {source} and {tuple(own.shape)} in the model.")
        filled[name] = _copy(own, tensor)
    for name, (module, attribute, own) in slots.items():
        target: dict[str, Any] = module._parameters if isinstance(own, nn.Parameter) else module._buffers
        target[attribute] = filled[tied.get(name, name)]


def _copy(own: Tensor, tensor: Tensor) -> Tensor:
    """Copy the values of `tensor` into `own` and return it; return a new tensor if the dtypes differ."""
    if own.dtype == tensor.dtype and not own.is_meta:
        # in place, because an optimizer may hold it
        with torch.no_grad():
            return own.copy_(tensor)
    placed = tensor.to("cpu" if own.is_meta else own.device)
    if not isinstance(own, nn.Parameter):
        return placed
    return nn.Parameter(placed, own.requires_grad and tensor.is_floating_point())


def parse_size(size: int | str) -> int:
    """Return a size in bytes, given as a number or a string like "5GB"."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?I?B?)", str(size).upper())
    if match is None or match[2] not in UNITS or int(match[1]) < 1:
        raise SettingError(f"max_shard_size is {size!r}; expected a number of bytes, or a size like '500MB' or '5GB'.")
    return int(match[1]) * UNITS[match[2]]
