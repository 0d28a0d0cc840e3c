"""Models built from sizes that a file names, which may be anything: no larger than the tensors that belong to them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

# A new model may have float32 numbers for bytes, projections that are replaced later, and buffers that are not kept.
GROWTH, SPARE_BYTES, SPARE_TENSORS = 8, 64 << 20, 64

Model = TypeVar("Model", bound=nn.Module)


class TooLarge(BaseException):
    """A model became far larger than its tensors; no constructor catches it."""


def build_within(make: Callable[[], Model], *, tensors: int, size: int) -> Model:
    """Return a new model, unless it is far larger than its tensors.

    Args:
        make: Makes the model.
        tensors: Number of its tensors.
        size: Their bytes.

    Raises:
        TooLarge: It would have more than twice as many tensors, or more than eight times the bytes, and some.
    """
    most = 2 * tensors + SPARE_TENSORS, GROWTH * size + SPARE_BYTES
    # first without memory: a size may be anything. Some models need memory to be built at all.
    with _limit_size(*most), torch.device("meta"), suppress(Exception):
        make()
    with _limit_size(*most):
        return make()


@contextmanager
def _limit_size(most_tensors: int, most_bytes: int) -> Iterator[None]:
    """Stop building a model in the block when it has more parameters and buffers."""
    counted, total = 0, 0

    def count(_module: nn.Module, _name: str, tensor: Tensor | None) -> None:
        nonlocal counted, total
        if tensor is not None:
            counted, total = counted + 1, total + tensor.numel() * tensor.element_size()
        if counted > most_tensors or total > most_bytes:
            raise TooLarge

    hooks = [register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
