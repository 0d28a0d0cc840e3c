"""Reading the values, attention weights and outputs of each head during a forward pass.

Owns the hooks and the bookkeeping of calls. Outputs are read at the module that plays W_O, values where they are
projected, weights inside headwise's own attention module. What cannot be read is refused when the tap is attached,
and a site that did not fire is refused when the captures are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.checks import LayoutError, NotFired, SettingError, ShapeError
from headwise.heads import Heads, Site
from headwise.nn import Attended, MultiheadAttention, Observer, valid_keys

__all__ = ["Capture", "Taps"]

# A loop that trains for this many calls without reading its taps holds every graph it has built.
UNREAD_CALLS = 64


@dataclass
class Capture:
    """What one call of one site computed.

    Attributes:
        site: The attention module.
        outputs: O_h of each head before W_O, [B, Q, H, e].
        values: V_g of each key/value head, [B, K, G, e].
        weights: Attention weights before dropout, [B, H, Q, K].
        key_keep: True where a key is a real token, [B, K]; None when the call received no `key_padding_mask`.
        query_keep: The same for queries, [B, Q]; for cross-attention that of the decoder's own self-attention.
    """

    site: Site
    outputs: Tensor | None = None
    values: Tensor | None = None
    weights: Tensor | None = None
    key_keep: Tensor | None = None
    query_keep: Tensor | None = None


class Taps:
    """Captures of chosen sites, from a forward pass until they are read.

    While the model trains (training mode, gradients on) every call since the last `read` is kept, so that an
    encoder called twice gives two captures a site. Otherwise a forward of the model drops what the one before it
    left. Recomputation by activation checkpointing is not captured again.

    Args:
        heads: The sites to read.
        outputs: Whether to read O_h.
        values: Whether to read V_g.
        weights: Whether to read attention weights; they are computed explicitly, as torch does with need_weights.

    Raises:
        SettingError: Nothing was asked for.
        LayoutError: A site cannot be read that way.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> with Taps(hw.find_heads(model), outputs=True) as taps:
        ...     _ = model(torch.randn(3, 5, 8))
        ...     (capture,) = taps.read()
        >>> capture.outputs.shape
        torch.Size([3, 5, 2, 4])
    """

    def __init__(self, heads: Heads, *, outputs: bool = False, values: bool = False, weights: bool = False) -> None:
        if not (outputs or values or weights):
            raise SettingError("Taps was asked to read nothing; expected some of outputs, values, weights.")
        self.heads = heads
        self.outputs, self.values, self.weights = outputs, values, weights
        self._captures: list[Capture] = []
        self._padding: dict[tuple[str, int], Tensor | None] = {}
        self._handles: list[RemovableHandle] = []
        self._observed: list[tuple[MultiheadAttention, Observer]] = []
        self._paused = False
        self._transient = False
        try:
            self._attach()
        except BaseException:
            self.remove()
            raise

    def read(self) -> list[Capture]:
        """Return the captures since the last read, in the order of the calls, and forget them.

        Raises:
            NotFired: A site was not called since the last read.
        """
        captures, self._captures = self._captures, []
        called = {capture.site.name for capture in captures}
        silent = [site.name or "(model)" for site in self.heads.sites if site.name not in called]
        if silent:
            raise NotFired(
                f"{len(silent)} of {len(self.heads)} tapped sites were not called since the last read: "
                f"{', '.join(silent[:6])}. Run a forward pass of the model first; if you did, the call went around "
                "the module (attach before torch.compile and before the first forward)."
            )
        for capture in captures:
            if capture.site.kind != "cross":
                capture.query_keep = capture.key_keep
        return captures

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Capture nothing inside the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()
        for module, observer in self._observed:
            module.observers = tuple(o for o in module.observers if o is not observer)
        self._handles, self._observed, self._captures, self._padding = [], [], [], {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _attach(self) -> None:
        self._handles.append(self.heads.model.register_forward_pre_hook(self._model_hook()))
        crossed = {(site.stack, site.layer) for site in self.heads.sites if site.kind == "cross"}
        for site in self.heads.found:
            if site.kind == "decoder" and (site.stack, site.layer) in crossed:
                hook = self._padding_hook(site)
                self._handles.append(site.module.register_forward_pre_hook(hook, with_kwargs=True))
        for site in self.heads.sites:
            seam = site.expose() if self.outputs or isinstance(site.module, nn.MultiheadAttention) else site.seam
            self._handles.append(site.module.register_forward_pre_hook(self._call_hook(site), with_kwargs=True))
            if self.outputs and seam is not None:
                self._handles.append(seam.module.register_forward_pre_hook(self._output_hook(site)))
            if self.values or self.weights:
                self._attach_inside(site)

    def _attach_inside(self, site: Site) -> None:
        module = site.module
        if isinstance(module, MultiheadAttention):
            observer = Observer(self._see(site), weights=self.weights)
            module.observers = (*module.observers, observer)
            self._observed.append((module, observer))
            return
        if self.weights:
            raise LayoutError(
                f"{site.name or 'the model'} ({type(module).__name__}): attention weights can be read inside "
                "headwise.nn.MultiheadAttention and torch's own; read outputs or values here."
            )
        if site.value_module is None:
            raise LayoutError(f"{site.name or 'the model'}: no module computes its projected values.")
        self._handles.append(site.value_module.register_forward_hook(self._value_hook(site)))

    def _silent(self) -> bool:
        # a forward inside backward is the recomputation of a checkpoint: its first run was captured
        recomputing = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        return self._paused or recomputing

    def _accumulates(self) -> bool:
        return self.heads.model.training and torch.is_grad_enabled()

    # Hooks are plain functions that ask whose they are: a deep copy of the model shares them, and must not be captured.
    def _model_hook(self):
        def called(module: nn.Module, _args: tuple) -> None:
            if module is self.heads.model and not self._silent() and not self._accumulates():
                self._forget()

        return called

    def _forget(self) -> None:
        self._captures, self._padding = [], {}

    def _call_hook(self, site: Site):
        def called(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if module is not site.module or self._silent():
                return
            accumulates = self._accumulates()
            if accumulates and self._transient:
                # what an evaluation left unread must not enter the next penalty
                self._forget()
            if not accumulates and any(capture.site is site for capture in self._captures):
                # a part of the model may be called without the model: keep its newest call only
                self._captures = [capture for capture in self._captures if capture.site is not site]
            self._transient = not accumulates
            key_keep = _given_padding(module, args, kwargs)
            # the decoder's own self-attention ran just before, on the queries of this call
            cross = site.kind == "cross"
            query_keep = self._padding.get((site.stack, site.layer)) if cross else None
            self._captures.append(Capture(site, key_keep=key_keep, query_keep=query_keep))
            if len(self._captures) > UNREAD_CALLS * len(self.heads):
                raise NotFired(
                    f"{len(self._captures)} captures were kept and never read; call the penalty (or read the taps) "
                    "after each forward, or remove() it."
                )

        return called

    def _padding_hook(self, site: Site):
        def called(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if module is site.module and not self._silent():
                self._padding[site.stack, site.layer] = _given_padding(module, args, kwargs)

        return called

    def _newest(self, site: Site) -> Capture | None:
        if self._silent():
            return None
        return next((capture for capture in reversed(self._captures) if capture.site is site), None)

    def _output_hook(self, site: Site):
        def called(module: nn.Module, args: tuple) -> None:
            seam = site.seam
            capture = self._newest(site) if seam is not None and module is seam.module else None
            if capture is not None:
                capture.outputs = _split(args[0], site.num_heads, site.head_size, f"{site.name} output")

        return called

    def _value_hook(self, site: Site):
        def called(module: nn.Module, _args: tuple, output: Tensor) -> None:
            capture = self._newest(site) if module is site.value_module else None
            if capture is not None:
                capture.values = _split(output, site.key_value_heads, site.head_size, f"{site.name} value")

        return called

    def _see(self, site: Site):
        def see(attended: Attended) -> None:
            capture = self._newest(site)
            if capture is not None:
                capture.key_keep = attended.key_keep
                capture.values = attended.values if self.values else None
                capture.weights = attended.weights if self.weights else None

        return see


def _given_padding(module: nn.Module, args: tuple, kwargs: dict) -> Tensor | None:
    mask = kwargs.get("key_padding_mask")
    if mask is None and isinstance(module, nn.MultiheadAttention) and len(args) > 3:
        mask = args[3]
    return valid_keys(mask) if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _split(tensor: Tensor, heads: int, size: int, name: str) -> Tensor:
    if tensor.dim() != 3 or tensor.shape[-1] != heads * size:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; expected (batch, tokens, {heads * size}).")
    return tensor.unflatten(-1, (heads, size))
