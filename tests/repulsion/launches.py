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
        if _waits(packet, args, kwargs or {}):
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
        if _waits(func.overloadpacket, args, kwargs or {}):
            self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def _waits(packet: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits: it reads a value, a tensor goes to another device, or a shape depends on a mask."""
    given = [argument.device for argument in args if isinstance(argument, torch.Tensor) and argument.dim() > 0]
    asked = kwargs.get("device")
    kinds = {device.type for device in given} | ({asked.type} if asked is not None and given else set())
    crosses = packet in (aten._to_copy, aten.copy_) and len(kinds) > 1
    indices = args[1] if packet in (aten.index, aten.index_put_) else ()
    return packet in WAITING or crosses or any(i is not None and i.dtype == torch.bool for i in indices)
