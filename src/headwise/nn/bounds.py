"""Models built from sizes that a file names, which may be anything: no larger than the tensors that belong to them."""

import threading
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
# Of weights that are stored with as little as two bits for each.
PACKED_GROWTH = 32

Model = TypeVar("Model", bound=nn.Module)


class TooLarge(BaseException):
    """A model became far larger than its tensors; no constructor catches it.

    Attributes:
        shape: That of the tensor with which it did.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(f"a tensor of the shape {shape} is one too many")
        self.shape = shape


def build_within(make: Callable[[], Model], *, tensors: int, size: int) -> Model:
    """Return a new model, unless it is far larger than its tensors.

    Args:
        make: Makes the model.
        tensors: Number of its tensors.
        size: Their bytes.

    Raises:
        TooLarge: It would have more than twice as many tensors, or more than eight times the bytes, and some.
    """
    # first without memory: a size may be anything. Some models need memory to be built at all.
    with limit_size(tensors, size), torch.device("meta"), suppress(Exception):
        make()
    with limit_size(tensors, size):
        return make()


@contextmanager
def limit_size(tensors: int, size: int, *, packed: bool = False) -> Iterator[None]:
    """Stop building a model in the block when its parameters and buffers are far larger than its tensors.

    Args:
        tensors: Number of its tensors.
        size: Their bytes.
        packed: Whether weights are stored in fewer bits than a byte.

    Raises:
        TooLarge: It has more than twice as many, or more than 8 times the bytes (packed: 32 times), and some.
    """
    most_tensors, most_bytes = 2 * tensors + SPARE_TENSORS, (PACKED_GROWTH if packed else GROWTH) * size + SPARE_BYTES
    thread, total = threading.get_ident(), 0
    # a parameter that takes the place of another is no further one
    counted: dict[tuple[int, str], int] = {}

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal total
        if tensor is None or threading.get_ident() != thread:
            return
        place, own = (id(module), name), tensor.numel() * tensor.element_size()
        total += own - counted.get(place, 0)
        counted[place] = own
        if len(counted) > most_tensors or total > most_bytes:
            raise TooLarge(tuple(tensor.shape))

    hooks = [register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
