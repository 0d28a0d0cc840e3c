"""What a step asks of a device: how many launches, and whether the host waits for an answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# These copy a value to the host, or allocate by one: on a GPU the host waits, and a CUDA graph cannot hold them.
WAITING = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.item,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.bincount,
    # numbers of the host, as torch.tensor(list) has them
    aten.lift_fresh,
    aten.lift_fresh_copy,
}
# These only allocate.
SILENT = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.detach,
    aten._unsafe_view,
    aten.promote_types,
}


class Launches(TorchDispatchMode):
    """Counts what is launched, by name, and fails where the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in WAITING or _by_mask(packet, args) or _crosses(packet, args, kwargs or {}):
            raise AssertionError(f"{func} waits for the device")
        if not func.is_view and packet not in SILENT:
            self.counts[str(packet)] += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Counts the calls for which the host would wait for an accelerator, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in WAITING or _by_mask(packet, args) or _crosses(packet, args, kwargs or {}):
            self.counts[str(packet)] += 1
        return func(*args, **(kwargs or {}))


def _crosses(packet: Any, args: Any, kwargs: Any) -> bool:
    """Whether a tensor goes from one device to another."""
    given = [argument.device for argument in args if isinstance(argument, torch.Tensor) and argument.dim() > 0]
    asked = kwargs.get("device")
    kinds = {device.type for device in given} | ({asked.type} if asked is not None and given else set())
    return packet in (aten._to_copy, aten.copy_) and len(kinds) > 1


def _by_mask(packet: Any, args: Any) -> bool:
    """Whether the shape of what comes out depends on which entries of a mask are True."""
    indices = args[1] if packet in (aten.index, aten.index_put_) else ()
    return any(index is not None and index.dtype == torch.bool for index in indices)
