"""Checkpoints sealed by digests of their files, and the weights of a run's last epochs, whose mean is tested."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file, save_model
from torch import nn

from headwise.atomic import digest_file, new_file, require_files_unchanged
from headwise.errors import DataError
from headwise_lab.experiment.run_folder import EPOCH, read_json, write_json

MANIFEST = "manifest.json"


def seal_checkpoint(checkpoint: Path) -> None:
    """Write the digests of all files of a checkpoint into its manifest, before the checkpoint gets its name."""
    write_json(checkpoint / MANIFEST, {name: digest_file(checkpoint / name) for name in _list_files(checkpoint)})


def verify_checkpoint(checkpoint: Path) -> None:
    """Make sure that a checkpoint holds what was written, and nothing else."""
    manifest, remedy = checkpoint / MANIFEST, f"delete {checkpoint} to start that run again."
    try:
        digests = read_json(manifest)
        if not isinstance(digests, dict):
            raise DataError(f"{manifest} holds no digests")
    except DataError as error:
        raise DataError(f"the checkpoint is corrupt ({str(error).partition(';')[0]}); {remedy}") from None
    require_files_unchanged(manifest, digests, {*digests, *_list_files(checkpoint)}, remedy=remedy)


def _list_files(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.iterdir() if path.name != MANIFEST)


def write_epoch_weights(model: nn.Module, folder: Path, epoch: int, most: int) -> dict[str, str]:
    """Write a model's weights after an epoch, drop the weights of `most` epochs before; return the digest by name."""
    place = folder / f"{EPOCH}{epoch}.safetensors"
    with new_file(place) as temporary:
        save_model(model, str(temporary))
    (folder / f"{EPOCH}{epoch - most}.safetensors").unlink(missing_ok=True)
    return {place.name: digest_file(place)}


def load_mean_weights(model: nn.Module, folder: Path, digests: Mapping[str, str]) -> None:
    """Give a model the mean of the weights kept in a run's folder."""
    remedy = f"delete {folder} to start that run again."
    files = sorted(folder.glob(f"{EPOCH}*.safetensors"))
    if not files:
        raise DataError(f"{folder} keeps no weights of single epochs; {remedy}")
    known = [path.name for path in files if path.name in digests]
    require_files_unchanged(folder / EPOCH, digests, known, remedy=remedy)
    mean: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  safe_open is no mapping
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point():
                    share = tensor.double() / len(files)
                    total = mean[name] + share if name in mean else share
                    tensor = total.to(tensor.dtype) if path == files[-1] else total
                mean[name] = tensor
    temporary = folder / f".{EPOCH}mean.safetensors"
    save_file(mean, str(temporary))
    load_model(model, str(temporary))
    temporary.unlink()
