"""Save and load models whose output projections were replaced by aggregators, or whose heads were removed.

A folder holds `headwise.json` (the model, its aggregators and sizes, and the file of each tensor, with digests), tensor
files under our own names, and a `config.json` that other libraries refuse: they would load every weight but those of
the aggregators, or draw new weights where others were cut. A folder that is new appears when it is complete; into one
that holds other files, ours are moved when complete, `headwise.json` last. Settings are stored as plain JSON with the
names of their classes; no code is stored.

Modules of a rebuilt model brought to the sizes of a saved one: its heads were removed or merged.

Settings of aggregators as plain JSON, with the names of their classes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.atomic import SEAL, name_write_errors, new_folder, seal
from headwise.errors import DataError, HeadwiseError, SettingError
from headwise.input_files import encode_json, parse_json
from headwise.nn.difference import HeadDifference
from headwise.nn.hooks import strip_wrappers, unwrap_compiled, without_wrappers
from headwise.nn.mixing import HeadMixer
from headwise.nn.multihead import MultiheadAttention, adopt
from headwise.nn.resized import GROUPS, read_sizes, resize, set_data
from headwise.routing.algorithms import DistinctCapsules, PerHead, SharedTrunk
from headwise.routing.modules import (
    Aggregator,
    Chunks,
    EMRouting,
    Gate,
    GatedProjection,
    Residual,
    ResidualAggregator,
    Setting,
    SimpleRouting,
    Trunk,
    build,
)
from headwise.routing.saved import (
    CONFIG,
    FILE,
    FORMAT,
    REMEDY,
    SIZES,
    Saved,
    collect_tensors,
    load_tensors,
    parse_size,
    read_saved,
    read_tensors,
    rebuild,
    split_into_shards,
)
from headwise.stock_folders import RECORD, Stored


def resize_modules(saved: Saved, model: nn.Module, tensors: Mapping[str, Tensor]) -> list[Callable[[], None]]:
    """Give modules of a model the saved sizes, and return what gives them the old ones.

    Parameters and buffers that these modules hold themselves get the shapes of the saved tensors, and no values yet. A
    model that has these sizes stays as it is, with the same parameters.

    Raises:
        DataError: A module, or an attribute of it, is not there, or a saved tensor is larger than the model's.
    """
    undo: list[Callable[[], None]] = []
    try:
        for name, sizes in saved.sizes.items():
            module = find_module(saved, model, name)
            wrong = [key for key in sizes if type(vars(module).get(key, 1 if key == GROUPS else None)) is not int]
            if wrong:
                raise DataError(
                    f"{saved.path}: {name[:60]}.{wrong[0][:60]} is no number of heads or features of a "
                    f"{type(module).__name__}; {REMEDY}"
                )
            undo.append(resize(module, sizes))
            for attribute, parameter in (*module._parameters.items(), *module._buffers.items()):
                path = f"{name}.{attribute}" if name else attribute
                stored = tensors.get(saved.tied.get(path, path))
                if parameter is None or stored is None or stored.shape == parameter.shape:
                    continue
                if stored.dim() != parameter.dim() or any(map(int.__gt__, stored.shape, parameter.shape)):
                    raise DataError(
                        f"{path} has shape {tuple(stored.shape)} in {saved.folder} and {tuple(parameter.shape)} in the "
                        f"model, which has fewer; {REMEDY}"
                    )
                undo.append(_shrink(parameter, stored.shape))
    except BaseException:
        for one in reversed(undo):
            one()
        raise
    return undo


def _shrink(parameter: Tensor, shape: torch.Size) -> Callable[[], None]:
    before, gradient = parameter.data, parameter.grad
    parameter.grad = None
    set_data(parameter, before.new_empty(shape))

    def undo() -> None:
        set_data(parameter, before)
        parameter.grad = gradient

    return undo


def find_module(saved: Saved, model: nn.Module, name: str) -> nn.Module:
    """Return a module that a record names.

    Raises:
        DataError: The model has none of that name.
    """
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise DataError(
            f"the model has no module {name[:60]!r}, which {saved.path} names; pass a model of the same structure."
        ) from None


SETTINGS: tuple[type, ...] = (
    Chunks,
    DistinctCapsules,
    EMRouting,
    Gate,
    PerHead,
    Residual,
    SharedTrunk,
    SimpleRouting,
    Trunk,
)
# Fields that would be taken for the name of the class.
TAGGED = re.compile("setting_*")


def record(value: Any) -> Any:
    """Return a setting as JSON: {"setting": its class, field: value, ...}; tuples become lists.

    A field that is itself called `setting` is written as "setting_", one called `setting_` as "setting__", and so on.

    Raises:
        DataError: A field holds something that JSON cannot represent, or the class has the name of one of headwise's.

    Example:
        >>> record(EMRouting(iterations=2))["inverse_temperature"]
        [1.0, 3.0]
    """
    if is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if type(value) not in SETTINGS and name in {cls.__name__ for cls in SETTINGS}:
            raise DataError(f"the setting {name} is not headwise's {name}, as which it would be loaded; rename it.")
        # what a class computes itself it will compute again
        held = {f.name: record(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"setting": name, **{f"{key}_" if TAGGED.fullmatch(key) else key: item for key, item in held.items()}}
    if isinstance(value, tuple):
        return [record(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise DataError(f"a setting holds a {type(value).__name__}; expected numbers, strings, tuples or settings.")


def restore(value: Any, classes: Sequence[type] = ()) -> Any:
    """Return the setting that `record` wrote.

    Args:
        value: The result of `record`.
        classes: User-defined classes that may appear in it.

    Raises:
        DataError: A class is unknown, or does not have those fields.

    Example:
        >>> restore(record(Residual(SimpleRouting(iterations=4)))).routing.iterations
        4
    """
    if isinstance(value, list):
        return tuple(restore(item, classes) for item in value)
    if not isinstance(value, dict):
        return value
    held = {key.removesuffix("_") if TAGGED.fullmatch(key) else key: key for key in value if key != "setting"}
    name = str(value.get("setting"))
    known = {cls.__name__: cls for cls in (*SETTINGS, *classes)}
    if name not in known:
        raise DataError(
            f"the folder holds the setting {name!r}; expected one of {', '.join(sorted(known))}. If you defined it, "
            "pass its class: load(settings=(...,))."
        )
    try:
        return known[name](**{key: restore(value[written], classes) for key, written in held.items()})
    except (TypeError, ValueError) as error:
        raise DataError(f"the setting {name} cannot be built from {value}: {error}") from error


STOCK_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "tf_model.h5", "flax_model.msgpack")


def find_aggregators(model: nn.Module) -> dict[str, Aggregator]:
    """Return the aggregators of a model by module name, without those inside a `ResidualAggregator`."""
    inner = {m.aggregator for m in model.modules() if isinstance(m, ResidualAggregator)}
    return {
        name: module for name, module in model.named_modules() if isinstance(module, Aggregator) and module not in inner
    }


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a model with aggregators or fewer heads to a folder for `load`; other libraries refuse to load it.

    All parameters and buffers are written in their dtype, tied ones once. Files saved there before are replaced when
    the new ones are complete.

    Args:
        model: Any module that holds aggregators, or whose heads were removed. The class and configuration of a
            transformers model are saved too.
        folder: Created if it does not exist.
        state_dict: Tensors to write instead of the model's, under its names and in its shapes, for example gathered
            from several processes.
        max_shard_size: Largest size of a file, in bytes or as a string like "500MB". A larger tensor is written to a
            separate file.

    Raises:
        DataError: The model holds no aggregator, and all its heads or as many as its configuration says; it holds
            talking heads; the folder holds the weights of an unchanged model, which would be loaded instead; or a
            tensor is sharded over processes, or in `state_dict` missing, unknown or of another shape.
        SettingError: `model` is not a module, or `max_shard_size` is not a size.

    Example:
        >>> import tempfile
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> _ = hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(model, folder)
        ...     again = load(folder, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
        >>> type(again.self_attn.out_proj).__name__
        'SimpleAggregator'
    """
    if not isinstance(model, nn.Module):
        raise SettingError(f"model is a {type(model).__name__}; expected the torch module that holds the aggregators.")
    inner = unwrap_compiled(model)
    with without_wrappers(inner):
        _save(inner, Path(folder), state_dict, parse_size(max_shard_size))


