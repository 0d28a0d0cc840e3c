"""Methods attached to a model and its optimizer, and attached again where a trainer builds either anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from headwise.disagreement.penalty import Disagreement
from headwise.errors import LayoutError, NotFired, SettingError
from headwise.heads.adapters import get_called
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.integrations.methods import Aggregate, Penalize, Repel, select_heads
from headwise.nn.checkpointing import is_recomputing
from headwise.nn.hooks import Hook
from headwise.repulsion.groups import ForceNorms
from headwise.repulsion.optimizers import list_held, unwrap_optimizers
from headwise.repulsion.repel import Repulsion
from headwise.routing.aggregate import Aggregation
from headwise.routing.modules import Aggregator

Method = Aggregate | Penalize | Repel
H = TypeVar("H", Aggregation, Disagreement, Repulsion)


class Attached:
    """The handles of some methods on one model and its optimizer; `attach` moves them to another model or optimizer.

    Attributes:
        methods: What is attached.
        find: Returns the heads of a model.
        seed: Seed of the noise of rules that have one.
        aggregations: Handles of the `Aggregate` methods.
        penalties: Those of the `Penalize` methods.
        repulsions: Those of the `Repel` methods.
        readings: How many forwards had their penalty read.

    Raises:
        SettingError: Something given is no method.

    Example:
        >>> import headwise as hw
        >>> attached = Attached([Penalize(hw.Output(), weight=0.1), Repel(hw.SVGD(alpha=0.01))])
        >>> for _ in range(2):  # a new model in each trial
        ...     model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     attached.attach(model, optimizer)
        ...     attached.add_penalty(model(torch.randn(3, 5, 8)).square().mean()).backward()
        ...     optimizer.step()
        >>> attached.repulsions[0].steps, sorted(attached.read_metrics())
        (1, ['force_ratio', 'penalty', 'similarity'])
    """

    def __init__(
        self, methods: Sequence[Method], *, find: Callable[[nn.Module], Heads] = find_heads, seed: int = 0
    ) -> None:
        for method in methods:
            if not isinstance(method, Method):
                raise SettingError(
                    f"{method!r} is no method; expected Aggregate(...), Penalize(...) or Repel(...) of "
                    "headwise.integrations."
                )
        self.methods, self.find, self.seed = tuple(methods), find, seed
        self.aggregations: tuple[Aggregation, ...] = ()
        self.penalties: tuple[Disagreement, ...] = ()
        self.repulsions: tuple[Repulsion, ...] = ()
        self._model: nn.Module | None = None
        self._aggregated: nn.Module | None = None
        self._optimizers: list[Optimizer] = []
        self._loaded: Mapping[str, Any] | None = None
        self._hooks: list[RemovableHandle] = []
        self._pauses = ExitStack()
        self._called = self._learned = False
        self.readings = 0
        self._forget_values()

    def is_on(self, model: nn.Module) -> bool:
        """Whether penalties and repulsion are attached to this model."""
        return self._model is model

    def aggregate(self, model: nn.Module) -> None:
        """Put the aggregators into a model, before its optimizer is built; a model that has them stays as it is.

        Raises:
            LayoutError: As of `hw.aggregate`.
        """
        settings = [method for method in self.methods if isinstance(method, Aggregate)]
        if settings and self._aggregated is not model:
            # so that the whole model is saved with them, wherever in it the heads were found
            heads = replace(self.find(model), model=model)
            self.aggregations = _attach_all(partial(method.attach, heads) for method in settings)
            self._aggregated = model

    def attach(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Attach penalties and repulsion to a model and its optimizer; where they are attached there, do nothing.

        On another model everything begins anew. On another optimizer of the same model the noise goes on, and the
        strength stays.

        Raises:
            LayoutError: The optimizer was built before the aggregators were put into the model; or as of
                `hw.Disagreement` and `hw.repel`.
            SettingError: As of `hw.repel`.
        """
        self._pauses.close()
        optimizers = unwrap_optimizers(optimizer)
        if self._model is model and list(map(id, optimizers)) == list(map(id, self._optimizers)):
            return
        state = self._loaded
        if self._model is model and state is None:
            state = self.state_dict()
        if self._model is not model:
            self.detach()
        heads = self.find(model)
        self._require_aggregators(heads, optimizers)
        if self._model is not model:
            penalize = [method for method in self.methods if isinstance(method, Penalize)]
            self.penalties = _attach_all(partial(method.attach, heads, training_only=True) for method in penalize)
            for module in {site.module for penalty in self.penalties for site in penalty.heads}:
                self._hooks.append(module.register_forward_pre_hook(Hook(module, self._note_call)))
        for repulsion in self.repulsions:
            repulsion.remove()
        rules = [method for method in self.methods if isinstance(method, Repel)]
        self.repulsions = ()
        try:
            self.repulsions = _attach_all(partial(method.attach, optimizers, heads, seed=self.seed) for method in rules)
        except BaseException:
            self.detach()
            raise
        self._model, self._optimizers = model, optimizers
        if state is not None:
            self.load_state_dict(state)

    def detach(self) -> None:
        """Take penalties and repulsion off again; aggregators stay in their model."""
        self._pauses.close()
        for handle in (*self.penalties, *self.repulsions, *self._hooks):
            handle.remove()
        self.penalties, self.repulsions, self._hooks = (), (), []
        self._model, self._optimizers, self._called, self._learned = None, [], False, False
        self._forget_values()

    def pause(self) -> None:
        """Read nothing of the model until the next `attach`, so that what it does elsewhere is not kept."""
        self._pauses.close()
        for penalty in self.penalties:
            if penalty.taps is not None:
                self._pauses.enter_context(penalty.taps.paused())

    def drop_forward(self) -> None:
        """Forget the last forward, whose loss is left out."""
        self._called = self._learned = False
        for penalty in self.penalties:
            if penalty.taps is not None:
                penalty.taps.read_called()

    def add_penalty(self, loss: Tensor, *, share: float = 1.0) -> Tensor:
        """Return loss + share * sum_p weight_p * penalty_p of the last forward, and in evaluation the loss alone.

        A relative strength is a share of the loss given, without the other penalties.

        Args:
            loss: A scalar.
            share: Factor on the penalty: 1 / n where the loop adds up n micro-batches without dividing their losses.

        Raises:
            NotFired: The penalties are attached to no model, or to another one than that which ran.
        """
        methods = [method for method in self.methods if isinstance(method, Penalize)]
        if not methods:
            return loss
        if not self._called:
            raise NotFired(
                "the penalty is attached to "
                + (
                    "a model that was not called since the last loss: another one runs"
                    if self.penalties
                    else "no model"
                )
                + "; call attach(model, optimizer) with those in use."
            )
        learned, self._called, self._learned = self._learned, False, False
        if not (self.penalties[0].heads.model.training and torch.is_grad_enabled()):
            return loss
        if not learned and any(penalty.taps is not None for penalty in self.penalties):
            raise NotFired(
                "the penalized attentions ran without gradients for this loss: a cached loss (GradCache, as in "
                "CachedMultipleNegativesRankingLoss) runs the model again inside the backward pass, where no penalty "
                "can be added to it, and so does activation checkpointing with use_reentrant=True. Use the loss "
                "without a cache, checkpoints with use_reentrant=False, or a term on parameters such as "
                "hw.SpanOverlap()."
            )
        task = loss
        for method, penalty in zip(methods, self.penalties, strict=True):
            before, loss = loss, method.add(penalty, loss, share=share, task=task)
            assert penalty.last is not None  # it was read
            self._similarity = self._similarity.to(loss.device) + penalty.last.to(loss.device) / len(methods)
            self._penalty = self._penalty.to(loss.device) + (loss - before).detach() / share
        self.readings += 1
        self._counted += 1
        return loss

    def read_metrics(self) -> dict[str, Tensor]:
        """Return what is worth logging, as scalars.

        "penalty" is what was added to the loss and "similarity" the same without its strength, both means over the
        forwards since the last call; "force_ratio" is the norm of all repulsion over that of all driving terms at the
        last step. What was not attached, or has not run, is left out.
        """
        found: dict[str, Tensor] = {}
        if self._counted:
            found |= {"penalty": self._penalty / self._counted, "similarity": self._similarity / self._counted}
            self._forget_values()
        with suppress(NotFired):
            found |= _compare_forces([repulsion.last for repulsion in self.repulsions])
        return found

    @property
    def has_state(self) -> bool:
        """Whether a run that resumes without `state_dict` would differ: there is noise, or a strength is measured."""
        noisy = any(repulsion.rule.noise_scale() or repulsion.steering for repulsion in self.repulsions)
        return noisy or any(penalty.state_dict() for penalty in self.penalties)

    @property
    def steps(self) -> int:
        """Steps that the repulsion has acted on: the least of all rules, 0 without one."""
        return min((repulsion.steps for repulsion in self.repulsions), default=0)

    def verify(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Raise unless every rule is attached to an optimizer in use and has acted; errors as of `Repulsion.verify`."""
        for repulsion in self.repulsions:
            repulsion.verify(*unwrap_optimizers(optimizer))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs for the same noise and strength, as plain JSON."""
        return {
            "repulsions": [repulsion.state_dict() for repulsion in self.repulsions],
            "penalties": [penalty.state_dict() for penalty in self.penalties],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; where nothing is attached yet, once it is.

        Raises:
            SettingError: It is no such state, or of other methods. Nothing is changed then.
        """
        states = state.get("repulsions") if isinstance(state, Mapping) else None
        rules = sum(isinstance(method, Repel) for method in self.methods)
        if not isinstance(states, list) or len(states) != rules:
            held = f"{len(states)} repulsions" if isinstance(states, list) else "no list of repulsions"
            raise SettingError(
                f"the state holds {held}, and {rules} are attached; resume with the methods it was saved with."
            )
        if self._model is None:
            self._loaded = state
            return
        weights = state.get("penalties")
        if not isinstance(weights, list) or len(weights) != len(self.penalties):
            raise SettingError(
                f"the state holds penalties={weights!r}, and {len(self.penalties)} are attached; resume with the "
                "methods it was saved with."
            )
        handles: list[Any] = [*self.repulsions, *self.penalties]
        before = [handle.state_dict() for handle in handles]
        try:
            for handle, own in zip(handles, [*states, *weights], strict=True):
                handle.load_state_dict(own)
        except SettingError:
            for handle, own in zip(handles, before, strict=True):
                handle.load_state_dict(own)
            raise
        self._loaded = None

    def __str__(self) -> str:
        handles = (*self.aggregations, *self.penalties, *self.repulsions)
        return "\n".join(map(str, handles)) if handles else f"{', '.join(map(str, self.methods))}; not attached yet"

    __repr__ = __str__

    def _note_call(self, _module: nn.Module, _arguments: tuple) -> None:
        if not is_recomputing():
            self._called = True
            self._learned = self._learned or torch.is_grad_enabled()

    def _forget_values(self) -> None:
        self._penalty, self._similarity, self._counted = torch.zeros(()), torch.zeros(()), 0

    def _require_aggregators(self, heads: Heads, optimizers: Sequence[Optimizer]) -> None:
        """Raise unless the aggregators are in the model, and their parameters in the optimizers."""
        held = {parameter for optimizer in optimizers for parameter in list_held(optimizer)}
        settings = [method for method in self.methods if isinstance(method, Aggregate)]
        for site in (site for method in settings for site in select_heads(heads, method.layers, method.kinds)):
            module = get_called(site.expose().module)
            if not isinstance(module, Aggregator):
                raise LayoutError(
                    f"{site.label} has no aggregator: the model was built anew after aggregate(model); call it on this "
                    "model, and build the optimizer afterwards."
                )
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and id(parameter) not in held:
                    raise LayoutError(
                        f"{site.label}: the optimizer does not hold {name} of its {type(module).__name__} and would "
                        "never train it; build the optimizer after the aggregators are in the model."
                    )


def _compare_forces(last: Sequence[ForceNorms]) -> dict[str, Tensor]:
    if not last:
        return {}
    device = last[0].driving_norm.device
    repelling = torch.cat([forces.repulsion_norm.to(device) for forces in last]).norm()
    driving = torch.cat([forces.driving_norm.to(device) for forces in last]).norm()
    return {"force_ratio": repelling / driving.clamp_min(torch.finfo(driving.dtype).tiny)}


def _attach_all(methods: Iterable[Callable[[], H]]) -> tuple[H, ...]:
    """Return the handles of methods; where one cannot be attached, take the others off again."""
    handles: list[H] = []
    with ExitStack() as undo:
        for attach in methods:
            handle = attach()
            undo.callback(handle.remove)
            handles.append(handle)
        undo.pop_all()
    return tuple(handles)
