"""Muon on the matrix of each head, on whole matrices elsewhere and AdamW on the rest: one torch optimizer.

Momentum and decay act on parameters, as they do for each entry alone. Only the orthogonalization sees matrices, which
are views of a parameter made in each step, so that the model may be moved, cast, wrapped or compiled.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from headwise.errors import (
    LayoutError,
    SettingError,
    require_boolean,
    require_choice,
    require_integer,
    require_range,
)
from headwise.heads.find import find_regular_heads, unwrap_model
from headwise.heads.heads import PROJECTIONS, Heads, align, require_heads, shorten
from headwise.heads.layouts.known import LAYOUTS
from headwise.heads.layouts.rows import LatentLinears
from headwise.heads.view import HeadView, is_sharded, read_projection
from headwise.nn.hooks import strip_wrappers

# The quintic polynomial of Newton-Schulz steps, and the least norm, as in torch.optim.Muon.
COEFFICIENTS, EPSILON = (3.4445, -4.7750, 2.0315), 1e-7
# Entries of all matrices that are orthogonalized at once, so that a large model needs little memory beside its own.
MOST_ENTRIES = 2**26
# Last parts of names of layers that give the output of a model, where these lie beside an attention.
OUTPUT = re.compile(r"(^|_)(head|classifier|logits|score|unembed)$")
MOST_SHOWN = 4
LATENT_ROWS = {row.name for row in LAYOUTS if isinstance(row, LatentLinears)}
SCALES = ("match_rms_adamw", "original")
LATENT = ("heads", "whole")
HEAD, WHOLE, REST = "Muon by head", "Muon whole", "AdamW"


class Blocks(NamedTuple):
    """Matrices in a parameter: `view` returns them as a view [N, r, c]; all N are one of N r rows where `joined`."""

    view: Callable[[Tensor], Tensor]
    joined: bool = False

    def read(self, tensor: Tensor) -> Tensor:
        """Return the matrices of a tensor shaped like the parameter."""
        matrices = self.view(tensor)
        return matrices.flatten(0, 1)[None] if self.joined else matrices


def orthogonalize(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return about U V^T of the singular value decomposition of each matrix, by Newton-Schulz steps on all at once.

    With X = G / max(|G|, 1e-7), transposed where G has more rows than columns, each step is

        A = X X^T,  X <- 3.4445 X + (-4.7750 A + 2.0315 A A) X

    as in `torch.optim.Muon` (Jordan et al. 2024), whose bits it returns for each matrix.

    Args:
        matrices: G, [N, r, c].
        steps: Number of steps.
        dtype: Precision of the steps.

    Returns:
        The matrices, [N, r, c], of this `dtype`.

    Example:
        >>> (values,) = torch.linalg.svdvals(orthogonalize(torch.randn(1, 4, 8), dtype=torch.float32))
        >>> bool((values > 0.5).all() and (values < 1.3).all())
        True
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class PerHeadMuon(Optimizer):
    """Muon on matrices in parameters, and another optimizer on the other parameters; see `per_head_muon`.

    Groups are of whole parameters, as in any optimizer of torch, and the state is `momentum_buffer` of each.

    Args:
        groups: Parameter groups of Muon, each with "lr" and "weight_decay", and a "method" that is printed.
        blocks: The matrices of each parameter of these groups.
        rest: The optimizer of the others.
        names: Name of each parameter, for the printed text.
        momentum, nesterov, scale, steps, dtype: As in `per_head_muon`.
        notes: Further lines of the printed text.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        blocks: Mapping[Tensor, Sequence[Blocks]],
        rest: Optimizer,
        *,
        names: Mapping[Any, str],
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: str = "match_rms_adamw",
        steps: int = 5,
        dtype: torch.dtype = torch.bfloat16,
        notes: Sequence[str] = (),
    ) -> None:
        require_range("momentum", momentum, low=0.0, high=0.9999)
        require_choice("scale", scale, SCALES)
        require_integer("steps", steps, low=1)
        self._blocks, self._names, self._notes, self._rest = blocks, names, notes, rest
        settings = {"momentum": momentum, "nesterov": nesterov, "scale": scale, "steps": steps}
        self._dtype = dtype
        for group in rest.param_groups:
            group.setdefault("method", type(rest).__name__)
        own = [{"method": HEAD, **group, **settings} for group in groups]
        # the groups are shared, so that a schedule reaches those of both
        super().__init__([*own, *rest.param_groups], {**rest.defaults, "method": REST})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  torch's has overloads
        """Take one step, and return what the closure returns where one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        others = []
        for group in self.param_groups:
            if "scale" in group:
                self._step(group)
            else:
                others.append(group)
        # load_state_dict makes new ones
        self._rest.param_groups, self._rest.state = others, self.state
        self._rest.step()
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        chunk, entries = [], 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            _require_whole(parameter, self._names.get(parameter, "a parameter"))
            if entries + parameter.numel() > MOST_ENTRIES and chunk:
                self._update(chunk, group)
                chunk, entries = [], 0
            chunk.append(parameter)
            entries += parameter.numel()
        self._update(chunk, group)

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Step parameters, with one orthogonalization for all their matrices of a shape."""
        rate, momentum = float(group["lr"]), group["momentum"]
        shapes: dict[Any, list[tuple[Tensor, tuple[Tensor, bool, float]]]] = defaultdict(list)
        for parameter in parameters:
            gradient: Any = parameter.grad
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            parameter.mul_(1 - rate * group["weight_decay"])
            update = gradient.lerp(average, momentum) if group["nesterov"] else average
            for blocks in self._blocks[parameter]:
                matrices, target = blocks.read(update), blocks.view(parameter)
                *_, rows, columns = matrices.shape
                # of one orientation, so that those of W_O are together with those of W_Q
                wide = matrices.mT if rows > columns else matrices
                ratio = 0.2 * sqrt(max(rows, columns))
                ratio = sqrt(max(1, rows / columns)) if group["scale"] == "original" else ratio
                shapes[tuple(wide.shape[1:]), wide.device].append(
                    (wide.to(self._dtype), (target, rows > columns, ratio))
                )
        for pieces in shapes.values():
            found = orthogonalize(torch.cat([wide for wide, _ in pieces]), steps=group["steps"], dtype=self._dtype)
            counts = [len(wide) for wide, _ in pieces]
            for (_, (target, tall, ratio)), own in zip(pieces, found.split(counts), strict=True):
                target.add_((own.mT if tall else own).reshape(target.shape), alpha=-rate * ratio)

    def describe(self) -> str:
        """Return which parameters each method has: what `print` shows."""
        rows = [("method", "lr", "decay", "parameters", "matrices", "names")]
        for group in self.param_groups:
            shapes: Counter[str] = Counter()
            for parameter in group["params"]:
                for blocks in self._blocks.get(parameter, ()):
                    count, height, width = blocks.read(parameter.detach()).shape
                    shapes[f"{height} x {width}"] += count
            matrices = [f"{count} of {shape}" for shape, count in shapes.most_common()]
            names = dict.fromkeys(re.sub(r"\b\d+\b", "*", self._names.get(p, "?")) for p in group["params"])
            count = f"{len(group['params'])} ({sum(p.numel() for p in group['params']):,})"
            numbers = (f"{float(group['lr']):g}", f"{group['weight_decay']:g}", count)
            rows.append((group["method"], *numbers, _list(matrices) or "-", _list([*names])))
        return "\n".join([f"{type(self).__name__} (updates scaled by {self._scale})", *align(rows), *self._notes])

    @property
    def _scale(self) -> str:
        return next((group["scale"] for group in self.param_groups if "scale" in group), "")

    __repr__ = describe


