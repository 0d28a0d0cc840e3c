"""Where the heads of a model live: slices of parameters, attention sites, and the collection a user holds.

Owns the only reading of a weight as heads (`HeadSlice.view`). Finding sites is `layouts`' business; what is done
with them is everybody else's.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, SettingError, require_choice
from headwise.nn.scores import Scores
from headwise.parallel import computes_part, gathered, is_sharded, own_slice, pieces, scaled
from headwise.unsupported import flattened

PROJECTIONS = ("query", "key", "value")
KINDS = ("self", "decoder", "cross", "pooling")


@dataclass(frozen=True, eq=False)
class HeadSlice:
    """The part of one parameter that belongs to the heads of one projection of one site.

    Head i owns `head_size` consecutive rows (columns when `axis` is 1) starting at `start + i * stride`.

    Attributes:
        projection: "query", "key", "value", or "output" for W_O.
        name: Dotted name of the parameter in the model, for example "layers.0.self_attn.in_proj_weight".
        owner: The module that holds the parameter.
        attribute: Its attribute name on `owner`.
        heads: Number of heads M (key/value heads under grouped queries).
        head_size: Rows (or columns) of one head, e.
        start: First row (or column) of head 0.
        stride: Rows (or columns) from one head's start to the next one's.
        axis: 0 when heads are rows, 1 when they are columns.
        bias: Attribute name of the bias on `owner`; None when there is none.
        bias_start: First entry of head 0 in the bias; the weight's `start` when negative.
        module: The module whose call computes the projection: `owner` when not given, or what wraps it (LoRA); None
            where no module call does, in `nn.MultiheadAttention`.
        along: Size of the weight along `axis`; taken from the parameter when 0.
        across: Its size along the other axis; likewise.
        obstacle: Why the parameter cannot be read and written as heads (parametrised, quantised, the base of a LoRA
            layer); None when it can. Features can be read all the same.
    """

    projection: str
    name: str
    owner: nn.Module
    attribute: str
    heads: int
    head_size: int
    start: int = 0
    stride: int = 0
    axis: int = 0
    bias: str | None = None
    bias_start: int = -1
    module: nn.Module | None = None
    along: int = 0
    across: int = 0
    obstacle: str | None = None

    def __post_init__(self) -> None:
        if self.stride == 0:
            object.__setattr__(self, "stride", self.head_size)
        if self.bias_start < 0:
            object.__setattr__(self, "bias_start", self.start)
        if self.module is None and not isinstance(self.owner, nn.MultiheadAttention):
            object.__setattr__(self, "module", self.owner)
        weight = self.owner._parameters.get(self.attribute)
        if self.along == 0 and weight is not None and weight.dim() == 2:
            object.__setattr__(self, "along", weight.shape[self.axis])
            object.__setattr__(self, "across", weight.shape[1 - self.axis])

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself, looked up at each use so that a moved or reloaded model stays right.

        Raises:
            LayoutError: It cannot be read and written as heads; the message says why.
        """
        if self.obstacle is not None:
            raise LayoutError(f"{self.name} {self.obstacle}.")
        held = self.owner._parameters.get(self.attribute)
        if held is None:
            raise LayoutError(self.vanished)
        return held

    @property
    def vanished(self) -> str:
        """The refusal of a parameter that was there when its heads were found."""
        reason = flattened(self.owner, None)
        if reason is not None:
            return f"{self.name} {reason}."
        return (
            f"{self.name} is no longer a parameter of {type(self.owner).__name__}: something took its place after its "
            "heads were found (a parametrisation, pruning, sharding). Take that off, or call find_heads again, which "
            "says what can still be done."
        )

    def view(self, tensor: Tensor) -> Tensor:
        """Return the heads of `tensor` (the parameter, its gradient, or anything shaped like it) without a copy.

        Args:
            tensor: Two-dimensional tensor with the shape of the parameter, any strides.

        Returns:
            A view [M, e, d_in] when heads are rows, [M, d_out, e] when they are columns. Writing to it writes
            to `tensor`.

        Raises:
            LayoutError: `tensor` does not have the parameter's shape.
        """
        if tensor.shape != self.parameter.shape:
            raise LayoutError(
                f"{self.name}: a tensor of shape {tuple(tensor.shape)} was given to be read as heads; "
                f"the parameter has shape {tuple(self.parameter.shape)}."
            )
        if is_sharded(tensor):
            raise LayoutError(
                f"{self.name} is sharded over processes (DTensor) and its heads lie on several of them; read them in "
                "its full_tensor()."
            )
        return self.part(tensor)

    def part(self, tensor: Tensor) -> Tensor:
        """Return the heads of some columns of the parameter (rows when `axis` is 1): as `view`, of what there is."""
        row, column = tensor.stride()
        if self.axis == 0:
            size = (self.heads, self.head_size, tensor.shape[1])
            strides, start = (self.stride * row, row, column), self.start * row
        else:
            size = (self.heads, tensor.shape[0], self.head_size)
            strides, start = (self.stride * column, row, column), self.start * column
        return tensor.as_strided(size, strides, tensor.storage_offset() + start)

    def features(self, tensor: Tensor) -> Tensor:
        """Return the heads among the features of a call of the module that holds this head slice, without a copy.

        For query, key and value these are features of the module's output: a fused projection returns all three in
        one tensor, and this is the part of one of them, so values can be read where they are projected in every
        layout. For "output" they are features of the module's input, the concatenated heads.

        Args:
            tensor: Output (input, for "output") of the module, [..., F], any strides; F is the number of rows of the
                weight, or of columns when `axis` is 1.

        Returns:
            A view [..., M, e]. Writing to it writes to `tensor`; gradients flow through it.

        Raises:
            LayoutError: The last axis does not have F features.

        Example:
            >>> owner = nn.Linear(4, 18)  # [query; key; value] of 2 heads of 3
            >>> value = HeadSlice("value", "qkv.weight", owner, "weight", heads=2, head_size=3, start=12)
            >>> value.features(owner(torch.randn(5, 7, 4))).shape
            torch.Size([5, 7, 2, 3])
        """
        if tensor.dim() < 1 or tensor.shape[-1] != self.along:
            raise LayoutError(
                f"{self.name}: a tensor of shape {tuple(tensor.shape)} was given to be read as the features of "
                f"{self.projection} heads; expected {self.along} features along its last axis."
            )
        own = tensor.narrow(-1, self.start, (self.heads - 1) * self.stride + self.head_size)
        if self.stride == self.head_size:
            return own.unflatten(-1, (self.heads, self.head_size))
        return own.unfold(-1, self.head_size, self.stride)

    def bias_view(self, tensor: Tensor) -> Tensor:
        """Return the heads of a bias [rows] as a view [M, e]; only for heads that are rows."""
        (step,) = tensor.stride()
        size, strides = (self.heads, self.head_size), (self.stride * step, step)
        return tensor.as_strided(size, strides, tensor.storage_offset() + self.bias_start * step)


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """The place of the module that plays W_O: its input is the concatenated heads [B, Q, H * e]."""

    owner: nn.Module
    attribute: str

    @property
    def module(self) -> nn.Module:
        """The module in that place now."""
        return getattr(self.owner, self.attribute)


