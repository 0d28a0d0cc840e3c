"""Saved folders in transformers: `AutoModel.from_pretrained(folder)`, pipelines, and what uses these, such as peft.

`import headwise` registers the model type of these folders as soon as transformers has imported its Auto classes. What
AutoConfig reads from such a folder is the configuration of the stock model, in a class of its own by which the Auto
classes know that `headwise.load` opens the folder; the model that they return has the stock configuration again.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from headwise.errors import DataError, SettingError

MODEL_TYPE = "headwise"
# What `from_pretrained` takes of what AutoConfig leaves, and what changes nothing here.
OPTIONS = ("attn_implementation", "device_map", "dtype", "torch_dtype", "output_loading_info", "trust_remote_code")
HUB = ("cache_dir", "force_download", "local_files_only", "revision", "token")
HARMLESS = ("adapter_kwargs", "code_revision", "low_cpu_mem_usage", "proxies", "use_safetensors", "weights_only")


def register() -> None:
    """Have AutoConfig and the Auto classes of models open saved folders; a second time changes nothing.

    Example:
        >>> import headwise, transformers
        >>> register()
        >>> transformers.AutoConfig.for_model("headwise").model_type
        'headwise'
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING.register(MODEL_TYPE, HeadwiseConfig, exist_ok=True)


class HeadwiseConfig(PreTrainedConfig):
    """What the model type "headwise" stands for; read from a folder, it is the configuration of the stock model."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration of the stock model, with changes as of any other.

        Raises:
            DataError: The folder names no class of transformers, or no configuration.
            SettingError: The folder holds a model that is not from transformers.
        """
        from headwise.routing.saved import find_class, read_stock
        from headwise.stock_folders import Stored, require_countable

        path = Path(kwargs.get("name_or_path") or ".", "config.json")
        stock = read_stock(path, config_dict)
        if stock is None:
            # a ValueError, which those who look for a tokenizer pass over
            raise SettingError(f"{path} is of a model that is not from transformers; use headwise.load(folder, model).")
        require_countable(path, stock["config"], Stored())
        kind = _mark(find_class(path, stock["class"]).config_class)
        return kind.from_dict(copy.deepcopy(stock["config"]), **kwargs)


@cache
def _mark(kind: type[PreTrainedConfig]) -> Any:
    """Return a subclass of a class of configurations, for which the Auto classes have openers."""
    from transformers.models.auto import modeling_auto

    # of the same name, by which transformers finds tokenizers and processors
    marked: Any = type(kind.__name__, (kind,), {"__module__": __name__})
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and kind in mapping:
            opener = type(auto.__name__, (Opener,), {"auto": auto, "kind": kind})
            mapping.register(marked, opener, exist_ok=True)
    return marked


class Opener:
    """Stands in an Auto class for the models of saved folders.

    Attributes:
        auto: The Auto class.
        kind: The class of the configuration of the models.
    """

    auto: ClassVar[Any]
    kind: ClassVar[type[PreTrainedConfig]]

    @classmethod
    def from_pretrained(cls, place: str | os.PathLike[str], *arguments: Any, config: Any, **options: Any) -> Any:
        """Return the model of a saved folder, or of a repository of the Hub that holds one.

        AutoModel returns the model without its head, and the other Auto classes one of their own.

        Raises:
            DataError: As `headwise.load`; or the saved model is none of the Auto class.
            SettingError: An option was given that saved folders do not have.
        """
        import torch

        from headwise.routing.save import load_saved, read_settings
        from headwise.routing.saved import read_saved

        hub = {name: options.pop(name) for name in HUB if name in options}
        given = {name: options.pop(name, None) for name in OPTIONS}
        known = [name for name in options if name in HARMLESS or name.startswith("_")]
        refused = [*arguments, *(name for name in options.keys() - known if options[name] is not None)]
        if refused:
            raise SettingError(
                f"{place} was saved by headwise, and from_pretrained was given {refused}; expected "
                f"{', '.join(OPTIONS)}, or attributes of the configuration."
            )
        saved = read_saved(_find_folder(place, hub))
        stock: dict[str, Any] = {**(saved.stock or {}), "config": read_settings(config)}
        attention = given["attn_implementation"] or config._attn_implementation
        if attention is not None:
            stock["attention"] = (
                attention if isinstance(attention, dict) else dict.fromkeys(stock["attention"], attention)
            )
        saved = dataclasses.replace(saved, stock=stock)
        model = cls._choose(place, load_saved(saved, trusted=bool(given["trust_remote_code"])))
        model.name_or_path = model.config.name_or_path = str(place)
        dtype = given["dtype"] or given["torch_dtype"]
        if dtype not in (None, "auto"):
            model = model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        if given["device_map"] is not None:
            model = model.to(_find_device(given["device_map"]))
        said = {name: set() for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")}
        return (model, said) if given["output_loading_info"] else model

    @classmethod
    def _choose(cls, place: str | os.PathLike[str], model: Any) -> Any:
        expected = cls.auto._model_mapping[cls.kind]
        expected = expected if isinstance(expected, tuple) else (expected,)
        if isinstance(model, expected):
            return model
        if cls.__name__ == "AutoModel":
            return model.base_model
        raise DataError(
            f"{place} holds a {type(model).__name__}, and {cls.__name__} opens a {expected[0].__name__}, whose head "
            f"would get new weights; load it with headwise.load({str(place)!r}), or save a {expected[0].__name__}."
        )

    @classmethod
    def _from_config(cls, *_: Any, **__: Any) -> Any:
        """Refuse to build a model with new weights.

        Raises:
            SettingError: Always: the configuration does not say what headwise changed in the model.
        """
        raise SettingError(
            "from_config was given the configuration of a folder that headwise saved, which does not say what was "
            f"changed in the model; expected one of a stock model: {cls.kind.__name__}.from_dict(config.to_dict())."
        )


def _find_folder(place: str | os.PathLike[str], hub: Mapping[str, Any]) -> Path:
    if Path(place).is_dir():
        return Path(place)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(place), **hub))


def _find_device(given: Any) -> Any:
    """Return the one device of a `device_map`."""
    import torch

    place = given.get("") if isinstance(given, dict) and len(given) == 1 else given
    if place == "auto":
        return torch.accelerator.current_accelerator() or "cpu"
    if not isinstance(place, str | int | torch.device) or place in ("balanced", "balanced_low_0", "sequential"):
        raise SettingError(f"device_map is {given!r}; expected one device, since headwise loads a model whole.")
    return place
