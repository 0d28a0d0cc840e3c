"""Save and load models whose output projections were replaced by aggregators, or whose heads were removed.

A folder holds the stock model (`config.json`), what was changed in it (`headwise.json`: a list of surgeries, and the
SHA-256 of each file) and all tensors as safetensors. Loading builds the stock model, does the surgeries again and fills
in the tensors. The model type is "headwise" and the files of tensors have names of our own, so that transformers
without headwise refuses the folder: it would load every weight but those of the aggregators, or draw new weights where
others were cut. A folder that is new appears when it is complete; into one that holds other files, ours are moved when
complete, `headwise.json` last. Settings are stored as JSON with the names of their classes; no code is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.atomic import SEAL, name_write_errors, new_folder, seal
from headwise.errors import DataError, HeadwiseError, SettingError
from headwise.heads.adapters import is_peft_model
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
    FORMAT,
    SIZES,
    WEIGHTS,
    Saved,
    collect_tensors,
    count_stored,
    load_tensors,
    parse_size,
    read_saved,
    read_tensors,
    rebuild,
    write_tensors,
)
from headwise.settings import from_json, to_json
from headwise.stock_folders import CONFIG, RECORD, REMEDY, TooLarge, build_within

CLASSES = (Chunks, DistinctCapsules, EMRouting, Gate, PerHead, Residual, SharedTrunk, SimpleRouting, Trunk)
SETTINGS: Mapping[str, type] = {cls.__name__: cls for cls in CLASSES}
STOCK_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "tf_model.h5", "flax_model.msgpack")


def record(value: Any) -> Any:
    """Return a setting as JSON: {"setting": its class, "fields": {name: value}}; tuples become lists.

    Raises:
        DataError: A field holds something that JSON does not have, or the class has the name of one of headwise's.

    Example:
        >>> record(Residual(SimpleRouting(iterations=4)))["fields"]["routing"]["fields"]["iterations"]
        4
    """
    return to_json(value, _pack, _require_plain)


def _pack(setting: Any, held: dict[str, Any]) -> dict[str, Any]:
    name = type(setting).__name__
    if SETTINGS.get(name, type(setting)) is not type(setting):
        raise DataError(f"the setting {name} is not headwise's {name}, as which it would be loaded; rename it.")
    # what a class computes itself it will compute again
    return {"setting": name, "fields": {field.name: held[field.name] for field in fields(setting) if field.init}}


def _require_plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise DataError(f"a setting holds a {type(value).__name__}; expected numbers, strings, tuples or settings.")


def restore(value: Any, classes: Sequence[type] = ()) -> Any:
    """Return the setting that `record` wrote; `classes` of the user may appear in it.

    Raises:
        DataError: A class is unknown, or does not have those fields.

    Example:
        >>> restore(record(Residual(SimpleRouting(iterations=4)))).routing.iterations
        4
    """
    known = {**{cls.__name__: cls for cls in classes}, **SETTINGS}

    def unpack(written: Mapping[str, Any]) -> tuple[type, Mapping[str, Any]]:
        name = str(written.get("setting"))
        if name not in known:
            raise DataError(
                f"the folder holds the setting {name!r}; expected one of {', '.join(sorted(known))}. If you defined "
                "it, pass its class: load(settings=(...,))."
            )
        return known[name], dict(written.get("fields") or {})

    return from_json(value, unpack)


def find_aggregators(model: nn.Module) -> dict[str, Aggregator]:
    """Return the aggregators of a model by module name, without those inside a `ResidualAggregator`."""
    inner = {m.aggregator for m in model.modules() if isinstance(m, ResidualAggregator)}
    return {
        name: module for name, module in model.named_modules() if isinstance(module, Aggregator) and module not in inner
    }


def is_changed(model: nn.Module) -> bool:
    """Return whether a model has aggregators, or sizes that its configuration does not give."""
    return bool(find_aggregators(model) or read_sizes(model))


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a model with aggregators or fewer heads to a folder for `load`; libraries without headwise refuse it.

    All parameters and buffers are written in their dtype as safetensors, tied ones once. Files saved there before are
    replaced when the new ones are complete. Once headwise is imported, the Auto classes of transformers open it too.

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
    target, limit = Path(folder), parse_size(max_shard_size)
    model = unwrap_compiled(model)
    with without_wrappers(model):
        name, stock = type(model).__name__, _describe_stock(model)
        if not is_changed(model):
            raise DataError(
                f"{name} holds no aggregator, and no sizes that its configuration does not give; save it "
                "as you would without headwise (save_pretrained, or torch.save of its state_dict)."
            )
        if any(isinstance(module, HeadMixer) for module in model.modules()):
            raise DataError(f"{name} has talking heads, which load() does not make; save its state_dict.")
        if stock and any(isinstance(module, HeadDifference) for module in model.modules()):
            raise DataError(f"{name} has differential attention, which load() does not make; save its state_dict.")
        _refuse_stock_weights(target)
        given = None if state_dict is None else {strip_wrappers(name): tensor for name, tensor in state_dict.items()}
        tensors, tied = collect_tensors(model, given)
        written = {"format": FORMAT, "surgeries": list(_list_surgeries(model)), "tied": tied}
        with new_folder(target, replaced=_Replaced(), wait=True) as temporary, name_write_errors(target):
            files = write_tensors(tensors, temporary, limit)
            text = encode_json({"model_type": "headwise", **stock}, indent=2)
            (temporary / CONFIG).write_text(text, encoding="utf-8")
            sealed = seal({**written, "weights": files[0]}, temporary, [*files, CONFIG])
            (temporary / RECORD).write_text(encode_json(sealed, indent=2), encoding="utf-8")


def _list_surgeries(model: nn.Module) -> Iterator[dict[str, Any]]:
    for name, sizes in read_sizes(model).items():
        yield {"do": "resize", "module": name, "sizes": sizes}
    for name, aggregator in find_aggregators(model).items():
        yield {"do": "aggregate", "module": name, **_describe(aggregator)}
    for name, module in model.named_modules():
        if type(module) is MultiheadAttention:
            yield {"do": "adopt", "module": name}


def _describe(aggregator: Aggregator) -> dict[str, Any]:
    routed: Any = aggregator.aggregator if isinstance(aggregator, ResidualAggregator) else aggregator
    setting: Setting = Residual(routed.setting) if routed is not aggregator else routed.setting
    sized = routed if isinstance(routed, GatedProjection) else routed.votes
    return {"setting": record(setting), **{name: getattr(sized, name) for name in SIZES}}


def _describe_stock(model: nn.Module) -> dict[str, Any]:
    """Return what rebuilds the model without its weights, as a config.json; empty unless it is of transformers."""
    cls, config = type(model), getattr(model, "config", None)
    if not cls.__module__.startswith("transformers.") or config is None:
        return {}
    generation = getattr(model, "generation_config", None)
    names = {"": config, **{name: getattr(config, name) for name in config.sub_configs}}
    return {
        "architectures": [cls.__name__],
        "class": f"{cls.__module__}:{cls.__qualname__}",
        # at this depth classes of configurations of transformers find their own
        "config": read_settings(config),
        "attention": {name: part._attn_implementation for name, part in names.items() if part is not None},
        "generation": None if generation is None else read_settings(generation),
    }


def read_settings(config: Any) -> Any:
    """Return a configuration as JSON data.

    Raises:
        DataError: It holds something else.
    """
    try:
        return parse_json(config.to_json_string(use_diff=False))
    except ValueError as error:
        raise DataError(f"{type(config).__name__} cannot be saved as JSON ({error}); set another value.") from None


class _Replaced:
    """The names of what `save` writes, and of the seal of a folder that it changes."""

    def __contains__(self, name: object) -> bool:
        return name in (CONFIG, RECORD, SEAL) or WEIGHTS.fullmatch(str(name)) is not None


def _refuse_stock_weights(folder: Path) -> None:
    found = sorted(path.name for pattern in STOCK_WEIGHTS for path in folder.glob(pattern))
    if found:
        raise DataError(
            f"{folder} holds {found[0]}, the weights of a model that headwise did not change, which transformers would "
            "load; use another folder for the model with aggregators or fewer heads."
        )


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
    return load_saved(read_saved(Path(folder)), model, settings=settings, trusted=trust_remote_code)


def load_saved(
    saved: Saved, model: nn.Module | None = None, *, settings: Sequence[type] = (), trusted: bool = False
) -> nn.Module:
    """Return the model of a folder that was read; see `load`."""
    _refuse_stock_weights(saved.folder)
    if saved.stock is None and model is None:
        raise DataError(
            f"{saved.folder} holds a model whose class is not from transformers; build one like it, with all its heads "
            "and without aggregators, and pass it: load(folder, model)."
        )
    tensors = read_tensors(saved)
    # initial weights, soon replaced, must not advance the caller's random generator
    with torch.random.fork_rng(devices=[]):
        if model is None:
            model = rebuild(saved, tensors, trusted=trusted)
        inner = unwrap_compiled(model)
        with without_wrappers(inner):
            _replay(saved, inner, tensors, settings)
    return model.eval()


def _replay(saved: Saved, model: nn.Module, tensors: Mapping[str, Tensor], settings: Sequence[type]) -> None:
    """Do the surgeries on a model and load the tensors, or leave it as it was."""
    adopted = [_find_module(saved, model, name) for name in saved.surgeries["adopt"]]
    for name, module in zip(saved.surgeries["adopt"], adopted, strict=True):
        if not isinstance(module, MultiheadAttention) and type(module) is not nn.MultiheadAttention:
            raise DataError(
                f"{saved.path} names {name[:60]!r} as an attention of torch, and it is a {type(module).__name__}; pass "
                "a model of the same structure."
            )
    with ExitStack() as undo:
        for name, described in saved.surgeries["resize"].items():
            # an aggregator keeps the output projection under a name of its own, which there is not yet
            place = next((place for place in saved.surgeries["aggregate"] if name.startswith(f"{place}.")), None)
            module = _find_module(saved, model, name if place is None else place)
            if isinstance(module, Aggregator):
                module = _find_module(saved, model, name)
            _resize(saved, module, name, described["sizes"], tensors, undo)
        placed = []
        for name, described in saved.surgeries["aggregate"].items():
            parent, _, attribute = name.rpartition(".")
            owner, old = _find_module(saved, model, parent), _find_module(saved, model, name)
            if not isinstance(old, Aggregator):
                placed.append((owner, attribute, old, _build(saved, name, old, tensors, settings)))
            elif (own := _describe(old)) != described:
                raise DataError(
                    f"{name} is a {type(old).__name__} already, with {own}; the saved one has {described}. Pass load() "
                    "a model without aggregators, or with the saved ones."
                )
        for owner, attribute, old, new in placed:
            undo.callback(setattr, owner, attribute, old)
            setattr(owner, attribute, new)
        load_tensors(model, saved, tensors)
        undo.pop_all()
    # it cannot be undone, and does not fail
    for attention in adopted:
        adopt(model, attention)
    set_saving(model)


def _find_module(saved: Saved, model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise DataError(
            f"the model has no module {name[:60]!r}, which {saved.path} names; pass a model of the same structure."
        ) from None


def _resize(
    saved: Saved, module: nn.Module, name: str, sizes: Mapping[str, int], tensors: Mapping[str, Tensor], undo: ExitStack
) -> None:
    """Give a module the saved sizes, and its own parameters and buffers the saved shapes, without values yet."""
    wrong = [key for key in sizes if type(vars(module).get(key, 1 if key == GROUPS else None)) is not int]
    if wrong:
        raise DataError(
            f"{saved.path}: {name[:60]}.{wrong[0][:60]} is no number of heads or features of a "
            f"{type(module).__name__}; {REMEDY}"
        )
    undo.callback(resize(module, sizes))
    for attribute, own in (*module._parameters.items(), *module._buffers.items()):
        path = f"{name}.{attribute}" if name else attribute
        stored = tensors.get(saved.tied.get(path, path))
        if own is None or stored is None or stored.shape == own.shape:
            continue
        if stored.dim() != own.dim() or any(map(int.__gt__, stored.shape, own.shape)):
            raise DataError(
                f"{path} has shape {tuple(stored.shape)} in {saved.folder} and {tuple(own.shape)} in the "
                f"model, which has fewer; {REMEDY}"
            )
        undo.callback(setattr, own, "grad", own.grad)
        undo.callback(set_data, own, own.data)
        own.grad = None
        set_data(own, own.data.new_empty(stored.shape))


def _build(
    saved: Saved, name: str, old: nn.Module, tensors: Mapping[str, Tensor], settings: Sequence[type]
) -> Aggregator:
    """Return an aggregator no larger than the tensors of the folder."""
    described, stored = saved.surgeries["aggregate"][name], count_stored(saved, tensors)
    heads, size, width = (described[name] for name in SIZES)
    try:
        setting = restore(described["setting"], settings)
        kept = old if isinstance(setting, Residual | Gate) else None
        return build_within(lambda: build(setting, heads, size, width, kept), tensors=stored.tensors, size=stored.size)
    except (Exception, TooLarge) as error:
        # a setting of the user's own may raise anything
        reason = str(error) if isinstance(error, HeadwiseError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{saved.path}: the aggregator {name[:60]} cannot be built ({reason[:200]}); {REMEDY}"
        ) from error


def set_saving(model: nn.Module) -> None:
    """Have `save_pretrained` of each changed model of transformers in a module write a folder for `load`.

    The original method would write a folder that loads without the aggregators or with new weights in the place of
    those that were cut, with only a warning.
    """
    for module in model.modules():
        stock = callable(getattr(type(module), "save_pretrained", None)) and not is_peft_model(module)
        if stock and is_changed(module):
            vars(module)["save_pretrained"] = SavePretrained(module)


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
        if not is_changed(self.model):
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
