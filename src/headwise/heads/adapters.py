"""The structure of peft: adapters that add to a weight, when it is W + B A, and which copy of a module is called."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter of a LoRA layer: it adds s B A to the weight W of the layer inside (Hu et al. 2021, section 4.1).

    Attributes:
        name: Its name in the layer, for example "default".
        down: The module whose weight is A, [r, d_in].
        up: The module whose weight is B, [d_out, r].
        scaling: s, lora_alpha / r or lora_alpha / sqrt(r).
    """

    name: str
    down: nn.Module = field(repr=False)
    up: nn.Module = field(repr=False)
    scaling: float

    @property
    def first(self) -> nn.Parameter:
        """A, [r, d_in]."""
        return _get_weight(self.down)

    @property
    def second(self) -> nn.Parameter:
        """B, [d_out, r]."""
        return _get_weight(self.up)

    @property
    def factors(self) -> dict[str, nn.Parameter]:
        """A and B by their names in the layer."""
        return {f"lora_A.{self.name}.weight": self.first, f"lora_B.{self.name}.weight": self.second}

    @property
    def trained(self) -> bool:
        """Whether both require a gradient."""
        return self.first.requires_grad and self.second.requires_grad


def has_peft(model: nn.Module) -> bool:
    """Whether a model holds layers of peft, which freezes what is not named in `modules_to_save`."""
    return "peft" in sys.modules and any(is_peft_layer(module) or is_peft_model(module) for module in model.modules())


def is_peft_layer(module: nn.Module) -> bool:
    """Whether a module is a layer with adapters of peft itself; others may have the same structure."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def is_peft_model(module: nn.Module) -> bool:
    """Whether `save_pretrained` of a module writes adapters alone: of a PeftModel, or of transformers with adapters."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and (
        isinstance(module, peft.PeftModel) or getattr(module, "_hf_peft_config_loaded", False) is True
    )


def has_adapters(layer: nn.Module) -> bool:
    """Whether a module holds what every form of LoRA names lora_..."""
    return any(name.startswith("lora_") for name in (*layer._modules, *layer._parameters))


def find_saved(module: nn.Module) -> str | None:
    """Return the path of what peft's wrapper of a module to save calls: the active copy or the original.

    None where a module is not such a wrapper.
    """
    saved = getattr(module, "modules_to_save", None)
    if not isinstance(saved, nn.ModuleDict) or "original_module" not in module._modules:
        return None
    active: Any = getattr(module, "active_adapters", ())
    used = None if getattr(module, "disable_adapters", False) else next((a for a in active if a in saved), None)
    return "original_module" if used is None else f"modules_to_save.{used}"


def get_called(module: nn.Module) -> nn.Module:
    """Return what a call of a module reaches: the copy that peft's wrapper of a module to save calls, else itself."""
    place = find_saved(module)
    return module if place is None else module.get_submodule(place)


def list_adapters(layer: nn.Module) -> tuple[Adapter, ...]:
    """Return the adapters that the next call of a LoRA layer adds: the active ones; none if merged or disabled.

    The layer has the structure of peft's: adapters by name in `lora_A`, `lora_B` and `scaling`. Ask
    `find_lora_obstacle` first.
    """
    if getattr(layer, "disable_adapters", False) or list_merged(layer):
        return ()
    scaling: Any = layer.scaling
    downs, ups = layer._modules["lora_A"], layer._modules["lora_B"]
    assert isinstance(downs, nn.ModuleDict)  # as `find_lora_obstacle` found them
    assert isinstance(ups, nn.ModuleDict)
    return tuple(Adapter(name, downs[name], ups[name], float(scaling[name])) for name in list_active(layer))


def list_active(layer: nn.Module) -> list[str]:
    """Return the names of a LoRA layer's active adapters; all where the layer does not tell."""
    held: Any = layer._modules["lora_A"]
    active = getattr(layer, "active_adapters", None)
    if active is None:
        return list(held)
    return [name for name in ([active] if isinstance(active, str) else active) if name in held]


def list_merged(layer: nn.Module) -> list[str]:
    """Return the names of the adapters that are merged into a layer's weight."""
    return list(getattr(layer, "merged_adapters", ()))


def find_lora_obstacle(layer: nn.Module) -> str | None:
    """Return why the weight under a LoRA layer is not W + sum_a s_a B_a A_a, a clause; None where it is."""
    first, second = layer._modules.get("lora_A"), layer._modules.get("lora_B")
    scaling = getattr(layer, "scaling", None)
    if not (
        isinstance(first, nn.ModuleDict)
        and isinstance(second, nn.ModuleDict)
        and isinstance(scaling, Mapping)
        and all(name in second and name in scaling for name in first)
        and all(_holds_matrix(part[name]) for name in list_active(layer) for part in (first, second))
    ):
        return (
            f"is the base of a {type(layer).__module__}.{type(layer).__name__}, whose adapter is not a plain A and B, "
            "so that the weight it computes with is not known; merge the adapter first"
        )
    # variants of peft, and DoRA before they had a name
    magnitudes: Any = layer._modules.get("lora_magnitude_vector") or ()
    variants = dict.fromkeys(magnitudes, "DoRA")
    variants |= {name: type(kind).__name__ for name, kind in getattr(layer, "lora_variant", {}).items()}
    for name in (name for name in list_active(layer) if name in variants):
        return (
            f"is the base of a LoRA layer whose adapter {name!r} is a variant ({variants[name]}), so that its heads "
            "are not rows of W + B A; use plain LoRA, or merge the adapter first"
        )
    if list_merged(layer) and getattr(layer, "disable_adapters", False):
        return (
            "has adapters merged that are disabled, which its next call takes out of it; enable or unmerge them first"
        )
    return None


def find_untrained(layer: nn.Module, weight: nn.Parameter) -> str | None:
    """Return why forces on the effective weight under a LoRA layer cannot be carried to A and B, a clause; or None."""
    merged, adapters = list_merged(layer), list_adapters(layer)
    names = ", ".join(map(repr, merged or list_active(layer)))
    if merged:
        return f"has the adapters {names} merged into it, which are not trained then; call unmerge_adapter() first"
    if not adapters:
        held = ", ".join(map(repr, layer.get_submodule("lora_A")._modules))
        disabled = "disabled" if getattr(layer, "disable_adapters", False) else "inactive"
        return f"is the base of a LoRA layer whose adapters ({held}) are {disabled}; call set_adapter() first"
    if any(hasattr(one, "device_mesh") for one in (weight, *(f for a in adapters for f in a.factors.values()))):
        return (
            "or an adapter of it is sharded over processes (DTensor), where no force is carried to A and B; train with "
            "DistributedDataParallel"
        )
    if weight.requires_grad:
        return "is trained beside its LoRA adapters; freeze it, or merge the adapters"
    if any(adapter.first.requires_grad != adapter.second.requires_grad for adapter in adapters):
        return f"is the base of a LoRA layer of which A or B alone is trained (adapters {names}); train both"
    if not any(adapter.trained for adapter in adapters):
        return f"is the base of a LoRA layer whose adapters {names} are frozen; load them with is_trainable=True"
    return None


def _get_weight(module: nn.Module) -> nn.Parameter:
    weight = module._parameters["weight"]
    assert weight is not None  # `find_lora_obstacle` found a matrix there
    return weight


def _holds_matrix(part: nn.Module) -> bool:
    weight = part._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.is_floating_point()
