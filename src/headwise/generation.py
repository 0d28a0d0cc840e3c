"""A model's own generate(), which takes the mask of its prompts from the batch as a forward does.

Owns `MaskedGenerate`. Must not know masks, or what is done with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["MaskedGenerate"]


class MaskedGenerate:
    """Stands in the place of a model's generate() until `remove()`: takes one argument out and calls the old one.

    Transformers refuses arguments that its models do not know, and its trainers hand whole batches to generate(). A
    copy or a pickle of the model has its own generate() again.

    Args:
        model: The model; one without generate() stays as it is.
        name: The name of the argument.
        take: What is called with its value, before the model generates.

    Example:
        >>> class Model(nn.Module):
        ...     def generate(self, tokens):
        ...         return tokens + 1
        >>> model, taken = Model(), []
        >>> masked = MaskedGenerate(model, "role_mask", taken.append)
        >>> model.generate(1, role_mask="a mask"), taken
        (2, ['a mask'])
    """

    def __init__(self, model: nn.Module, name: str, take: Callable[[Any], object]) -> None:
        self.model, self.name = model, name
        self.take: Callable[[Any], object] | None = take
        self._before = vars(model).get("generate")
        original = getattr(model, "generate", None)
        if callable(original):
            # the attributes of another one of these are not ours
            functools.update_wrapper(self, original, updated=())
            self.original = original
            vars(model)["generate"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does."""
        if self.take is not None and self.name in kwargs:
            self.take(kwargs.pop(self.name))
        return self.original(*args, **kwargs)

    def remove(self) -> None:
        """Give the model its own generate() back."""
        self.take = None
        # what was put in this place later still calls this, which does nothing any more
        if vars(self.model).get("generate") is self:
            del vars(self.model)["generate"]
            if self._before is not None:
                vars(self.model)["generate"] = self._before

    def __reduce__(self) -> tuple:
        # asked for by copy and by pickle: the generate() that the class of the copied model has
        return getattr, (self.model, "generate")