def _list(items: Sequence[str]) -> str:
    first, left_out, last = shorten(items, MOST_SHOWN)
    return ", ".join([*first, *([f"... {left_out} more ..."] if left_out else []), *last])


def split_heads(heads: Heads, *, per_head: bool = True, latent: str = "heads") -> dict[Tensor, list[Blocks]]:
    """Return the matrix of each head in each trainable parameter of the selected projections.

    These are each head's rows of W_Q, W_K and W_V, and its columns of W_O where all three are selected. Rows of these
    parameters that belong to no selected head, such as gates, are a matrix for each run of them.

    Args:
        heads: Which heads.
        per_head: Whether each head is a matrix, or each projection with all its heads, also where query, key and value
            are one parameter.
        latent: "heads", or "whole" to leave W_Q, W_K and W_V of latent attention out; see `per_head_muon`.

    Raises:
        LayoutError: No parameter is trained, or one is sharded, flattened, parametrized, or read by two attentions in
            two ways.
        SettingError: `heads` is something else, or `latent` no choice.
    """
    require_heads(heads)
    require_boolean("per_head", per_head)
    require_choice("latent", latent, LATENT)
    every, found = {*PROJECTIONS} <= {*heads.projections}, defaultdict[Tensor, list[HeadView]](list)
    for site in heads:
        split = latent == "heads" or site.layout not in LATENT_ROWS
        own = [one for one in site.slices if split and one.projection in heads.projections]
        for part in [part for one in (*own, *([site.output] if every and site.output else ())) for part in one.parts]:
            held = part.owner._parameters.get(part.attribute)
            if part.obstacle is not None and held is not None and not held.requires_grad:
                continue
            parameter = part.parameter
            if parameter.requires_grad:
                _require_whole(parameter, part.name)
                # one parameter of several attentions, or values that are the keys
                if (part.rows, part.heads) not in [(other.rows, other.heads) for other in found[parameter]]:
                    found[parameter].append(part)
    if not found:
        raise LayoutError(
            "no projection of the selected heads is trained: their weights are frozen, as under LoRA, or are those of "
            "latent attention left whole; unfreeze them before the optimizer is made, or use torch.optim.Muon."
        )
    return {parameter: _divide(parameter, parts, per_head) for parameter, parts in found.items()}