def _save(model: nn.Module, target: Path, state_dict: Mapping[str, Tensor] | None, limit: int) -> None:
    places, sizes = find_aggregators(model), read_sizes(model)
    if not places and not sizes:
        raise DataError(
            f"{type(model).__name__} holds no aggregator, and no sizes that its configuration does not give; save it "
            "as you would without headwise (save_pretrained, or torch.save of its state_dict)."
        )
    if any(isinstance(module, HeadMixer) for module in model.modules()):
        raise DataError(f"{type(model).__name__} has talking heads, which load() does not make; save its state_dict.")
    if _describe_model(model) is not None and any(isinstance(module, HeadDifference) for module in model.modules()):
        raise DataError(
            f"{type(model).__name__} has differential attention, which load() does not make; save its state_dict."
        )
    _refuse_stock_weights(target)
    given = None if state_dict is None else {strip_wrappers(name): tensor for name, tensor in state_dict.items()}
    tensors, tied = collect_tensors(model, given)
    shards = split_into_shards(tensors, limit)
    token = secrets.token_hex(4)
    files = {f"headwise-{token}-{i:05d}-of-{len(shards):05d}.pt": names for i, names in enumerate(shards, start=1)}
    written = {
        "format": FORMAT,
        "model": _describe_model(model),
        "aggregators": {name: _describe(aggregator) for name, aggregator in places.items()},
        "adopted": [name for name, module in model.named_modules() if type(module) is MultiheadAttention],
        "sizes": sizes,
        "tied": tied,
        "files": files,
    }
    marker = {"model_type": "headwise", "note": "a model changed by headwise: headwise.load(folder)"}
    with new_folder(target, replaced=_Replaced(), wait=True) as temporary, name_write_errors(target):
        for file, names in files.items():
            torch.save({name: tensors[name] for name in names}, temporary / file)
        (temporary / CONFIG).write_text(encode_json(marker, indent=2), encoding="utf-8")
        text = encode_json(seal(written, temporary, [*files, CONFIG]), indent=2)
        (temporary / RECORD).write_text(text, encoding="utf-8")


