"""Checks of models and tokenizers that transformers loaded from a folder.

Where a folder lacks parameters, transformers draws them at random and only warns, and another model is trained.
"""

import atexit
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoTokenizer

from headwise.errors import DataError, HeadwiseError
from headwise.gating.attach import NAME as GATES
from headwise.nn.difference import CHILD as DIFFERENCE
from headwise.nn.mixing import CHILD as MIXER
from headwise.stock_folders import TooLarge, limit_size, open_within
from headwise.texts.tokenizer_bounds import require_bounded, require_small_numbers

# Many folders lack the pooler, which the head in use may not read.
UNREAD = "pooler"
# Modules of methods, which transformers passes over in a folder that holds them.
ADDED = (GATES, MIXER, DIFFERENCE)


def holds_added(network: nn.Module) -> bool:
    """Return whether a model has gates, talking heads or differential attention, which its folder would lose."""
    return any({*ADDED} & {*module._modules} for module in network.modules())


def require_whole(
    folder: Path, model: Any, said: Mapping[str, Any], *, backbone: str = "", unread: tuple[str, ...] = ()
) -> None:
    """Refuse a backbone with missing, mismatched or non-finite parameters, and a model whose gates were passed over.

    `said` is the loading info that `from_pretrained(output_loading_info=True)` returned with the model, `backbone` the
    prefix of the names of the backbone's parameters, and `unread` prefixes of names that are not checked.

    Raises:
        DataError: As above; the message names the first parameter.
    """
    lost = next((name for name in said.get("unexpected_keys", ()) if {*ADDED} & {*name.split(".")}), None)
    if lost is not None:
        raise DataError(
            f"{folder} holds {lost!r}, which transformers does not load: its model would be another than the one that "
            "was trained; go on from a model without gates, talking heads or differential attention."
        )

    def is_computed(name: str) -> bool:
        # Marian keeps no sinusoidal positions, and makes them itself
        return "Sinusoidal" in type(model.get_submodule(name.rpartition(".")[0])).__name__

    def is_finite(parameter: Tensor) -> bool:
        # isfinite does not support one-byte floats
        return bool((parameter.float() if parameter.dtype.itemsize == 1 else parameter).isfinite().all())

    asked = type(model).__name__
    remedy = f"the folder holds another model, a part of this one, or other names; save a whole {asked} there."
    for key, fault in (("missing_keys", "has no"), ("mismatched_keys", "has another shape of")):
        # of a shape that differs transformers tells both
        names = sorted(one if isinstance(one, str) else one[0] for one in said[key])
        read = (name for name in names if name.startswith(backbone) and not name.startswith(unread))
        found = next((name for name in read if UNREAD not in name and not is_computed(name)), None)
        if found is not None:
            raise DataError(f"{folder} {fault} {found!r}, which {asked} has: {remedy}")
    wrong = next((name for name, parameter in model.named_parameters() if not is_finite(parameter)), None)
    if wrong is not None:
        raise DataError(f"{folder}: {wrong!r} holds numbers that are not finite; save a model with finite ones.")


@contextmanager
def quietly() -> Iterator[None]:
    """Turn off the warnings and progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@cache
def convert_gguf(path: Path) -> Path:
    """Write the model and tokenizer of a GGUF file, in float32, into a folder that goes when the process ends.

    Raises:
        DataError: The package gguf is missing, or transformers cannot read a causal language model from the file.
    """
    from transformers import AutoModelForCausalLM

    if find_spec("gguf") is None:
        raise DataError(f"{path} is read by the package gguf, which is not installed; pip install gguf.")
    from gguf import GGUFReader

    options: Any = {"gguf_file": path.name, "local_files_only": True}
    try:
        tensors = len(GGUFReader(path).tensors)
        with quietly(), limit_size(tensors, path.stat().st_size, packed=True):
            model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **options)
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path.parent), **options)
    except (Exception, TooLarge) as error:
        # whatever the readers raise for a file that is damaged, or of an architecture that they do not know
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{path} cannot be read as a GGUF file with a causal language model: {reason}") from error
    # its weights are whole now, and are saved as such
    del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    made = mkdtemp(prefix="headwise-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    place = Path(made, path.stem)
    with quietly():
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    return place


MODEL = "model"


def open_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer in a model's folder; code that the folder names runs if `trust_remote_code`.

    Raises:
        DataError: There is none that transformers can load.
    """
    options: Any = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    require_small_numbers(folder)
    try:
        with open_within(folder, trusted=trust_remote_code):
            tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), **options)
    except HeadwiseError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder} holds no tokenizer that transformers can load ({reason}).") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        require_bounded(folder, backend)
    # transformers makes up an empty one where a folder has none
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise DataError(
            f"{folder} holds no tokenizer with a vocabulary; save it with the model, "
            f"tokenizer.save_pretrained({str(folder)!r})."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer
