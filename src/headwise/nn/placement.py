"""Where new parameters of a model are put: where its own are."""

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def match_placement(new: M, old: nn.Module) -> M:
    """Move a module to the device of another, and to the dtype of its weights where these are floating; return it.

    >>> match_placement(nn.Linear(2, 2), nn.Linear(3, 3).double()).weight.dtype
    torch.float64
    """
    parameters = list(old.parameters())
    # the weights of a quantized module are integers
    dtype = next((one.dtype for one in parameters if one.is_floating_point()), None)
    return new.to(device=parameters[0].device, dtype=dtype) if parameters else new
