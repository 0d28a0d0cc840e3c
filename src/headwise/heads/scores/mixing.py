"""Parameters added to attention: talking heads on any model, and differential attention in decoders of transformers.

Talking heads are mixed by learned matrices before and after the softmax. New parameters are put where the attention's
own are, and are watched until they are trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, LayoutError, NotFired, SettingError
from headwise.heads.adapters import has_peft
from headwise.heads.heads import Heads, Site, require_heads
from headwise.heads.method import Method, Stage
from headwise.heads.view import is_sharded
from headwise.nn.additive import AdditiveAttention
from headwise.nn.difference import CHILD as DIFFERENCE
from headwise.nn.difference import HeadDifference, find_difference
from headwise.nn.hooks import Handle, guard_hooks, require_original
from headwise.nn.mixing import CHILD, HeadMixer, find_mixer
from headwise.nn.multihead import MultiheadAttention


def require_unwrapped(heads: Heads, site: Site, old: nn.Module, what: str, call: str) -> None:
    """Raise `LayoutError` if an engine around the model would train new parameters in each process separately."""
    if heads.replicated or getattr(old, "_is_fsdp_managed_module", False):
        engine = "DistributedDataParallel" if heads.replicated else "FSDP"
        raise LayoutError(
            f"{site.label}: the model is wrapped by {engine}, which exchanges no gradients of parameters added later, "
            f"so each process would train {what} of its own; call {call} first and wrap the model afterwards."
        )


class RequireTrained:
    """A forward pre-hook of a new module: notes its calls, and raises where training would leave its start as it is.

    peft freezes all that it does not know. A module whose parameters were loaded, or trained before, may be frozen.
    `otherwise` is another remedy under peft.
    """

    def __init__(self, name: str, what: str, otherwise: str = "") -> None:
        self.name, self.what, self.otherwise, self.fresh = name, what, otherwise, True
        self.called = False

    def watch(self, module: nn.Module) -> None:
        """Begin to look at a module."""
        module.register_forward_pre_hook(self)
        module.register_load_state_dict_post_hook(self.note_loaded)

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Raise `SettingError` where what comes before the module is trained and the module never was."""
        self.called = True
        if not self.fresh or not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            self.fresh = False
        elif isinstance(arguments[0], Tensor) and arguments[0].requires_grad:
            raise SettingError(
                f"{self.name}: its new {self.what} is frozen, while what comes before it is trained; under peft, name "
                f"it: LoraConfig(modules_to_save=[{self.name!r}, ...]){f', {self.otherwise}' * bool(self.otherwise)}. "
                f"Elsewhere: {self.what}.requires_grad_(True)."
            )

    def note_loaded(self, *_: Any) -> None:
        """Note that the parameters are loaded from a state."""
        self.fresh = False

    def __getstate__(self) -> dict[str, Any]:
        # for copy and pickle
        return {**vars(self), "called": False}


def was_called(module: nn.Module) -> bool:
    """Return whether a new module, which `RequireTrained` watches, was called.

    >>> was_called(nn.Linear(2, 2))
    False
    """
    return any(isinstance(hook, RequireTrained) and hook.called for hook in module._forward_pre_hooks.values())


# Attributes of attentions that compute scores or weights in more than one step: sinks, caps, learned biases.
UNPAIRED = ("sinks", "attn_logit_softcapping", "softcap", "position_bias")


