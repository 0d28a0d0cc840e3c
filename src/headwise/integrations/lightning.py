"""Methods in Lightning's Trainer, which builds its optimizers anew in each fit."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn
from typing_extensions import override

from headwise.attached import Attached
from headwise.errors import HeadwiseError, NotFired, SettingError
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.heads.method import Method
from headwise.repulsion.repel import Repulsion
from headwise.similarity.penalty import Disagreement


def _find_callback_class() -> Any:
    """Return the class of callbacks: that of `lightning`, or of `pytorch_lightning` where it alone is used."""
    # the one that was imported already is the one in use
    names = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ModuleNotFoundError("headwise.integrations.lightning needs Lightning; pip install lightning.")


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = _find_callback_class()


class HeadwiseCallback(Callback):
    """Methods for the model of a Lightning Trainer: `Trainer(callbacks=[HeadwiseCallback(...)])`.

    The penalty is added to what `training_step` returns, and to nothing else. Repulsion acts in the step of the
    optimizers that `configure_optimizers` returned, after clipping; each fit attaches again. Aggregators are put into
    the model before `configure_optimizers` is called and before a checkpoint is loaded, so that build it in `__init__`.
    The state of the methods is in each checkpoint: the noise of a resumed fit goes on bit for bit. "penalty",
    "similarity" (the penalty without its weight) and "force_ratio" (the norm of the repulsion over that of the driving
    terms) are logged with `self.log` after each batch.

    In manual optimization write `loss = callback.attached.loss(loss)` before the backward of `training_step`.

    Args:
        methods: `hw.Aggregate(...)`, `hw.Penalize(...)`, `hw.Repel(...)` or another `hw.Method`, any number of each.
        find: Returns the heads of the LightningModule, for example `lambda module: hw.find_heads(module.encoder)`.
        seed: Seed of the noise of rules that have one.

    Attributes:
        attached: The methods and their handles, which there are once a fit has begun.

    Raises:
        SettingError: Something given is no method, or nothing is given.

    Example:
        >>> import headwise as hw
        >>> callback = HeadwiseCallback(hw.Penalize(hw.similarity.CKA()), hw.Repel(hw.SVGD(), layers=(0,)))
        >>> callback.state_key
        'HeadwiseCallback'
    """

    def __init__(self, *methods: Method, find: Callable[[nn.Module], Heads] = find_heads, seed: int = 0) -> None:
        if not methods:
            raise SettingError(
                "HeadwiseCallback was given no method; expected hw.Penalize(...), hw.Repel(...) or hw.Aggregate(...)."
            )
        self.attached = Attached(methods, find=find, seed=seed)
        self._module: Any = None
        self._steps = self._readings = self._global_step = 0

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the aggregators into a model, before it has an optimizer or is loaded."""
        if not self.attached.is_on(pl_module):
            self.attached.detach()
        self.attached.build(pl_module)

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the methods to the model and its new optimizers."""
        self._release()
        self.attached.attach(pl_module, trainer.optimizers)
        if pl_module.automatic_optimization:
            original = pl_module.training_step

            @wraps(original)
            def training_step(*arguments: Any, **options: Any) -> Any:
                return self._add_penalty(original(*arguments, **options))

            pl_module.training_step = training_step
            self._module = pl_module

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note what was done before the batch."""
        self._steps, self._readings = self.attached.steps, self.attached.readings
        self._global_step = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what the methods did, and raise where they did not act.

        Raises:
            NotFired: The optimizer in use is another one than at the start of the fit, or `training_step` added no
                penalty in manual optimization.
        """
        attached = self.attached
        manual = not pl_module.automatic_optimization
        if manual and attached.of(Disagreement) and attached.readings == self._readings:
            raise NotFired(
                f"the penalty entered no loss: {type(pl_module).__name__} optimizes manually; in training_step, write "
                "loss = callback.attached.loss(loss) before manual_backward(loss)."
            )
        # a scaler leaves steps out, and Lightning those of a training_step that returned None
        left_out = getattr(trainer.precision_plugin, "scaler", None) is not None or not (manual or outputs)
        stepped = trainer.global_step > self._global_step and not left_out
        if attached.of(Repulsion) and stepped and attached.steps == self._steps:
            attached.check(trainer.optimizers)
            raise NotFired(f"{type(pl_module).__name__} took a step without the optimizer that heads repel under.")
        pl_module.log_dict(attached.stats())

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say what `Repulsion.check` would raise; an error here would lose a trained model."""
        try:
            if self.attached.steps:
                self.attached.check(trainer.optimizers)
        except HeadwiseError as error:
            warnings.warn(str(error), stacklevel=2)

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the model its own `training_step` back."""
        self._release()

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Do the same after an error."""
        self._release()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed fit needs for the same noise and strength."""
        return self.attached.state_dict()

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from it, once the methods are attached."""
        self.attached.load_state_dict(state_dict)

    def _add_penalty(self, output: Any) -> Any:
        if output is None:
            # Lightning leaves the batch out
            self.attached.drop_forward()
            return None
        if isinstance(output, Mapping):
            return {**output, "loss": self.attached.loss(output["loss"])}
        return self.attached.loss(output)

    def _release(self) -> None:
        self.attached.pause()
        if self._module is not None:
            del self._module.training_step
            self._module = None
