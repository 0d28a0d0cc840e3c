"""Engines that leave no matrix to read heads in, recognised and refused by name: FSDP1 and DeepSpeed's ZeRO.

Both keep parameters as parts of flat vectors, so that a process holds no rows nor columns of a head but a run of
numbers. Nothing of them is imported.
"""

from __future__ import annotations

from torch import Tensor, nn

from headwise.errors import LayoutError, SettingError

FSDP1 = (
    "is flattened by FSDP1 (FullyShardedDataParallel), which leaves no matrix to read heads in; shard the model with "
    "FSDP2 instead (torch.distributed.fsdp.fully_shard; in Accelerate fsdp_version: 2)"
)
ZERO3 = (
    "is partitioned by DeepSpeed's ZeRO-3, which leaves no matrix to read heads in; shard the model with FSDP2 instead "
    "(torch.distributed.fsdp.fully_shard)"
)


def flattened(owner: nn.Module, parameter: Tensor | None) -> str | None:
    """Return what makes a parameter no matrix any more, a clause that follows its name; None where nothing does.

    >>> flattened(nn.Linear(2, 2), None) is None
    True
    """
    if parameter is not None and (hasattr(parameter, "ds_id") or hasattr(parameter, "ds_tensor")):
        return ZERO3
    # FSDP2 marks modules too, but leaves a matrix
    if getattr(owner, "_is_fsdp_managed_module", False) and (parameter is None or parameter.dim() != 2):
        return FSDP1
    return None


def require_readable(name: str, owner: nn.Module, parameter: Tensor) -> None:
    """Raise `LayoutError` where an engine has left of a parameter no matrix to read heads in.

    >>> layer = nn.Linear(2, 2)
    >>> require_readable("weight", layer, layer.weight)
    """
    reason = flattened(owner, parameter)
    if reason is not None:
        raise LayoutError(f"{name} {reason}.")


def refuse_flat_optimizer(optimizer: object) -> None:
    """Raise `SettingError` for DeepSpeed's engine and optimizers, and for what Accelerate wraps them in.

    >>> refuse_flat_optimizer(object())
    """
    for kind in type(optimizer).__mro__:
        if kind.__module__.partition(".")[0] == "deepspeed" or kind.__name__.startswith("DeepSpeed"):
            raise SettingError(
                f"optimizer is {type(optimizer).__name__} of DeepSpeed, which steps on parts of flat vectors in which "
                "no heads can be read; train with DistributedDataParallel or FSDP2 (torch.distributed.fsdp."
                "fully_shard) instead."
            )