def _divide(parameter: Tensor, parts: Sequence[HeadView], per_head: bool) -> list[Blocks]:
    counted = Counter(row for part in parts for row in part.rows)
    inputs, name = parts[0].axes.inputs, parts[0].name
    if max(counted.values()) > 1:
        raise LayoutError(f"{name} is read as different heads by several attentions; select one: heads.where(...).")
    blocks = [
        Blocks(
            (lambda tensor, part=part: part.of(tensor).mT) if part.transposed and not per_head else part.of,
            not per_head,
        )
        for part in parts
    ]
    others = sorted({*range(parameter.numel() // parameter.shape[inputs])} - {*counted})
    if others and parameter.dim() > 2:
        raise LayoutError(
            f"{name} has {parameter.dim()} axes, and {len(others)} of its rows belong to no selected head; select all "
            "of its projections."
        )
    starts = [row for row in others if row - 1 not in others]
    ends = [row + 1 for row in others if row + 1 not in others]
    axis = 1 - inputs if parameter.dim() == 2 else 0
    return blocks + [
        Blocks(lambda tensor, start=start, end=end: tensor.narrow(axis, start, end - start)[None])
        for start, end in zip(starts, ends, strict=True)
    ]


def _require_whole(parameter: Tensor, name: str) -> None:
    if is_sharded(parameter):
        raise LayoutError(
            f"{name} is sharded over processes (FSDP2, tensor parallel), and no process has the whole matrices that "
            "Muon orthogonalizes; train under DistributedDataParallel, or by AdamW."
        )


def per_head_muon(
    model: nn.Module,
    lr: float = 1e-3,
    *,
    heads: Heads | None = None,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: str = "match_rms_adamw",
    latent: str = "heads",
    adamw: str | Sequence[str] = (),
    adamw_lr: float | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
) -> PerHeadMuon:
    """Return an optimizer: Muon on the matrix of each head, Muon on other hidden matrices, AdamW on the rest.

    The update of a head then does not depend on other heads (MuonSplit; Group Muon, arXiv 2605.08933). Of a matrix W
    of r rows and c columns with gradient G, as in `torch.optim.Muon`:

        M <- m M + (1 - m) G,  X = (1 - m) G + m M  (M without `nesterov`)
        W <- (1 - lr decay) W - lr s NS(X)

    NS is `orthogonalize`, of all matrices of one shape at once. The learning rate is scaled by s = 0.2 sqrt(max(r, c)),
    which gives every update a root mean square of about 0.2 lr, as AdamW's: one rate is right for all. With
    `scale="original"`, s = sqrt(max(1, r / c)); AdamW then needs a rate of its own, `adamw_lr`.

    Print the optimizer to see which parameter is where:

    * By head: rows of W_Q, W_K and W_V, columns of W_O, of every attention that `find_heads` reads. Their rows without
      heads, such as gates, are a matrix for each run.
    * Whole: other weights of linear layers among the layers of the model, each expert of a stack [experts, r, c] by
      itself. So are those of attention without regular heads (linear attention in hybrids), which is named.
    * AdamW: embeddings, what lies outside of the layers (input projections, output heads), convolutions, and with
      decay 0 biases, norms and other vectors. A weight of one row is for AdamW too.

    Args:
        model: The model, also compiled or in DistributedDataParallel.
        lr: Learning rate.
        heads: Which heads, where they are not `find_heads(model)`; others are trained in whole matrices.
        weight_decay: Decay of all but vectors, decoupled.
        momentum: m, in [0, 1).
        nesterov: Whether X looks ahead.
        scale: "match_rms_adamw" or "original".
        latent: How the projections from a latent to heads (DeepSeek-V2 and V3) are taken: by "heads", with keys and
            values apart, as GLM-5 does, or each "whole". W_O is by head in both; projections to a latent are whole.
        adamw: Shell patterns of names of parameters for AdamW, such as "*.router.weight".
        adamw_lr: Rate of AdamW; `lr` when None.
        betas: Those of AdamW.
        steps: Number of Newton-Schulz steps.
        dtype: Precision of these steps.

    Raises:
        LayoutError: No attention is read, none of them is trained, or a parameter is sharded (FSDP, tensor parallel,
            ZeRO-3) or parametrized.
        SettingError: A setting is out of range, or a pattern matches nothing.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> optimizer = hw.optim.per_head_muon(model, lr=1e-3)
        >>> model(torch.randn(3, 5, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> [(group["method"], len(group["params"])) for group in optimizer.param_groups]
        [('Muon by head', 4), ('Muon whole', 4), ('AdamW', 16)]
    """
    require_range("lr", lr, low=0.0)
    require_range("weight_decay", weight_decay, low=0.0)
    require_range("adamw_lr", lr if adamw_lr is None else adamw_lr, low=0.0)
    if heads is not None:
        require_heads(heads)
    chosen, skipped = find_regular_heads(model) if heads is None else (heads, {})
    inner, _ = unwrap_model(model)
    if chosen.model is not inner:
        raise SettingError("heads are those of another model; give those of this one: hw.find_heads(model).")
    names: dict[Tensor, str] = {parameter: strip_wrappers(name) for name, parameter in inner.named_parameters()}
    patterns = (adamw,) if isinstance(adamw, str) else tuple(adamw)
    for pattern in patterns:
        if not fnmatch.filter(names.values(), pattern):
            raise SettingError(f"adamw has {pattern!r}, which matches the name of no parameter of the model.")
    apart = {p for p, name in names.items() if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    by_head = {p: blocks for p, blocks in split_heads(chosen, latent=latent).items() if p not in apart}
    whole = {p: blocks for p, blocks in _find_hidden(inner, chosen).items() if p not in apart and p not in by_head}
    rest = [p for p in names if p.requires_grad and p not in by_head and p not in whole]
    vectors = [p for p in rest if p.dim() < 2 or "bias" in names[p].rpartition(".")[2]]
    held = {*vectors}
    groups = [{"params": [*by_head]}, {"params": [*whole], "method": WHOLE}]
    others = [{"params": [p for p in rest if p not in held]}, {"params": vectors, "weight_decay": 0.0}]
    for parameter in (*whole, *rest):
        _require_whole(parameter, names[parameter])
    return PerHeadMuon(
        [{**group, "lr": lr, "weight_decay": weight_decay} for group in groups if group["params"]],
        by_head | whole,
        AdamW(
            [group for group in others if group["params"]] or others[:1],
            lr=lr if adamw_lr is None else adamw_lr,
            betas=betas,
            weight_decay=weight_decay,
        ),
        names=names,
        momentum=momentum,
        nesterov=nesterov,
        scale=scale,
        steps=steps,
        dtype=dtype,
        notes=[f"no heads: {name}, a {what}" for name, what in skipped.items()],
    )


def _find_hidden(model: nn.Module, heads: Heads) -> dict[Tensor, list[Blocks]]:
    """Return the matrices of linear layers and stacks of experts among the layers that hold attention."""
    places = {site.stack or site.name.rpartition(".")[0] for site in heads.found}
    embeddings = {
        p for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) for p in part.parameters()
    }
    found: dict[Tensor, list[Blocks]] = {}
    for name, module in [(strip_wrappers(name), module) for name, module in model.named_modules()]:
        if not any(not place or name.startswith(f"{place}.") for place in places):
            continue
        projection = read_projection(module)
        for attribute, parameter in module.named_parameters(recurse=False):
            linear = projection is not None and projection.owner is module and attribute == "weight"
            experts = parameter.dim() == 3 and "expert" in f"{name}.{attribute}".lower()
            output = parameter in embeddings or OUTPUT.search(name.rpartition(".")[2])
            if parameter.requires_grad and not output and (experts or (linear and min(parameter.shape) > 1)):
                found[parameter] = [Blocks(lambda tensor: tensor if tensor.dim() == 3 else tensor[None])]
    return found