class _Replaced:
    """The names of what `save` writes, and of the seal of a folder that it changes."""

    def __contains__(self, name: object) -> bool:
        return name in (CONFIG, RECORD, SEAL) or FILE.fullmatch(str(name)) is not None


def load(
    folder: str | Path,
    model: nn.Module | None = None,
    *,
    settings: Sequence[type] = (),
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model from a folder of `save`, or of `save_pretrained` after `aggregate` or `prune`, in evaluation mode.

    The files are compared with the digests that `save` wrote.

    Args:
        folder: The folder.
        model: A model of the same structure to load into; needed unless its class is from transformers. It has all
            its heads or those saved, and no aggregators or the same ones; with those, its parameters stay the same
            objects, so that an optimizer still holds them.
        settings: User-defined setting classes (parameterizations of votes) that the aggregators were built from.
        trust_remote_code: Whether transformers may run code that the folder names: its Python files, and attention
            kernels from the Hub.

    Returns:
        The model; its outputs equal those of the saved one bit for bit.

    Raises:
        DataError: The folder holds no such model, an incomplete or changed one, or one that does not fit `model`, which
            is then left as it was.
    """
    saved = read_saved(Path(folder))
    _refuse_stock_weights(saved.folder)
    tensors = read_tensors(saved)
    # initial weights, soon replaced, must not advance the caller's random generator
    with torch.random.fork_rng(devices=[]):
        model = _rebuild(saved, tensors, trusted=trust_remote_code) if model is None else model
        inner = unwrap_compiled(model)
        with without_wrappers(inner):
            _fill(saved, inner, tensors, settings)
    return model.eval()


def _fill(saved: Saved, model: nn.Module, tensors: Mapping[str, Tensor], settings: Sequence[type]) -> None:
    """Give a model the saved aggregators and tensors, or leave it as it was."""
    adopted = [_find_adopted(saved, model, name) for name in saved.adopted]
    undo = resize_modules(saved, model, tensors)
    placed: list[_Place] = []
    try:
        placed = _build_aggregators(saved, model, tensors, settings)
        for owner, attribute, _, new in placed:
            setattr(owner, attribute, new)
        load_tensors(model, saved, tensors)
    except BaseException:
        for owner, attribute, old, _ in placed:
            setattr(owner, attribute, old)
        for one in reversed(undo):
            one()
        raise
    # it cannot be undone, and does not fail
    for attention in adopted:
        adopt(model, attention)
    if saved.sizes and callable(getattr(type(model), "save_pretrained", None)):
        vars(model)["save_pretrained"] = SavePretrained(model)


class SavePretrained:
    """`save_pretrained` of a model with aggregators or fewer heads; set by `aggregate` and `prune`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        before = vars(model).get("save_pretrained")
        # what the model itself had in the place of its class's method
        self.before: Any = before.before if isinstance(before, SavePretrained) else before

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        *,
        max_shard_size: int | str = "5GB",
        **other: object,
    ) -> None:
        """Write a folder for `headwise.load`; of a model that headwise did not change, call the original method.

        Raises:
            SettingError: An option was given that does not apply to such a folder.
        """
        if not find_aggregators(self.model) and not read_sizes(self.model):
            stock: Any = type(self.model)
            own = {"is_main_process": is_main_process, "state_dict": state_dict, "max_shard_size": max_shard_size}
            # what it writes is not what the folder was sealed with
            Path(save_directory, SEAL).unlink(missing_ok=True)
            stock.save_pretrained(self.model, save_directory, **own, **other)
            return
        harmless = {"token", "safe_serialization", "save_function", "save_peft_format", "save_original_format"}
        refused = {name: value for name, value in other.items() if name not in harmless and value}
        if refused:
            raise SettingError(
                f"save_pretrained of a model changed by headwise was given {refused}; expected only save_directory, "
                "is_main_process, state_dict and max_shard_size."
            )
        if is_main_process:
            save(self.model, save_directory, state_dict=state_dict, max_shard_size=max_shard_size)