@dataclass(frozen=True, eq=False)
class Site:
    """One attention module of a model, and how its heads are read.

    Attributes:
        model: The model it was found in.
        name: Dotted name of the module in the model; empty when the model is the attention module.
        module: The attention module.
        kind: "self", "decoder" (self-attention of the decoder of an encoder-decoder), "cross", or "pooling" (learned
            queries, one for the whole sequence and head).
        layer: Index of the layer in its stack, from 0.
        stack: Dotted name of that stack, for example "encoder.layers".
        layout: Name of the layout row that found it.
        num_heads: Query heads H.
        key_value_heads: Key/value heads G; H unless queries are grouped.
        head_size: Width e of one head.
        slices: The query, key and value head slices; the query alone in additive attention, whose keys and values are
            shared by all heads.
        output: The head slice of W_O (columns are heads), or None where W_O was not found.
        output_projection: The place of the module that plays W_O, or None where it was not found.
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
                f"{self.name or 'the model'} ({type(self.module).__name__}): no output projection was found beside "
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

    def all_heads(self, tensor: Tensor, axis: int, size: int) -> Tensor:
        """Return `tensor` for all heads, differentiably, where tensor parallel computes some of them in each process.

        Args:
            tensor: What a call computed of its heads; returned as it is when it is of all of them.
            axis: The axis along which the heads are.
            size: Its size for all heads.
        """
        query = self.slices[0]
        return gathered(tensor, axis, size, query.owner._parameters.get(query.attribute), query.axis)

    def own_heads(self, tensor: Tensor, axis: int, heads: int) -> Tensor:
        """Return the part of `tensor`, given for all heads along an axis, of the `heads` this process computes with."""
        query = self.slices[0]
        return own_slice(tensor, axis, heads, query.owner._parameters.get(query.attribute), query.axis)

    def scaled(self, joined: Tensor, factors: Tensor) -> Tensor:
        """Return what W_O gets, [..., H * e] or this process's part of it, times one factor a head, [H]."""
        query = self.slices[0]
        every = factors.repeat_interleave(self.head_size)
        return scaled(joined, every, query.owner._parameters.get(query.attribute), query.axis)

    def heads_of(self, computed: int) -> int:
        """Return how many heads there are in all processes together where this one computes some: H, or as given."""
        return self._of_all(computed, self.num_heads)

    def features_of(self, computed: int) -> int:
        """Return the same of their features: H * e, or as given."""
        return self._of_all(computed, self.num_heads * self.head_size)

    def _of_all(self, computed: int, size: int) -> int:
        if computed == size:
            return size
        query = self.slices[0]
        parts = pieces(query.owner._parameters.get(query.attribute), query.axis)
        return size if computed * parts == size else computed

    @property
    def width(self) -> int:
        """Width d of the site's output: the rows of W_O, or H * e where W_O is unknown."""
        if self.output is not None:
            return self.output.across
        return self.num_heads * self.head_size


