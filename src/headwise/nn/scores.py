"""The attention scores of one call: observers of the weights, and biases added to the scores."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError
from headwise.nn.hooks import PerThread


@dataclass(frozen=True)
class Attended:
    """What one call of an attention module computed, for its observers.

    Attributes:
        values: Projected values, [B, K, H, e]; None where the observer reads them elsewhere.
        weights: Attention weights before dropout, [B, H, Q, K]; None unless an observer wants them.
        key_keep: True where a key is a real token, [B, K]; None when the call received no padding mask.
        mean_weights: Mean of the attention weights over heads, [B, Q, K]; None unless an observer wants it.
        outputs: O_h of each head, [B, Q, H, e]; None where the observer reads them elsewhere.
    """

    values: Tensor | None
    weights: Tensor | None
    key_keep: Tensor | None
    mean_weights: Tensor | None = None
    outputs: Tensor | None = None


@dataclass(frozen=True)
class Compared:
    """What the scores of one call are computed from: scale Q K^T, where queries may attend.

    Attributes:
        query: Queries as they are compared, [B, H, Q, e].
        key: Keys, [B, G or H, K, e].
        mask: Boolean (True may attend) or additive, broadcastable to [B, H, Q, K]; what flex attention takes; or None.
        causal: Whether query i sees keys 0 to i only, where there is no mask.
        scale: What products are multiplied by; None for 1 / sqrt(e).
    """

    query: Tensor
    key: Tensor
    mask: Any
    causal: bool = False
    scale: float | None = None


def always() -> bool:
    """Return True."""
    return True


@dataclass(frozen=True)
class Observer:
    """A function called with `Attended` at each forward, and whether it needs the attention weights or their mean.

    Attributes:
        see: The function.
        weights: Whether it needs the weights; the module then attends with them.
        mean_weights: Whether it needs their mean over heads.
        beside: Whether the weights are computed separately, so that the attention stays identical to the bit.
        active: Whether it observes now; while it does not, the module computes what it would without it.
        edit: Changes the outputs of the heads [B, Q, H, e], where the attention gives them to observers.
        compare: Is called with the queries and keys, before they are compared.
    """

    see: Callable[[Attended], None]
    weights: bool = False
    mean_weights: bool = False
    beside: bool = False
    active: Callable[[], bool] = always
    edit: Callable[[Tensor], Tensor] | None = None
    compare: Callable[[Compared], None] | None = None

    def notify(
        self,
        values: Tensor | None,
        weights: Tensor | None,
        keep: Tensor | None,
        mean: Tensor | None,
        outputs: Tensor | None = None,
    ) -> None:
        """Call the function with what it needs of one call."""
        weights, mean = weights if self.weights else None, mean if self.mean_weights else None
        self.see(Attended(values, weights, keep, mean, outputs))


def show_compared(observers: Sequence[Observer], *compared: Any) -> None:
    """Give queries, keys and what else `Compared` has to the observers that want them."""
    for observer in observers:
        if observer.compare is not None and observer.active():
            observer.compare(Compared(*compared))


@dataclass(frozen=True)
class ScoreCall:
    """One call of an attention module, for a function that makes a bias for it.

    Attributes:
        batch: Sequences B; with beam search, beams of one example are adjacent.
        heads: Query heads H.
        queries: Queries Q of this call; 1 while generating with a cache.
        keys: Keys K, cached ones included.
        first: Position of the first query: how many tokens came before it, in the cache.
        first_key: Position of the first key; above 0 where a sliding window has dropped the oldest from the cache.
        cached: Whether the call writes to or reads from a cache.
        dtype: Dtype of the scores.
        device: Device of the scores.
        causal: Whether the call itself says that query i sees keys 0 to i only, and not a mask, or, where a softmax
            is written out, its scores do.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    first: int = 0
    first_key: int = 0
    cached: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    causal: bool = False

    @classmethod
    def of(cls, query: Tensor, key: Tensor, cached: int | None, causal: bool = False) -> Self:
        """Return the call with queries [B, H, Q, e] and keys [B, G, K, e], and `cached` tokens in its cache, if any."""
        batch, (heads, queries), keys = max(query.shape[0], key.shape[0]), query.shape[1:3], key.shape[2]
        return cls(batch, heads, queries, keys, cached or 0, 0, cached is not None, query.dtype, query.device, causal)

    @property
    def query_positions(self) -> Tensor:
        """Positions of the queries, [Q]; padding on the left counts."""
        return torch.arange(self.first, self.first + self.queries, device=self.device)


class Bias(Protocol):
    """What is added to the scores of one module."""

    def __call__(self, call: ScoreCall) -> Tensor | None:
        """Return the additive bias of a call, broadcastable to [B, H, Q, K], or None for none."""
        ...


