"""The record of a saved model, `headwise.json`, read and checked value by value: what a folder says is not trusted.

The tensors of a model in sharded files, where tied tensors are stored once and listed by name.

A model of transformers built from what a folder says of it, no larger than its tensors and without foreign code.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.atomic import PARTIAL, require_folder_unchanged, require_unchanged
from headwise.errors import DataError, HeadwiseError, SettingError
from headwise.input_files import find_inside, is_file, parse_json, read_whole
from headwise.stock_folders import (
    FLAG,
    LARGEST,
    LOCAL,
    RECORD,
    Stored,
    TooLarge,
    build_within,
    describe_excess,
    is_local,
    refuse_foreign_code,
    require_countable,
    require_local_kernels,
    require_tensors_alone,
)

FORMAT = 1
CONFIG = "config.json"
REMEDY = "copy the folder again, or save the model again."
FILE = re.compile(r"headwise-[\w-]+\.pt")
SIZES = ("num_heads", "head_size", "width")
KINDS = {dict: "an object", list: "a list", str: "a text"}


@dataclass(frozen=True)
class Identity:
    """What a model of transformers is rebuilt from.

    Attributes:
        path: The file that says so.
        module: Name of the module of its class.
        name: Name of its class.
        config: Its configuration, as JSON data.
        attention: Its attention implementations, by name of the part of the configuration.
        generation: Its generation configuration, as JSON data, if it has one.
    """

    path: Path
    module: str
    name: str
    config: dict[str, Any]
    attention: dict[str, Any]
    generation: dict[str, Any] | None


@dataclass(frozen=True)
class Saved:
    """The content of a `headwise.json`.

    Attributes:
        path: The file.
        model: What the model is rebuilt from; None for a class that is not from transformers.
        aggregators: Setting and sizes of each aggregator, as JSON data, by name of the module.
        adopted: Names of the modules that are `headwise.nn.MultiheadAttention`.
        sizes: Sizes of modules that the model's configuration does not give, by name of the module.
        tied: For each tied tensor, the name that it is stored under.
        files: Names of the tensors of each file.
    """

    path: Path
    model: Identity | None
    aggregators: Mapping[str, Mapping[str, Any]]
    adopted: tuple[str, ...]
    sizes: Mapping[str, Mapping[str, int]]
    tied: Mapping[str, str]
    files: Mapping[str, tuple[str, ...]]

    @property
    def folder(self) -> Path:
        """The folder of the saved model."""
        return self.path.parent


def read_saved(folder: Path) -> Saved:
    """Return the record of a folder, after comparing its files with their digests.

    Raises:
        DataError: There is none, it is damaged or of another version, or a file was changed since.
    """
    path = folder / RECORD
    require_folder_unchanged(folder)
    if not is_file(path):
        raise DataError(
            f"{folder} holds no {RECORD}; expected a folder written by save_pretrained after aggregate() or "
            "prune(), or by headwise.save. Load a model that headwise did not change as it was saved (from_pretrained)."
        )
    try:
        written = parse_json(read_whole(path))
        version = written["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a record of headwise ({error}); save the model again.") from None
    if version != FORMAT:
        raise DataError(
            f"{path} has format {str(version)[:60]}; expected {FORMAT}, so use the version of headwise that wrote it."
        )
    files = _read_files(path, written)
    require_unchanged(path, written, [*files, CONFIG], remedy=REMEDY)
    _require_no_others(path, files)
    saved = Saved(
        path,
        _read_identity(path, written),
        {name: _read_aggregator(path, name, one) for name, one in _take(path, written, "aggregators", dict).items()},
        tuple(_require_name(path, "adopted", name) for name in _take(path, written, "adopted", list)),
        {name: _read_sizes(path, name, one) for name, one in _take(path, written, "sizes", dict).items()},
        {name: _require_name(path, "tied", other) for name, other in _take(path, written, "tied", dict).items()},
        files,
    )
    stored = {name for names in files.values() for name in names}
    wrong = [name for name, other in saved.tied.items() if other not in stored or name in stored]
    if wrong:
        raise _fault(path, "tied", wrong[0], "tensors that are tied to stored ones, and not stored themselves")
    return saved


def _require_no_others(path: Path, files: Mapping[str, Any]) -> None:
    others = sorted(other.name for other in path.parent.glob("headwise-*.pt") if other.name not in files)
    # a `save` into this folder that was killed has left both
    if others and not path.parent.resolve().with_name(f".{path.parent.resolve().name}{PARTIAL}").exists():
        raise DataError(f"{path.parent / others[0]} is no file of the model that was saved here; {REMEDY}")


def _fault(path: Path, name: str, value: Any, expected: str) -> DataError:
    return DataError(f"{path}: {name} is {str(value)[:60]!r}; expected {expected}; {REMEDY}")


def _take(path: Path, record: Mapping[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if type(value) is not kind:
        raise _fault(path, name, value, KINDS[kind])
    return value


def _require_name(path: Path, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _fault(path, key, value, "names of modules or tensors")
    return value


def _read_files(path: Path, written: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    files: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for file, names in _take(path, written, "files", dict).items():
        if not FILE.fullmatch(file) or not isinstance(names, list):
            raise _fault(path, "files", file, "names of files beside it, such as headwise-1a2b-00001-of-00001.pt")
        for name in names:
            if _require_name(path, file, name) in seen:
                raise _fault(path, "files", name, "each tensor in one file")
            seen.add(name)
        files[file] = tuple(names)
    return files


def _read_aggregator(path: Path, name: str, described: Any) -> dict[str, Any]:
    if not isinstance(described, dict) or described.keys() != {"setting", *SIZES}:
        raise _fault(path, name, described, f"a setting, {', '.join(SIZES)}")
    for size in SIZES:
        value = described[size]
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise _fault(path, f"{size} of {name}", value, "a positive integer")
    return described


def _read_sizes(path: Path, name: str, sizes: Any) -> dict[str, int]:
    if not isinstance(sizes, dict):
        raise _fault(path, f"sizes of {name}", sizes, "numbers by attribute")
    for attribute, value in sizes.items():
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise _fault(path, f"{attribute} of {name}", value, "a positive integer")
    return sizes


def _read_identity(path: Path, written: Mapping[str, Any]) -> Identity | None:
    if written.get("model", "") is None:
        return None
    model = _take(path, written, "model", dict)
    module, _, name = _take(path, model, "class", str).partition(":")
    generation = model.get("generation")
    return Identity(
        path,
        module,
        name,
        _take(path, model, "config", dict),
        _take(path, model, "attention", dict),
        None if generation is None else _take(path, model, "generation", dict),
    )


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


MODULE = re.compile(r"transformers\.models(\.\w+)+")


def rebuild(identity: Identity, names: Collection[str], stored: Stored, *, trusted: bool) -> nn.Module:
    """Return a new model of the class and configuration that a folder names.

    Args:
        identity: What the folder says of the model.
        names: Names of its tensors, those that are tied to others too.
        stored: Its tensors.
        trusted: Whether Python files and kernels that the configuration names may run.

    Raises:
        DataError: The class is no model of transformers, the configuration does not fit it or names code, or the model
            would be much larger than its tensors.
    """
    cls = _find_class(identity)
    if not trusted:
        _require_local_attention(identity)
    require_countable(identity.path, identity.config, stored)
    try:
        with refuse_foreign_code(identity.path.parent, trusted=trusted):

            def build(given: Mapping[str, bool]) -> nn.Module:
                return build_within(lambda: _build(cls, identity, given), tensors=stored.tensors, size=stored.size)

            return build(find_arguments(cls, names, build))
    except TooLarge as error:
        raise DataError(describe_excess(identity.path, identity.config, stored, error)) from None
    except HeadwiseError:
        raise
    except Exception as error:
        # whatever a class of transformers raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"{identity.path}: no {identity.name} can be built from its configuration ({reason}); {REMEDY}"
        ) from None


def _find_class(identity: Identity) -> Any:
    cls: Any = None
    if MODULE.fullmatch(identity.module):
        with contextlib.suppress(ImportError):
            cls = getattr(importlib.import_module(identity.module), identity.name, None)
    from transformers import PreTrainedModel

    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise DataError(
            f"{identity.path}: the class is {f'{identity.module}:{identity.name}'[:60]!r}, which is not from "
            "transformers, or no model of the installed version; build one like it, without aggregators, and pass it: "
            "load(folder, model)."
        )
    return cls


def _build(cls: Any, identity: Identity, arguments: Mapping[str, bool]) -> nn.Module:
    config = cls.config_class.from_dict(copy.deepcopy(identity.config))
    config._attn_implementation = dict(identity.attention)
    model = cls(config, **arguments)
    if identity.generation is not None and getattr(model, "generation_config", None) is not None:
        model.generation_config = type(model.generation_config).from_dict(copy.deepcopy(identity.generation))
    return model


def find_arguments(
    cls: type, names: Collection[str], build: Callable[[Mapping[str, bool]], nn.Module]
) -> dict[str, bool]:
    """Return the switches of a class of models, such as `add_pooling_layer`, that give its tensors certain names.

    Args:
        cls: The class.
        names: The names.
        build: Builds a model with such switches; called without memory for its weights.
    """
    switches = {
        name: not parameter.default
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if isinstance(parameter.default, bool)
    }

    def count_others(arguments: Mapping[str, bool]) -> int:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return len(set(list_tensors(build(arguments))) ^ {*names})

    found: dict[str, bool] = {}
    try:
        others = count_others(found) if switches else 0
        for name, value in switches.items():
            if others and (fewer := count_others({**found, name: value})) < others:
                found, others = {**found, name: value}, fewer
    except Exception:
        # what cannot be built so is told where it is built
        return {}
    return found


def list_tensors(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the parameters and buffers of a model by name, tied ones under all their names."""
    held = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor.shape for some in held for name, tensor in some}


def _require_local_attention(identity: Identity) -> None:
    require_local_kernels(identity.path, identity.config)
    from transformers import AttentionInterface

    registered = (name for name in AttentionInterface().valid_keys() if not re.match(r"flash_|.*/", name))
    known = LOCAL["attn_implementation"].union(registered)
    strange = next((name for name in identity.attention.values() if not is_local(name, known)), None)
    if strange is not None:
        raise DataError(
            f"{identity.path} has the attention {str(strange)[:60]!r}, which is not installed: transformers may fetch "
            f"it from the Hub and run it; {FLAG}."
        )
