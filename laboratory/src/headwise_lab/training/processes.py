"""The processes that train one run together, as torchrun and `accelerate launch` start them, and the batches of each.

With one process every function here does nothing, and nothing of `torch.distributed` is started. This is not
accelerate's `PartialState` because that opens NCCL alone on GPUs (what processes agree on is on the CPU), starts with
one process too, and deals whole batches to processes, which changes the size of a batch.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from headwise.errors import HeadwiseError

# The others wait while the first one reads data, decodes the test set and writes the page.
PATIENCE = timedelta(days=2)

# Whether this process works on something that the others have no part in.
_ALONE = ContextVar("alone", default=False)

T = TypeVar("T")


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables of the environment in the block, and what they were before afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def launched() -> bool:
    """Whether a launcher started several processes for this command."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def meet() -> None:
    """Join the other processes, once; where there are none, nothing happens."""
    if launched() and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # what processes agree on is on the CPU, gradients are where the model is
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)


def end() -> None:
    """Leave the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Let this process be the only one for a while: what it does then, it never waits for the others in."""
    before = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(before)


def count() -> int:
    """Return how many processes work together; one where this one is `alone`."""
    return dist.get_world_size() if dist.is_initialized() and not _ALONE.get() else 1


def rank() -> int:
    """Return which of them this is; the first one, 0, writes and speaks."""
    return dist.get_rank() if dist.is_initialized() else 0


def group() -> Any:
    """Return the group of the processes that train together; None where there is one."""
    return dist.group.WORLD if count() > 1 else None


def wait() -> None:
    """Wait until all processes are here."""
    if count() > 1:
        agree(0)


def agree(value: T) -> T:
    """Return what the first process has, in every process; small values that pickle."""
    if count() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0, device=torch.device("cpu"))
    return held[0]


def by_first(function: Callable[[], T]) -> T:
    """Return what a function returns, called by the first process `alone`; what it refuses is raised in all of them."""
    if count() == 1:
        return function()
    answer: Any = (None, None)
    if rank() == 0:
        try:
            with alone():
                answer = (function(), None)
        except HeadwiseError as error:
            answer = (None, error)
    value, refusal = agree(answer)
    if refusal is not None:
        raise refusal
    return value


def total(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over the processes."""
    if count() == 1:
        return tensor
    added = tensor.detach().clone()
    dist.all_reduce(added)
    return added


def gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensor of each process, in the order of their ranks; of one shape, and on the CPU."""
    if count() == 1:
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(count())]
    dist.all_gather(found, tensor)
    return found


def mean(tensor: Tensor) -> Tensor:
    """Return the mean of a tensor over the processes."""
    return total(tensor) / count() if count() > 1 else tensor


# What torch's losses leave out.
IGNORED = -100


class OwnBatches(Sampler[list[int]]):
    """Every batch of another sampler, divided: process r of n has examples r, r + n, r + 2 n, ... of it.

    A batch of fewer examples than processes is given to each of them whole.

    Example:
        >>> [list(OwnBatches([[4, 5, 6], [7]], rank, 2)) for rank in (0, 1)]
        [[[4, 6], [7]], [[5], [7]]]
    """

    drop_last = False  # accelerate asks every batch sampler

    def __init__(self, batches: Any, rank: int, count: int) -> None:
        self.batches, self.rank, self.count = batches, rank, count

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield batch[self.rank :: self.count] if len(batch) >= self.count else batch


def weigh_loss(loss: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Return a loss, the mean over this process's labels, such that its mean over processes is that of the whole batch.

    loss n c_r / sum_s c_s, where c_r is how many labels process r of n has; the loss itself in one process.

    >>> weigh_loss(torch.tensor(2.0), {"labels": torch.tensor([0, 1])})
    tensor(2.)
    """
    if count() == 1:
        return loss
    own = (inputs["labels"] != IGNORED).sum().to(torch.float64)
    return loss * (count() * own / total(own).clamp_min(1)).to(loss.dtype)