class Scores(Protocol):
    """How listeners reach the scores of one attention module.

    Attributes:
        gives: What observers get beside the weights: "values", "outputs".
        written: Whether they are reached at a softmax that the module writes out, with its masks in them.
    """

    gives: tuple[str, ...]
    written: bool

    def listen(self, listener: Observer | Bias) -> Callable[[], None]:
        """Attach an observer or a bias to the module, and return what detaches it.

        Raises:
            LayoutError: The scores of the module cannot be reached.
        """
        ...

    def mix(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Have the module attend with the `HeadMixer` it holds.

        Returns:
            What ends that, and what is called before each forward and raises `NotFired` where the mixer is passed by.

        Raises:
            LayoutError: The module cannot.
        """
        ...


class RunningCall:
    """The number of tokens in the cache of the running call, None without one, and whether it has attended."""

    def __init__(self) -> None:
        self.cached: int | None = None
        self.attended = False


class Listeners:
    """Observers and biases of one attention module; a copy or a pickle of them is empty."""

    observers: tuple[Observer, ...] = ()
    biases: tuple[Bias, ...] = ()

    def __init__(self) -> None:
        self.running = PerThread(RunningCall)

    def __bool__(self) -> bool:
        return bool(self.observers or self.biases)

    def __reduce__(self) -> tuple:
        # for copy and pickle
        return Listeners, ()


def add_listener(owner: Any, listener: Observer | Bias, *then: Callable[[], object]) -> Callable[[], None]:
    """Add a listener to what has `observers` and `biases`; return what removes it, and calls functions afterwards.

    Without listeners, these are the empty ones of the owner's class again.
    """
    name = "observers" if isinstance(listener, Observer) else "biases"
    setattr(owner, name, (*getattr(owner, name), listener))

    def stop() -> None:
        left = tuple(other for other in getattr(owner, name) if other is not listener)
        if left:
            setattr(owner, name, left)
        else:
            vars(owner).pop(name, None)
        for end in then:
            end()

    return stop


@dataclass(eq=False)
class TorchScores:
    """The scores of a torch attention module; it must be headwise's own class before anything listens."""

    module: nn.Module = field(repr=False)
    gives: tuple[str, ...] = ("values",)
    written: bool = False

    def listen(self, listener: Observer | Bias) -> Callable[[], None]:
        """Attach an observer or a bias to the module, and return what detaches it."""
        if not hasattr(self.module, "observers"):
            raise LayoutError(f"{type(self.module).__name__} computes its scores internally; adopt() it first.")
        return add_listener(self.module, listener)

    def mix(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return what ends the mixing, and a check: nothing, as the module itself attends with its mixer."""
        return always, always


def sum_masks(
    mask: Tensor | None, causal: bool, biases: Sequence[Tensor], queries: int, keys: int, dtype: torch.dtype
) -> Tensor:
    """Return one additive mask [B or 1, H or 1, Q or 1, K] in `dtype`: the biases, and -inf where a mask forbids.

    Args:
        mask: Boolean (True may attend) or additive, broadcastable to [B, H, Q, K]; None for none.
        causal: Whether query i sees keys 0 to i only; ignored where there is a mask.
        biases: Additive, broadcastable likewise; at least one.
        queries: Q.
        keys: K.
        dtype: Dtype of the scores.
    """
    total = functools.reduce(torch.add, (_cast(bias, dtype) for bias in biases))
    if mask is None and causal:
        positions = torch.arange(max(queries, keys), device=total.device)
        mask = positions[:queries, None] >= positions[None, :keys]
    if mask is None:
        return total
    if mask.dtype == torch.bool:
        return torch.where(mask, total, -math.inf)
    # additive masks write "forbidden" as the least number of their dtype; with a bias added that would be a score
    forbidden = mask <= torch.finfo(mask.dtype).min / 2
    return torch.where(forbidden, -math.inf, total + mask.to(dtype))


def normalize_scores(scores: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return softmax(scores) over keys [..., K], and 0 in a row of -inf alone, as of a query that attends to nothing.

    So does torch's scaled dot product attention; `torch.softmax` would return NaN, and NaN gradients.

    >>> normalize_scores(torch.tensor([[0.0, 0.0], [0.0, -math.inf], [-math.inf, -math.inf]]))
    tensor([[0.5000, 0.5000],
            [1.0000, 0.0000],
            [0.0000, 0.0000]])
    """
    device = scores.device.type
    # autocast computes a softmax in single precision, but not on CPUs
    if dtype is None and device != "cpu" and torch.amp.is_autocast_available(device):
        dtype = torch.promote_types(scores.dtype, torch.float32) if torch.is_autocast_enabled(device) else None
    # filling the rows of a softmax would keep the weights twice for the backward pass; this one casts no gradient back
    return torch.ops.aten._safe_softmax.default(scores if dtype is None else scores.to(dtype), -1)


def clear_empty_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return an additive mask without rows of -inf alone, and where they were, [.., .., Q or 1, 1].

    Such a query has O_h = 0, as in torch's scaled dot product attention with boolean masks. Its row is finite here, so
    that no backend computes NaN.
    """
    empty = (mask == -math.inf).all(-1, keepdim=True)
    return mask.masked_fill(empty, 0.0), empty


def _cast(bias: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.finfo(bias.dtype).max <= torch.finfo(dtype).max:
        return bias.to(dtype)
    # a large finite bias must not become -inf in half precision, where it would forbid
    least, largest = torch.finfo(dtype).min, torch.finfo(dtype).max
    return torch.where(bias == -math.inf, -math.inf, bias.clamp(least, largest).to(dtype))
