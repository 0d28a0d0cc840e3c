"""What one call of an attention module computed, and which of its tokens were real.

Owns the records; `taps` fills them. Must not know hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from headwise.checks import NotFired
from headwise.heads import Site
from headwise.padding import given_padding

__all__ = ["Call", "Capture", "Padding", "padding_of"]


@dataclass
class Capture:
    """What one call of one site computed.

    Attributes:
        site: The attention module.
        outputs: O_h of each head before W_O, [B, Q, H, e].
        values: V_g of each key/value head, [B, K, G, e].
        weights: Attention weights before dropout, [B, H, Q, K].
        key_keep: True where a key is a real token, [B, K], cached keys included: one that the mask the call received
            lets some query attend to. None when it received none, as where nothing is padded.
        query_keep: The same for queries, [B, Q]; for cross-attention that of the decoder's own self-attention.
    """

    site: Site
    outputs: Tensor | None = None
    values: Tensor | None = None
    weights: Tensor | None = None
    key_keep: Tensor | None = None
    query_keep: Tensor | None = None


@dataclass(frozen=True)
class Padding:
    """Which keys of a call are real, and how many tokens were in the cache before it."""

    keep: Tensor | None = None
    first: int = 0

    def of_queries(self, queries: int) -> Tensor | None:
        """Return the padding of the call's own queries, the newest of its keys."""
        if self.keep is None or self.keep.shape[1] == queries:
            return self.keep
        start = min(self.first, self.keep.shape[1] - queries)
        return self.keep[:, start : start + queries]


def padding_of(module: nn.Module, arguments: Mapping[str, object]) -> Padding:
    """Return the padding of a call, from its arguments by name."""
    cached = next((value for value in arguments.values() if hasattr(value, "get_seq_length")), None)
    length = getattr(cached, "get_seq_length", None)
    first = 0 if length is None else int(length(getattr(module, "layer_idx", None) or 0))
    return Padding(given_padding(module, arguments), first)


@dataclass
class Call:
    """A capture on its way: with the padding of its queries' own attention.

    Attributes:
        capture: What is filled while the call runs.
        queries: Padding of the self-attention that ran on the same queries; its own for self-attention.
        inside: Whether the model itself was being called.
    """

    capture: Capture
    queries: Padding
    inside: bool

    def finished(self, weights: bool) -> Capture:
        """Return the capture with the padding of its queries, one row a sequence.

        Args:
            weights: Whether attention weights were asked for.

        Raises:
            NotFired: They were, and the call did not compute them where they are read.
        """
        capture = self.capture
        if weights and capture.weights is None:
            raise NotFired(
                f"{capture.site.name or 'the model'} was called but computed its attention in another way than the "
                "one its weights are read in; attach after any set_attn_implementation()."
            )
        padding = self.queries if capture.site.kind == "cross" else Padding(capture.key_keep, self.queries.first)
        capture.query_keep = padding.keep
        if capture.outputs is not None:
            capture.query_keep = padding.of_queries(capture.outputs.shape[1])
        elif capture.weights is not None:
            capture.query_keep = padding.of_queries(capture.weights.shape[2])
        read = next((t for t in (capture.outputs, capture.values, capture.weights) if t is not None), None)
        if read is not None:
            capture.key_keep = _for_batch(capture.key_keep, len(read))
            capture.query_keep = _for_batch(capture.query_keep, len(read))
        return capture


def _for_batch(keep: Tensor | None, batch: int) -> Tensor | None:
    # a mask may be given once for all sequences
    return keep if keep is None or keep.shape[0] == batch else keep.expand(batch, -1)
