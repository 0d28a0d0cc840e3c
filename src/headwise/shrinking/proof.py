"""The proof that a model with fewer heads computes what it should: with removed heads, what it did without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise.errors import HeadwiseError, LayoutError, NotFired, SettingError
from headwise.heads.experiments.arrangement import KNOWN
from headwise.heads.heads import Heads, Site
from headwise.heads.record import evaluating, list_tensors, record, restored

# Largest difference, relative to the largest output: matrix products of another width round apart.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# Numbers that are compared at once.
PART = 1 << 20
# Attentions of transformers that our tests prune and compare with ablation, with all their parameters.
_NAMES = """
AlbertAttention BartAttention BertCrossAttention BertSelfAttention CLIPAttention CanineSelfAttention
ChameleonAttention ClvpSelfAttention CodeGenAttention CohereAttention DeepseekV2Attention DeepseekV3Attention
DisentangledSelfAttention DistilBertSelfAttention ElectraSelfAttention FalconAttention FunnelRelMultiheadAttention
GPT2Attention GPTJAttention GPTNeoXAttention Gemma3nAudioAttention GemmaAttention GptOssAttention LlamaAttention
MarianAttention MiMoV2FlashAttention MistralAttention ModernBertAttention MoonshineAttention PerceiverSelfAttention
Phi3Attention Qwen2Attention Qwen3Attention RoFormerSelfAttention RobertaSelfAttention T5Attention ViTAttention
Wav2Vec2Attention WhisperAttention XGLMAttention
"""
TESTED = frozenset(_NAMES.split())


@dataclass(frozen=True)
class Change:
    """How messages name a change: what was done, what the result should compute, why it may not, and what to do."""

    done: str
    like: str
    left: str
    remedy: str


PRUNED = Change(
    "these heads removed", "{} with them ablated", "something holds heads that was not cut", "use hw.ablate"
)
SHRUNK = Change(
    "these heads and neurons removed",
    "{} with them zeroed",
    "something holds heads or neurons that was not cut",
    "remove heads alone, with hw.prune",
)
MERGED = Change(
    "these heads merged",
    "{} with each of them in the place of several",
    "its code reads key and value heads in a way that is not known",
    "leave its heads as they are",
)


@dataclass(frozen=True, eq=False)
class Expected:
    """The outputs of a model before its weights are cut, its coarsest precision in that call, and the inputs."""

    outputs: list[Tensor]
    precision: torch.dtype
    inputs: Sequence | Mapping


class _Precision(TorchDispatchMode):
    """Inside the block, the coarsest precision of the tensors that are computed is noted."""

    coarsest = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
                self.coarsest = max(self.coarsest, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return found


def expect(model: nn.Module, inputs: Sequence | Mapping) -> Expected:
    """Return what a model computes now, in evaluation mode, and how precisely.

    Raises:
        HeadwiseError: It cannot be run on these inputs, or computes NaN.
    """
    name = type(model).__name__
    try:
        with _Precision() as precision:
            outputs = run(model, inputs)
    except HeadwiseError:
        raise
    except Exception as error:
        raise HeadwiseError(
            f"{name} could not be run on the given inputs ({type(error).__name__}: {_shorten(error)}); give "
            "what the model itself takes: a mapping of names, or a sequence of positional arguments."
        ) from error
    if any(bool(tensor.isnan().any()) for tensor in outputs):
        raise HeadwiseError(
            f"{name} computes NaN on the given inputs, so that nothing can be compared; give inputs on which it is "
            "finite, without sequences of padding alone."
        )
    return Expected(outputs, precision.coarsest, inputs)


def expect_ablated(
    heads: Heads, removed: Mapping[Site, Sequence[int]], inputs: Sequence | Mapping | None
) -> Expected | None:
    """Return what a model computes without the heads removed from each site; None if no call is needed to know it.

    Without inputs it is called with those that its class gives (`dummy_inputs`).

    Raises:
        SettingError: A call is needed, and none is known.
        NotFired: A site was not reached by the call.
    """
    if inputs is not None:
        return _expect_ablated(heads, removed, inputs)
    doubt = _find_doubt(heads, removed)
    if doubt is None:
        return None
    dummy = find_dummy(heads.model)
    try:
        if dummy is not None:
            return _expect_ablated(heads, removed, dummy)
    except HeadwiseError:
        # they need not reach every attention
        pass
    raise SettingError(
        f"{doubt}; only a call shows whether the model works with fewer heads: pass inputs=..., what it is called with."
    )


def _expect_ablated(heads: Heads, removed: Mapping[Site, Sequence[int]], inputs: Sequence | Mapping) -> Expected:
    outputs = [(site.output, gone) for site, gone in removed.items() if site.output is not None]
    with (
        restored([output.parameter.data for output, _ in outputs]),
        record([site.module for site in removed]) as calls,
    ):
        for output, gone in outputs:
            # O_h W_O = 0 is the same as O_h = 0
            output.of(output.parameter.data)[list(gone)] = 0.0
        expected = expect(heads.model, inputs)
    silent = [site.label for site in removed if site.module not in {call.module for call in calls}]
    if silent:
        raise NotFired(
            f"{', '.join(silent[:6])} was not reached by a forward pass on the given inputs; give inputs that reach it."
        )
    return expected


def find_dummy(model: nn.Module) -> Mapping[str, Any] | None:
    """Return the inputs that a class of transformers gives for a call; None where it cannot be called with them."""
    dummy: Any = getattr(model, "dummy_inputs", None)
    if not isinstance(dummy, Mapping):
        return None
    device = next(model.parameters()).device
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in dummy.items()}
    try:
        run(model, inputs)
    except Exception:
        # they are for models of text
        return None
    return inputs


def _find_doubt(heads: Heads, removed: Mapping[Site, Sequence[int]]) -> str | None:
    """Return why removing these heads may not be ablating them; None if it is known to be."""
    if heads.left_out:
        return (
            f"attentions of the {type(heads.model).__name__} were left out of these heads (exclude=...), and may read "
            "what is removed"
        )
    for site in removed:
        kind, origin = type(site.module).__name__, type(site.module).__module__
        if not origin.startswith(KNOWN) or "forward" in vars(site.module):
            return f"{site.label} is a {kind} of {origin}"
        if origin.startswith("transformers.") and kind not in TESTED:
            return f"{site.label} is a {kind}, which is not among the attentions that pruning is tested on"
    places = Counter(
        id(parameter)
        for _, module in heads.model.named_modules(remove_duplicate=False)
        for parameter in module._parameters.values()
        if parameter is not None
    )
    views = [view for site in heads.found for view in (*site.parts, site.output) if view is not None]
    shared = next((view.name for view in views if places[id(view.owner._parameters.get(view.attribute))] > 1), None)
    return None if shared is None else f"{shared} is read by several layers"


@torch.no_grad()
def run(model: nn.Module, inputs: Sequence | Mapping) -> list[Tensor]:
    """Return the floating-point tensors that a model returns in evaluation mode."""
    args = () if isinstance(inputs, Mapping) else tuple(inputs)
    named: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {}
    with evaluating(model), torch.random.fork_rng(devices=[]):
        return [tensor for tensor in list_tensors(model(*args, **named)) if tensor.is_floating_point()]


def require_equal(model: nn.Module, expected: Expected, change: Change) -> None:
    """Raise `LayoutError` unless the outputs of the model are the expected ones.

    Attention weights and cached keys, which have fewer heads now, are not compared.
    """
    name = type(model).__name__
    try:
        found = run(model, expected.inputs)
    except HeadwiseError:
        raise
    except Exception as error:
        raise LayoutError(
            f"{name} cannot run with {change.done} ({type(error).__name__}: {_shorten(error)}): its code counts on the "
            f"heads it was built with. The model is as it was; {change.remedy}."
        ) from error
    same = [(a, b) for a, b in zip(expected.outputs, found, strict=False) if a.shape == b.shape]
    if not same or len(expected.outputs) != len(found):
        raise LayoutError(f"{name} returns other tensors with {change.done}; the model is as it was.")
    for before, after in same:
        largest, apart = _measure(before, after)
        # written so that NaN is refused too
        if not apart <= TOLERANCE.get(expected.precision, 2e-1) * max(largest, 1e-6):
            raise LayoutError(
                f"{name} with {change.done} is not {change.like.format(name)}: outputs of up to {largest:.3g} are "
                f"{apart:.3g} apart, so {change.left}. The model is as it was; {change.remedy}."
            )


def _measure(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the largest finite size before, and the largest difference; a part at a time, as logits are large."""
    sizes, differences = [before.new_zeros(1)], [before.new_zeros(1)]
    for first, second in zip(before.flatten().split(PART), after.flatten().split(PART), strict=True):
        sizes.append(first.where(first.isfinite(), 0.0).abs())
        # infinities are the same or not
        differences.append(torch.where(first == second, 0.0, (first - second).abs()))
        sizes, differences = [torch.cat(sizes).amax()[None]], [torch.cat(differences).amax()[None]]
    return float(sizes[0]), float(differences[0])


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
