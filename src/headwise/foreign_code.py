"""Folders of transformers may name code: Python files, kernels and adapters. None of it runs unless that was asked for.

`config.json` names Python files as "auto_map", and kernels, which transformers fetches from the Hub and runs, as
"attn_implementation"; `adapter_config.json` names modules to import.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.input_files import is_file, read_whole
from headwise.strict_json import parse_json

CONFIG, ADAPTER = "config.json", "adapter_config.json"
FLAG = "if you trust it, give --trust-remote-code, or trust_remote_code=True in Python"
# What transformers and torch have themselves, by the key that names it; a key of a private attribute begins with _.
LOCAL: Mapping[str, frozenset[str]] = {
    "attn_implementation": frozenset({"eager", "sdpa", "flex_attention", "paged|eager"}),
    "experts_implementation": frozenset({"eager", "batched_mm", "grouped_mm"}),
}
KERNELS = ("use_kernels", "kernel_config")


@contextmanager
def refuse_foreign_code(folder: Path, *, trusted: bool) -> Iterator[None]:
    """Let transformers load a folder in the block, without asking whether to run code that the folder names.

    Args:
        folder: The folder.
        trusted: Whether that code may run; the block then does nothing.

    Raises:
        DataError: The folder cannot be loaded without running code that it names.
    """
    if trusted:
        yield
        return
    if is_file(folder / ADAPTER):
        raise DataError(
            f"{folder / ADAPTER} names a base model and modules that transformers would import; merge the adapter into "
            f"its model (merge_and_unload) and save that, or {FLAG}."
        )
    if is_file(folder / CONFIG):
        require_local_kernels(folder / CONFIG, read_config(folder / CONFIG))
    from transformers import dynamic_module_utils

    # with a time of 0 it refuses, where some of its classes do not pass trust_remote_code on to those they load
    before, dynamic_module_utils.TIME_OUT_REMOTE_CODE = dynamic_module_utils.TIME_OUT_REMOTE_CODE, 0
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise DataError(
            f"{folder} holds Python code of its own (auto_map), without which transformers cannot load it, and which "
            f"was not run; {FLAG}."
        ) from None
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the content of a `config.json`.

    Raises:
        DataError: It cannot be read, or is no JSON object.
    """
    try:
        config = parse_json(read_whole(path))
    except ValueError as error:
        raise DataError(f"{path} is not readable as JSON ({error}); save the model again.") from None
    if not isinstance(config, dict):
        raise DataError(f"{path} holds a {type(config).__name__}; expected the configuration of a model.")
    return config


def require_local_kernels(path: Path, config: Any) -> None:
    """Refuse a configuration that names a kernel, at any depth.

    Args:
        path: The file that holds it, for the message.
        config: JSON data.

    Raises:
        DataError: It names a kernel that transformers would fetch from the Hub.
    """
    waiting = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                _require_local(path, key, item)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _require_local(path: Path, key: str, value: Any) -> None:
    allowed = LOCAL.get(key.removeprefix("_").removesuffix("_internal"))
    if allowed is not None:
        named = value.values() if isinstance(value, dict) else (value,)
        strange = next((name for name in named if not is_local(name, allowed)), None)
    else:
        strange = value if key in KERNELS and value else None
    if strange is not None:
        raise DataError(
            f"{path} has {key} {str(strange)[:60]!r}, code that transformers would fetch from the Hub and run; delete "
            f"that line, or {FLAG}."
        )


def is_local(name: Any, allowed: frozenset[str]) -> bool:
    """Return whether an implementation needs no code but that of installed packages."""
    if not isinstance(name, str):
        return name is None
    # without flash_attn, transformers takes its kernel from the Hub
    flash = name.startswith("flash_attention") and "/" not in name
    return name in allowed or (flash and find_spec("flash_attn") is not None)
