"""A saved folder as it is read: its record, its tensors and its stock model. What a folder says is not trusted.

Values are checked one by one, a model is no larger than its tensors, and no foreign code runs.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.atomic import FILES, require_folder_unchanged, require_unchanged
from headwise.errors import DataError, HeadwiseError, SettingError
from headwise.input_files import encode_json, find_inside, is_file, parse_json, read_whole, refuse_failures
from headwise.stock_folders import (
    CONFIG,
    LARGEST,
    RECORD,
    REMEDY,
    Stored,
    TooLarge,
    build_within,
    describe_excess,
    list_named_weights,
    read_config,
    refuse_foreign_code,
    require_countable,
    require_local_kernels,
)

FORMAT = 2
SIZES = ("num_heads", "head_size", "width")
# What each kind of surgery has beside the name of its module.
SURGERIES = {"resize": ("sizes",), "aggregate": ("setting", *SIZES), "adopt": ()}
WEIGHTS = re.compile(r"headwise-[\w-]+\.safetensors(\.index\.json)?")
MODULE = re.compile(r"transformers\.models(\.\w+)+")
KINDS = {dict: "an object", list: "a list", str: "a text"}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Saved:
    """The content of a folder but for its tensors.

    Attributes:
        folder: The folder.
        stock: What the model is rebuilt from, as JSON data: its "class" as "module:class", its "config", the
            "attention" implementation of each part of that, and its "generation" config. None for a class that is not
            from transformers.
        surgeries: What was changed, as JSON data, by kind of surgery and name of the module.
        tied: For each tied tensor, the name that it is stored under.
        files: The files of tensors.
    """

    folder: Path
    stock: Mapping[str, Any] | None
    surgeries: Mapping[str, Mapping[str, Any]]
    tied: Mapping[str, str]
    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """Its `headwise.json`."""
        return self.folder / RECORD


def read_saved(folder: Path) -> Saved:
    """Return what a folder holds, after comparing its files with their digests.

    Raises:
        DataError: It is no saved folder, damaged or of another version, or a file was changed since.
    """
    path = folder / RECORD
    require_folder_unchanged(folder)
    if not is_file(path):
        raise DataError(
            f"{folder} holds no {RECORD}; expected a folder written by save_pretrained after aggregate() or "
            "prune(), or by headwise.save. Load a model that headwise did not change as it was saved (from_pretrained)."
        )
    try:
        written = parse_json(read_whole(find_inside(folder, RECORD, RECORD, REMEDY)))
        version = written["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a record of headwise ({error}); save the model again.") from None
    if version != FORMAT:
        raise DataError(
            f"{path} has format {str(version)[:60]}; expected {FORMAT}: benchmarks/convert_saved.py of the repository "
            "of headwise converts format 1, and a newer format needs a newer headwise."
        )
    require_unchanged(path, written, remedy=REMEDY)
    weights = _take(path, written, "weights", str)
    files = list_named_weights(folder, weights, RECORD)
    for name in (CONFIG, weights, *(str(file.relative_to(folder)) for file in files)):
        if name not in written[FILES] or (name != CONFIG and not WEIGHTS.fullmatch(name)):
            raise _fault(path, "weights", name, "a file with a digest such as headwise-1a2b.safetensors")
    tied = _take(path, written, "tied", dict)
    stock = read_stock(folder / CONFIG, read_config(folder / CONFIG))
    return Saved(folder, stock, _read_surgeries(path, written), tied, tuple(files))


def read_stock(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what the `config.json` of a saved folder says of a model of transformers; None where it has no such.

    Raises:
        DataError: It says something else.
    """
    if "class" not in config:
        return None
    for name, kind in {"class": str, "config": dict, "attention": dict}.items():
        _take(path, config, name, kind)
    if config.get("generation") is not None:
        _take(path, config, "generation", dict)
    return config


