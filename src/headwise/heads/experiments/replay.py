"""Repeated calls of one attention module with chosen queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headwise.errors import LayoutError, NotFired
from headwise.heads.capture import split_heads
from headwise.heads.heads import Site
from headwise.heads.record import Call, clone, record, restored, watching
from headwise.heads.view import HeadView

# Changes the features [..., M, e] of a projection in place.
Edit = Callable[[Tensor], None]
# Where nothing may change, what is left is rounding; a change of the kind sought is far above it.
UNCHANGED = {torch.float64: 1e-9, torch.float32: 1e-5}


class Uncalled(NotFired):
    """A projection of an attention that ran was not called."""


class Replay:
    """One site, called again and again with drawn queries, keys and values.

    The site is of a float64 model in evaluation mode, and its output projection visible. The call runs both. `draws`
    are what queries, keys and values are replaced by, [..., M, e] each; known after the first call.
    """

    def __init__(self, site: Site, call: Call) -> None:
        self.site, self.call = site, call
        self.draws: dict[str, Tensor] = {}
        self._inputs: dict[int | None, tuple[Any, Any]] = {}

    @property
    def unchanged(self) -> float:
        """What may be left of a change, relative to the largest number."""
        return UNCHANGED[self.call.dtype]

    def list_changes(self, before: Tensor, after: Tensor, axes: tuple[int, ...] = (-2,)) -> list[int]:
        """Return the indices along `axes`, those of heads, at which two tensors differ by more than rounding."""
        scale = before.abs().max().clamp_min(1e-12)
        others = [axis for axis in range(before.dim()) if axis - before.dim() not in axes and axis not in axes]
        return ((after - before).abs() / scale > self.unchanged).amax(others).nonzero().flatten().tolist()

    def disturb(self, view: Tensor, before: Tensor, read: Callable[[], Tensor]) -> list[int]:
        """Return the heads of what is read that differ from `before` when noise is added to a view."""
        with restored([view]):
            view.add_(draw_noise(view))
            return self.list_changes(before, read())

    def list_own(self, projection: str, head: int) -> list[int]:
        """Return the query heads that a head of a projection belongs to."""
        return [head] if projection == "query" else list(self.site.list_members(head))

    def heads(self, edits: Mapping[str, Edit]) -> Tensor:
        """Return the concatenated heads [T, H, e] that reach W_O when q, k and v are drawn at random, then edited."""
        with self._take_over(edits):
            seen = self._record_outputs(self.call)
        missing = [head_slice.projection for head_slice in self.site.slices if head_slice.projection not in self.draws]
        if missing or not seen:
            silent = f"its {missing[0]} projection" if missing else "the module found as its W_O"
            raise Uncalled(f"{self.site.label}: {silent} was not called in a forward pass on the given inputs.")
        sizes = (self.site.num_heads, self.site.head_size)
        if seen[0].shape[-1] != sizes[0] * sizes[1]:
            self.refuse(f"its W_O takes {seen[0].shape[-1]} features, not {sizes[0]} heads of {sizes[1]}")
        return seen[0].unflatten(-1, sizes).flatten(0, -3)

    def outputs(self, call: Call | None = None) -> Tensor:
        """Return the concatenated heads [.., H, e] that reach W_O when the call is made as it was, or another one."""
        seen = self._record_outputs(call or self.call)
        if not seen:
            raise Uncalled(f"{self.site.label}: the module found as its W_O was not called in a forward pass.")
        return split_heads(seen[0], self.site)

    def _record_outputs(self, call: Call) -> list[Tensor]:
        """Return what W_O gets in each of its calls; where heads of a list are concatenated, what the site returns."""
        whole = self.site.output_projection is None
        module = self.site.module if whole else self.site.expose().module
        with record([module], inputs=None if whole else clone, outputs=clone if whole else None) as calls:
            call.again()
        if whole:
            return [one.output for one in calls if isinstance(one.output, Tensor)]
        return [one.given for one in calls]

    @contextmanager
    def _take_over(self, edits: Mapping[str, Edit]) -> Iterator[None]:
        """Inside the block, the first projection of each call of the site returns drawn and edited features."""
        done: set[int | None] = set()
        module: Any = self.site.module
        projecting = {id(part.module): part.module for part in self.site.parts}.values()
        if None in projecting:
            module._project = self._make_project(edits)
        try:
            with watching(after=[(one, self._make_hook(one, edits, done)) for one in projecting if one is not None]):
                yield
        finally:
            module.__dict__.pop("_project", None)

    def _make_hook(self, projecting: nn.Module, edits: Mapping[str, Edit], done: set[int | None]):
        places = [
            (head_slice, sum(before.heads for before in head_slice.parts[:index]), part)
            for head_slice in self.site.slices
            for index, part in enumerate(head_slice.parts)
            if part.module is projecting
        ]

        def returned(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            if id(module) in done:
                # further calls project something else: the positions of DeBERTa
                return None
            done.add(id(module))
            self._inputs[id(module)] = tree_map(_draw_like, args), tree_map(_draw_like, kwargs)
            if not isinstance(output, Tensor):
                kind = places[0][0].projection
                self.refuse(f"its {kind} projection returns a {type(output).__name__}, not a tensor")
            output = output.clone()
            for head_slice, first, part in places:
                self._replace(head_slice, part.features(output), edits, first)
            return output

        return returned

    def _make_project(self, edits: Mapping[str, Edit]):
        def projected(*inputs: Tensor) -> tuple[Tensor, ...]:
            self._inputs[None] = tuple(_draw_like(tensor) for tensor in inputs), {}
            outputs = [output.clone() for output in self._torch_project(*inputs)]
            for head_slice, output in zip(self.site.slices, outputs, strict=True):
                self._replace(head_slice, output.unflatten(-1, (head_slice.heads, head_slice.head_size)), edits)
            return tuple(outputs)

        return projected

    def _replace(self, head_slice: HeadView, features: Tensor, edits: Mapping[str, Edit], first: int = 0) -> None:
        """Write drawn and edited features of the heads from `first` on."""
        if head_slice.projection not in self.draws:
            every = features.new_empty((*features.shape[:-2], head_slice.heads, features.shape[-1]))
            # on a grid without 0, so that a norm over all heads is exactly the same after a shift, also in float32
            drawn = draw_noise(every, seed=len(self.draws)).clamp(-3.0, 3.0)
            drawn = (drawn * 4.0).round() / 4.0
            self.draws[head_slice.projection] = torch.where(drawn == 0.0, 0.25, drawn)
        edited = self.draws[head_slice.projection].clone()
        if head_slice.projection in edits:
            edits[head_slice.projection](edited)
        features.copy_(edited.narrow(-2, first, features.shape[-2]))

    def project(self, head_slice: HeadView) -> Tensor:
        """Return the features of a head slice as its projection computes them from random inputs."""
        features = []
        for part in head_slice.parts:
            if part.module is None:
                output = self._torch_project(*self._inputs[None][0])[self.site.slices.index(head_slice)]
                return output.unflatten(-1, (head_slice.heads, head_slice.head_size)).clone()
            args, kwargs = self._inputs[id(part.module)]
            features.append(part.features(part.module(*args, **kwargs)))
        return torch.cat(features, -2)

    def _torch_project(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        module: Any = self.site.module
        return type(module)._project(module, *inputs)

    def refuse(self, finding: str) -> NoReturn:
        """Raise `LayoutError` with the finding."""
        raise LayoutError(
            f"{self.site.label}: layout {self.site.layout!r} with {self.site.num_heads} heads of {self.site.head_size} "
            f"misreads {type(self.site.module).__name__}: {finding}. Pass a layout row that describes it to "
            "find_heads, or leave it out if it is no softmax attention."
        )


def draw_noise(like: Tensor, seed: int = 50) -> Tensor:
    """Return standard normal numbers of the same shape, the same at each call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


def _draw_like(value: object) -> object:
    return draw_noise(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def clear(features: Tensor) -> None:
    """Set features to zero."""
    features.zero_()


def redraw(features: Tensor, seed: int = 60) -> None:
    """Draw features anew."""
    features.copy_(draw_noise(features, seed))
