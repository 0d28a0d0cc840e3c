"""The tensors of a model in sharded files, where tied tensors are stored once and listed by name."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import DataError, SettingError
from headwise.input_files import find_inside
from headwise.routing.saved import REMEDY, Saved
from headwise.stored_tensors import require_tensors_alone

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
        DataError: A tensor is sharded or on the meta device; or of the given ones, one is missing, is not in the model
            or has another shape.
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
        tensors = _choose_given(model, tensors, tied, given)
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


def _choose_given(
    model: nn.Module, own: Mapping[str, Tensor], tied: Mapping[str, str], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors given for a model's own, whatever of its names a tied one is given under."""
    aliases = {name: [name] for name in own}
    for alias, name in tied.items():
        aliases[name].append(alias)
    # a state dict lacks the buffers that are not persistent, and may hold extra states, which are not tensors
    unsaved = {
        name
        for name, (module, attribute, _) in _find_tensors(model).items()
        if attribute in module._non_persistent_buffers_set
    }
    missing = [name for name, names in aliases.items() if not given.keys() & {*names} and not {*names} <= unsaved]
    unknown = [name for name in given if name not in own and name not in tied and not name.endswith("_extra_state")]
    if missing or unknown:
        raise DataError(
            f"state_dict does not fit {type(model).__name__}: {missing[:4]} ({len(missing)}) are missing and "
            f"{unknown[:4]} ({len(unknown)}) are not in the model; pass every tensor under the model's own name: strip "
            "a prefix such as 'module.' from the names."
        )
    chosen = {}
    for name, names in aliases.items():
        tensor = next((given[alias] for alias in names if alias in given), own[name])
        # DeepSpeed keeps the shape of a divided parameter apart
        expected = getattr(own[name], "ds_shape", own[name].shape)
        if tensor.shape != expected:
            raise DataError(
                f"{name} has shape {tuple(tensor.shape)} in state_dict and {tuple(expected)} in the model; pass a full "
                "tensor of a model of the same structure."
            )
        chosen[name] = tensor
    return chosen


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


def read_tensors(saved: Saved) -> dict[str, Tensor]:
    """Return the tensors of a folder by name.

    Raises:
        DataError: A file is missing or damaged, or does not hold its tensors.
    """
    found: dict[str, Tensor] = {}
    for file, names in saved.files.items():
        path = find_inside(saved.folder, file, saved.path.name, REMEDY)
        require_tensors_alone(path)
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            # whatever torch raises for a file that is damaged, or that holds more than tensors
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
            raise DataError(
                f"{path} cannot be read as tensors, and nothing in it was run ({reason}); {REMEDY}"
            ) from None
        if not isinstance(tensors, dict) or tensors.keys() != set(names):
            raise DataError(f"{path} does not hold the {len(names)} tensors that {saved.path.name} names; {REMEDY}")
        for name, tensor in tensors.items():
            if not _is_plain(tensor):
                raise DataError(f"{path}: {name} is no tensor with numbers; {REMEDY}")
        found |= tensors
    return found


def load_tensors(model: nn.Module, saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of a folder into a model, tied ones under all their names.

    Raises:
        DataError: The tensors do not match those of the model; it is then left as it was.
    """
    slots, source, tied = _find_tensors(model), saved.folder, saved.tied
    missing = sorted(slots.keys() - tensors.keys() - tied.keys())
    unknown = sorted((tensors.keys() | tied.keys()) - slots.keys())
    if missing or unknown:
        remedy = "pass a model of the same structure"
        if any("head_gates" in name.split(".") for name in unknown):
            remedy = (
                "load() does not make gates: change a new model as the saved one was, with hw.aggregate or hw.prune "
                "and then hw.gate_heads, and pass it, load(folder, model)"
            )
        raise DataError(
            f"{source} does not fit {type(model).__name__}: {missing[:4]} ({len(missing)}) are missing and "
            f"{unknown[:4]} ({len(unknown)}) are not in the model; {remedy}."
        )
    for name, (_, _, own) in slots.items():
        _require_fitting(source, name, own, tensors[tied.get(name, name)])
    filled = {name: _copy(slots[name][2], tensor) for name, tensor in tensors.items()}
    for name, (module, attribute, own) in slots.items():
        target: dict[str, Any] = module._parameters if isinstance(own, nn.Parameter) else module._buffers
        target[attribute] = filled[tied.get(name, name)]


def _is_plain(tensor: Any) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_meta and not tensor.is_quantized


def _require_fitting(source: Path, name: str, own: Tensor, tensor: Tensor) -> None:
    if own.shape != tensor.shape:
        raise DataError(f"{name} has shape {tuple(tensor.shape)} in {source} and {tuple(own.shape)} in the model.")
    # weights may be saved as one-byte numbers with scales
    numbers = tensor.dtype.is_floating_point or (tensor.element_size() == 1 and tensor.dtype != torch.bool)
    if own.dtype.is_floating_point and not numbers:
        raise DataError(f"{name} is {tensor.dtype} in {source} and {own.dtype} in the model; {REMEDY}")
    if isinstance(own, nn.Parameter) and tensor.dtype.is_floating_point and bool(tensor.isnan().any()):
        raise DataError(
            f"{name} holds {int(tensor.isnan().sum())} NaN in {source}; load a model that was saved before "
            "its training diverged."
        )


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
