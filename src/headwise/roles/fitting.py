"""How role masks fit a model: the calls of its attentions, its longest text, and its generate()."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import LayoutError, MaskError
from headwise.heads.heads import Heads, Site
from headwise.masks.head_mask import HeadMask
from headwise.nn.scores import ScoreCall

# Parts of the names that models give tables of positions.
POSITIONS = ("position", "wpe")
# Names of the prompts in transformers.
PROMPTS = ("inputs", "input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")


def require_fit(site: Site, call: ScoreCall, mask: HeadMask, generating: bool, prompts: int | None) -> None:
    """Raise `MaskError` unless the mask has the sentences and tokens of a call.

    Args:
        site: The attention, for the message.
        call: The call.
        mask: The mask.
        generating: Whether generate() is running, which may have several beams per prompt.
        prompts: Number of prompts given to generate(); None if unknown.
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


def require_self_attention(heads: Heads) -> None:
    """Raise `LayoutError` for cross-attention, and for attention of both an encoder and a decoder."""
    kinds = {site.kind for site in heads.sites}
    if "cross" in kinds or {"self", "decoder"} <= kinds:
        raise LayoutError(
            f"guide was given attention of the kinds {', '.join(sorted(kinds))}; role masks are square and for one "
            "text: choose with heads.kind('self') or heads.kind('decoder')."
        )


def select_keys(bias: Tensor, call: ScoreCall) -> Tensor:
    """Return the columns of a bias for the keys of a call; the model masks unfilled places of a cache."""
    columns = bias[..., call.first_key : call.first_key + call.keys]
    missing = call.keys - columns.shape[-1]
    return F.pad(columns, (0, missing)) if missing else columns


def find_max_length(model: nn.Module) -> int | None:
    """Return the largest number of tokens that a model's tables of learned positions allow; None without such tables.

    Rows for padding and rows before the first position do not count.

    Args:
        model: The model.

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
            # positions of RoBERTa start after the padding row, those of BART after two unused rows
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            rooms.append(module.num_embeddings - max(before, int(getattr(module, "offset", 0))))
    return min(rooms, default=None)


class MaskedGenerate:
    """Replaces a model's generate() until `remove()`: removes one argument and calls the original.

    Transformers refuses arguments that its models do not know, and its trainers pass whole batches to generate(). A
    copy or a pickle of the model has the original generate().

    Args:
        model: The model; without generate() it is unchanged.
        name: The name of the argument.
        take: Called with the value of the argument, before the model generates.
        around: Makes the context in which the model generates, from the number of prompts, or None if unknown.

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
    """Return the number of prompts given to generate(), or None if unknown.

    >>> import torch
    >>> _count_prompts((), {"input_ids": torch.ones(3, 5)}), _count_prompts((torch.ones(2, 4),), {})
    (3, 2)
    """
    given = [*args[:1], *(kwargs[name] for name in PROMPTS if name in kwargs)]
    return next((len(one) for one in given if isinstance(one, Tensor)), None)
