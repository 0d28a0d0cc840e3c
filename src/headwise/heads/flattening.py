"""Engines that leave no matrix to read heads in: FSDP1 and DeepSpeed's ZeRO-3."""

from torch import Tensor, nn

# Engines that keep parameters as parts of flat vectors, where a process holds no rows nor columns of a head.
FSDP1 = (
    "is flattened by FSDP1 (FullyShardedDataParallel), which leaves no matrix to read heads in; shard the model with "
    "FSDP2 instead (torch.distributed.fsdp.fully_shard; in Accelerate fsdp_version: 2)"
)
ZERO3 = (
    "is partitioned by DeepSpeed's ZeRO-3, which leaves no matrix to read heads in; shard the model with FSDP2 instead "
    "(torch.distributed.fsdp.fully_shard)"
)


def find_flattening(owner: nn.Module, parameter: Tensor | None) -> str | None:
    """Return why a parameter is no longer a matrix, a clause that follows its name; None where it is one.

    >>> find_flattening(nn.Linear(2, 2), None) is None
    True
    """
    if parameter is not None and (hasattr(parameter, "ds_id") or hasattr(parameter, "ds_tensor")):
        return ZERO3
    # FSDP2 marks modules too, but leaves a matrix
    if getattr(owner, "_is_fsdp_managed_module", False) and (parameter is None or parameter.dim() < 2):
        return FSDP1
    return None
