"""The matrix of each head as a tensor of its own, for optimizers that work on matrices."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from headwise.errors import LayoutError, NotFired, SettingError
from headwise.heads.heads import PROJECTIONS, Heads, require_heads
from headwise.heads.view import HeadView, is_sharded
from headwise.nn.hooks import Handle


class _Share(NamedTuple):
    """The blocks of one slice, and the parameter that held them when they were made."""

    part: HeadView
    held: Tensor
    leaves: list[Tensor]


class HeadBlocks(Handle):
    """Each head's rows of W_Q, W_K and W_V, and columns of W_O, as parameters that share the model's memory.

    Optimizers that orthogonalize updates (Muon, Jordan et al. 2024) take a weight as one matrix; on the matrix of each
    head alone the update of one head does not depend on the others' (MuonSplit; Group Muon, arXiv 2605.08933). A view
    of a parameter cannot be given to `torch.optim`, so that every block is a leaf which shares its storage, and gets
    its part of the parameter's gradient in each backward pass. `zero_grad` of the optimizer also clears the gradients
    of the whole parameters.

    Gradients of blocks can be clipped and scaled (GradScaler) as those of parameters can, but not under
    DistributedDataParallel(gradient_as_bucket_view=True), which moves gradients after the backward pass has made them.

    Update sizes that depend on the shape differ between a block and the whole weight: with `torch.optim.Muon` use
    `adjust_lr_fn="match_rms_adamw"`, which gives every update the same root mean square.

    Attributes:
        names: Name of each block, such as "layers.0.self_attn.in_proj_weight query 3"; without the number where a block
            holds all heads.
        wholes: The parameter that each block is a part of.
        rest: The model's other trainable parameters, for an optimizer of their own.

    Example:
        >>> import torch
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> blocks = head_blocks(hw.find_heads(model))
        >>> muon = torch.optim.Muon(list(blocks), lr=0.01, adjust_lr_fn="match_rms_adamw")
        >>> blocks.attach(muon)
        >>> adamw = torch.optim.AdamW(blocks.rest, lr=1e-3)
        >>> model(torch.randn(3, 5, 8)).square().mean().backward()
        >>> muon.step(), adamw.step()
        (None, None)
    """

    def __init__(self, heads: Heads, *, per_head: bool = True) -> None:
        super().__init__()
        slices = _list_slices(heads)
        self._per_head, self._acted = per_head, False
        _require_covered(slices)
        self.names, self.wholes, self._shares = [], [], []
        for part in slices:
            leaves = [block.requires_grad_() for block in self._divide(part, part.parameter.detach())]
            self._shares.append(_Share(part, part.parameter, leaves))
            self.names += [f"{part.name} {part.projection}{f' {head}' * per_head}" for head in range(len(leaves))]
            self.wholes += [part.parameter] * len(leaves)
        self._leaves = [leaf for share in self._shares for leaf in share.leaves]
        split = {id(parameter) for parameter in self.wholes}
        self.rest = [p for p in heads.model.parameters() if p.requires_grad and id(p) not in split]

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._leaves)

    @property
    def attached(self) -> bool:
        """Whether they are attached to an optimizer."""
        return bool(self._removers)

    def check(self) -> None:
        """Raise `NotFired` unless blocks were given gradients for an optimizer."""
        if not self._acted:
            raise NotFired(
                f"none of the {len(self)} blocks was given a gradient; call attach(optimizer), and then backward() and "
                "step() in the loop."
            )

    def attach(self, optimizer: Optimizer) -> None:
        """Give every block its gradient in each backward pass, and again before each step of the optimizer.

        Args:
            optimizer: An optimizer of blocks; each of them in its `param_groups`.

        Raises:
            SettingError: It does not hold each block, or is attached already.
        """
        if not isinstance(optimizer, Optimizer):
            raise SettingError(f"optimizer is {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
        own = {id(block) for block in self._leaves}
        own &= {id(held) for options in optimizer.param_groups for held in options["params"]}
        if len(own) < len(self):
            raise SettingError(
                f"{type(optimizer).__name__} holds {len(own) or 'none'} of the {len(self)} blocks, and would not train "
                "the others; build it from list(blocks)."
            )
        if self._removers:
            raise SettingError("the blocks are attached already; call remove() before attaching another optimizer.")
        before = optimizer.register_step_pre_hook(self._before_step)
        self._removed, self._acted = False, False

        def zero_wholes(set_to_none: bool) -> None:
            for _, parameter, _ in self._shares:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

        self._removers += [before.remove, _ZeroGrad(optimizer, zero_wholes).remove]
        hand_out = _make_handing_out(weakref.ref(self))
        for parameter in {id(parameter): parameter for parameter in self.wholes}.values():
            self._removers.append(parameter.register_post_accumulate_grad_hook(hand_out).remove)

    def _before_step(self, _optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[tuple, dict] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._hand_out()
            return None

        def closure_then_hand_out() -> Any:
            loss = closure()
            self._hand_out()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_hand_out}
        return (args[0], closure_then_hand_out, *args[2:]), kwargs

    def _hand_out(self, wanted: Tensor | None = None) -> None:
        """Give each block, of one parameter where it is given, its part of the present gradients."""
        for part, held, leaves in self._shares:
            if wanted is not None and held is not wanted:
                continue
            if part.parameter is not held:
                raise LayoutError(
                    f"{part.name} was replaced since hw.heads.head_blocks was called; call remove(), and "
                    "hw.heads.head_blocks again."
                )
            views = self._divide(part, held.detach())
            gradients = [None] * len(views) if held.grad is None else self._divide(part, held.grad)
            for block, view, gradient in zip(leaves, views, gradients, strict=True):
                if block.data_ptr() != view.data_ptr():
                    raise LayoutError(
                        f"{part.name} is in another place of memory than when hw.heads.head_blocks was called (the "
                        "model was moved or cast since); call remove(), and hw.heads.head_blocks again."
                    )
                block.grad = gradient
                self._acted = self._acted or gradient is not None

    def _divide(self, part: HeadView, tensor: Tensor) -> Sequence[Tensor]:
        """Return the blocks of a parameter or its gradient, as views."""
        views = part.of(tensor)
        if self._per_head:
            return views.unbind(0)
        # features of all heads side by side: [M e, d]
        rows = views.mT if part.transposed else views
        if rows.stride(0) != rows.shape[1] * rows.stride(1):
            raise LayoutError(
                f"{part.name}: the heads of its {part.projection} do not lie side by side, so that no matrix of all of "
                "them shares the memory of the parameter; use per_head=True, or give the parameter itself."
            )
        return [rows.flatten(0, 1)]

    def __repr__(self) -> str:
        kind = "heads" if self._per_head else "projections"
        attached = "" if self.attached else "; attached to no optimizer"
        return f"HeadBlocks({len(self)} {kind} of {len(set(map(id, self.wholes)))} parameters{attached})"


class _ZeroGrad:
    """A zero_grad of an optimizer that calls the one before and zeros more, until `remove()`."""

    def __init__(self, optimizer: Optimizer, zero_more: Callable[[bool], None]) -> None:
        self.optimizer, self.zero_more = weakref.ref(optimizer), zero_more
        self.attached, self.before = True, vars(optimizer).get("zero_grad")
        vars(optimizer)["zero_grad"] = self

    def __call__(self, set_to_none: bool = True) -> None:
        """Zero the gradients."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        earlier = type(optimizer).zero_grad.__get__(optimizer) if self.before is None else self.before
        earlier(set_to_none)
        if self.attached:
            self.zero_more(set_to_none)

    def remove(self) -> None:
        """Put the one before back; where another one lies over this, with that."""
        self.attached = False
        optimizer = self.optimizer()
        own = {} if optimizer is None else vars(optimizer)
        while isinstance(held := own.get("zero_grad"), _ZeroGrad) and not held.attached:
            del own["zero_grad"]
            if held.before is not None:
                own["zero_grad"] = held.before


