"""Methods attached to the heads of a model as one handle, and again where a trainer builds model or optimizer anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from headwise.errors import LayoutError, NotFired, SettingError, warn_renamed
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads, require_heads
from headwise.heads.method import Method
from headwise.nn.checkpointing import is_recomputing
from headwise.nn.hooks import Handle, Hook, PerThread
from headwise.repulsion.optimizers import list_held, unwrap_optimizers
from headwise.repulsion.repel import Repulsion
from headwise.routing.aggregate import Aggregation
from headwise.similarity.penalty import Disagreement

H = TypeVar("H", bound=Handle)


# What the handles of a class were called in earlier versions.
KINDS: Mapping[str, type[Handle]] = {
    "aggregations": Aggregation,
    "penalties": Disagreement,
    "repulsions": Repulsion,
}


@dataclass
class _Forward:
    """Whether penalized attentions were called since the last loss, and with gradients."""

    called: bool = False
    learned: bool = False

    def forget(self) -> None:
        """Begin anew."""
        self.called = self.learned = False


class Attached(Handle):
    """The handles of some methods on one model and its optimizer; `attach` moves them to another model or optimizer.

    Attributes:
        methods: What is attached.
        handles: The handle of each method; None where it is not attached yet.
        find: Returns the heads of a model.
        seed: Seed of what methods draw.
        readings: How many forwards had their penalty read.

    Raises:
        SettingError: Something given is not a method.

    Example:
        >>> import headwise as hw
        >>> attached = Attached([hw.Penalize(hw.similarity.Output(), weight=0.1), hw.Repel(hw.SVGD(alpha=0.01))])
        >>> for _ in range(2):  # a new model in each trial
        ...     model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     attached.attach(model, optimizer)
        ...     attached.loss(model(torch.randn(3, 5, 8)).square().mean()).backward()
        ...     optimizer.step()
        >>> attached.of(hw.repulsion.Repulsion)[0].steps, sorted(attached.stats())
        (1, ['force_ratio', 'penalty', 'similarity'])
    """

    def __init__(
        self, methods: Sequence[Method], *, find: Callable[[nn.Module], Heads] = find_heads, seed: int = 0
    ) -> None:
        super().__init__()
        for method in methods:
            if not isinstance(method, Method):
                raise SettingError(
                    f"{method!r} is no method; expected hw.Repel(...), hw.Penalize(...), hw.Aggregate(...) or another "
                    "hw.Method."
                )
        self.methods, self.find, self.seed = tuple(methods), find, seed
        self.handles: list[Handle | None] = [None] * len(self.methods)
        self._model: nn.Module | None = None
        self._built: nn.Module | None = None
        self._optimizers: list[Optimizer] = []
        self._loaded: Mapping[str, Any] | None = None
        self._hooks: list[RemovableHandle] = []
        self._pauses = ExitStack()
        self._forward = PerThread(_Forward)
        self.readings = 0
        self._removers.append(self._take_all_off)

    def of(self, kind: type[H]) -> tuple[H, ...]:
        """Return the handles of a class, such as `hw.repulsion.Repulsion`."""
        return tuple(handle for handle in self.handles if isinstance(handle, kind))

    def __getattr__(self, name: str) -> Any:
        # names of before
        if name not in KINDS:
            return super().__getattr__(name)
        warn_renamed(f"Attached.{name}", f"of({KINDS[name].__name__})")
        return self.of(KINDS[name])

    def is_on(self, model: nn.Module) -> bool:
        """Whether what acts in forwards and steps is attached to this model."""
        return self._model is model

    def build(self, model: nn.Module) -> None:
        """Put the modules of methods into a model, before its optimizer is built; one that has them stays as it is.

        Raises:
            LayoutError: As of these methods.
        """
        if self._built is not model:
            # so that the whole model is saved with them, wherever in it the heads were found
            self._attach("build", lambda: replace(self.find(model), model=model))
            self._built = model

    def attach(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Attach what acts in forwards of a model and in steps of its optimizer; where it is attached, do nothing.

        On another model everything begins anew. On another optimizer of the same model the noise goes on, and the
        strength stays. Without an optimizer, what acts in its steps waits for one.

        Raises:
            LayoutError: The optimizer was built before the modules of methods were put into the model; or as of the
                methods.
            SettingError: As of the methods.
        """
        self._pauses.close()
        optimizers = [] if optimizer is None else unwrap_optimizers(optimizer)
        if self._model is model and list(map(id, optimizers)) == list(map(id, self._optimizers)):
            return
        if self._model is not model:
            self.detach()
        kept = {index: handle.state_dict() for index, handle in self._list_stage("step")}
        heads = self.find(model)
        self._require_built(model, optimizers)
        try:
            if self._model is not model:
                self._attach("forward", lambda: heads)
                for module in {site.module for penalty in self.of(Disagreement) for site in penalty.heads}:
                    self._hooks.append(module.register_forward_pre_hook(Hook(module, self._note_call)))
            self._take_off("step")
            if optimizers:
                self._attach("step", lambda: heads, optimizers)
        except BaseException:
            self.detach()
            raise
        self._model, self._optimizers = model, optimizers
        for index, handle in self._list_stage("step"):
            if index in kept:
                handle.load_state_dict(kept[index])
        if self._loaded is not None:
            self.load_state_dict(self._loaded)

    def detach(self) -> None:
        """Take off what acts in forwards and steps; modules stay in their model."""
        self._pauses.close()
        self._take_off("step")
        self._take_off("forward")
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._model, self._optimizers, self._forward = None, [], PerThread(_Forward)

    def pause(self) -> None:
        """Read nothing of the model until the next `attach`, so that what it does elsewhere is not kept."""
        self._pauses.close()
        for penalty in self.of(Disagreement):
            self._pauses.enter_context(penalty.paused())

    def drop_forward(self) -> None:
        """Forget the last forward, whose loss is left out."""
        self._forward.own.forget()
        for penalty in self.of(Disagreement):
            if penalty.taps is not None:
                penalty.taps.read_called()

    def loss(self, loss: Tensor, *, share: float = 1.0) -> Tensor:
        """Return the loss of the last forward with all that the methods add to it, and in evaluation the loss alone.

        A relative strength is measured against the task's loss, without what other methods add.

        Raises:
            NotFired: Penalties are attached to no model, or to another one than that which ran; or as of the methods.
        """
        if any(method.stage == "forward" and handle is None for method, handle in self._pairs()):
            raise NotFired("the methods are attached to no model; call attach(model, optimizer) with those in use.")
        penalties = self.of(Disagreement)
        if penalties and not self._read_forward(penalties):
            return loss
        terms = [None if handle is None else handle.compute_term(loss, share) for handle in self.handles]
        self.readings += 1
        return sum((term for term in terms if term is not None), loss)

    def stats(self) -> dict[str, Tensor]:
        """Return what is worth logging: what each method says, the second with a name under `name-2`, and so on."""
        found: dict[str, Tensor] = {}
        for handle in self.handles:
            for name, value in {} if handle is None else handle.stats().items():
                count = sum(known.partition("-")[0] == name for known in found)
                found[f"{name}-{count + 1}" if count else name] = value
        return found

    @property
    def has_state(self) -> bool:
        """Whether a run that resumes without `state_dict` would differ: there is noise, or a strength is measured."""
        noisy = any(repulsion.rule.noise_scale() or repulsion.steering for repulsion in self.of(Repulsion))
        return noisy or any(handle.state_dict() for handle in self.handles if not isinstance(handle, Repulsion | None))

    @property
    def steps(self) -> int:
        """Steps that the repulsion has acted on: the least of all rules, 0 without one."""
        return min((repulsion.steps for repulsion in self.of(Repulsion)), default=0)

    def check(self, *optimizers: Optimizer | Sequence[Optimizer]) -> None:
        """Raise unless every method is attached and has acted, in steps of these optimizers where any are given.

        Raises:
            NotFired: A method is not attached, or has not acted; or as of the handles.
        """
        for method, handle in self._pairs():
            if handle is None:
                needed = "attach(model, optimizer)" if method.stage == "step" else "attach(model)"
                raise NotFired(f"{method!r:.80} is not attached; call {needed} with what the loop uses.")
            if isinstance(handle, Repulsion):
                handle.check(*(own for given in optimizers for own in unwrap_optimizers(given)))
            else:
                handle.check()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on alike, as plain JSON: the state of each method."""
        return {"methods": [{} if handle is None else handle.state_dict() for handle in self.handles]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; where nothing is attached yet, once it is.

        Raises:
            SettingError: It is no such state, or of other methods. Nothing is changed then.
        """
        states = state.get("methods") if isinstance(state, Mapping) else None
        if not isinstance(states, list) or len(states) != len(self.methods):
            held = f"{len(states)} methods" if isinstance(states, list) else "no methods"
            raise SettingError(
                f"the state is that of {held}, and {len(self.methods)} are attached; resume with the methods it "
                "was saved with."
            )
        if self._model is None:
            self._loaded = state
            return
        pairs = [(handle, own) for handle, own in zip(self.handles, states, strict=True) if handle is not None]
        before = [handle.state_dict() for handle, _ in pairs]
        try:
            for handle, own in pairs:
                handle.load_state_dict(own)
        except SettingError:
            for (handle, _), own in zip(pairs, before, strict=True):
                handle.load_state_dict(own)
            raise
        self._loaded = None if len(pairs) == len(states) else state

    def _describe(self) -> str:
        return "; ".join(
            f"{method} not attached yet" if handle is None else str(handle) for method, handle in self._pairs()
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "handles": [None] * len(self.methods),
            **dict.fromkeys(("_model", "_built", "_loaded")),
            "_optimizers": [],
            "_hooks": [],
            "_pauses": ExitStack(),
        }

    def _pairs(self) -> list[tuple[Method, Handle | None]]:
        return list(zip(self.methods, self.handles, strict=True))

    def _attach(self, stage: str, find: Callable[[], Heads], optimizers: Sequence[Optimizer] = ()) -> None:
        """Attach the methods of a stage; where one cannot be attached, take the others off again."""
        wanted = [index for index, method in enumerate(self.methods) if method.stage == stage]
        heads = find() if wanted else None
        try:
            for index in wanted:
                method: Any = self.methods[index]
                step = (optimizers, self.seed) if stage == "step" else ()
                self.handles[index] = method.attach(heads, *step)
        except BaseException:
            self._take_off(stage)
            raise

    def _list_stage(self, stage: str) -> list[tuple[int, Handle]]:
        """Return what is attached of a stage, each with its place."""
        numbered = [(index, *pair) for index, pair in enumerate(self._pairs())]
        return [(index, handle) for index, method, handle in numbered if method.stage == stage and handle is not None]

    def _take_off(self, stage: str) -> None:
        for index, handle in reversed(self._list_stage(stage)):
            self.handles[index] = None
            handle.remove()

    def _take_all_off(self) -> None:
        self.detach()
        self._take_off("build")
        self._built = None

    def _note_call(self, _module: nn.Module, _arguments: tuple) -> None:
        if not is_recomputing():
            forward = self._forward.own
            forward.called, forward.learned = True, forward.learned or torch.is_grad_enabled()

    def _read_forward(self, penalties: Sequence[Disagreement]) -> bool:
        """Return whether a loss takes penalties of the last forward."""
        forward = self._forward.own
        if not forward.called:
            raise NotFired(
                "the penalty is attached to a model that was not called since the last loss: another one runs; call "
                "attach(model, optimizer) with those in use."
            )
        learned = forward.learned
        forward.forget()
        if not (penalties[0].heads.model.training and torch.is_grad_enabled()):
            return False
        if not learned and any(penalty.taps is not None for penalty in penalties):
            raise NotFired(
                "the penalized attentions ran without gradients for this loss: a cached loss (GradCache, as in "
                "CachedMultipleNegativesRankingLoss) runs the model again inside the backward pass, where no penalty "
                "can be added to it, and so does activation checkpointing with use_reentrant=True. Use the loss "
                "without a cache, checkpoints with use_reentrant=False, or a term on parameters such as "
                "hw.similarity.SpanOverlap()."
            )
        return True

    def _require_built(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Raise unless the modules of methods are in the model, and their parameters in the optimizers."""
        held = {parameter for optimizer in optimizers for parameter in list_held(optimizer)}
        there = set(model.modules())
        for method, handle in self._pairs():
            if method.stage != "build":
                continue
            if handle is None or not there.issuperset(handle.added):
                raise LayoutError(
                    f"the model was built anew after the modules of {type(method).__name__} were put into one; call "
                    "build(model) on this model, and build the optimizer afterwards."
                )
            for module in handle.added if optimizers else ():
                for name, parameter in module.named_parameters():
                    if parameter.requires_grad and id(parameter) not in held:
                        raise LayoutError(
                            f"the optimizer does not hold {name} of a {type(module).__name__} that "
                            f"{type(method).__name__} has put into the model, and would never train it; build the "
                            "optimizer after that."
                        )


def attach(
    heads: Heads, *methods: Method, optimizer: Optimizer | Sequence[Optimizer] | None = None, seed: int = 0
) -> Attached:
    """Attach methods to the heads of a model; returns one handle for all of them.

    In the loop, `loss = run.loss(loss)` adds penalties and the balance of mixtures while the model trains; repulsion
    acts in the steps of the optimizer; `run.check()`, which the end of a `with` block calls, raises unless every method
    has acted; `run.stats()` is worth logging; `run.state_dict()` belongs into a checkpoint; `run.remove()` leaves the
    model as it was.

    Args:
        heads: Heads, from `find_heads`. A method with `layers` or `kinds` selects among them.
        methods: What to do: `Repel`, `Penalize`, `Aggregate`, `GateHeads`, `MixHeads`, `DropHeads`, `Guide`,
            `BiasHeads`, `Ablate`, `ClipScores`, `Distill`, `Tap`, or a `Method` of your own.
        optimizer: The optimizer of the model, or several. Methods that add modules come before it: leave it out, build
            it, and call `run.attach(model, optimizer)`.
        seed: Seed of the noise of rules.

    Raises:
        SettingError: Something given is no method, or nothing is given; or as of the methods.
        LayoutError: As of the methods. Nothing is attached then.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> methods = hw.Penalize(hw.similarity.CKA()), hw.Repel(hw.SVGD())
        >>> with attach(hw.find_heads(model), *methods, optimizer=optimizer) as run:
        ...     run.loss(model(torch.randn(3, 5, 8)).square().mean()).backward()
        ...     optimizer.step()
        >>> run.attached
        False
    """
    require_heads(heads)
    if not methods:
        raise SettingError("attach was given no method; expected hw.Repel(...), hw.Penalize(...) or another hw.Method.")
    run = Attached(methods, find=lambda _model: heads, seed=seed)
    with run._attaching():
        run.build(heads.model)
        run.attach(heads.model, optimizer)
    return run