def pair_decoder_heads(site: Site, layer: int = 1, *, second: bool = True) -> None:
    """Turn a decoder's attention with H query and G key/value heads into differential attention with H / 2 and G / 2.

    Query heads 2g and 2g + 1 are the first and second map of head g, and so are key heads; it has the values of both.
    Under grouped queries, head g has the keys and values of the pair g // (H / G), as in the released code for fused
    kernels (Ye et al. 2024). Rotary positions and norms act within each map as before. `HeadDifference` has 4 e + 2 e
    new parameters, which `from_pretrained` passes over. For a model that is yet to be trained; find heads, and build
    the optimizer, afterwards. Copies of the model attend likewise.

    Args:
        site: A self-attention of a causal model of transformers with projections of their own (Llama, Qwen3, Mistral).
        layer: Number of its layer, from 1.
        second: As in `HeadDifference`.

    Raises:
        LayoutError: It is something else, has an odd number of heads, is paired or mixed already, has adapters, or
            attends with sinks, a cap on its scores or a scale of its own.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from headwise.heads.find import find_heads
        >>> sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        >>> model = LlamaModel(LlamaConfig(vocab_size=9, num_attention_heads=4, num_key_value_heads=2, **sizes))
        >>> pair_decoder_heads(find_heads(model).sites[0])
        >>> [(site.num_heads, site.key_value_heads, site.head_size) for site in find_heads(model)]
        [(2, 1, 8)]
    """
    module = site.module
    given = f"{site.label} ({type(module).__name__})"
    if not reads_pairs(site):
        raise LayoutError(
            f"{given}: heads are paired in torch's multi-head attention and in causal self-attention of transformers "
            "with projections of their own, such as Llama's."
        )
    if find_difference(module) is not None or find_mixer(module) is not None:
        raise LayoutError(f"{given} has paired or talking heads already; pair the heads of a new model.")
    if has_peft(site.model):
        raise LayoutError(f"{given} has adapters of peft, and differential attention is for a model yet to be trained.")
    if site.num_heads % 2 or site.key_value_heads % 2:
        raise LayoutError(
            f"{given} has {site.num_heads} query and {site.key_value_heads} key/value heads; expected even numbers, to "
            "be paired."
        )
    own = [name for name in UNPAIRED if getattr(module, name, None) is not None]
    scaling, common = getattr(module, "scaling", None), site.head_size**-0.5
    if isinstance(scaling, float) and not math.isclose(scaling, common):
        own.append(f"scores times {scaling:.6g} instead of {common:.6g}")
    if own:
        raise LayoutError(
            f"{given} attends with {', '.join(own)}, which differential attention does not have; pair the heads of "
            "another model, such as a Llama."
        )
    from headwise.heads.scores.huggingface import require_reached  # needs transformers, which found the site

    require_reached(module)
    guard_hooks()
    weight = next(module.parameters())
    difference = HeadDifference(2 * site.head_size, layer, second=second)
    module.add_module(DIFFERENCE, difference.to(device=weight.device, dtype=weight.dtype))
    module.register_forward_pre_hook(_keep_paired)


def reads_pairs(site: Site) -> bool:
    """Return whether a site is causal self-attention of transformers whose heads can be paired."""
    return (
        site.layout == "separate"
        and site.kind in ("self", "decoder")
        and getattr(site.module, "is_causal", False)
        and any(base.__module__.startswith("transformers.") for base in type(site.module).__mro__)
        and {head_slice.head_size for head_slice in site.slices} == {site.head_size}
    )


def _keep_paired(module: nn.Module, _arguments: tuple) -> None:
    from headwise.heads.scores.huggingface import require_reached

    require_reached(module)


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


CONNECTION = "_headwise_connection"


@dataclass(eq=False)
class _Connection:
    """What makes a module that computes its scores elsewhere attend with its mixer; a copy of the module has `None`."""

    check: Callable[[], object]

    def __reduce__(self) -> tuple:
        # for copy and pickle: type(None)() is None
        return type(None), ()


