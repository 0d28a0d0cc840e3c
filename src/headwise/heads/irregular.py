"""What keeps the heads of an attention from being regular, told from what its module holds."""

import inspect
import re
from types import FunctionType

from torch import nn

from headwise.heads.heads import Site
from headwise.heads.layout_steps import find_letters
from headwise.heads.projection import read_projection

# What the names of attentions mention.
ATTENTION = re.compile("attention|attn", re.IGNORECASE)
RECURRENT = "is linear attention: it keeps a state and has no attention weights"
# Names that a module holds (or that its forward takes), and what is not regular then: a clause that follows its name.
IRREGULAR = (
    ("lambda_q1", "is differential attention: two heads share their values, and one is subtracted from the other"),
    ("dt_proj", "masks the keys of a head by the values of all heads (a dynamic mask)"),
    (
        "autocorrelation_factor",
        "is no softmax attention: all heads together choose delays, by which values are shifted",
    ),
    ("approx_mode", "averages blocks of queries and keys, so that tokens have no attention weights of their own"),
    ("global_hidden_states", "projects two sequences with the same weights in each call, and has two outputs"),
    ("quant_mode", "calls quantized projections, which return a scale besides the tensor"),
    ("query_key", "has one projection for queries and keys"),
    ("A_log", RECURRENT),
    ("slope_rate", RECURRENT),
)


def find_irregularity(module: nn.Module) -> str | None:
    """Return what is not regular in an attention module, a clause that follows its name; None where nothing is known.

    >>> find_irregularity(nn.MultiheadAttention(4, 2)) is None
    True
    """
    known = {*vars(module), *module._modules, *module._parameters, *module._buffers, *_list_arguments(module)}
    for name, clause in IRREGULAR:
        if name in known:
            return clause
    if any(find_letters(name) and _convolves(child) for name, child in module._modules.items()):
        return "projects with convolutions, and heads are read from matrices"
    return None


def find_mixing(site: Site) -> str | None:
    """Return what mixes the heads of a site with one another, a clause that follows its name; None without it."""
    heads = site.num_heads
    used = {id(head_slice.module) for head_slice in site.slices}
    for name, child in site.module.named_children():
        projection = None if id(child) in used or heads == 1 or site.head_size == 1 else read_projection(child)
        if projection is not None and projection.rows == projection.columns == heads:
            return f"mixes its {heads} heads by {name}, a matrix of heads by heads (talking heads)"
    return None


def attends(module: nn.Module) -> bool:
    """Return whether the code of a module's own class computes attention, and not only that of a module inside it.

    >>> attends(nn.MultiheadAttention(4, 2)), attends(nn.Linear(2, 2))
    (True, False)
    """
    names = {name for function in list_functions(module) for name in function.__code__.co_names}
    return any(
        re.search("softmax|attend|attention|attn|sdpa", name, re.IGNORECASE) for name in names - {*module._modules}
    )


def list_functions(module: nn.Module) -> list[FunctionType]:
    """Return the methods of a module's own classes but `__init__`, without decorators."""
    return [
        function
        for base in type(module).__mro__
        if base not in (nn.Module, object)
        for name, member in vars(base).items()
        if name != "__init__"
        and isinstance(function := inspect.unwrap(member) if callable(member) else None, FunctionType)
    ]


def _list_arguments(module: nn.Module) -> tuple[str, ...]:
    forward = inspect.unwrap(type(module).forward)
    return forward.__code__.co_varnames[: forward.__code__.co_argcount] if isinstance(forward, FunctionType) else ()


def _convolves(child: nn.Module | None) -> bool:
    if child is None:
        return False
    return any(isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) for part in child.modules())
