"""An arm on a model: what it changes in the model, the parameters that are drawn, and its methods attached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.attached import Attached
from headwise.errors import LayoutError, SettingError
from headwise.heads.ablation import DropHeads, HeadDropping
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.heads.method import Method
from headwise.heads.scores.mixing import pair_decoder_heads, reads_pairs
from headwise.heads.view import HeadView
from headwise.nn.difference import pair_heads
from headwise.nn.hooks import Handle
from headwise.repulsion.repel import Repel, Repulsion
from headwise.roles.guide import guide
from headwise.routing.aggregate import Aggregate
from headwise.routing.modules import Gate, Residual, Setting
from headwise.similarity.penalty import Disagreement, Penalize
from headwise_lab.experiment.arm import Arm, Guided, LengthenQueries, OtherModel, PairHeads, Widen
from headwise_lab.experiment.scale import Scale
from headwise_lab.experiment.seeding import derive_key, initialize_parameters
from headwise_lab.experiment.task import Data, MaskMaker, Task
from headwise_lab.role_masks.encoder import mask_encoder
from headwise_lab.training import processes

FEED_FORWARD = ("feed_forward", "mlp")


def pair_all_heads(heads: Heads, *, second: bool) -> None:
    """Pair the heads of each attention; find heads again afterwards."""
    for site in heads:
        if reads_pairs(site):
            pair_decoder_heads(site, site.layer + 1, second=second)
            continue
        if not isinstance(site.module, nn.MultiheadAttention):
            raise LayoutError(
                f"{site.label} is a {type(site.module).__name__}; the arms differential and paired change torch's "
                "multi-head attention and the decoders of transformers, so leave them out of this task."
            )
        if site.prepare is not None:
            site.prepare(site.model, site.module)
        pair_heads(site.module, site.layer + 1, second=second)


def widen_feed_forward(heads: Heads, units: int | None = None) -> None:
    """Give the feed-forward layer beside each attention further hidden units, with parameters that are not drawn yet.

    It is the `feed_forward` or `mlp` of the module that holds the attention: Linears from the width to the hidden
    units, and after them one back; a PReLU may have a slope for each unit. Attentions of one module share it.

    Args:
        heads: The attentions.
        units: Number of further units; None for about as many parameters as gates on features have, (d + 1) d.
    """
    holders: Any = {site.model.get_submodule(site.name.rpartition(".")[0]): None for site in heads}
    for holder in holders:
        layer = next((found for name in FEED_FORWARD if (found := getattr(holder, name, None)) is not None), None)
        parts = [] if layer is None else list(layer.modules())
        linears = [part for part in parts if isinstance(part, nn.Linear)]
        sizes = [(part.in_features, part.out_features) for part in linears]
        if len(sizes) < 2 or {*sizes[:-1]} != {sizes[-1][::-1]}:
            raise SettingError(
                f"{type(holder).__name__} has no feed_forward or mlp of Linears that the arm wider would widen; leave "
                "that arm out of this task."
            )
        width, hidden = sizes[0]
        slopes = [part for part in parts if isinstance(part, nn.PReLU) and part.num_parameters == hidden]
        each = sum(width + (part.bias is not None) for part in linears[:-1]) + width + len(slopes)
        new = hidden + (round((width + 1) * width / each) if units is None else units)
        linears[-1].in_features = new
        for part in linears[:-1]:
            part.out_features = new
            if part.bias is not None:
                part.bias = nn.Parameter(part.bias.new_empty(new))
        for part in linears:
            part.weight = nn.Parameter(part.weight.new_empty(part.out_features, part.in_features))
        for part in slopes:
            part.num_parameters = new
            part.weight = nn.Parameter(part.weight.new_empty(new))
        config: Any = getattr(layer, "config", None)
        if getattr(config, "intermediate_size", None) == hidden:
            # transformers builds the model anew from it
            config.intermediate_size = new


def attach_arm(task: Task, arm: Arm, data: Data, scale: Scale, *, seed: int) -> tuple[nn.Module, Methods]:
    """Return a new model whose parameters are drawn, and the arm's methods on it.

    Raises:
        SettingError: As `build_model`, or the arm does not fit the model.
        DataError: A role needs what the data does not have.
    """
    model, masks = build_model(task, arm, data, scale, seed=seed)
    methods = Methods(
        task.remaining_arm(arm, data),
        model,
        find_target(task, arm, model),
        seed=seed,
        compile_routing=scale.compile_routing,
        masks=masks,
        rule_layers=task.rule_layers(scale),
    )
    return model, methods


def build_model(task: Task, arm: Arm, data: Data, scale: Scale, *, seed: int) -> tuple[nn.Module, MaskMaker | None]:
    """Return the model of an arm without anything of the arm on it, and what makes its role masks, if it has roles."""
    other, guided = arm.find(OtherModel), arm.find(Guided)
    dropout = task.remaining_arm(arm, data).dropout
    if dropout is not None:
        if not scale.sets_dropout:
            raise SettingError(
                f"arm {arm.name} sets dropout, and the model of task {task.name} has none or is that of a folder; "
                "leave it out."
            )
        changed: Any = scale
        scale = replace(changed, dropout=dropout)
    if other is not None:
        if other.model not in task.models:
            raise SettingError(
                f"task {task.name} has no model {other.model}; models besides its own: {task.models or 'none'}."
            )
        return task.other_model(other.model, data, scale), None
    masks = None if guided is None else task.role_masks(guided, data, scale, seed)
    return task.initial_model(arm, data, scale, seed), masks


def find_target(task: Task, arm: Arm, model: nn.Module) -> nn.Module | None:
    """Return the part of a model whose heads an arm acts on; None where it has no heads."""
    return None if arm.find(OtherModel) is not None else task.target(model)


H = TypeVar("H", bound=Handle)


class Methods:
    """The methods of one arm, attached to one model whose parameters they draw.

    What adds parameters is put in place before the parameters are drawn, the penalty after them, repulsion once there
    is an optimizer.

    Args:
        arm: The arm.
        model: The model; what the arm adds to it is put in place and every parameter is drawn anew.
        part: The part of the model whose heads the arm acts on; None for a model without attention.
        seed: Seed of the run; each use of it has its own stream.
        compile_routing: Whether the arm's routing is compiled with `torch.compile`.
        masks: Makes the role masks of a batch from the arguments of the model's forward; None where no head is guided.
        rule_layers: Layers that the arm's rule acts on where the arm names none; None for all.
    """

    def __init__(
        self,
        arm: Arm,
        model: nn.Module,
        part: nn.Module | None,
        *,
        seed: int,
        compile_routing: bool = False,
        masks: MaskMaker | None = None,
        rule_layers: tuple[int, ...] | None = None,
    ) -> None:
        self.arm, self.masks = arm, masks
        self.heads: Heads | None = None
        self.run = Attached([])
        if part is not None:
            if (pairs := arm.find(PairHeads)) is not None:
                pair_all_heads(find_heads(part), second=pairs.second)
            self.heads = heads = find_heads(part)
            if (wider := arm.find(Widen)) is not None:
                widen_feed_forward(heads, wider.units)
            methods = [_fit(own, seed, rule_layers, compile_routing) for own in arm.methods if isinstance(own, Method)]
            self.run = Attached(methods, find=lambda _: heads, seed=derive_key(seed, "noise"))
            self.run.build(part)
        initialize_parameters(model, seed)
        if (longer := arm.find(LengthenQueries)) is not None:
            with torch.no_grad():
                for query in self._list_queries():
                    query.of(query.parameter).mul_(longer.drawn)
        if self.heads is not None:
            self.run.attach(self.heads.model)
            if masks is not None:
                _guide(model, self.heads, masks)

    @property
    def penalty(self) -> Disagreement | None:
        """The handle of the arm's penalty."""
        return self._find(Disagreement)

    @property
    def repulsion(self) -> Repulsion | None:
        """The handle of the arm's rule."""
        return self._find(Repulsion)

    def _find(self, kind: type[H]) -> H | None:
        return next(iter(self.run.of(kind)), None)

    def _list_queries(self) -> list[HeadView]:
        assert self.heads is not None  # an arm of another model has one method
        return [part for head_slice in self.heads.projection("query").slices() for part in head_slice.parts]

    def repel(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach the arm's rule to the optimizer; the loop calls `apply_repulsion` before it clips."""
        longer = self.arm.find(LengthenQueries)
        if longer is not None and longer.rate != 1.0:
            _train_faster(optimizer, self._list_queries(), longer.rate)
        if self.heads is not None:
            self.run.attach(self.heads.model, optimizer)

    def begin_step(self, step: int, steps: int, warmup: int) -> None:
        """Set what depends on the step, counted from 0, of a training of `steps` steps of which `warmup` warm up."""
        drop, dropping = self.arm.find(DropHeads), self._find(HeadDropping)
        if dropping is not None and drop is not None:
            dropping.rate = drop.rate_at(step, steps, warmup)

    def loss(self, loss: Tensor) -> Tensor:
        """Return the loss of training with the arm's penalty added, and the balance of a mixture of heads."""
        return self.run.loss(loss)

    def apply_repulsion(self) -> Tensor | None:
        """Apply the rule to the gradients and return its force ratio; without a rule, that of a measured penalty.

        The norm of all repulsion over the norm of all driving terms: a group that the loss hardly moves, as queries and
        keys are at the start, would dominate a mean of the groups' ratios. NaN where the loss moves no head, and
        infinite where a rule without finite forces left a gradient as it was. For a penalty whose strength is measured
        against the loss, the mean over attentions of |gradient of the penalty| / |gradient of the loss|, as last
        measured; else None.
        """
        if self.repulsion is not None:
            self.repulsion.apply()
            last = self.repulsion.last
            driving = last.driving_norm.norm()
            ratio = torch.where(driving == 0, torch.nan, last.repulsion_norm.norm() / driving)
            return torch.where(last.finite.all(), ratio, torch.inf)
        relative = None if self.penalty is None else self.penalty.relative
        if relative is None or not relative.shares:
            return None
        shares = list(relative.shares.values())
        return torch.stack([share.to(shares[0].device) for share in shares]).mean()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluation mode without gradients, and the old mode afterwards."""
        training = model.training
        with torch.no_grad():
            model.eval()
            try:
                yield
            finally:
                model.train(training)

    def state_dict(self) -> dict[str, Any]:
        """Return what the methods draw from, for a checkpoint; called in all processes."""
        state = self.run.state_dict()
        dropping = self._find(HeadDropping)
        if dropping is not None and dropping.generator is not None:
            # several processes drop other heads each
            state["generators"] = [own.tolist() for own in processes.gather(dropping.generator.get_state())]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if not self.run.methods:
            return
        dropping, rank = self._find(HeadDropping), processes.rank()
        begun = {} if dropping is None else dropping.state_dict()
        self.run.load_state_dict(state)
        if dropping is not None:
            # a process that the checkpoint knows nothing of begins its own
            known = state["generators"]
            dropping.load_state_dict({"generator": known[rank]} if rank < len(known) else begun)


def _fit(method: Method, seed: int, rule_layers: tuple[int, ...] | None, compile_routing: bool) -> Method:
    """Return a method of an arm with what the loop decides."""
    if isinstance(method, Repel):
        return replace(method, when="manual", layers=rule_layers if method.layers is None else method.layers)
    if isinstance(method, Penalize):
        return replace(method, across=processes.group())
    if isinstance(method, Aggregate) and compile_routing:
        return replace(method, setting=_compile(method.setting))
    if isinstance(method, DropHeads):
        # the first process drops those heads that one process alone would
        return replace(method, seed=derive_key(seed, "drophead", *filter(None, [processes.rank()])))
    return method


def _compile(setting: Setting) -> Setting:
    if isinstance(setting, Residual):
        return replace(setting, routing=replace(setting.routing, chunks=replace(setting.routing.chunks, compile=True)))
    return setting if isinstance(setting, Gate) else replace(setting, chunks=replace(setting.chunks, compile=True))


def _train_faster(optimizer: torch.optim.Optimizer, queries: list[HeadView], factor: float) -> None:
    """Move queries to parameter groups of their own, whose learning rate is `factor` times as high."""
    for part in queries:
        if part.of(part.parameter).numel() != part.parameter.numel():
            raise SettingError(
                f"{part.name} holds more than queries, and one parameter has one learning rate; give the arm "
                "rate=1, or a model whose queries are a parameter of their own."
            )
    found = {id(part.parameter) for part in queries}
    for group in list(optimizer.param_groups):
        if moved := [one for one in group["params"] if id(one) in found]:
            group["params"] = [one for one in group["params"] if id(one) not in found]
            optimizer.add_param_group({**group, "params": moved, "lr": factor * group["lr"]})


def _guide(model: Any, heads: Heads, masks: MaskMaker) -> None:
    """Give each forward of the model the masks of its batch; where the model encodes a source, those of the source."""
    if hasattr(model, "get_encoder"):
        mask_encoder(
            model, lambda ids, real: masks({"input_ids": ids, "attention_mask": real}), sites=heads.kind("self")
        )
        return
    guidance = guide(heads)

    def before(_model: nn.Module, _arguments: tuple[Any, ...], batch: dict[str, Any]) -> None:
        guidance(masks(batch))

    model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
