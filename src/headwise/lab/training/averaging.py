"""The mean of the weights of a run's last epochs, which is what such a run is tested with.

Owns the files that keep each epoch's weights until the mean is made. Must not know the model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file, save_model
from torch import nn

from headwise.errors import DataError

PREFIX = "epoch-"


def keep_epoch_weights(model: nn.Module, folder: Path, epoch: int, most: int) -> None:
    """Write a model's weights as those of an epoch, whole or not at all, and drop those of `most` epochs before."""
    temporary = folder / f".{PREFIX}{epoch}.safetensors"
    save_model(model, str(temporary))
    temporary.replace(_path(folder, epoch))
    _path(folder, epoch - most).unlink(missing_ok=True)


def load_averaged(model: nn.Module, folder: Path) -> None:
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


def drop_epoch_weights(folder: Path) -> None:
    """Remove the weights of single epochs: the run is finished."""
    for path in folder.glob(f"{PREFIX}*.safetensors"):
        path.unlink()


def _path(folder: Path, epoch: int) -> Path:
    return folder / f"{PREFIX}{epoch}.safetensors"