class HeadMixing(Handle):
    """Talking heads in a model, until `remove()` or the end of a `with` block; returned by `mix_heads`.

    Attributes:
        heads: The sites.
        mixers: The matrices of each site, by its name.
    """

    def __init__(self, heads: Heads, *, logits: bool, weights: bool) -> None:
        require_heads(heads)
        _require_one(logits, weights)
        super().__init__()
        self.heads = heads
        self.mixers: dict[str, HeadMixer] = {}
        if has_peft(heads.model):
            raise LayoutError(
                f"{type(heads.model).__name__} holds adapters of peft, which would not save the matrices with them; "
                "call hw.mix_heads on the base model, and then get_peft_model with "
                f"LoraConfig(modules_to_save=[{CHILD!r}])."
            )
        for site in heads:
            _require_mixable(site, logits=logits, weights=weights)
            require_unwrapped(heads, site, site.module, "matrices", "hw.mix_heads")
        guard_hooks()
        with self._attaching():
            for site in heads:
                end, check = site.reach_scores(self._removers.append).mix()
                self._removers.append(end)
                self.mixers[site.name] = self._attach(site, check, logits=logits, weights=weights)

    @property
    def added(self) -> tuple[nn.Module, ...]:
        """The matrices of each attention."""
        return tuple(self.mixers.values())

    def check(self) -> None:
        """Raise `NotFired` unless the heads of every attention were mixed in some call."""
        silent = [name or "the model" for name, mixer in self.mixers.items() if not was_called(mixer)]
        if silent or not self.mixers:
            raise NotFired(
                f"no call of {len(silent)} of {len(self.heads)} attentions had its heads mixed: "
                f"{', '.join(silent[:6])}. Run a forward pass of the model that mix_heads was called on, not of a copy."
            )

    def remove(self) -> None:
        """Have the model attend as before; the matrices leave it.

        Raises:
            HeadwiseError: An attention no longer has the matrices of this handle. Nothing is changed then.
        """
        for site in self.heads if self.attached else ():
            mixer = self.mixers.get(site.name)
            if mixer is not None and find_mixer(site.module) is not mixer:
                raise HeadwiseError(
                    f"{site.label} no longer has the matrices of this mix_heads(): they were replaced or removed since."
                )
        super().remove()

    def _attach(self, site: Site, check: Callable[[], object], *, logits: bool, weights: bool) -> HeadMixer:
        module, kept = site.module, _find_own(site.module)
        mixer = _make(site, logits=logits, weights=weights) if kept is None else kept
        module.register_module(CHILD, mixer)
        module.__dict__[CONNECTION] = _Connection(check)
        if not isinstance(module, MultiheadAttention):
            # stays in copies, which would attend without their matrices; torch's attention itself looks for them
            module.register_forward_pre_hook(_require_connected)

        def stop() -> None:
            hooks = module._forward_pre_hooks
            for number in [number for number, hook in hooks.items() if hook is _require_connected]:
                del hooks[number]
            module._modules.pop(CHILD, None)
            module.__dict__.pop(CONNECTION, None)

        self._removers.append(stop)
        return mixer

    def _describe(self) -> str:
        return f"{next(iter(self.mixers.values()), '')} in {len(self.heads)} sites"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "mixers": {}}


@dataclass(frozen=True)
class MixHeads(Method):
    """Talking heads: `mix_heads`, as a value.

    Attributes:
        logits: Whether scores are mixed, before the masks.
        weights: Whether weights are mixed, before dropout.

    Raises:
        SettingError: Neither is mixed; or as of `Method`.

    Example:
        >>> MixHeads(weights=False).logits
        True
    """

    logits: bool = True
    weights: bool = True
    stage: ClassVar[Stage] = "build"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one(self.logits, self.weights)

    def attach(self, heads: Heads) -> HeadMixing:
        """Let the heads of each attention talk; errors as of `mix_heads`."""
        return HeadMixing(self.select(heads), logits=self.logits, weights=self.weights)


def mix_heads(heads: Heads, *, logits: bool = True, weights: bool = True) -> HeadMixing:
    """Let the heads of each attention talk (Shazeer et al. 2020); returns a handle that undoes it.

    With J_h = Q_h K_h^T / sqrt(e), two learned matrices [H, H] for each attention and the masks of the model:

        L_g = sum_h P_l[h, g] J_h,  W_g = softmax(L_g + mask),  U_g = sum_h P_w[h, g] W_g,  O_g = dropout(U_g) V_g

    P_l and P_w start as the identity. They are parameters of the model, `<attention>.head_mixer.logits` and `.weights`:
    build the optimizer and wrap the model for several processes afterwards. Masks, biases and attention sinks come
    after P_l, caps on scores before it; a query without a key has O_g = 0. `Taps` read W, whose rows sum to 1. No fused
    kernel is used: [B, H, Q, K] is kept for the backward pass, at 2 H^2 more multiplications for each query and key.

    `from_pretrained` passes over saved matrices: call `mix_heads` on the loaded model, then load the tensors. Under
    peft, call `mix_heads` first, with `LoraConfig(modules_to_save=["head_mixer"])`. A copy of a model that does not
    attend by torch's module refuses to run until `mix_heads` is called on it, which keeps its matrices.

    Args:
        heads: The sites. Their scores must be reached, as for `bias_heads`.
        logits: Whether scores are mixed, before the masks; a softmax that a module writes out has these in it already.
        weights: Whether weights are mixed, before dropout.

    Raises:
        SettingError: `heads` is something else, or neither is mixed.
        LayoutError: The scores of a site are not reached, or it has one head, or is mixed already; or the model is
            wrapped, divided over processes or has adapters. Nothing is changed then.

    Example:
        >>> import torch
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> x = torch.randn(3, 5, 8)
        >>> before = model(x)
        >>> mixing = mix_heads(hw.find_heads(model))
        >>> torch.allclose(model(x), before, atol=1e-6), mixing.mixers["self_attn"].logits.shape
        (True, torch.Size([2, 2]))
    """
    return HeadMixing(heads, logits=logits, weights=weights)


