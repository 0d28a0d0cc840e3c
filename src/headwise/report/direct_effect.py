"""What heads add to a logit by themselves: the final norm and the unembedding, read in a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.functional.tokens import accumulation_dtype
from headwise.heads.heads import Heads
from headwise.heads.record import Call, keep, list_tensors, record


class DirectEffect:
    """Reads a forward pass, and gives the gradient of the logit of the right next token, with its norm frozen.

    The residual stream x goes through the final norm, N(x) = s g (x - c mean(x)) + b with a scale s of x, and the
    unembedding. With s as it is in the pass, this is linear in what a head adds to x.

    Attributes:
        reason: Why there is no direct effect in this model; None where there is.
    """

    def __init__(self, heads: Heads) -> None:
        self.reason: str | None = None
        self.heads, self.calls = heads, list[Call]()
        model: Any = heads.model
        stacks = tuple(f"{stack}." for stack in {site.stack for site in heads.found} if stack)
        norms = [(name, part) for name, part in model.named_modules() if _is_norm(part)]
        self.norms = [part for name, part in norms if not name.startswith(stacks)]
        self.inner = [part for name, part in norms if name.startswith(stacks)]
        find = getattr(model, "get_output_embeddings", None)
        self.unembedding: Any = find() if callable(find) else _find_last(model, stacks)
        scale = getattr(getattr(model, "config", None), "residual_multiplier", None)
        if not isinstance(getattr(self.unembedding, "weight", None), Tensor):
            self.reason = f"{type(model).__name__} has no unembedding that is a module"
        elif scale not in (None, 1.0):
            self.reason = "its layers scale what heads add to the residual stream"

    @contextmanager
    def reading(self, *, proving: bool) -> Iterator[None]:
        """Read the one forward pass inside the block; `proving` that heads add to the residual stream as they are."""
        if self.reason is not None:
            yield
            return
        projections = [site.output_projection.module for site in self.heads if site.output_projection is not None]
        layers = [
            layer
            for stack in {site.stack for site in self.heads if site.stack}
            for layer in self.heads.model.get_submodule(stack).children()
        ]
        inside = [*projections, *layers, *self.inner] if proving else []
        with ExitStack() as recorded:
            self.calls = recorded.enter_context(record([*self.norms, self.unembedding], inputs=keep, outputs=keep))
            within = recorded.enter_context(record(dict.fromkeys(inside), inputs=keep, outputs=keep))
            yield
        if proving and self._normalizes(within, projections, layers):
            self.reason = "its layers normalize what heads add to the residual stream"

    def _normalizes(self, calls: Sequence[Call], projections: Sequence[nn.Module], layers: Sequence[nn.Module]) -> bool:
        """Return whether a norm gets what heads add, or gives what a layer returns."""
        norms = [call for call in calls if call.module in set(self.inner)]
        added = [call for call in calls if call.module in set(projections)]
        following = [(call, next((norm for norm in norms if norm.start > call.end), None)) for call in added]
        if any(norm is not None and torch.equal(_first(norm.args), _first(call.output)) for call, norm in following):
            return True
        returned = [call for call in calls if call.module in set(layers)]
        ends = [(call, [norm for norm in norms if call.start < norm.start < call.end][-1:]) for call in returned]
        return any(torch.equal(_first(norm.output), _first(call.output)) for call, last in ends for norm in last)

    def differentiate(self, output: Any, ids: Tensor) -> Tensor | None:
        """Return the gradient [B, T - 1, d] of each next token's logit, less the mean logit, by what a head adds."""
        if self.reason is not None:
            return None
        logits = read_logits(output, ids)
        last = next((call for call in reversed(self.calls) if call.module is self.unembedding), None)
        if logits is None or last is None:
            self.reason = "the model returned no logits for each token"
            return None
        if not torch.equal(last.output, logits):
            self.reason = "its logits are not what the unembedding returns, but scaled or capped"
            return None
        states = last.given
        norm = next((c for c in reversed(self.calls) if c.module in set(self.norms) and _same(c.output, states)), None)
        frozen = None if norm is None else freeze_norm(norm.module, norm.given, states)
        self.calls = []
        if frozen is None:
            self.reason = "no layer norm or RMS norm that is a module comes before the unembedding"
            return None
        gain, scale, centered = frozen
        weight = self.unembedding.weight.detach().to(gain)
        read = (weight[ids[:, 1:]] - weight.mean(0)) * gain
        read = read - read.mean(-1, keepdim=True) if centered else read
        return read * scale[:, :-1]


@torch.no_grad()
def freeze_norm(norm: nn.Module, given: Tensor, returned: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """Return gain g [d], scale s [B, T, 1] and whether the mean is subtracted, N(x) = s g (x - c mean(x)) + b.

    None where the norm is none of that form on this input.

    >>> x = torch.tensor([[[1.0, -1.0, 3.0, 5.0]]])
    >>> gain, scale, centered = freeze_norm(nn.LayerNorm(4), x, nn.LayerNorm(4)(x))
    >>> gain.round(decimals=3), round(float(scale), 3), centered
    (tensor([1., 1., 1., 1.]), 0.447, True)
    """
    size = given.shape[-1]
    # of mean 0 and root mean square 1, up to an odd last entry
    probe = torch.ones(size, dtype=given.dtype, device=given.device)
    probe[1::2] = -1.0
    compute = accumulation_dtype(given)
    bias, ones, signs = (norm(one).to(compute) for one in (probe * 0, probe * 0 + 1, probe))
    # the epsilon of the norm makes these slightly too small, and the scale as much too large
    gain, centered = (signs - bias) * probe.to(compute), not bool((ones - bias).abs().max() > 0.1 * signs.abs().max())
    x, y = given.to(compute), returned.to(compute) - bias
    x = gain * (x - x.mean(-1, keepdim=True) if centered else x)
    scale = (x * y).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True).clamp_min(torch.finfo(compute).tiny)
    # norms of transformers compute in float32 whatever they are given
    close = max(torch.finfo(given.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5 * float(y.abs().max())
    return (gain, scale, centered) if float((scale * x - y).abs().max()) <= close else None


def read_logits(output: Any, ids: Tensor) -> Tensor | None:
    """Return the logits [B, T, V] in what a model returned; None where there are none."""
    held = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    return held if isinstance(held, Tensor) and held.dim() == 3 and held.shape[:2] == ids.shape else None


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(module.children())


def _find_last(model: nn.Module, stacks: tuple[str, ...]) -> nn.Module | None:
    """Return the last linear layer outside the stacks of layers."""
    linear = [
        part for name, part in model.named_modules() if isinstance(part, nn.Linear) and not name.startswith(stacks)
    ]
    return linear[-1] if linear else None


def _same(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and torch.equal(one, other)


def _first(value: Any) -> Tensor:
    return next(list_tensors(value), torch.empty(0))