@dataclass(frozen=True, eq=False)
class Heads:
    """The attention heads of a model: immutable, printable, selectable.

    Made by `find_heads`. Every selector returns a new collection and refuses to return an empty one.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3,
        ...                               enable_nested_tensor=False)
        >>> heads = hw.find_heads(model)
        >>> len(heads.layers(0, 2)), heads.layer(1).projection("value").projections
        (2, ('value',))
    """

    model: nn.Module
    sites: tuple[Site, ...]
    projections: tuple[str, ...] = PROJECTIONS
    found: tuple[Site, ...] = ()
    replicated: bool = False

    def __post_init__(self) -> None:
        if not self.found:
            object.__setattr__(self, "found", self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def layer(self, index: int) -> Heads:
        """Return the heads of one layer, counted from 0; negative counts from the end of each stack.

        Raises:
            LayoutError: No site has that layer, or several kinds of attention have it: choose with `kind`.
        """
        return self.layers(index)

    def layers(self, *indices: int) -> Heads:
        """Return the heads of several layers; refuses as `layer` does."""
        if not indices:
            raise SettingError("layers() was given nothing; expected at least one layer, counted from 0.")
        for index in indices:
            if not isinstance(index, int) or isinstance(index, bool):
                raise SettingError(f"layer is {index!r}; expected an integer.")
        last = {site.stack: max(s.layer for s in self.sites if s.stack == site.stack) for site in self.sites}
        wanted = tuple(
            site
            for site in self.sites
            if any(site.layer == (i if i >= 0 else last[site.stack] + 1 + i) for i in indices)
        )
        places = sorted({(site.stack, site.kind) for site in wanted})
        if len(places) > 1:
            listed = ", ".join(f"{kind!r} in {stack or 'the model'}" for stack, kind in places)
            raise LayoutError(
                f"layer {', '.join(map(str, indices))} exists in several places ({listed}); "
                "select one first with .kind(...) or .where(...)."
            )
        missing = [i for i in indices if not any(s.layer == (i if i >= 0 else last[s.stack] + 1 + i) for s in wanted)]
        if missing:
            have = sorted({site.layer for site in self.sites})
            raise LayoutError(f"no attention in layer {missing[0]}; there is attention in layers {have}.")
        return replace(self, sites=wanted)

    def kind(self, *kinds: str) -> Heads:
        """Return the heads of some kinds of attention: "self", "decoder", "cross", "pooling"."""
        if not kinds:
            raise SettingError(f"kind() was given nothing; expected some of {', '.join(KINDS)}.")
        for kind in kinds:
            require_choice("kind", kind, KINDS)
        return self._selected(tuple(site for site in self.sites if site.kind in kinds), f"of kind {', '.join(kinds)}")

    def where(self, pattern: str) -> Heads:
        """Return the heads whose site name matches a shell pattern, for example "decoder.*"."""
        if not isinstance(pattern, str):
            raise SettingError(f"pattern is {pattern!r}; expected a shell pattern of site names, such as 'decoder.*'.")
        kept = tuple(site for site in self.sites if fnmatch.fnmatchcase(site.name, pattern))
        return self._selected(kept, f"named like {pattern!r}")

    def projection(self, *projections: str) -> Heads:
        """Return the same sites with fewer projections: what repulsion acts on."""
        for projection in projections:
            require_choice("projection", projection, PROJECTIONS)
        if not projections:
            raise SettingError("projection() was given nothing; expected some of query, key, value.")
        return replace(self, projections=tuple(p for p in PROJECTIONS if p in projections))

    def slices(self) -> tuple[HeadSlice, ...]:
        """Return the slices of the selected projections, site by site."""
        return tuple(part for site in self.sites for part in site.slices if part.projection in self.projections)

    def slabs(self) -> tuple[HeadSlice, ...]:
        """Return `slices()`, under its name in version 0.1."""
        return self.slices()

    def _selected(self, sites: tuple[Site, ...], description: str) -> Heads:
        if not sites:
            names = ", ".join(f"{site.name or '(model)'} [{site.kind}]" for site in self.sites[:8])
            raise LayoutError(f"no attention {description} among {len(self.sites)} sites: {names}.")
        return replace(self, sites=sites)

    def __str__(self) -> str:
        header = ("site", "kind", "layer", "heads", "size", "layout", "output")
        rows = [
            (
                site.name or "(model)",
                site.kind,
                str(site.layer),
                str(site.num_heads)
                if site.num_heads == site.key_value_heads
                else f"{site.num_heads}/{site.key_value_heads}",
                str(site.head_size),
                site.layout,
                "-"
                if site.output_projection is None
                else f"{site.output_projection.attribute}: {type(site.output_projection.module).__name__}",
            )
            for site in self.sites
        ]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
        ]
        total = sum(site.num_heads for site in self.sites)
        lines.append(f"{total} heads in {len(self.sites)} sites; projections: {', '.join(self.projections)}")
        obstacles = {
            head_slice.obstacle: head_slice.name
            for head_slice in reversed(self.slices())
            if head_slice.obstacle is not None
        }
        lines += [f"no repulsion, for example in {name}: it {obstacle}" for obstacle, name in obstacles.items()]
        return "\n".join(lines)