def _require_one(logits: bool, weights: bool) -> None:
    if not (logits or weights):
        raise SettingError("heads are mixed by neither matrix; expected logits, weights or both to be True.")


def _require_connected(module: nn.Module, _args: tuple) -> None:
    require_original(module)
    connection = module.__dict__.get(CONNECTION)
    if connection is None:
        raise NotFired(
            f"{type(module).__name__} holds the matrices of hw.mix_heads and does not attend with them: it is a copy "
            "of the module they were made for, or was unpickled. Call hw.mix_heads(hw.find_heads(model)) on the new "
            "model, which keeps its matrices."
        )
    connection.check()


def _require_mixable(site: Site, *, logits: bool, weights: bool) -> None:
    module, kept = site.module, _find_own(site.module)
    given = f"{site.label} ({type(module).__name__})"
    own = isinstance(module, MultiheadAttention) and type(module).forward is not MultiheadAttention.forward
    if site.scores is None or isinstance(module, AdditiveAttention) or own:
        raise LayoutError(
            f"{given}: heads are mixed in torch.nn.MultiheadAttention, headwise.nn.MultiheadAttention and modules that "
            "call torch's scaled_dot_product_attention, a softmax or the attention interface of transformers; not "
            f"in one {'whose forward is its own' if own else 'that computes its scores otherwise'}."
        )
    if logits and site.scores(module).written:
        raise LayoutError(
            f"{given} writes its softmax out, where scores have the masks in them already and cannot be mixed before "
            "these; pass logits=False to mix weights, or have it call torch's scaled_dot_product_attention."
        )
    if site.divided or any(is_sharded(parameter) for parameter in module.parameters()):
        raise LayoutError(
            f"{given}: its heads or weights are divided over processes, and the matrices are not; call hw.mix_heads "
            "first, or leave this attention out of the plan of parallelize_module."
        )
    if find_difference(module) is not None:
        raise LayoutError(f"{given} is differential attention, whose maps are subtracted in pairs; mix another one.")
    if site.num_heads < 2:
        raise LayoutError(f"{given} has one head; expected two or more to mix.")
    if hasattr(module, CHILD) and kept is None:
        raise LayoutError(f"{given} has an attribute {CHILD!r} of its own; rename it first.")
    if kept is not None and module.__dict__.get(CONNECTION) is not None:
        raise LayoutError(f"{given} has talking heads already; call remove() on the handle of the first mix_heads().")
    if kept is not None and (kept.logits is not None, kept.weights is not None) != (logits, weights):
        raise LayoutError(
            f"{given} is a copy that holds matrices ({kept.extra_repr()}); call mix_heads with the same logits and "
            "weights."
        )


def _find_own(module: nn.Module) -> HeadMixer | None:
    held = find_mixer(module)
    return held if isinstance(held, HeadMixer) else None


def _make(site: Site, *, logits: bool, weights: bool) -> HeadMixer:
    """Return new matrices on the device and in the dtype of the site's weights."""
    mixer = HeadMixer(site.num_heads, logits=logits, weights=weights)
    match_placement(mixer, site.slices[0].owner)
    RequireTrained(f"{site.name}.{CHILD}".removeprefix("."), "mixer of heads").watch(mixer)
    return mixer.train(site.module.training)
