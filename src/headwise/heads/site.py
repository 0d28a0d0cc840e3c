"""One attention module of a model, and how its heads are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from headwise.errors import LayoutError
from headwise.heads.head_slice import HeadSlice, OutputProjection
from headwise.nn.scores import Scores
from headwise.parallel import computes_part, count_parts, gather_features, scale_features, select_own_heads

PROJECTIONS = ("query", "key", "value")
KINDS = ("self", "decoder", "cross", "pooling")


@dataclass(frozen=True, eq=False)
class Site:
    """One attention module of a model, and how its heads are read.

    Attributes:
        model: The model it was found in.
        name: Dotted name of the module in the model; empty when the model is the attention module.
        module: The attention module.
        kind: "self", "decoder" (self-attention of the decoder of an encoder-decoder), "cross", or "pooling" (one
            learned query per head for the whole sequence).
        layer: Index of the layer in its stack, from 0.
        stack: Dotted name of that stack, for example "encoder.layers".
        layout: Name of the layout row that matched.
        num_heads: Query heads H.
        key_value_heads: Key/value heads G; H unless queries are grouped.
        head_size: Width e of one head.
        slices: The query, key and value head slices; the query alone in additive attention, whose keys and values are
            shared by all heads.
        output: The head slice of W_O (columns are heads), or None where W_O was not found.
        output_projection: Where the module that plays W_O is, or None where it was not found.
        value_module: The module whose output holds the projected values, at `slices[2].features(output)`; None where
            no module call returns them (`nn.MultiheadAttention`).
        prepare: Makes the output projection a module call (swaps a stock torch module), given model and module.
        scores: Makes what reaches the attention scores of the module, given it; None where nothing does.
        found_at: What `paths` returned when the site was made, which tells when a layer was wrapped since.
    """

    model: nn.Module
    name: str
    module: nn.Module
    kind: str
    layer: int
    stack: str
    layout: str
    num_heads: int
    key_value_heads: int
    head_size: int
    slices: tuple[HeadSlice, ...]
    output: HeadSlice | None = None
    output_projection: OutputProjection | None = None
    value_module: nn.Module | None = None
    prepare: Callable[[nn.Module, nn.Module], object] | None = None
    scores: Callable[[nn.Module], Scores] | None = None
    found_at: tuple[tuple[str | None, str | None], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "found_at", self.paths())

    @property
    def slabs(self) -> tuple[HeadSlice, ...]:
        """`slices`, under its name in version 0.1."""
        return self.slices

    @property
    def seam(self) -> OutputProjection | None:
        """`output_projection`, under its name in version 0.1."""
        return self.output_projection

    def paths(self) -> tuple[tuple[str | None, str | None], ...]:
        """Return the current paths of each head slice's owner and called module inside the attention module."""
        paths = {id(part): path for path, part in self.module.named_modules()}
        return tuple((paths.get(id(head_slice.owner)), paths.get(id(head_slice.module))) for head_slice in self.slices)

    def expose(self) -> OutputProjection:
        """Make the output projection's call visible and return the output projection.

        Raises:
            LayoutError: The module that plays W_O was not found.
        """
        if self.output_projection is None:
            raise LayoutError(
                f"{self.name or 'the model'} ({type(self.module).__name__}): no output projection was found next to "
                "its query, key and value; name it in the layout row (output=...)."
            )
        if self.prepare is not None:
            self.prepare(self.model, self.module)
        return self.output_projection

    def reach_scores(self) -> Scores:
        """Return what reaches the attention scores of the module: its weights and what is added to them.

        Raises:
            LayoutError: Nothing does.
        """
        if self.scores is None:
            raise LayoutError(
                f"{self.name or 'the model'} ({type(self.module).__name__}): attention weights and biases of heads are "
                "reached in torch.nn.MultiheadAttention, headwise.nn.MultiheadAttention and modules that call the "
                "attention interface of transformers; outputs and values are read here."
            )
        if self.prepare is not None:
            self.prepare(self.model, self.module)
        return self.scores(self.module)

    @property
    def divided(self) -> bool:
        """Whether tensor parallel has each process compute some of the heads."""
        query = self.slices[0]
        return computes_part(query.owner, query.attribute, query.axis)

    def gather_heads(self, tensor: Tensor, axis: int, size: int) -> Tensor:
        """Return `tensor` for all heads, differentiably, where tensor parallel computes some of them in each process.

        Args:
            tensor: What a call computed of its heads; returned as it is when it is of all of them.
            axis: The axis along which the heads are.
            size: Its size for all heads.
        """
        query = self.slices[0]
        return gather_features(tensor, axis, size, query.owner._parameters.get(query.attribute), query.axis)

    def select_own_heads(self, tensor: Tensor, axis: int, heads: int) -> Tensor:
        """Return the part of `tensor`, given for all heads along an axis, of the `heads` this process computes with."""
        query = self.slices[0]
        return select_own_heads(tensor, axis, heads, query.owner._parameters.get(query.attribute), query.axis)

    def scale_heads(self, joined: Tensor, factors: Tensor) -> Tensor:
        """Return what W_O gets, [..., H * e] or this process's part of it, times one factor per head, [H]."""
        query = self.slices[0]
        every = factors.repeat_interleave(self.head_size)
        return scale_features(joined, every, query.owner._parameters.get(query.attribute), query.axis)

    def count_all_heads(self, computed: int) -> int:
        """Return how many heads there are in all processes together where this one computes some: H, or as given."""
        return self._count_all(computed, self.num_heads)

    def count_all_features(self, computed: int) -> int:
        """Return the same of their features: H * e, or as given."""
        return self._count_all(computed, self.num_heads * self.head_size)

    def _count_all(self, computed: int, size: int) -> int:
        if computed == size:
            return size
        query = self.slices[0]
        parts = count_parts(query.owner._parameters.get(query.attribute), query.axis)
        return size if computed * parts == size else computed

    @property
    def width(self) -> int:
        """Width d of the site's output: the rows of W_O, or H * e where W_O is unknown."""
        if self.output is not None:
            return self.output.across
        return self.num_heads * self.head_size
