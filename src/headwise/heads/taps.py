"""Reading the values, attention weights and outputs of each head during a forward pass.

Outputs are read at the module that plays W_O, values where they are projected, weights where the scores are computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import LayoutError, NotFired, SettingError
from headwise.heads.capture import (
    Capture,
    ForwardToken,
    OpenCapture,
    Padding,
    list_parameters,
    name_arguments,
    read_padding,
    split_heads,
)
from headwise.heads.heads import Heads, Site, require_heads
from headwise.nn.checkpointing import is_recomputing
from headwise.nn.hooks import Handle, Hook, read_first_argument
from headwise.nn.scores import Attended, Observer

# A loop that trains for this many calls without reading its taps holds every graph it has built.
UNREAD_CALLS = 64


class Taps(Handle):
    """Reads chosen attentions during forward passes and keeps the captures until they are read.

    While the model trains (training mode, gradients on) every call since the last `read` is kept, so that an encoder
    called twice gives two captures per attention; captures of a forward that raised are dropped by the next one.
    Otherwise each forward of the model drops the captures of the previous one, and a part called without the model (the
    encoder, while generating) keeps its newest call. A module shared between layers gives one capture per call, in
    order. Recomputation by activation checkpointing is not captured again. Copies and pickles of the model are not
    tapped.

    Args:
        heads: The sites to read.
        outputs: Whether to read O_h.
        values: Whether to read V_g.
        weights: Whether to read attention weights; they are computed explicitly, as torch does with need_weights, and
            only while this is attached. A model of transformers may run sdpa or eager then.
        beside: Whether weights are computed separately, so that the output of the attention stays bitwise identical,
            at the cost of one more attention. Otherwise the module attends with the weights that are read.
        mean_weights: Whether to read the mean of the attention weights over heads. In `nn.MultiheadAttention` and
            over the sdpa of transformers it is computed one head at a time, in addition to fused attention, and the
            weights of the heads are not kept.

    Raises:
        SettingError: Nothing was requested.
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

    def __init__(
        self,
        heads: Heads,
        *,
        outputs: bool = False,
        values: bool = False,
        weights: bool = False,
        mean_weights: bool = False,
        beside: bool = False,
    ) -> None:
        require_heads(heads)
        if not (outputs or values or weights or mean_weights):
            raise SettingError(
                "Taps was given nothing to read; expected at least one of outputs, values, weights, mean_weights."
            )
        super().__init__()
        self.heads = heads
        self.outputs, self.values, self.weights, self.mean_weights = outputs, values, weights, mean_weights
        self.beside = beside
        self._calls: list[OpenCapture] = []
        self._padding: dict[tuple[str, int], Padding] = {}
        self._paused = False
        self._transient = False
        self._forward, self._running = ForwardToken(), False
        try:
            self._attach()
        except BaseException:
            self.remove()
            raise

    def read(self) -> list[Capture]:
        """Return the captures since the last read, in the order of the calls, and forget them.

        Raises:
            NotFired: A site was not called since the last read, or a call of it did not compute all that is read (a
                cache holds values of earlier calls). Or the taps are attached to no model.
        """
        if not self.attached:
            raise NotFired(
                "these taps are attached to no model: remove() was called on them, or they are a copy or were "
                "unpickled. Make new ones for the heads of the model that runs."
            )
        calls, self._calls = self._calls, []
        silent = [site.label for site in self.heads.sites if not any(call.capture.site is site for call in calls)]
        if silent:
            raise NotFired(
                f"{len(silent)} of {len(self.heads)} tapped sites were not called since the last read: "
                f"{', '.join(silent[:6])}. Run a forward pass of the model first. If you did: a copy of the model is "
                "not tapped (find_heads in the copy), torch.compile bypasses what is attached later (attach before "
                "the first forward), and calls without gradients are dropped when training continues."
            )
        names = ("outputs", "values", "weights", "mean_weights")
        return [call.finish(**{name: getattr(self, name) for name in names}) for call in calls]

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
        super().remove()
        self._calls, self._padding = [], {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_calls": [], "_padding": {}}

    def _attach(self) -> None:
        model = self.heads.model
        self._hook_before(model, self._on_model_call)
        self._keep(model.register_forward_hook(Hook(model, self._on_model_return)))
        crossed = {(site.stack, site.layer) for site in self.heads.sites if site.kind == "cross"}
        for site in self.heads.found:
            if site.kind != "cross" and (site.stack, site.layer) in crossed:
                self._hook_before(site.module, self._make_queries_hook(site))
        for site in self.heads.sites:
            inside = isinstance(site.module, nn.MultiheadAttention)
            projection = site.expose() if self.outputs or inside else None
            self._hook_before(site.module, self._make_site_hook(site))
            if self.outputs and projection is not None:
                self._hook_before(projection.module, self._make_outputs_hook(site))
            if self.mean_weights and site.divided:
                raise LayoutError(
                    f"{site.label}: under tensor parallel no process computes the weights of all heads, "
                    "so their mean is not available; read weights=True, or use Position() without recompute."
                )
            if self.weights or self.mean_weights or (self.values and inside):
                listener = Observer(self._make_observer(site), self.weights, self.mean_weights, self.beside)
                self._removers.append(site.reach_scores().listen(listener))
            if self.values and not inside:
                if site.value_module is None:
                    raise LayoutError(
                        f"{site.label} ({type(site.module).__name__}): no module computes values of its "
                        "heads; read their outputs or weights."
                    )
                hook = Hook(site.value_module, self._make_values_hook(site))
                self._keep(site.value_module.register_forward_hook(hook))

    def _keep(self, handle: RemovableHandle) -> None:
        self._removers.append(handle.remove)

    def _is_silent(self) -> bool:
        # the first run of a checkpoint was captured
        return self._paused or is_recomputing()

    def _accumulates(self) -> bool:
        return self.heads.model.training and torch.is_grad_enabled()

    def _on_model_call(self, _module: nn.Module, _args: tuple, _kwargs: dict) -> None:
        if self._is_silent():
            return
        if self._running:
            # the previous forward failed: what it captured must not enter the next penalty
            self._calls = [call for call in self._calls if call.forward is not self._forward]
        if not self._accumulates():
            self._calls = [call for call in self._calls if call.forward is None]
            self._padding = {}
        self._forward, self._running = ForwardToken(), True

    def _on_model_return(self, _module: nn.Module, _args: tuple, _output: object) -> None:
        self._running = False

    def _make_site_hook(self, site: Site) -> Callable[[nn.Module, tuple, dict], None]:
        names = list_parameters(site.module)

        def called(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if self._is_silent():
                return
            accumulates = self._accumulates()
            if accumulates and self._transient:
                # what an evaluation left unread must not enter the next penalty
                self._calls, self._padding = [], {}
            if not accumulates:
                self._calls = [
                    call
                    for call in self._calls
                    if call.capture.site is not site or (self._running and call.forward is not None)
                ]
            self._transient = not accumulates
            own = read_padding(module, name_arguments(names, args, kwargs))
            # the decoder's own self-attention ran just before, on the queries of this call
            queries = self._padding.get((site.stack, site.layer), Padding()) if site.kind == "cross" else own
            self._calls.append(
                OpenCapture(Capture(site, key_keep=own.keep), own, queries, self._forward if self._running else None)
            )
            if len(self._calls) > UNREAD_CALLS * len(self.heads):
                raise NotFired(
                    f"{len(self._calls)} captures were kept and never read; call the penalty (or read the taps) "
                    "after each forward, or remove() it."
                )

        return called

    def _make_queries_hook(self, site: Site) -> Callable[[nn.Module, tuple, dict], None]:
        names = list_parameters(site.module)

        def called(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not self._is_silent():
                self._padding[site.stack, site.layer] = read_padding(module, name_arguments(names, args, kwargs))

        return called

    def _find_newest(self, site: Site) -> Capture | None:
        if self._is_silent():
            return None
        return next((call.capture for call in reversed(self._calls) if call.capture.site is site), None)

    def _make_outputs_hook(self, site: Site) -> Callable[[nn.Module, tuple, dict], None]:
        def called(module: nn.Module, args: tuple, kwargs: dict) -> None:
            projection = site.output_projection
            if projection is None or module is not projection.module:
                return
            capture = self._find_newest(site)
            if capture is not None:
                capture.outputs = split_heads(read_first_argument(module, args, kwargs), site)

        return called

    def _make_values_hook(self, site: Site) -> Callable[[nn.Module, tuple, Tensor], None]:
        head_slice = next(head_slice for head_slice in site.slices if head_slice.projection == "value")

        def called(_module: nn.Module, _args: tuple, output: Tensor) -> None:
            capture = self._find_newest(site)
            if capture is not None:
                capture.values = head_slice.features(site.gather_heads(output, -1, head_slice.along))

        return called

    def _make_observer(self, site: Site) -> Callable[[Attended], None]:
        def see(attended: Attended) -> None:
            capture = self._find_newest(site)
            if capture is None:
                return
            if attended.values is not None:
                capture.key_keep = attended.key_keep
                capture.values = attended.values if self.values else None
            if self.weights and attended.weights is not None:
                capture.weights = site.gather_heads(attended.weights, 1, site.num_heads)
            if self.mean_weights:
                capture.mean_weights = attended.mean_weights

        return see
