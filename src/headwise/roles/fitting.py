"""How role masks fit a model: the calls of its attention, its table of positions, and its generate()."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import LayoutError, MaskError
from headwise.heads.heads import Heads
from headwise.heads.site import Site
from headwise.masks.head_mask import HeadMask
from headwise.nn.scores import ScoreCall

# What models call a table of positions.
POSITIONS = ("position", "wpe")
# What transformers calls the prompts.
PROMPTS = ("inputs", "input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")


def require_fitting(site: Site, call: ScoreCall, mask: HeadMask, generating: bool, prompts: int | None) -> None:
    """Raise `MaskError` unless the mask is of the sentences and the tokens of this call.

    Args:
        site: The site, to be named.
        call: The call.
        mask: The mask.
        generating: Whether the call is generate()'s, which may have several beams a prompt.
        prompts: How many prompts generate() was given; None where that is not known.
    """
    if prompts is not None and prompts != mask.batch:
        raise MaskError(
            f"the mask has {mask.batch} sentences and generate() was given {prompts} prompts; make the mask of the "
            "prompts."
        )
    beams = generating and call.batch % mask.batch == 0
    if call.batch != mask.batch and not beams:
        raise MaskError(
            f"{name_of(site)}: the mask has {mask.batch} sentences and the batch {call.batch}; make the mask of the "
            "batch that the model is given."
        )
    # a cache may have room for more keys than there are yet
    keys = mask.tokens if not call.cached else max(mask.tokens, call.keys)
    if call.first != 0 or call.queries != mask.tokens or call.keys != keys:
        hint = "" if call.cached else " (generate() with use_cache=True keeps to the prompt's)"
        raise MaskError(
            f"{name_of(site)}: the mask has {mask.tokens} tokens and this call {call.queries} queries and {call.keys} "
            f"keys; make the mask of the tokens that the model is given, special tokens and padding included{hint}."
        )


def require_self_attention(heads: Heads) -> None:
    """Raise `LayoutError` where sites are no self-attention, or of an encoder and a decoder at once."""
    kinds = {site.kind for site in heads.sites}
    if "cross" in kinds or {"self", "decoder"} <= kinds:
        raise LayoutError(
            f"guide was given attention of the kinds {', '.join(sorted(kinds))}; role masks are square and of one "
            "text: choose with heads.kind('self') or heads.kind('decoder')."
        )


def own_keys(bias: Tensor, call: ScoreCall) -> Tensor:
    """Return the columns of this call's keys; the model masks those there is only room for."""
    columns = bias[..., call.first_key : call.first_key + call.keys]
    return F.pad(columns, (0, call.keys - columns.shape[-1]))


def name_of(site: Site) -> str:
    """Return what a site is called in a sentence."""
    return site.name or "the model"


def longest_text(model: nn.Module) -> int | None:
    """Return the tokens of the longest text that every table of positions of a model has room for; None without any.

    Rows that a table keeps for padding, and for what comes before the first position, do not count.

    Args:
        model: The model.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> longest_text(BertModel(BertConfig(max_position_embeddings=40, **sizes))), longest_text(nn.Linear(2, 2))
        (40, None)
    """
    rooms = []
    for name, module in model.named_modules():
        own = name.rpartition(".")[2].lower()
        if isinstance(module, nn.Embedding) and any(word in own for word in POSITIONS) and "relative" not in own:
            # RoBERTa's begin after the row of padding, BART's after two rows of its own
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            rooms.append(module.num_embeddings - max(before, int(getattr(module, "offset", 0))))
    return min(rooms, default=None)


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
