"""Role masks on the heads of an encoder, made once per forward and kept while its states are decoded."""

import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from headwise.errors import MaskError, SettingError
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.masks.head_mask import HeadMask
from headwise.roles.guide import Guidance, guide

MaskFunction = Callable[[Tensor, Tensor], HeadMask]


class EncoderMasks:
    """Masks on an encoder's heads until `remove()` or the end of a `with` block; made by `mask_encoder`.

    Attributes:
        guidance: The handle of `guide` that masks; `guidance.calls` counts the calls of each site.
    """

    def __init__(self, model: Any, masks: MaskFunction, sites: Heads) -> None:
        self.masks = masks
        self._padding_id: int = model.config.pad_token_id
        encoder: nn.Module = model.get_encoder()
        self._signature = inspect.signature(encoder.forward)
        self.guidance: Guidance = guide(sites)
        self._hook = encoder.register_forward_pre_hook(self._read, with_kwargs=True)

    def remove(self) -> None:
        """Remove the masks."""
        self._hook.remove()
        self.guidance.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        self.guidance.__exit__(kind, error, trace)

    def _read(self, _encoder: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        given = self._signature.bind_partial(*arguments, **named).arguments
        ids = given.get("input_ids")
        if ids is None:
            raise MaskError("the encoder was given no input_ids, from which its masks are made.")
        keep = given.get("attention_mask")
        self.guidance(self.masks(ids, ids != self._padding_id if keep is None else keep.bool()))


def mask_encoder(model: Any, masks: MaskFunction, *, sites: Heads | None = None) -> EncoderMasks:
    """Let heads of an encoder attend only where a mask allows; returns a handle that removes the masks.

    As `guide`, A_h = softmax(Q_h K_h^T / sqrt(e) + M_h) for the heads that have a mask (Wang et al. 2021), but each
    forward of the encoder makes its masks. In generate() the encoder runs once for all beams.

    Args:
        model: An encoder-decoder with Hugging Face's get_encoder(), such as `Seq2Seq` or Marian.
        masks: Called once per forward of the encoder with its ids [B, S] and False at padding, bool [B, S].
        sites: The attentions to guide; None for all of the encoder.

    Raises:
        SettingError: A site is not self-attention of an encoder.
        MaskError: In a forward: a mask does not fit, or the encoder was given no ids.
        LayoutError: The scores of a site are not reached.

    Example:
        >>> import torch
        >>> from headwise_lab.tasks.translation.model import Seq2Seq, Seq2SeqConfig
        >>> model = Seq2Seq(Seq2SeqConfig(vocab_size=9)).eval()
        >>> def itself(ids, real):
        ...     return HeadMask(torch.eye(ids.shape[1], dtype=torch.bool)[None, None], real, num_heads=2)
        >>> with mask_encoder(model, itself) as handle:
        ...     _ = model.generate(torch.tensor([[4, 5, 2]]), num_beams=3, max_new_tokens=4)
        >>> handle.guidance.calls
        {'encoder.layers.0.attention': 1}
    """
    chosen = find_heads(model).kind("self") if sites is None else sites
    other = [site.name for site in chosen if site.kind != "self"]
    if other:
        raise SettingError(f"{other[0]} is no self-attention of an encoder; expected sites of kind self.")
    return EncoderMasks(model, masks, chosen)
