"""`guide`: add role masks to the attention scores of an unchanged model, with a handle that takes the masks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import LayoutError, MaskError, NotFired, SettingError
from headwise.heads.capture import ForwardScope, drops_layers, is_partial
from headwise.heads.heads import Heads, Site
from headwise.heads.method import Method
from headwise.heads.scores.bias import bias_heads
from headwise.masks.head_mask import HeadMask
from headwise.nn.checkpointing import is_recomputing
from headwise.nn.hooks import Handle, PerThread
from headwise.nn.scores import ScoreCall
from headwise.roles.build import Roles
from headwise.roles.collator import ROLE_MASK, RoleCollator

# Parts of the names that models give tables of positions.
POSITIONS = ("position", "wpe")
# Names of the prompts in transformers.
PROMPTS = ("inputs", "input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")


def require_fit(site: Site, call: ScoreCall, mask: HeadMask, generating: bool, prompts: int | None) -> None:
    """Raise `MaskError` unless the mask has the sentences and tokens of a call.

    generate() may be running, with several beams for each of its prompts, whose number is None if unknown.
    """
    if prompts is not None and prompts != mask.batch:
        raise MaskError(
            f"the mask has {mask.batch} sentences and generate() was given {prompts} prompts; build the mask from the "
            "prompts."
        )
    beams = generating and call.batch % mask.batch == 0
    if call.batch != mask.batch and not beams:
        raise MaskError(
            f"{site.label}: the mask has {mask.batch} sentences and the batch {call.batch}; build the mask from "
            "the batch that the model receives."
        )
    # a static cache has room for more keys than are filled
    keys = mask.tokens if not call.cached else max(mask.tokens, call.keys)
    if call.first != 0 or call.queries != mask.tokens or call.keys != keys:
        hint = "" if call.cached else " (in generate(), set use_cache=True)"
        raise MaskError(
            f"{site.label}: the mask has {mask.tokens} tokens and this call {call.queries} queries and "
            f"{call.keys} keys; build the mask from all tokens of the model, with special tokens and padding{hint}."
        )


def find_max_length(model: nn.Module) -> int | None:
    """Return the largest number of tokens that a model's tables of learned positions allow; None without such tables.

    Rows for padding and rows before the first position do not count.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> find_max_length(BertModel(BertConfig(max_position_embeddings=40, **sizes)))
        40
    """
    rooms = []
    for name, module in model.named_modules():
        own = name.rpartition(".")[2].lower()
        if isinstance(module, nn.Embedding) and any(word in own for word in POSITIONS) and "relative" not in own:
            # positions of RoBERTa start after the padding row, positions of BART after two unused rows
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            rooms.append(module.num_embeddings - max(before, int(getattr(module, "offset", 0))))
    return min(rooms, default=None)


class MaskedGenerate:
    """Replaces a model's generate() until `remove()`: gives the argument `name` to `take`, and calls the original.

    Transformers refuses arguments that its models do not know, and its trainers pass whole batches to generate(). A
    copy or a pickle of the model has the original generate(). `around` makes the context in which the model generates,
    from the number of prompts, or None if unknown.

    Example:
        >>> import contextlib
        >>> class Model(nn.Module):
        ...     def generate(self, tokens):
        ...         return tokens + 1
        >>> model, taken = Model(), []
        >>> masked = MaskedGenerate(model, "role_mask", taken.append, contextlib.nullcontext)
        >>> model.generate(1, role_mask="a mask"), taken
        (2, ['a mask'])
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        take: Callable[[Any], object],
        around: Callable[[int | None], AbstractContextManager[object]],
    ) -> None:
        self.model, self.name, self.around = model, name, around
        self.take: Callable[[Any], object] | None = take
        self._before = vars(model).get("generate")
        original = getattr(model, "generate", None)
        if callable(original):
            # the original may be another MaskedGenerate, whose attributes must not be copied
            functools.update_wrapper(self, original, updated=())
            self.original = original
            vars(model)["generate"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the model."""
        if self.take is None:
            return self.original(*args, **kwargs)
        given = kwargs.pop(self.name, None)
        with self.around(_count_prompts(args, kwargs)):
            if given is not None:
                self.take(given)
            return self.original(*args, **kwargs)

    def remove(self) -> None:
        """Restore the model's generate()."""
        self.take = None
        # a later wrapper may still call this one, which then only calls the original, and goes with that
        held = vars(self.model).get("generate")
        while isinstance(held, MaskedGenerate) and held.take is None:
            held = held._before
            if held is None:
                del vars(self.model)["generate"]
            else:
                vars(self.model)["generate"] = held

    def __reduce__(self) -> tuple:
        # used by copy and pickle: the generate() of the class of the copied model
        return getattr, (self.model, "generate")


def _count_prompts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of prompts given to generate(), or None if unknown."""
    given = [*args[:1], *(kwargs[name] for name in PROMPTS if name in kwargs)]
    return next((len(one) for one in given if isinstance(one, Tensor)), None)


_guided: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Guidance]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class _SiteUse:
    """The calls of an attention: whether the latest mask guided one, and their latest is_causal."""

    fired: bool = False
    causal: bool | None = None


@dataclass(eq=False)
class _Use:
    """The mask of the next forward, and its use.

    Attributes:
        mask: The mask, at first the one of all forwards, if there is one.
        excused: Whether it need not guide every attention.
        used: Whether it guided a call.
        over: Whether the forward of that call is over.
        paused: Whether guidance is suspended.
        prompts: Number of prompts that the model generates from.
        biases: Its biases, by causality, dtype and device.
    """

    mask: HeadMask | None = None
    excused: bool = False
    used: bool = False
    over: bool = False
    paused: bool = False
    prompts: int | None = None
    biases: dict[tuple, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _GuidedSite:
    """One attention, the number of its guided calls, and its calls in this thread.

    Its own object, so that layers that torch.compile compiles one by one share a graph.
    """

    site: Site
    calls: int = 0
    here: PerThread[_SiteUse] = field(default_factory=lambda: PerThread(_SiteUse))

    def note_causality(self, _module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
        """Take the is_causal that a call is given."""
        if isinstance(kwargs.get("is_causal"), bool):
            self.here.own.causal = kwargs["is_causal"]


class Guidance(Handle):
    """Heads guided by role masks until `remove()` or the end of a `with` block; made by `guide`.

    Attributes:
        heads: The guided heads.
    """

    def __init__(self, heads: Heads, mask: HeadMask | None, every_forward: bool) -> None:
        super().__init__()
        kinds = {site.kind for site in heads.sites}
        if "cross" in kinds or {"self", "decoder"} <= kinds:
            raise LayoutError(
                f"guide was given attention of the kinds {', '.join(sorted(kinds))}; role masks are square and for one "
                "text: choose with heads.kind('self') or heads.kind('decoder')."
            )
        earlier = _find_earlier(heads)
        self.heads, self.every_forward = heads, every_forward
        self._guided = [_GuidedSite(site) for site in heads.sites]
        self._use = PerThread(_Use)
        for guidance in earlier:
            guidance.remove()
        self._copied = False
        self._forward = ForwardScope(heads.model, self._end_use, self._end_forward)
        with self._attaching():
            self._attach()
            if mask is not None:
                self(mask)
        if every_forward:
            # threads begin with it
            self._use = PerThread(partial(_Use, mask))

    @property
    def calls(self) -> dict[str, int]:
        """Number of guided calls of each attention by name, without recomputations and tokens after a prompt.

        1 where an attention was guided in a compiled model.
        """
        return {guided.site.name: guided.calls for guided in self._guided}

    def __call__(self, mask: HeadMask) -> Self:
        """Set the mask of the next forward.

        Raises:
            MaskError: It is not a HeadMask, or an attention has a different number of heads.
            NotFired: The previous mask did not guide every attention; the new mask is set nevertheless. Or the handle
                is a copy, or was removed, as another `guide` of its attentions does.
        """
        if self._copied:
            raise NotFired(
                "this guidance is a copy or was unpickled, and guides no model; call hw.guide on the heads of the "
                "model that runs."
            )
        if not self.attached:
            raise NotFired(
                "this guidance was removed, by remove(), the end of its block or a later hw.guide, and guides nothing; "
                "call the handle that guides now, or hw.guide again."
            )
        if not isinstance(mask, HeadMask):
            raise MaskError(f"the mask is a {type(mask).__name__}; expected a HeadMask, made by Roles(...)(tables).")
        for site in self.heads.sites:
            if site.num_heads != mask.num_heads:
                raise MaskError(
                    f"the mask is for {mask.num_heads} heads and {site.label} has {site.num_heads}; build it with "
                    f"num_heads={site.num_heads}."
                )
        try:
            self._verify_latest()
        finally:
            # set it even if that raises: the error must not repeat forever
            self._set_mask(mask, excused=is_partial() or drops_layers(self.heads.model))
        return self

    def check(self) -> None:
        """Raise `NotFired` unless masks guided calls, and the latest of this thread every attention in its forward."""
        self._verify_latest()
        if not any(guided.calls for guided in self._guided):
            raise NotFired(
                "no mask was given, or no forward ran with it, so nothing was guided; give each forward one."
            )

    def _verify_latest(self) -> None:
        silent = [guided.site.label for guided in self._guided if not guided.here.own.fired]
        if self._use.own.mask is not None and silent and not self._use.own.excused:
            raise NotFired(
                f"the mask guided no call of {len(silent)} of {len(self.heads)} attentions: {', '.join(silent[:6])}. "
                "Run a forward pass after setting it; if you did, the call bypassed the module."
            )

    def collator(self, roles: Roles, tokenizer: Any, **settings: Any) -> RoleCollator:
        """Return a `RoleCollator`, with its settings, that adds the masks for these heads to batches."""
        longest = find_max_length(self.heads.model)
        return RoleCollator(roles, tokenizer, self.heads.sites[0].num_heads, longest=longest, **settings)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend guidance of this thread inside the block: all heads are regular."""
        before, self._use.own.paused = self._use.own.paused, True
        try:
            yield
        finally:
            self._use.own.paused = before

    def remove(self) -> None:
        """Stop guiding; all heads are regular again."""
        super().remove()
        for site in self.heads.sites:
            if site.module in _guided and _guided[site.module]() is self:
                del _guided[site.module]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_copied": True, "_forward": None, "_use": PerThread(_Use)}

    def __repr__(self) -> str:
        state = "no mask yet" if self._use.own.mask is None else str(self._use.own.mask)
        if not self.attached and not self._copied:
            state = "removed"
        return f"Guidance({len(self.heads)} attentions, {state})"

    def _attach(self) -> None:
        model = self.heads.model
        self._removers.append(self._forward.remove)
        self.hook_before(model, self._take_mask, prepend=True)
        self._removers.append(MaskedGenerate(model, ROLE_MASK, self, self._generating).remove)
        for guided in self._guided:
            site, module = guided.site, guided.site.module
            alone = Heads(model, (site,), self.heads.projections, self.heads.found)
            self._removers.append(bias_heads(alone, partial(self._compute_bias, guided)).remove)
            self.hook_before(module, guided.note_causality)
            _guided[module] = weakref.ref(self)

    def _set_mask(self, mask: HeadMask | None, *, excused: bool = False) -> None:
        use = self._use.own
        use.mask, use.excused, use.biases = mask, excused, {}
        use.used = use.over = False
        for guided in self._guided:
            guided.here.own.fired = False

    def _forget_failed(self) -> None:
        """Drop the mask of a forward that raised: it belongs to no later forward."""
        if not all(guided.here.own.fired for guided in self._guided):
            self._set_mask(self._use.own.mask if self.every_forward else None, excused=True)

    @contextmanager
    def _generating(self, prompts: int | None) -> Iterator[None]:
        self._use.own.prompts = prompts
        try:
            yield
        except BaseException:
            self._forget_failed()
            raise
        finally:
            self._use.own.prompts = None

    def _end_use(self) -> None:
        """Note at the start and the end of a forward that the mask of what ran before is over."""
        self._use.own.over = self._use.own.used

    def _end_forward(self, failed: bool) -> None:
        self._end_use()
        if failed:
            self._forget_failed()

    def _take_mask(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if ROLE_MASK not in kwargs:
            return None
        if not is_recomputing():
            self(kwargs[ROLE_MASK])
        return args, {name: value for name, value in kwargs.items() if name != ROLE_MASK}

    # traced by torch.compile, for which only tensors change from one mask to the next
    def _compute_bias(self, guided: _GuidedSite, site: Site, call: ScoreCall) -> Tensor | None:
        use = self._use.own
        if use.paused:
            return None
        mask = use.mask
        if mask is None:
            raise NotFired(
                f"{site.label} is guided and this forward has no mask; give it one (guidance(mask), or "
                "role_mask=mask in the batch; a mask is of the thread that sets it), or call guidance.paused() or "
                "remove()."
            )
        if call.cached and call.first >= mask.tokens:
            return None
        # part of the model called on its own: each attention may be called once
        again = not self._forward.inside and guided.here.own.fired
        if (again or use.over) and not self.every_forward:
            raise MaskError(
                f"{site.label}: the latest mask belongs to the previous forward; give each forward a mask "
                "(guidance(mask), or role_mask=mask in the batch), or use guide(..., every_forward=True). In "
                "generate(), set use_cache=True."
            )
        require_fit(site, call, mask, self._forward.generating, use.prompts)
        use.used, guided.here.own.fired = True, True
        # a number that grows would be compiled again at every call
        guided.calls = 1 if torch.compiler.is_compiling() else guided.calls + 1
        own = getattr(site.module, "is_causal", False) if guided.here.own.causal is None else guided.here.own.causal
        causal = mask.causal or site.kind == "decoder" or call.causal or bool(own)
        # kept from one compiled graph to the next it would be another input, and one more thing to compile for
        biases = {} if torch.compiler.is_compiling() else use.biases
        key = (causal, call.dtype, call.device)
        if key not in biases:
            biases[key] = _build_bias(mask, causal, call)
        bias = biases[key][..., call.first_key : call.first_key + call.keys]
        # the model masks the unfilled places of a cache
        missing = call.keys - bias.shape[-1]
        return F.pad(bias, (0, missing)) if missing else bias


def _build_bias(mask: HeadMask, causal: bool, call: ScoreCall) -> Tensor:
    """Return the mask as a bias that is 0 in regular heads: the model itself masks padding and causality."""
    bias = mask.to(call.device).additive(call.dtype, causal=causal)
    # one by one: indices in a list would be copied from the host
    for head in set(range(mask.num_heads)).difference(mask.heads):
        bias[:, head].zero_()
    return bias


@dataclass(frozen=True)
class Guide(Method):
    """Heads guided by role masks: `guide`, as a value.

    Attributes:
        mask: The mask of the next forward; None if each batch has one.
        every_forward: Whether a mask is used until the next is set.

    Example:
        >>> Guide(layers=(0,)).every_forward
        False
    """

    mask: HeadMask | None = None
    every_forward: bool = False

    def attach(self, heads: Heads) -> Guidance:
        """Guide the selected heads; errors as of `guide`."""
        return Guidance(self.select(heads), self.mask, self.every_forward)


def guide(heads: Heads, mask: HeadMask | None = None, *, every_forward: bool = False) -> Guidance:
    """Guide heads of a model by role masks; return a handle that sets the next mask and stops the guidance.

    A_h = softmax(Q_h K_h^T / sqrt(e) + M_h) for the heads that have a role, where M_h is 0 where the role allows and
    -inf elsewhere (Wang et al. 2021, eq. 2 and 3). The other heads are unchanged, and so is the model's own masking. In
    causal attention, causality is applied to the masks before the policy for empty rows. Causality is detected from the
    kind of the attention, from `is_causal` and from the scores of a softmax that a module writes out, not from a causal
    `attn_mask`: in that case set `causal` in the mask.

    A mask belongs to one forward of the model, including what activation checkpointing recomputes of it. Tokens
    generated after a prompt have no roles. Give each forward a mask: `model(**batch, role_mask=mask)`, where the
    argument is removed before the model sees it, `model.generate(**batch, role_mask=mask)`, or `guidance(mask)` before
    the call.

    Args:
        heads: Heads of self-attention only. Their scores must be reached, as for `bias_heads`.
        mask: The mask of the next forward; None if each batch has one.
        every_forward: Whether a mask is used until the next is set, for example to measure one batch repeatedly.

    Returns:
        The handle, also a context manager, which raises `NotFired` at its end if nothing was guided. It replaces
        earlier handles of the same attentions.

    Raises:
        MaskError: The mask has another number of heads; in a forward, another number of tokens or sentences, or it
            belongs to the previous forward.
        LayoutError: An attention is cross-attention, or its scores are not reached. Nothing is attached then.
        SettingError: A handle already guides some of these attentions together with others.
        NotFired: A forward has no mask.

    Example:
        >>> import torch
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> mask = hw.roles.Roles(hw.roles.Window(3))(hw.roles.WordTable.split("one two three four"), num_heads=2)
        >>> with guide(hw.find_heads(model)) as guidance:
        ...     _ = model(torch.randn(1, 4, 8), role_mask=mask)
        >>> guidance.calls
        {'self_attn': 1}
    """
    return Guidance(heads, mask, every_forward)


def _find_earlier(heads: Heads) -> list[Guidance]:
    """Return the handles that guide these attentions; raise `SettingError` if one also guides others."""
    modules = {site.module for site in heads.sites}
    found: dict[int, Guidance] = {}
    for site in heads.sites:
        guidance = _guided[site.module]() if site.module in _guided else None
        if guidance is None:
            continue
        if any(other.module not in modules for other in guidance.heads.sites):
            raise SettingError(
                f"{site.label} is guided already, together with attentions that are not in these heads; call "
                "remove() on that handle first."
            )
        found[id(guidance)] = guidance
    return list(found.values())