def _read_surgeries(path: Path, written: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {kind: {} for kind in SURGERIES}
    for surgery in _take(path, written, "surgeries", list):
        kind, module = (surgery.get("do"), surgery.get("module")) if isinstance(surgery, dict) else (None, None)
        named = SURGERIES.get(kind) if isinstance(kind, str) else None
        if named is None or not isinstance(module, str) or surgery.keys() != {"do", "module", *named}:
            kinds = "; ".join(f"{kind}: module, {', '.join(names)}" for kind, names in SURGERIES.items())
            raise _fault(path, "a surgery", surgery, f"a kind with its names ({kinds})")
        numbers = surgery["sizes"] if kind == "resize" else {name: surgery[name] for name in SIZES if name in named}
        if not isinstance(numbers, dict):
            raise _fault(path, f"sizes of {module}", numbers, "numbers by attribute")
        for name, value in numbers.items():
            if type(value) is not int or not 1 <= value <= LARGEST:
                raise _fault(path, f"{name} of {module}", value, "a positive integer")
        found[str(kind)][module] = {name: surgery[name] for name in named}
    return found


def _fault(path: Path, name: str, value: Any, expected: str) -> DataError:
    return DataError(f"{path}: {name[:60]} is {str(value)[:60]!r}; expected {expected}; {REMEDY}")


def _take(path: Path, record: Mapping[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if type(value) is not kind:
        raise _fault(path, name, value, KINDS[kind])
    return value


def _find_tensors(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """Return module, attribute and tensor of each parameter and buffer by name, tied ones under all their names."""
    return {
        f"{prefix}.{name}" if prefix else name: (module, name, tensor)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    }


def list_tensors(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the parameters and buffers of a model by name, tied ones under all their names."""
    return {name: tensor.shape for name, (_, _, tensor) in _find_tensors(model).items()}


def collect_tensors(model: nn.Module, given: Mapping[str, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to write by name, `given` ones instead of the model's, and the tied name of each other name.

    Raises:
        DataError: A tensor is sharded or on the meta device; or of the given ones, one is missing, is not in the model
            or has another shape.
    """
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, (_, _, own) in _find_tensors(model).items():
        if first.setdefault(id(own), name) != name:
            tied[name] = first[id(own)]
        else:
            tensors[name] = own
    if given is not None:
        tensors = _choose_given(model, tensors, tied, given)
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            raise DataError(
                f"{name} is a {type(tensor).__name__} on {tensor.device}; expected a full tensor: gather it and pass "
                "state_dict=."
            )
        # safetensors takes no part of a storage that another tensor has too
        storage = tensor.untyped_storage()
        own = storage.nbytes() == tensor.nbytes and tensor.is_contiguous() and storage.data_ptr() not in storages
        storages.add(storage.data_ptr())
        tensors[name] = tensor.detach() if own else tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensors, tied


def _choose_given(
    model: nn.Module, own: Mapping[str, Tensor], tied: Mapping[str, str], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors given for a model's own, whatever of its names a tied one is given under."""
    slots = _find_tensors(model)
    chosen = {tied.get(name, name): given[name] for name in slots if name in given}
    # a state dict lacks the buffers that are not persistent, and may hold extra states, which are not tensors
    unsaved = {
        tied.get(name, name) for name, (module, key, _) in slots.items() if key in module._non_persistent_buffers_set
    }
    missing = [name for name in own if name not in chosen and name not in unsaved]
    unknown = [name for name in given if name not in slots and not name.endswith("_extra_state")]
    remedy = "pass every tensor under the model's own name: strip a prefix such as 'module.' from the names"
    _require_all("state_dict", model, missing, unknown, remedy)
    for name, tensor in chosen.items():
        # DeepSpeed keeps the shape of a divided parameter apart
        expected = getattr(own[name], "ds_shape", own[name].shape)
        if tensor.shape != expected:
            raise DataError(
                f"{name} has shape {tuple(tensor.shape)} in state_dict and {tuple(expected)} in the model; pass a full "
                "tensor of a model of the same structure."
            )
    return {**own, **chosen}


def _require_all(source: object, model: nn.Module, missing: list[str], unknown: list[str], remedy: str) -> None:
    if missing or unknown:
        raise DataError(
            f"{source} does not fit {type(model).__name__}: {missing[:4]} ({len(missing)}) are missing and "
            f"{unknown[:4]} ({len(unknown)}) are not in the model; {remedy}."
        )


def parse_size(size: int | str) -> int:
    """Return a size in bytes, given as a number or a string like "5GB"."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?I?B?)", str(size).upper())
    if match is None or match[2] not in UNITS or int(match[1]) < 1:
        raise SettingError(f"max_shard_size is {size!r}; expected a number of bytes, or a size like '500MB' or '5GB'.")
    return int(match[1]) * UNITS[match[2]]


def _load_safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError as error:
        raise HeadwiseError("saved folders hold their tensors as safetensors; pip install safetensors.") from error


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, limit: int) -> list[str]:
    """Write tensors as transformers does, in files of at most `limit` bytes with an index, or in one.

    Returns:
        The names of the files, which are headwise's own, that of the one or of the index first.

    Raises:
        DataError: safetensors has no such dtype.
    """
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes + sum(other.nbytes for other in shards[-1].values()) > limit:
            shards.append({})
        shards[-1][name] = tensor
    # an interrupted write beside other files leaves those of before
    stem, count = f"headwise-{secrets.token_hex(4)}", len(shards)
    files = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files = files if count > 1 else [f"{stem}.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        try:
            _load_safetensors().save_file(shard, folder / file, metadata={"format": "pt"})
        except KeyError as error:
            name = next((name for name, tensor in shard.items() if tensor.dtype == error.args[0]), "a tensor")
            raise DataError(
                f"{name} has dtype {error.args[0]}, which safetensors does not store; change it, as with model.to()."
            ) from None
    if count == 1:
        return files
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": places}
    (folder / f"{stem}.safetensors.index.json").write_text(encode_json(index, indent=2), encoding="utf-8")
    return [f"{stem}.safetensors.index.json", *files]


def read_tensors(saved: Saved) -> dict[str, Tensor]:
    """Return the tensors of a folder by name.

    Raises:
        DataError: A file is damaged, two hold a tensor of one name, or the tied tensors are not tied to these.
    """
    found: dict[str, Tensor] = {}
    read = _load_safetensors().load_file
    for path in saved.files:
        with refuse_failures(f"{path} cannot be read as tensors", REMEDY):
            tensors = read(path)
        if twice := tensors.keys() & found.keys():
            raise DataError(f"{path} and another file both hold the tensor {min(twice)[:60]!r}; {REMEDY}")
        found |= tensors
    for name, other in saved.tied.items():
        if not isinstance(other, str) or other not in found or name in found:
            raise _fault(saved.path, "tied", name, "tensors that are tied to stored ones, and not stored themselves")
    return found


def load_tensors(model: nn.Module, saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of a folder into a model, tied ones under all their names.

    Raises:
        DataError: The tensors do not match those of the model; it is then left as it was.
    """
    slots, source, tied = _find_tensors(model), saved.folder, saved.tied
    missing = sorted(slots.keys() - tensors.keys() - tied.keys())
    unknown = sorted((tensors.keys() | tied.keys()) - slots.keys())
    remedy = "pass a model of the same structure"
    if any("head_gates" in name.split(".") for name in unknown):
        remedy = (
            "load() does not make gates: change a new model as the saved one was, with hw.aggregate or hw.prune and "
            "then hw.gate_heads, and pass it, load(folder, model)"
        )
    _require_all(source, model, missing, unknown, remedy)
    for name, (_, _, own) in slots.items():
        _require_fitting(source, name, own, tensors[tied.get(name, name)])
    filled = {name: _copy(slots[name][2], tensor) for name, tensor in tensors.items()}
    for name, (module, attribute, own) in slots.items():
        target: dict[str, Any] = module._parameters if isinstance(own, nn.Parameter) else module._buffers
        target[attribute] = filled[tied.get(name, name)]


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


def count_stored(saved: Saved, tensors: Mapping[str, Tensor]) -> Stored:
    """Return the number and sizes of the tensors of a folder."""
    size = sum(path.stat().st_size for path in saved.files)
    return Stored(len(tensors), size, frozenset(length for tensor in tensors.values() for length in tensor.shape))


def rebuild(saved: Saved, tensors: Mapping[str, Tensor], *, trusted: bool) -> nn.Module:
    """Return a new model of the class and configuration that a folder names; code that these name runs if `trusted`.

    Raises:
        DataError: The class is no model of transformers, the configuration does not fit it or names code, or the model
            would be much larger than its tensors.
    """
    path, stored, stock = saved.folder / CONFIG, count_stored(saved, tensors), saved.stock or {}
    cls, config = find_class(path, stock["class"]), stock["config"]
    if not trusted:
        require_local_kernels(path, {"attn_implementation": stock["attention"], **config})
    require_countable(path, config, stored)

    def build(arguments: Mapping[str, bool]) -> nn.Module:
        return build_within(lambda: _build(cls, stock, arguments), tensors=stored.tensors, size=stored.size)

    failed = f"{path}: no {cls.__name__} can be built from its configuration"
    try:
        with refuse_failures(failed, REMEDY), refuse_foreign_code(saved.folder, trusted=trusted):
            return build(find_arguments(cls, {*tensors, *saved.tied}, build))
    except TooLarge as error:
        raise DataError(describe_excess(path, config, stored, error)) from None


def find_class(path: Path, named: str) -> Any:
    """Return the class of transformers that a file names as "module:class".

    Raises:
        DataError: It is none.
    """
    from transformers import PreTrainedModel

    module, _, name = named.partition(":")
    cls: Any = None
    if MODULE.fullmatch(module):
        with contextlib.suppress(ImportError):
            cls = getattr(importlib.import_module(module), name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise DataError(
            f"{path}: the class is {named[:60]!r}, which is not from transformers, or no model of the installed "
            "version; build one like it, without aggregators, and pass it: load(folder, model)."
        )
    return cls


def _build(cls: Any, stock: Mapping[str, Any], arguments: Mapping[str, bool]) -> nn.Module:
    config = cls.config_class.from_dict(copy.deepcopy(stock["config"]))
    config._attn_implementation = dict(stock["attention"])
    model = cls(config, **arguments)
    generation = stock.get("generation")
    if generation is not None and getattr(model, "generation_config", None) is not None:
        model.generation_config = type(model.generation_config).from_dict(copy.deepcopy(generation))
    return model


def find_arguments(
    cls: type, names: Collection[str], build: Callable[[Mapping[str, bool]], nn.Module]
) -> dict[str, bool]:
    """Return the switches of a class of models, such as `add_pooling_layer`, that give its tensors these names.

    `build` builds a model with such switches; it is called without memory for its weights.
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
        # a model that cannot be built so is refused where it is built
        return {}
    return found
