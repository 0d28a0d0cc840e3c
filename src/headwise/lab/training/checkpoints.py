"""Checkpoints sealed by digests of their files, and the weights of a run's last epochs, whose mean is tested."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file, save_model
from torch import nn

from headwise.errors import DataError
from headwise.lab.experiment.run_folder import write_json

MANIFEST = "manifest.json"


def seal_checkpoint(checkpoint: Path) -> None:
    """Write the digests of all files of a checkpoint into its manifest, before the checkpoint gets its name."""
    files = sorted(path for path in checkpoint.iterdir() if path.is_file() and path.name != MANIFEST)
    write_json(checkpoint / MANIFEST, {path.name: _digest(path) for path in files})


def verify_checkpoint(checkpoint: Path) -> None:
    """Make sure that a checkpoint holds what was written.

    Raises:
        DataError: A file is missing or has changed; the message names it and what to do.
    """
    manifest = checkpoint / MANIFEST
    try:
        digests = json.loads(manifest.read_text(encoding="utf-8"))
        expected = {str(name): str(digest) for name, digest in digests.items()}
    except (OSError, ValueError, AttributeError):
        raise DataError(_explain_corrupt(manifest, "it is missing or not readable")) from None
    for name, digest in expected.items():
        path = checkpoint / name
        if not path.is_file():
            raise DataError(_explain_corrupt(path, "it is missing"))
        if _digest(path) != digest:
            raise DataError(_explain_corrupt(path, "its content is not what was written"))


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]


def _explain_corrupt(path: Path, reason: str) -> str:
    return f"the checkpoint file {path} is corrupt ({reason}); delete {path.parent} to start that run again."


PREFIX = "epoch-"


def write_epoch_weights(model: nn.Module, folder: Path, epoch: int, most: int) -> None:
    """Write a model's weights as those of an epoch, whole or not at all, and drop those of `most` epochs before."""
    temporary = folder / f".{PREFIX}{epoch}.safetensors"
    save_model(model, str(temporary))
    temporary.replace(_find_weights(folder, epoch))
    _find_weights(folder, epoch - most).unlink(missing_ok=True)


def load_mean_weights(model: nn.Module, folder: Path) -> None:
    """Give a model the mean of the weights kept in a run's folder.

    Raises:
        DataError: No weights were kept.
    """
    files = sorted(folder.glob(f"{PREFIX}*.safetensors"))
    if not files:
        raise DataError(f"{folder} keeps no weights of single epochs; delete it to start that run again.")
    mean: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  safe_open is no mapping
                tensor = opened.get_tensor(name)
                share = tensor.double() / len(files) if tensor.is_floating_point() else tensor
                mean[name] = mean[name] + share if name in mean and tensor.is_floating_point() else share
                dtype = tensor.dtype
                if path == files[-1]:
                    mean[name] = mean[name].to(dtype)
    temporary = folder / f".{PREFIX}mean.safetensors"
    save_file(mean, str(temporary))
    load_model(model, str(temporary))
    temporary.unlink()


def delete_epoch_weights(folder: Path) -> None:
    """Remove the weights of single epochs: the run is finished."""
    for path in folder.glob(f"{PREFIX}*.safetensors"):
        path.unlink()


def _find_weights(folder: Path, epoch: int) -> Path:
    return folder / f"{PREFIX}{epoch}.safetensors"
