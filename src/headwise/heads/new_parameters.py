"""What a method that adds parameters to a model requires, so that they are trained as one and not left as they are."""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, SettingError
from headwise.heads.heads import Heads, Site


def require_unwrapped(heads: Heads, site: Site, old: nn.Module, what: str, call: str) -> None:
    """Raise `LayoutError` if an engine around the model would train new parameters in each process separately.

    Args:
        heads: The heads that a method is given.
        site: One of their attentions.
        old: Its output projection.
        what: What has the parameters, with its article.
        call: The function that adds them.
    """
    if heads.replicated or getattr(old, "_is_fsdp_managed_module", False):
        engine = "DistributedDataParallel" if heads.replicated else "FSDP"
        raise LayoutError(
            f"{site.label}: the model is wrapped by {engine}, which exchanges no gradients of parameters added later, "
            f"so each process would train {what} of its own; call {call} first and wrap the model afterwards."
        )


class RequireTrained:
    """A forward pre-hook of a new module: notes its calls, and raises where training would leave its start as it is.

    peft freezes all that it does not know. A module whose parameters were loaded, or trained before, may be frozen.

    Args:
        name: Name of the module in the model.
        what: What it is.
        otherwise: What else can be done under peft.

    Attributes:
        called: Whether the module was called.
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
