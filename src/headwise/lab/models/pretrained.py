"""Whether a model that transformers loaded is the one that its folder holds.

Owns the refusal of a backbone that was filled with drawn numbers: transformers only remarks on it, and what is trained
or looked at then is another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.errors import DataError

# A pooler that the head in use does not read lacks in many folders.
UNREAD = "pooler"


def require_whole(
    folder: Path, model: Any, said: Mapping[str, Any], *, backbone: str = "", unread: tuple[str, ...] = ()
) -> None:
    """Refuse a model whose backbone lacks parameters, or holds some of another shape or that are no numbers.

    Args:
        folder: Where it was loaded from.
        model: The model.
        said: What `from_pretrained(output_loading_info=True)` returned beside it.
        backbone: What the names of the backbone's parameters begin with.
        unread: What names of parameters begin with that are not looked at.

    Raises:
        DataError: As above; the message names the first parameter.
    """
    remedy = "the folder holds a part of that model, or other names; save the whole model with save_pretrained()."
    for key, fault in (("missing_keys", "has no"), ("mismatched_keys", "has another shape of")):
        # of a shape that differs transformers tells both
        names = sorted(one if isinstance(one, str) else one[0] for one in said[key])
        read = (name for name in names if name.startswith(backbone) and not name.startswith(unread))
        found = next((name for name in read if UNREAD not in name and not _computed(model, name)), None)
        if found is not None:
            raise DataError(f"{folder} {fault} {found!r}, which its config.json asks for: {remedy}")
    wrong = next((name for name, parameter in model.named_parameters() if not _finite(parameter)), None)
    if wrong is not None:
        raise DataError(f"{folder}: {wrong!r} holds numbers that are not finite; save a model that is.")


def _computed(model: Any, name: str) -> bool:
    """Whether a parameter follows from its place: Marian keeps no sinusoidal positions, and makes them itself."""
    return "Sinusoidal" in type(model.get_submodule(name.rpartition(".")[0])).__name__


def _finite(parameter: Tensor) -> bool:
    # floating numbers of one byte cannot be asked
    return bool((parameter.float() if parameter.dtype.itemsize == 1 else parameter).isfinite().all())


def require_vocabulary(folder: Path, tokenizer: Any) -> None:
    """Refuse a tokenizer without words: transformers makes one up where a folder holds none.

    Raises:
        DataError: As above.
    """
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise DataError(
            f"{folder} holds no tokenizer with a vocabulary; save it beside the model, "
            f"tokenizer.save_pretrained({str(folder)!r})."
        )