def _refuse_stock_weights(folder: Path) -> None:
    found = sorted(path.name for pattern in STOCK_WEIGHTS for path in folder.glob(pattern))
    if found:
        raise DataError(
            f"{folder} holds {found[0]}, the weights of a model that headwise did not change, which transformers would "
            "load; use another folder for the model with aggregators or fewer heads."
        )


def _describe_model(model: nn.Module) -> dict | None:
    """Return what rebuilds the model without its weights; None for a class that is not from transformers."""
    cls, config = type(model), getattr(model, "config", None)
    if not cls.__module__.startswith("transformers.") or config is None:
        return None
    generation = getattr(model, "generation_config", None)
    names = {"": config, **{name: getattr(config, name) for name in config.sub_configs}}
    attention = {name: part._attn_implementation for name, part in names.items() if part is not None}
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "config": _read_settings(config),
        "attention": attention,
        "generation": None if generation is None else _read_settings(generation),
    }


def _read_settings(config: Any) -> Any:
    try:
        return parse_json(config.to_json_string(use_diff=False))
    except ValueError as error:
        raise DataError(f"{type(config).__name__} cannot be saved as JSON ({error}); set another value.") from None


def _rebuild(saved: Saved, tensors: Mapping[str, Tensor], *, trusted: bool) -> nn.Module:
    if saved.model is None:
        raise DataError(
            f"{saved.folder} holds a model whose class is not from transformers; build one like it, with all its heads "
            "and without aggregators, and pass it: load(folder, model)."
        )
    size = sum((saved.folder / file).stat().st_size for file in saved.files)
    stored = Stored(len(tensors), size, frozenset(length for tensor in tensors.values() for length in tensor.shape))
    return rebuild(saved.model, {*tensors, *saved.tied}, stored, trusted=trusted)


