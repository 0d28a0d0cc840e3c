"""Masks on the heads of an encoder that are made from what the encoder reads, kept while its states are decoded.

Owns when a mask is made (once a forward of the encoder), which heads have it and what happens to a row that it leaves
empty. The adding is `bias_heads`'. Must not know what the masks mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from headwise.checks import MaskError, SettingError
from headwise.head_bias import HeadBias, bias_heads
from headwise.heads import Heads, Site
from headwise.layouts import find_heads
from headwise.scores import ScoreCall

__all__ = ["EncoderMasks", "MaskFunction", "mask_encoder"]

MaskFunction = Callable[[Tensor, Tensor], Tensor]


class EncoderMasks:
    """Masks on an encoder's heads until `remove()` or the end of a `with` block; made by `mask_encoder`.

    Attributes:
        bias: The handle of `bias_heads` that adds them; `bias.calls` counts the calls of each site.
    """

    def __init__(self, model: Any, masks: MaskFunction, sites: Heads, guided: Sequence[int] | None) -> None:
        self.masks, self.guided = masks, guided
        self._padding_id: int = model.config.pad_token_id
        self._heads = {site.num_heads for site in sites}
        self._made: Tensor | None = None
        encoder: nn.Module = model.get_encoder()
        self._signature = inspect.signature(encoder.forward)
        self.bias: HeadBias = bias_heads(sites, self._of)
        self._hook = encoder.register_forward_pre_hook(self._read, with_kwargs=True)

    def remove(self) -> None:
        """Take the masks away."""
        self.bias.remove()
        self._hook.remove()
        self._made = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
        self.bias.__exit__(kind, error, trace)

    def _read(self, _encoder: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        given = self._signature.bind_partial(*arguments, **named).arguments
        ids = given.get("input_ids")
        if ids is None:
            raise MaskError("the encoder was given no input_ids, from which its masks are made.")
        keep = given.get("attention_mask")
        real = ids != self._padding_id if keep is None else keep.bool()
        self._made = additive(self.masks(ids, real), real, max(self._heads), self.guided)

    def _of(self, _site: Site, call: ScoreCall) -> Tensor | None:
        return None if self._made is None else self._made.to(call.dtype)


def mask_encoder(
    model: Any, masks: MaskFunction, *, sites: Heads | None = None, guided: Sequence[int] | None = None
) -> EncoderMasks:
    """Let heads of an encoder attend only where a mask allows; returns a handle that takes the masks away.

    A guided head has A = softmax(Q K^T / sqrt(e) + M), M = 0 where allowed and -inf elsewhere (Wang et al. 2021); the
    other heads stay as they are. A query that its mask leaves no real key attends as in a head without mask. In
    generate() the encoder runs once, so that all beams of a source decode the same masked states.

    Args:
        model: An encoder-decoder with Hugging Face's get_encoder(): `Seq2Seq`, Marian and their like.
        masks: Called once a forward of the encoder with its ids [B, S] and which of them are real, bool [B, S];
            returns True where a query may attend a key, bool [B or 1, h, S or 1, S], for the h guided heads.
        sites: The attentions to guide; None for all of the encoder.
        guided: The heads that have a mask, in the order of its second axis; None for the first h.

    Raises:
        SettingError: A site is not self-attention of an encoder, or the sites differ in their number of heads.
        MaskError: In a forward: a mask is not boolean or does not fit, or the encoder was given no ids.
        LayoutError: The scores of a site are not reached.

    Example:
        >>> from headwise.lab.models.seq2seq import Seq2Seq, Seq2SeqConfig
        >>> model = Seq2Seq(Seq2SeqConfig(vocab_size=9)).eval()
        >>> def itself(ids, real):
        ...     return torch.eye(ids.shape[1], dtype=torch.bool)[None, None]
        >>> with mask_encoder(model, itself) as handle:
        ...     _ = model.generate(torch.tensor([[4, 5, 2]]), num_beams=3, max_new_tokens=4)
        >>> handle.bias.calls
        {'encoder.layers.0.attention': 1}
    """
    chosen = find_heads(model).kind("self") if sites is None else sites
    other = [site.name for site in chosen if site.kind != "self"]
    if other:
        raise SettingError(f"{other[0]} is no self-attention of an encoder; expected sites of kind self.")
    sizes = {site.num_heads for site in chosen}
    if len(sizes) != 1:
        raise SettingError(f"the sites have {sorted(sizes)} heads; expected one number: guide them one by one.")
    _require_heads(guided, max(sizes))
    return EncoderMasks(model, masks, chosen, guided)


def additive(mask: Tensor, real: Tensor, heads: int, guided: Sequence[int] | None) -> Tensor:
    """Return 0 where a head may attend and -inf elsewhere, [B, H, S, S], of a mask for its guided heads.

    Padding is left to the model. A row whose mask allows no real key is 0 throughout.

    Args:
        mask: True where a query may attend, bool [B or 1, h, S or 1, S].
        real: True where an id is real, [B, S].
        heads: Number of heads H.
        guided: The heads of the mask's second axis; None for the first.

    Example:
        >>> real = torch.tensor([[True, True, False]])
        >>> additive(torch.tensor([[[[True, False, False], [False, False, True], [False] * 3]]]), real, 2, (1,))[0, 1]
        tensor([[0., -inf, -inf],
                [0., 0., 0.],
                [0., 0., 0.]])
    """
    batch, length = real.shape
    if mask.dtype != torch.bool:
        raise MaskError(
            f"the mask of the encoder has dtype {mask.dtype}; expected bool, True where a query may attend."
        )
    chosen = range(mask.shape[1]) if guided is None and mask.dim() == 4 else guided or ()
    sizes = (1, batch), (len(chosen),), (1, length), (length,)
    if mask.dim() != 4 or len(chosen) > heads or any(s not in fits for s, fits in zip(mask.shape, sizes, strict=True)):
        number = f"at most {heads}" if guided is None else len(chosen)
        raise MaskError(
            f"the mask of the encoder has shape {tuple(mask.shape)}; expected ({batch} or 1, {number} heads, {length} "
            f"or 1, {length}): batch, guided heads, queries, keys."
        )
    empty = ~(mask & real[:, None, None]).any(-1, keepdim=True)
    allowed = torch.ones(batch, heads, length, length, dtype=torch.bool, device=real.device)
    allowed[:, list(chosen)] = mask | empty
    return torch.where(allowed, 0.0, -torch.inf)


def _require_heads(guided: Sequence[int] | None, heads: int) -> None:
    if guided is None:
        return
    wrong = [head for head in guided if head not in range(heads)]
    if wrong or len(set(guided)) != len(guided) or not guided:
        raise SettingError(f"guided is {tuple(guided)}; expected different heads from 0 to {heads - 1}.")
