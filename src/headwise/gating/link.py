"""What connects the gates of an attention with its calls: it takes x before the queries, and gates what W_O gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import NotFired, ShapeError
from headwise.gating.gates import Gates, balance
from headwise.heads.capture import Padding, list_parameters
from headwise.heads.head_slice import OutputProjection
from headwise.heads.heads import Site
from headwise.nn.checkpointing import is_recomputing
from headwise.nn.compiled import unwrap_compiled
from headwise.nn.hooks import (
    PerThread,
    read_first_argument,
    replace_first_argument,
    require_original,
    run_uncompiled,
)

# The attribute of an attention that holds its gates.
NAME = "head_gates"
# A loop that trains for this many calls without reading their balance holds every graph it has built.
UNREAD_CALLS = 64


class Call:
    """What is known of the running call of an attention, and the balance of those before it.

    Attributes:
        x: What its queries are made from.
        padding: The padding of its queries.
        balances: The balance of each call since they were taken.
    """

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.padding = Padding()
        self.balances: list[Tensor] = []


class Link:
    """The hooks of one gated attention.

    Unlike hooks that observe, these are part of what the model computes: a deep copy of the model has its own, and a
    pickled model keeps them. A copy counts no balance.

    Attributes:
        attention: The attention, whose gates are looked up at each call: what wraps them is called too.
        queries: Name of its first argument.
        here: What is known of the running call.
        acted: Whether it gated a call.
    """

    def __init__(self, site: Site, output_projection: OutputProjection, source: nn.Module, balanced: bool) -> None:
        self.attention, self.source, self.balanced = site.module, source, balanced
        self.owner, self.attribute = output_projection.owner, output_projection.attribute
        self.projection = output_projection.module
        self.label, self.num_heads, self.head_size = site.label, site.num_heads, site.head_size
        self.stack, self.layer, self.crosses = site.stack, site.layer, site.kind == "cross"
        self.queries = next(iter(list_parameters(site.module)), "")
        self.here, self.acted = PerThread(Call), False

    def attach(self, gates: nn.Module) -> list[Callable[[], object]]:
        """Put the gates and the hooks in place, and return what removes them."""
        self.attention.add_module(NAME, gates)
        handles = [self.attention.register_forward_pre_hook(self.begin, with_kwargs=True)]
        if self.source is not self.attention:
            handles.append(self.source.register_forward_pre_hook(self.take_input, with_kwargs=True))
        # before what reads outputs, however early that was attached: it sees what W_O gets
        handles.append(self.projection.register_forward_pre_hook(self.gate, prepend=True, with_kwargs=True))
        return [*(handle.remove for handle in handles), lambda: self.attention._modules.pop(NAME, None)]

    def take_balances(self) -> list[Tensor]:
        """Return the balance of each call since the last time, and forget them."""
        taken, self.here.own.balances = self.here.own.balances, []
        return taken

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin a call of the attention; the hook before it. Where no module makes its queries, x is its argument."""
        require_original(module)
        held = self.owner._modules.get(self.attribute)
        if held is not self.projection and (held is None or unwrap_compiled(held) is not self.projection):
            raise NotFired(
                f"{self.label}: its output projection is now a {type(held).__name__}, set after hw.gate_heads, which "
                "would get the heads without their gates; call remove() on the gates, and gate the heads again."
            )
        self.here.own.x = None
        if module is self.source:
            # queries come first in a signature, and anywhere in a call by name
            given = kwargs[self.queries] if self.queries in kwargs else args[0] if args else None
            x = read_first_argument(module, (given,), {})
            if isinstance(module, nn.MultiheadAttention):
                x = x.unsqueeze(0) if x.dim() == 2 else x if module.batch_first else x.transpose(0, 1)
            self.here.own.x = x

    def take_input(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep x, [..., d], until the heads of the call arrive; the hook before the queries."""
        require_original(module)
        # DeBERTa-v3 projects positions with the same module, after its tokens
        if self.here.own.x is None:
            self.here.own.x = read_first_argument(module, args, kwargs)

    def gate(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of W_O with gated heads, [..., H * e]; the hook before it."""
        x, self.here.own.x = self.here.own.x, None
        if x is None:
            raise NotFired(
                f"{self.label} is gated and computed no queries before its output projection was called: the call "
                "bypassed them, or their projection was replaced. Call remove() on the gates, and gate the heads again."
            )
        joined = read_first_argument(module, args, kwargs)
        if joined.shape[-1:] != (self.num_heads * self.head_size,):
            raise ShapeError(
                f"{self.label} gave its output projection a tensor of shape {tuple(joined.shape)}; expected "
                f"{self.num_heads} heads of {self.head_size} numbers on the last axis. If heads were pruned since "
                "hw.gate_heads, remove the gates, and gate the heads again."
            )
        if x.shape[:-1] != joined.shape[:-1]:
            raise ShapeError(
                f"{self.label}: its queries are made from a tensor of shape {tuple(x.shape)} and its output projection "
                f"gets {tuple(joined.shape)}; gates need the same tokens in both."
            )
        self.acted = True
        gates: Any = getattr(self.attention, NAME)
        found: Gates = gates(x)
        if self.balanced and found.shares is not None and found.chosen is not None:
            self._count(found.shares, found.chosen)
        weights = found.weights.to(joined.dtype)
        if weights.shape[-1] != joined.shape[-1]:
            gated = (joined.unflatten(-1, (self.num_heads, self.head_size)) * weights[..., None]).flatten(-2)
        else:
            gated = joined * weights
        return replace_first_argument(args, kwargs, gated)

    def _count(self, shares: Tensor, chosen: Tensor) -> None:
        if not (self.attention.training and torch.is_grad_enabled()):
            return
        keep = self.here.own.padding.select_queries(shares.shape[1]) if shares.dim() == 3 else None
        if keep is not None:
            keep = keep.expand(shares.shape[:2])
        # a checkpoint that is computed again must save the same tensors
        term = balance(shares, chosen, keep)
        if is_recomputing():
            return
        self.here.own.balances.append(term)
        unread = len(self.here.own.balances)
        if unread > UNREAD_CALLS:
            raise NotFired(
                f"{unread} calls of {self.label} were counted and their balance was never read; call "
                "gating.add_to(loss) after each forward, or set balance=0 in MixtureOfHeads."
            )

    def __getstate__(self) -> dict[str, Any]:
        # for copy and pickle: no count that nobody would read
        return {**vars(self), "balanced": False, "acted": False}


def tell_queries(attention: nn.Module, x: Tensor) -> None:
    """Tell gates what the queries of an attention are made from, where its parts are called instead of itself.

    Args:
        attention: The attention, with or without gates.
        x: What its queries are made from, [B, Q, d].
    """
    for hook in attention._forward_pre_hooks.values():
        link = getattr(hook, "__self__", None)
        if isinstance(link, Link) and link.source is link.attention:
            link.here.own.x = x


# A compiled module calls its own hooks outside its graph; see `headwise.nn.hooks`.
run_uncompiled(Link.begin)
run_uncompiled(Link.take_input)
run_uncompiled(Link.gate)
