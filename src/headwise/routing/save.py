"""Save and load models whose output projections were replaced by aggregators.

A folder holds `headwise.json` (the model, its aggregators, and the file of each tensor), tensor files under our own
names, and a `config.json` that other libraries refuse, because they would load every weight but those of the
aggregators. Files are renamed to their names when complete, `headwise.json` last. Settings are stored as plain JSON
with the names of their classes; no code is stored.
"""

import importlib
import json
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import DataError, SettingError
from headwise.nn.multihead import MultiheadAttention, adopt
from headwise.routing.modules import Aggregator, Gate, GatedProjection, Residual, ResidualAggregator, Setting, build
from headwise.routing.settings import Chunks, EMRouting, SimpleRouting, Trunk
from headwise.routing.shards import collect_tensors, load_tensors, parse_size, split_into_shards
from headwise.routing.votes import DistinctCapsules, PerHead, SharedTrunk

FORMAT = 1
RECORD, CONFIG = "headwise.json", "config.json"
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
    """Write a model with aggregators to a folder for `load`; other libraries refuse to load it.

    All parameters and buffers are written in their dtype, tied ones once. Files saved there before are replaced when
    the new ones are complete.

    Args:
        model: Any module that holds aggregators. The class and configuration of a transformers model are saved too.
        folder: Created if it does not exist.
        state_dict: Tensors to write instead of the model's, for example gathered from several processes.
        max_shard_size: Largest size of a file, in bytes or as a string like "500MB". A larger tensor is written to a
            separate file.

    Raises:
        DataError: The model holds no aggregator; the folder holds the weights of a model without aggregators, which
            would be loaded instead; or a tensor is missing or sharded over processes.
        SettingError: `model` is not a module, or `max_shard_size` is not a size.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> _ = hw.aggregate(hw.find_heads(model), hw.SimpleRouting())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(model, folder)
        ...     again = load(folder, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
        >>> type(again.self_attn.out_proj).__name__
        'SimpleAggregator'
    """
    if not isinstance(model, nn.Module):
        raise SettingError(f"model is a {type(model).__name__}; expected the torch module that holds the aggregators.")
    places = find_aggregators(model)
    if not places:
        raise DataError(
            f"{type(model).__name__} holds no aggregator; save it as you would without headwise "
            "(save_pretrained, or torch.save of its state_dict)."
        )
    target, limit = Path(folder), parse_size(max_shard_size)
    _refuse_stock_weights(target)
    tensors, tied = collect_tensors(model, state_dict)
    shards = split_into_shards(tensors, limit)
    token = secrets.token_hex(4)
    files = {f"headwise-{token}-{i:05d}-of-{len(shards):05d}.pt": names for i, names in enumerate(shards, start=1)}
    written = {
        "format": FORMAT,
        "model": _describe_model(model),
        "aggregators": {name: _describe(aggregator) for name, aggregator in places.items()},
        "adopted": [name for name, module in model.named_modules() if type(module) is MultiheadAttention],
        "tied": tied,
        "files": files,
    }
    text = json.dumps(written, indent=2)
    marker = {"model_type": "headwise", "note": "a model with headwise aggregators: headwise.load(folder)"}
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".headwise-") as temporary:
        for file, names in files.items():
            torch.save({name: tensors[name] for name in names}, Path(temporary, file))
        Path(temporary, CONFIG).write_text(json.dumps(marker, indent=2), encoding="utf-8")
        Path(temporary, RECORD).write_text(text, encoding="utf-8")
        for file in (*files, CONFIG, RECORD):
            Path(temporary, file).replace(target / file)
    for stale in set(target.glob("headwise-*.pt")) - {target / file for file in files}:
        stale.unlink()


def load(folder: str | Path, model: nn.Module | None = None, *, settings: Sequence[type] = ()) -> nn.Module:
    """Load a model from a folder of `save`, or of `save_pretrained` after `aggregate`, in evaluation mode.

    Args:
        folder: The folder.
        model: A model of the same structure to load into; needed unless its class is from transformers. It has no
            aggregators or the same ones; in that case its parameters stay the same objects, so that an optimizer still
            holds them.
        settings: User-defined setting classes (parameterizations of votes) that the aggregators were built from.

    Returns:
        The model; its outputs equal those of the saved one bit for bit.

    Raises:
        DataError: The folder holds no such model, an incomplete one, or one that does not fit `model`.
    """
    source = Path(folder)
    written = _read_record(source)
    _refuse_stock_weights(source)
    # initial weights, soon replaced, must not advance the caller's random generator
    with torch.random.fork_rng(devices=[]):
        model = _rebuild(source, written["model"]) if model is None else model
        for name in written["adopted"]:
            adopt(model, model.get_submodule(name))
        for name, described in written["aggregators"].items():
            _insert(model, name, described, settings)
    load_tensors(model, source, written["files"], written["tied"])
    return model.eval()