def check_head_slice(head_slice: HeadSlice) -> None:
    """Raise `LayoutError` unless the head slice lies inside its parameter and its heads do not overlap.

    Raises:
        LayoutError: The parameter is absent or no floating-point matrix and no obstacle says so, or the rows do not
            fit.
    """
    if head_slice.obstacle is None:
        tensor = head_slice.owner._parameters.get(head_slice.attribute)
        if tensor is None or not torch.is_floating_point(tensor) or tensor.dim() != 2:
            found = "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise LayoutError(
                f"{head_slice.name} of {type(head_slice.owner).__name__} is not a plain floating-point matrix "
                f"(found {found}); a layout row that reads it must say so in the head slice's obstacle."
            )
    starts = [head_slice.start + i * head_slice.stride for i in range(head_slice.heads)]
    overlap = any(b - a < head_slice.head_size for a, b in pairwise(starts))
    if (
        head_slice.heads < 1
        or head_slice.head_size < 1
        or overlap
        or starts[-1] + head_slice.head_size > head_slice.along
    ):
        raise LayoutError(
            f"{head_slice.name}: {head_slice.heads} heads of {head_slice.head_size} "
            f"{'rows' if head_slice.axis == 0 else 'columns'} from {head_slice.start} every {head_slice.stride} do "
            f"not fit the {head_slice.along} of the weight."
        )