def _describe(aggregator: Aggregator) -> dict:
    routed: Any = aggregator.aggregator if isinstance(aggregator, ResidualAggregator) else aggregator
    sized = routed if isinstance(routed, GatedProjection) else routed.votes
    sizes = {"num_heads": sized.num_heads, "head_size": sized.head_size, "width": sized.width}
    return {"setting": record(_get_setting(aggregator)), **sizes}


def _find_adopted(saved: Saved, model: nn.Module, name: str) -> nn.Module:
    """Return a module that `adopt` takes."""
    module = find_module(saved, model, name)
    if not isinstance(module, MultiheadAttention) and type(module) is not nn.MultiheadAttention:
        raise DataError(
            f"{saved.path} names {name[:60]!r} as an attention of torch, and it is a {type(module).__name__}; pass a "
            "model of the same structure."
        )
    return module


class _Place(NamedTuple):
    """The place of an aggregator: the module that holds it and its attribute there, and what is there before."""

    owner: nn.Module
    attribute: str
    old: nn.Module
    new: Aggregator


def _build_aggregators(
    saved: Saved, model: nn.Module, tensors: Mapping[str, Tensor], settings: Sequence[type]
) -> list[_Place]:
    """Return the aggregators of a folder that the model does not have yet, built and not yet in place."""
    found = []
    for name, described in saved.aggregators.items():
        parent, _, attribute = name.rpartition(".")
        owner, old = find_module(saved, model, parent), find_module(saved, model, name)
        if isinstance(old, Aggregator):
            own = _describe(old)
            if own != described:
                raise DataError(
                    f"{name} is a {type(old).__name__} already, with {own}; the saved one has {described}. Pass load() "
                    "a model without aggregators, or with the saved ones."
                )
            continue
        found.append(_Place(owner, attribute, old, _build_aggregator(saved, name, old, tensors, settings)))
    return found


def _build_aggregator(
    saved: Saved, name: str, old: nn.Module, tensors: Mapping[str, Tensor], settings: Sequence[type]
) -> Aggregator:
    described = saved.aggregators[name]
    heads, size, width = (described[name] for name in SIZES)
    try:
        setting = restore(described["setting"], settings)
        kept = old if isinstance(setting, Residual | Gate) else None
        # first without memory: its sizes may be anything
        with torch.device("meta"):
            shapes = {part: own.shape for part, own in build(setting, heads, size, width, kept).state_dict().items()}
    except Exception as error:
        # a setting of the user's own may raise anything
        reason = str(error) if isinstance(error, HeadwiseError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{saved.path}: the aggregator {name[:60]} cannot be built ({reason[:200]}); {REMEDY}"
        ) from error
    for part, shape in shapes.items():
        stored = tensors.get(saved.tied.get(f"{name}.{part}", f"{name}.{part}"))
        if stored is None or stored.shape != shape:
            raise DataError(
                f"{saved.path}: {name}.{part} of the aggregator has shape {tuple(shape)}, the saved one "
                f"{'is missing' if stored is None else tuple(stored.shape)}; {REMEDY}"
            )
    return build(setting, heads, size, width, kept)


def _get_setting(aggregator: Any) -> Setting:
    """Return the setting an aggregator was built from."""
    if isinstance(aggregator, ResidualAggregator):
        routed: Any = aggregator.aggregator
        return Residual(routed.setting)
    return aggregator.setting