def _make_handing_out(own: weakref.ref[HeadBlocks]) -> Callable[[Tensor], None]:
    """Return a hook on parameters that hands out their gradients, without keeping the blocks alive."""

    def hand_out(parameter: Tensor) -> None:
        blocks = own()
        if blocks is not None:
            blocks._hand_out(parameter)

    return hand_out


def head_blocks(heads: Heads, *, per_head: bool = True) -> HeadBlocks:
    """Return the matrix of each head as a parameter of its own; see `HeadBlocks`.

    Args:
        heads: Which heads: their selected projections, and W_O where all three are selected and it was found.
        per_head: Whether each head is a block, or each projection with all its heads: the control, also where query,
            key and value are one parameter.

    Raises:
        LayoutError: A parameter is sharded, quantized, frozen, under LoRA or shared between sites, or has rows that
            belong to no selected head, which would get no update.
        SettingError: `heads` is something else.
    """
    require_heads(heads)
    return HeadBlocks(heads, per_head=per_head)


def _list_slices(heads: Heads) -> list[HeadView]:
    found: list[HeadView] = []
    for site in heads:
        own = [part for part in site.slices if part.projection in heads.projections]
        if {*PROJECTIONS} <= {*heads.projections} and site.output is not None:
            own.append(site.output)
        found += [part for stack in own for part in stack.parts]
    for part in found:
        if is_sharded(part.parameter):
            raise LayoutError(f"{part.name} is sharded over processes, which have no whole head; train it as a matrix.")
        if part.lora is not None:
            raise LayoutError(
                f"{part.name} is the base of a LoRA layer, which trains A and B in its place; merge the adapter "
                "(merge_and_unload), unfreeze the weight and call find_heads again, or act on its heads by hw.repel."
            )
        part.require_trainable()
    return found


def _require_covered(slices: list[HeadView]) -> None:
    """Raise `LayoutError` unless the heads of every parameter are all of it, each once."""
    rows: dict[int, Counter[int]] = {}
    for part in slices:
        rows.setdefault(id(part.parameter), Counter()).update(part.rows)
    for part in slices:
        counted = rows[id(part.parameter)]
        total = part.parameter.numel() // part.parameter.shape[part.axes.inputs]
        if max(counted.values()) > 1:
            raise LayoutError(
                f"{part.name} is shared by several attentions or projections, each of which would step it; select one."
            )
        if len(counted) != total:
            raise LayoutError(
                f"{part.name}: {len(counted)} of its {total} rows belong to selected heads, and the others would get "
                "no update; select all of its projections."
            )
