"""Role masks in a model as it is: which mask a forward has, and what each call of an attention gets of it.

Owns `guide` and its handle. The adding is done where the scores are, by `head_bias` and what it stands on. Must not
know words or roles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from headwise.errors import MaskError, NotFired, SettingError
from headwise.heads.bias import bias_heads
from headwise.heads.forward_scope import Forwards, are_partial, drops_layers
from headwise.heads.heads import Heads
from headwise.heads.site import Site
from headwise.masks.head_mask import HeadMask
from headwise.nn.checkpointing import outside_graphs, recomputing
from headwise.nn.hooks import Hook
from headwise.nn.scores import ScoreCall
from headwise.roles.build import Roles
from headwise.roles.collator import ROLE_MASK, RoleCollator
from headwise.roles.fitting import (
    MaskedGenerate,
    longest_text,
    name_of,
    own_keys,
    require_fitting,
    require_self_attention,
)
from headwise.roles.word_table import WordTable

_guided: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Guidance]] = weakref.WeakKeyDictionary()


class Guidance:
    """Heads guided by role masks until `remove()` or the end of a `with` block; made by `guide`.

    Attributes:
        heads: The sites.
        calls: Guided calls of each site, by its name; recomputations and tokens after a prompt are not counted.
    """

    def __init__(self, heads: Heads, mask: HeadMask | None, every_forward: bool) -> None:
        require_self_attention(heads)
        earlier = _earlier(heads)
        self.heads, self.every_forward = heads, every_forward
        self.calls = {site.name: 0 for site in heads.sites}
        self._take(None)
        self._paused = False
        # how many prompts a model generates from now
        self._prompts: int | None = None
        self._stops: list[Callable[[], None]] = []
        for guidance in earlier:
            guidance.remove()
        self._forwards = Forwards(heads, self._failed)
        try:
            self._attach()
            if mask is not None:
                self(mask)
        except BaseException:
            self.remove()
            raise

    def __call__(self, mask: HeadMask) -> Self:
        """Give the next forward its mask.

        Raises:
            MaskError: It is no HeadMask, or is for another number of heads than a site has.
            NotFired: The mask given before did not guide every site. This one is in its place.
        """
        if not isinstance(mask, HeadMask):
            raise MaskError(f"the mask is a {type(mask).__name__}; expected a HeadMask, as Roles(...)(tables) gives.")
        for site in self.heads.sites:
            if site.num_heads != mask.num_heads:
                raise MaskError(
                    f"the mask is for {mask.num_heads} heads and {name_of(site)} has {site.num_heads}; make it with "
                    f"num_heads={site.num_heads}."
                )
        try:
            self.verify()
        finally:
            # what is refused once is not refused for ever
            self._take(mask, excused=are_partial() or drops_layers(self.heads.model))
        return self

    def verify(self) -> None:
        """Raise `NotFired` unless the mask given last guided every site that its forward went through."""
        silent = [name_of(site) for site in self.heads.sites if site.name not in self._fired]
        if self._mask is not None and silent and not self._excused:
            raise NotFired(
                f"the mask guided no call of {len(silent)} of {len(self.heads)} sites: {', '.join(silent[:6])}. Run a "
                "forward pass after giving it; if you did, the call went around the module."
            )

    def collator(
        self,
        roles: Roles,
        tokenizer: Any,
        *,
        parse: Callable[[list[str]], Sequence[WordTable]] | None = None,
        text: str | tuple[str, str] = "text",
        collator: Callable[[list[dict[str, Any]]], Any] | None = None,
        max_length: int | None = None,
        heads: Sequence[int] = (),
        empty: str = "regular",
    ) -> RoleCollator:
        """Return the collator of batches that bring their masks to these heads; see `RoleCollator`."""
        return RoleCollator(
            roles,
            tokenizer,
            self.heads.sites[0].num_heads,
            parse=parse,
            text=text,
            collator=collator,
            max_length=max_length,
            heads=heads,
            empty=empty,
            longest=longest_text(self.heads.model),
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Guide nothing inside the block: all heads are regular."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def remove(self) -> None:
        """Let the heads go; they are regular again."""
        for stop in self._stops:
            stop()
        self._stops = []
        for site in self.heads.sites:
            if site.module in _guided and _guided[site.module]() is self:
                del _guided[site.module]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
        if kind is None:
            if self._mask is None:
                raise NotFired("no mask was given inside the block, so nothing was guided.")
            self.verify()

    def __repr__(self) -> str:
        return f"Guidance({len(self.heads)} sites, {'no mask yet' if self._mask is None else self._mask})"

    def _attach(self) -> None:
        model = self.heads.model
        self._stops.append(self._forwards.remove)
        taking = Hook(model, self._mask_taken)
        self._stops.append(model.register_forward_pre_hook(taking, with_kwargs=True, prepend=True).remove)
        self._stops.append(MaskedGenerate(model, ROLE_MASK, self, self._generating).remove)
        self._stops.append(bias_heads(self.heads, self._bias).remove)
        for site in self.heads.sites:
            _guided[site.module] = weakref.ref(self)

    def _take(self, mask: HeadMask | None, *, excused: bool = False) -> None:
        self._mask, self._excused = mask, excused
        self._biases: dict[tuple, Tensor] = {}
        self._fired: set[str] = set()
        self._bound: int | None = None

    def _failed(self) -> None:
        """Forget a forward that ended in an error: its mask is no later one's."""
        if any(site.name not in self._fired for site in self.heads.sites):
            self._take(self._mask if self.every_forward else None, excused=True)

    @contextmanager
    def _generating(self, prompts: int | None) -> Iterator[None]:
        self._prompts = prompts
        try:
            yield
        except BaseException:
            self._failed()
            raise
        finally:
            self._prompts = None

    # which mask it is changes with every forward, which a compiled graph must not hold
    @outside_graphs
    def _mask_taken(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if ROLE_MASK not in kwargs:
            return None
        if not recomputing():
            self(kwargs[ROLE_MASK])
        return args, {name: value for name, value in kwargs.items() if name != ROLE_MASK}

    @outside_graphs
    def _bias(self, site: Site, call: ScoreCall) -> Tensor | None:
        if self._paused:
            return None
        mask = self._mask
        if mask is None:
            raise NotFired(
                f"{name_of(site)} is guided and this forward has no mask; give it one (guidance(mask), or "
                "role_mask=mask in the batch), or use guidance.paused() or remove()."
            )
        if call.cached and call.first >= mask.tokens:
            return None
        self._require_own(site)
        require_fitting(site, call, mask, self._forwards.generating, self._prompts)
        self._fired.add(site.name)
        self.calls[site.name] += 1
        own = getattr(site.module, "is_causal", False)
        causal = mask.causal or site.kind == "decoder" or bool(self._forwards.causal.get(site.module, own))
        return own_keys(self._additive(mask, causal, call), call)

    def _require_own(self, site: Site) -> None:
        """Refuse a second forward with the mask of the first: its sentences are others."""
        forwards = self._forwards
        now = forwards.number if forwards.inside else None
        # a part of the model that is called alone calls each of its sites once
        again = now is None and site.name in self._fired
        if (again or (self._fired and now != self._bound)) and not self.every_forward:
            raise MaskError(
                f"{name_of(site)}: the mask given last belongs to the forward before this one; give every forward its "
                "own (guidance(mask), or role_mask=mask in the batch), or say guide(..., every_forward=True). "
                "generate() keeps to the prompt's with use_cache=True."
            )
        self._bound = now

    def _additive(self, mask: HeadMask, causal: bool, call: ScoreCall) -> Tensor:
        key = (causal, call.dtype, call.device)
        if key not in self._biases:
            bias = mask.to(call.device).additive(call.dtype, causal=causal)
            # what holds for all heads, padding and causality, the model masks itself
            bias[:, [head for head in range(mask.num_heads) if head not in mask.heads]] = 0.0
            self._biases[key] = bias
        return self._biases[key]


def guide(heads: Heads, mask: HeadMask | None = None, *, every_forward: bool = False) -> Guidance:
    """Guide heads of a model by role masks; returns a handle that takes the next mask, and lets the heads go.

    A_h = softmax(Q_h K_h^T / sqrt(e) + M_h) for the heads that have a role, M_h being 0 where the role allows and -inf
    elsewhere (Wang et al. 2021, eq. 2 and 3). The other heads are as they were. What the model itself masks stays
    masked; where it is causal, causality enters the masks before the policy for empty rows does. That is seen in the
    kind of the attention and in `is_causal`; a causal `attn_mask` without it is not, so set `causal` in the mask then.

    A mask belongs to one forward of the model, to what activation checkpointing computes again of it, and to the tokens
    that are generated after it: those have no roles. So give every forward its own: `model(**batch, role_mask=mask)`,
    which is taken out before the model sees it, `model.generate(**batch, role_mask=mask)` likewise, or `guidance(mask)`
    before the call.

    Args:
        heads: The sites; self-attention alone. Their scores must be reached, as for `bias_heads`.
        mask: The mask of the next forward; None where every batch brings its own.
        every_forward: Whether a mask stays until the next is given, as for measuring one batch again and again.

    Returns:
        The handle, also a context manager, which raises `NotFired` at its end when nothing was guided. Sites that were
        guided before are guided by the new handle alone.

    Raises:
        MaskError: The mask has another number of heads; in a forward, of tokens or sentences, or it is the one
            before's.
        LayoutError: A site is cross-attention, or its scores are not reached. Nothing is attached then.
        NotFired: A forward has no mask.

    Example:
        >>> import torch
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> mask = hw.Roles(hw.Window(3))(hw.WordTable.split("one two three four"), num_heads=2)
        >>> with guide(hw.find_heads(model)) as guidance:
        ...     _ = model(torch.randn(1, 4, 8), role_mask=mask)
        >>> guidance.calls
        {'self_attn': 1}
    """
    return Guidance(heads, mask, every_forward)


def _earlier(heads: Heads) -> list[Guidance]:
    """Return what guides these sites now, and refuse where it guides others too."""
    modules = {site.module for site in heads.sites}
    found: dict[int, Guidance] = {}
    for site in heads.sites:
        guidance = _guided[site.module]() if site.module in _guided else None
        if guidance is None:
            continue
        if any(other.module not in modules for other in guidance.heads.sites):
            raise SettingError(
                f"{name_of(site)} is guided already, together with sites that were not given now; call remove() on "
                "that handle first."
            )
        found[id(guidance)] = guidance
    return list(found.values())