class SavePretrained:
    """`save_pretrained` of a model with aggregators; set by `aggregate` and removed with its handle."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        *,
        max_shard_size: int | str = "5GB",
        **other: object,
    ) -> None:
        """Write a folder for `headwise.load`; without aggregators, call the original method.

        Raises:
            SettingError: An option was given that does not apply to such a folder.
        """
        if not find_aggregators(self.model):
            stock: Any = type(self.model)
            own = {"is_main_process": is_main_process, "state_dict": state_dict, "max_shard_size": max_shard_size}
            stock.save_pretrained(self.model, save_directory, **own, **other)
            return
        harmless = {"token", "safe_serialization", "save_function", "save_peft_format", "save_original_format"}
        refused = {name: value for name, value in other.items() if name not in harmless and value}
        if refused:
            raise SettingError(
                f"save_pretrained of a model with aggregators was given {refused}; expected only save_directory, "
                "is_main_process, state_dict and max_shard_size."
            )
        if is_main_process:
            save(self.model, save_directory, state_dict=state_dict, max_shard_size=max_shard_size)


def _refuse_stock_weights(folder: Path) -> None:
    found = sorted(path.name for pattern in STOCK_WEIGHTS for path in folder.glob(pattern))
    if found:
        raise DataError(
            f"{folder} holds {found[0]}, the weights of a model without aggregators, which transformers would load; "
            "use another folder for the model with aggregators."
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
        "config": json.loads(config.to_json_string(use_diff=False)),
        "attention": attention,
        "generation": None if generation is None else json.loads(generation.to_json_string(use_diff=False)),
    }


def _rebuild(source: Path, identity: dict | None) -> nn.Module:
    module, _, name = ("" if identity is None else identity["class"]).partition(":")
    if identity is None or not module.startswith("transformers."):
        raise DataError(
            f"{source} holds a model whose class is not from transformers; build one like it, without aggregators, "
            "and pass it: load(folder, model)."
        )
    cls: Any = getattr(importlib.import_module(module), name)
    config = cls.config_class.from_dict(identity["config"])
    config._attn_implementation = identity["attention"]
    model = cls(config)
    if identity["generation"] is not None and getattr(model, "generation_config", None) is not None:
        model.generation_config = type(model.generation_config).from_dict(identity["generation"])
    return model


def _describe(aggregator: Aggregator) -> dict:
    routed: Any = aggregator.aggregator if isinstance(aggregator, ResidualAggregator) else aggregator
    sized = routed if isinstance(routed, GatedProjection) else routed.votes
    sizes = {"num_heads": sized.num_heads, "head_size": sized.head_size, "width": sized.width}
    return {"setting": record(_get_setting(aggregator)), **sizes}


def _insert(model: nn.Module, name: str, described: dict, settings: Sequence[type]) -> None:
    parent, _, attribute = name.rpartition(".")
    try:
        owner = model.get_submodule(parent)
        old = getattr(owner, attribute)
    except AttributeError as error:
        raise DataError(
            f"the model has no module {name}, an aggregator in the saved one; pass a model of the same structure."
        ) from error
    if isinstance(old, Aggregator):
        found = _describe(old)
        if found != described:
            raise DataError(
                f"{name} is a {type(old).__name__} already, with {found}; the saved one has {described}. Pass load() "
                "a model without aggregators, or with the saved ones."
            )
        return
    setting = restore(described["setting"], settings)
    sizes = (described["num_heads"], described["head_size"], described["width"])
    keeps = isinstance(setting, Residual | Gate)
    setattr(owner, attribute, build(setting, *sizes, old if keeps else None))


def _read_record(source: Path) -> dict:
    path = source / RECORD
    if not path.is_file():
        raise DataError(
            f"{source} holds no {RECORD}; expected a folder written by save_pretrained after aggregate(), or by "
            "headwise.save. Load a model without aggregators as it was saved (from_pretrained)."
        )
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        version = written["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a record of headwise ({error}); save the model again.") from error
    if version != FORMAT:
        raise DataError(
            f"{path} has format {version}; expected {FORMAT}, so use the version of headwise that wrote it."
        )
    return written


def _get_setting(aggregator: Any) -> Setting:
    """Return the setting an aggregator was built from."""
    if isinstance(aggregator, ResidualAggregator):
        routed: Any = aggregator.aggregator
        return Residual(routed.setting)
    return aggregator.setting


def record(value: Any) -> Any:
    """Return a setting as JSON: {"setting": its class, field: value, ...}; tuples become lists.

    Raises:
        DataError: A field holds something that JSON cannot represent.

    Example:
        >>> record(EMRouting(iterations=2))["inverse_temperature"]
        [1.0, 3.0]
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {"setting": type(value).__name__, **{f.name: record(getattr(value, f.name)) for f in fields(value)}}
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
    name = value.get("setting")
    known = {cls.__name__: cls for cls in (*SETTINGS, *classes)}
    if name not in known:
        raise DataError(
            f"the folder holds the setting {name!r}; expected one of {', '.join(sorted(known))}. If you defined it, "
            "pass its class: load(settings=(...,))."
        )
    try:
        return known[name](**{key: restore(item, classes) for key, item in value.items() if key != "setting"})
    except (TypeError, ValueError) as error:
        raise DataError(f"the setting {name} cannot be built from {value}: {error}") from error
