"""A model's own generate(), which takes the mask of its prompts from the batch as a forward does.

Owns `MaskedGenerate`. Must not know masks, or what is done with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

# What transformers calls the prompts.
PROMPTS = ("inputs", "input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")


class MaskedGenerate:
    """Stands in the place of a model's generate() until `remove()`: takes one argument out and calls the old one.

    Transformers refuses arguments that its models do not know, and its trainers hand whole batches to generate(). A
    copy or a pickle of the model has its own generate() again.

    Args:
        model: The model; one without generate() stays as it is.
        name: The name of the argument.
        take: What is called with its value, before the model generates.
        around: What the model generates inside of; it is given the number of prompts, None where that is not known.

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
            # the attributes of another one of these are not ours
            functools.update_wrapper(self, original, updated=())
            self.original = original
            vars(model)["generate"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does."""
        if self.take is None:
            return self.original(*args, **kwargs)
        given = kwargs.pop(self.name, None)
        with self.around(_prompts(args, kwargs)):
            if given is not None:
                self.take(given)
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


def _prompts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return how many prompts generate() was given.

    >>> import torch
    >>> _prompts((), {"input_ids": torch.ones(3, 5)}), _prompts((torch.ones(2, 4),), {}), _prompts((), {})
    (3, 2, None)
    """
    given = [*args[:1], *(kwargs[name] for name in PROMPTS if name in kwargs)]
    return next((len(one) for one in given if isinstance(one, Tensor)), None)
