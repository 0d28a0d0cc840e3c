"""Distillation: a model is trained towards another one, such as a smaller model towards the model as it was.

`Distill` is a method for any training loop; `distill` is a short training with the Trainer of transformers.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError, NotFired, SettingError, ShapeError, require_integer
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.heads.method import Method
from headwise.heads.record import evaluating, keep, list_tensors, record
from headwise.nn.checkpointing import is_recomputing
from headwise.nn.hooks import Handle, PerThread
from headwise.settings import NonNegative, Positive

# What a model may put out, in the order in which it is looked for; the others are states.
LOGITS = "logits"
OUTPUTS = (LOGITS, "sentence_embedding", "last_hidden_state")
LABELS, MASK = "labels", "attention_mask"
# A loop that trains for this many forwards without reading their loss holds every graph it has built.
UNREAD_CALLS = 64


@dataclass(frozen=True)
class Distill(Method):
    """Training towards a teacher, as a value: its term replaces the loss of a training step, or is added to it.

    The loss of a step is

        text * L + logits * T^2 KL(softmax(z' / T) || softmax(z / T)) + hidden * mean_l |h_l - h'_l|^2 / |h'_l|^2

    with the loss L that the loop computed, logits z and states h_l after layer l of the model, and z', h'_l of the
    teacher: means over the positions that are no padding and have a label. The middle term is that of Hinton et al.
    (2015). A model that puts out no logits is compared by its states and the embedding that it puts out. Of models with
    other numbers of layers, layer l of L is compared with layer ceil(l L' / L) of the teacher.

    The teacher runs in evaluation mode and without gradients, on what the model was called with, and is not changed.

    Attributes:
        teacher: The model to learn from, with the same tokens and on the same device.
        logits, hidden, text: Weights of the three terms.
        temperature: T. Above 1, tokens with a low probability count for more.
        layers: Layers whose states are compared; None for all.

    Raises:
        SettingError: The teacher is not a module, or a number is outside its range; when attached, the teacher shares
            parameters with the model, or has no layers that correspond to those of the model.

    Example:
        >>> import copy
        >>> import headwise as hw
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> teacher = copy.deepcopy(model)
        >>> pruning = hw.prune(hw.find_heads(model), {0: [1]})
        >>> with hw.attach(hw.find_heads(model), hw.Distill(teacher)) as run:
        ...     states = model(torch.randn(3, 5, 8))
        ...     run.loss(states.new_zeros(())).backward()
    """

    teacher: nn.Module = field(repr=False)
    logits: NonNegative = 1.0
    hidden: NonNegative = 1.0
    text: NonNegative = 0.0
    temperature: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.teacher, nn.Module):
            raise SettingError(f"teacher is a {type(self.teacher).__name__}; expected a model (torch.nn.Module).")
        if not (self.logits or self.hidden or self.text):
            raise SettingError("logits, hidden and text are all 0, so that nothing would be learned; set one of them.")

    def attach(self, heads: Heads) -> Distillation:
        """Compare each forward of the model with the teacher, until the handle is removed."""
        return Distillation(self.select(heads), self)


@dataclass(eq=False)
class _Call:
    """One forward of the model: what it was called with, what it put out, and the states after each layer."""

    module: nn.Module = field(repr=False)
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    states: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class _Calls:
    """The forward that runs, and forwards since the last loss."""

    running: _Call | None = None
    done: list[_Call] = field(default_factory=list)


class Distillation(Handle):
    """A model compared with a teacher until `remove()` or the end of a `with` block; see `Distill`.

    Attributes:
        heads: Heads whose layers are compared.
        method: What it was attached with.
    """

    def __init__(self, heads: Heads, method: Distill) -> None:
        super().__init__()
        self.heads, self.method = heads, method
        _require_apart(heads.model, method.teacher)
        # each stack of layers, and that of the teacher
        self._stacks = {stack: _find_stack(heads, stack, method.teacher) for stack in self._list_stacks()}
        self._here, self._stats, self._acted = PerThread(_Calls), {}, False
        # a wrapper of the model (peft, a LightningModule) calls it, or its forward alone
        inner = next((one for one in heads.model.modules() if type(one) is type(method.teacher)), heads.model)
        with self._attaching():
            for module in dict.fromkeys((heads.model, inner)):
                self.hook_before(module, self._begin)
                self.hook_after(module, self._end)
            for stack in self._stacks:
                for layer in heads.model.get_submodule(stack).children():
                    self.hook_after(layer, lambda _module, _args, output, stack=stack: self._note_state(stack, output))

    def check(self) -> None:
        """Raise `NotFired` unless a loss was compared with the teacher."""
        if not self._acted:
            raise NotFired("no loss was computed with the teacher; call run.loss(loss) after a forward of the model.")

    def stats(self) -> dict[str, Tensor]:
        """Return the last terms without their weights: "logits_divergence" and "hidden_error"."""
        return dict(self._stats)

    def compute_term(self, loss: Tensor, share: float) -> Tensor | None:
        """Return what is added to a loss in training; None in evaluation.

        Raises:
            NotFired: The model was not called since the last loss.
            ShapeError: The teacher has another vocabulary, or states of another width.
            SettingError: The model puts out no logits, and nothing else is to be compared.
            HeadwiseError: The teacher cannot be run on what the model was called with.
        """
        here = self._here.own
        calls, here.done = here.done, []
        if not (self.heads.model.training and torch.is_grad_enabled()):
            return None
        if not calls:
            raise NotFired("the model was not called in training since the last loss; another one runs.")
        self._acted = True
        found = [self._compare(call) for call in calls] if self.method.logits or self.method.hidden else []
        means = {name: torch.stack([each[name] for each in found]).mean() for name in (found[0] if found else ())}
        self._stats = {name: value.detach() for name, value in means.items()}
        weights = {"logits_divergence": self.method.logits, "hidden_error": self.method.hidden}
        # the loss itself is added by whoever asked
        term = (self.method.text - 1.0) * loss
        for name, value in means.items():
            term = term + share * weights[name] * value
        return term

    def _list_stacks(self) -> list[str]:
        stacks = dict.fromkeys(site.stack for site in self.heads) if self.method.hidden else {}
        holders = (nn.ModuleList, nn.Sequential)
        return [stack for stack in stacks if stack and isinstance(self.heads.model.get_submodule(stack), holders)]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.heads.model.training and torch.is_grad_enabled() and not is_recomputing():
            self._here.own.running = _Call(module, args, dict(kwargs))

    def _end(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        here = self._here.own
        if here.running is None or here.running.module is not module or is_recomputing():
            return
        here.running.output = output
        here.done.append(here.running)
        here.running = None
        if len(here.done) > UNREAD_CALLS:
            raise NotFired(
                f"{len(here.done)} forwards of the model were kept and their loss was never read; call run.loss(loss) "
                "after each forward in training."
            )

    def _note_state(self, stack: str, output: Any) -> None:
        running = self._here.own.running
        if running is not None and not is_recomputing():
            running.states.setdefault(stack, []).append(next(list_tensors(output)))

    def _compare(self, call: _Call) -> dict[str, Tensor]:
        """Return the terms of one forward, without their weights."""
        output, states = self._run_teacher(call)
        masks = _Masks.of(call)
        found: dict[str, Tensor] = {}
        name, own = _read_output(call.output)
        _, wanted = _read_output(output)
        if name == LOGITS and self.method.logits:
            found["logits_divergence"] = logit_divergence(
                own, wanted, temperature=self.method.temperature, keep=masks.output
            )
        if self.method.hidden:
            # the state after the last layer may differ from what is put out by a norm
            errors = [] if name == LOGITS else [state_error(own, wanted, keep=masks.output)]
            for stack, mine in call.states.items():
                last = {site.kind for site in self.heads if site.stack == stack} & {"decoder", "cross"}
                padding = masks.output if last else masks.input
                errors += [
                    state_error(state, other, keep=padding) for state, other in self._pair(stack, mine, states[stack])
                ]
            if errors:
                found["hidden_error"] = torch.stack(errors).mean()
        if not found:
            missing = "logits" if self.method.logits else "layers whose states could be compared"
            raise SettingError(
                f"{type(self.heads.model).__name__} has no {missing}, and nothing else is to be learned from the "
                "teacher; give logits and hidden a weight."
            )
        return found

    def _pair(self, stack: str, own: Sequence[Tensor], wanted: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the state after each layer with that of the teacher at the same share of its depth."""
        layers = {site.layer for site in self.heads if site.stack == stack}
        for place, state in enumerate(own):
            if self.method.layers is None or place in layers:
                yield state, wanted[-(-(place + 1) * len(wanted) // len(own)) - 1]

    @torch.no_grad()
    def _run_teacher(self, call: _Call) -> tuple[Any, dict[str, list[Tensor]]]:
        """Return what the teacher puts out, and its states by the stack of the model."""
        teacher: Any = self.method.teacher
        made_of_labels = getattr(getattr(teacher, "config", None), "is_encoder_decoder", False)
        left_out = () if made_of_labels else (LABELS, "num_items_in_batch")
        kwargs = {name: value for name, value in call.kwargs.items() if name not in left_out}
        owners = {layer: stack for stack, layers in self._stacks.items() for layer in layers.children()}
        try:
            with evaluating(teacher), record(owners, outputs=keep) as calls:
                output = teacher(*call.args, **kwargs)
        except HeadwiseError:
            raise
        except Exception as error:
            # whatever a model does with tokens, names or a device that it does not have
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise HeadwiseError(
                f"the teacher ({type(teacher).__name__}) cannot be run on what the model was called with ({reason}); "
                "give a teacher that takes the same tokens and is on the same device."
            ) from error
        states: dict[str, list[Tensor]] = {stack: [] for stack in self._stacks}
        for one in calls:
            states[owners[one.module]].append(next(list_tensors(one.output)))
        return output, states

    def _describe(self) -> str:
        return f"{self.method} of a {type(self.method.teacher).__name__}"


@dataclass(frozen=True)
class _Masks:
    """Which positions count, [B, n] of bool: of the tokens that go in, and of what comes out. None for all."""

    input: Tensor | None
    output: Tensor | None

    @classmethod
    def of(cls, call: _Call) -> _Masks:
        """Read them from the arguments of a model of transformers."""
        try:
            bound = inspect.signature(call.module.forward).bind_partial(*call.args, **call.kwargs).arguments
        except TypeError:
            bound = call.kwargs
        given = {**bound.get("kwargs", {}), **bound}
        whole = _read_mask(given.get(MASK))
        config = getattr(call.module, "config", None)
        out = _read_mask(given.get("decoder_attention_mask")) if getattr(config, "is_encoder_decoder", False) else whole
        labels: Any = given.get(LABELS)
        if isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point():
            known = labels != -100
            if is_causal(type(call.module).__name__):
                # the logits of a position are for the next token
                known = F.pad(known[:, 1:], (0, 1))
            out = known if out is None or out.shape != known.shape else out & known
        return cls(whole, out)


def _read_mask(mask: Any) -> Tensor | None:
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _read_output(output: Any) -> tuple[str, Tensor]:
    """Return what a model puts out and its name, "" for a tensor without one."""
    for name in OUTPUTS:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return name, value
    return "", next(one for one in list_tensors(output) if one.dim() > 1)


def _require_apart(model: nn.Module, teacher: nn.Module) -> None:
    held = {*map(id, model.parameters())}
    if any(id(parameter) in held for parameter in teacher.parameters()):
        raise SettingError(
            "the teacher shares parameters with the model, and would change with it; give copy.deepcopy(model), made "
            "before the model was made smaller."
        )


def _find_stack(heads: Heads, stack: str, teacher: nn.Module) -> nn.Module:
    """Return the layers of a teacher that correspond to a stack of layers of the model, whose name may be longer."""
    modules, parts = dict(teacher.named_modules()), stack.split(".")
    for start in range(len(parts)):
        found = modules.get(".".join(parts[start:]))
        if found is not None and len(list(found.children())):
            return found
    raise SettingError(
        f"the teacher ({type(teacher).__name__}) has no layers at {stack!r}, as {type(heads.model).__name__} has, so "
        "that no states correspond; give a teacher of the same class, or hidden=0."
    )


def logit_divergence(logits: Tensor, wanted: Tensor, *, temperature: float = 1.0, keep: Tensor | None = None) -> Tensor:
    """Compute T^2 KL(softmax(z' / T) || softmax(z / T)), the mean over positions (Hinton et al. 2015).

    T^2 keeps the size of the gradient. Half precision is computed in float32.

    Args:
        logits: z, [..., V].
        wanted: z' of the teacher, [..., V].
        temperature: T, above 0.
        keep: Positions that count, bool of the shape [B, n], where logits are [B, n, V]; None for all.

    Raises:
        ShapeError: The shapes differ: the vocabularies do.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0]])
        >>> logit_divergence(logits, torch.tensor([[0.0, 1.0]]).log())  # the teacher is sure
        tensor(0.6931)
    """
    if logits.shape != wanted.shape:
        raise ShapeError(
            f"the model puts out logits of shape {tuple(logits.shape)} and the teacher of shape {tuple(wanted.shape)}; "
            "expected the same vocabulary, or the same labels."
        )
    own, other = (_widen(_select(one, keep).flatten(0, -2)) / temperature for one in (logits, wanted))
    divergence = F.kl_div(F.log_softmax(own, dim=-1), F.softmax(other, dim=-1), reduction="sum")
    return temperature**2 * divergence / max(1, len(own))


def state_error(states: Tensor, wanted: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """Compute |h - h'|^2 / |h'|^2, the mean over positions.

    Each position is compared with its own size, as what reads a state mostly normalizes it: some tokens of a trained
    decoder have states a hundred times larger than others.

    Args:
        states: h, [..., d].
        wanted: h' of the teacher, [..., d].
        keep: Positions that count, bool of the shape [B, n], where states are [B, n, d]; None for all.

    Raises:
        ShapeError: The shapes differ.

    Example:
        >>> state_error(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
        tensor(0.2500)
    """
    if states.shape != wanted.shape:
        raise ShapeError(
            f"the model has states of shape {tuple(states.shape)} and the teacher of shape {tuple(wanted.shape)}, "
            "which cannot be compared; give hidden=0, which leaves the logits."
        )
    own, other = (_widen(_select(one, keep)) for one in (states, wanted))
    sizes = other.square().sum(-1).clamp_min(torch.finfo(other.dtype).tiny)
    return ((own - other).square().sum(-1) / sizes).sum() / max(1, sizes.numel())


def _select(values: Tensor, keep: Tensor | None) -> Tensor:
    return values if keep is None or keep.shape != values.shape[:-1] else values[keep]


def _widen(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def is_causal(name: str) -> bool:
    """Return whether a class of transformers of that name predicts the next token.

    >>> is_causal("GPT2LMHeadModel"), is_causal("BertForMaskedLM")
    (True, False)
    """
    from transformers.models.auto import modeling_auto

    known = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    # XLM predicts tokens that are masked
    known -= {*modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()}
    return name.endswith("ForCausalLM") or name in known


@dataclass(frozen=True)
class Recovery:
    """What a training towards a teacher came to; returned by `hw.distill`.

    Attributes:
        steps: Steps of the optimizer.
        terms: What was learned from, "logits_divergence", "hidden_error" or "text": its value in each step.
    """

    steps: int
    terms: dict[str, tuple[float, ...]] = field(repr=False)

    def __str__(self) -> str:
        part = max(1, self.steps // 10)
        ends = [
            f"{name.replace('_', ' ')} {fmean(values[:part]):.4g} to {fmean(values[-part:]):.4g}"
            for name, values in self.terms.items()
        ]
        return f"{self.steps} steps: {', '.join(ends)} (means of {part} at either end)"


def distill(
    model: nn.Module,
    teacher: nn.Module | Distill,
    batches: Iterable[Mapping[str, Tensor] | Tensor],
    *,
    steps: int,
    lora: int | None = None,
    learning_rate: float = 1e-4,
    callbacks: Sequence[Any] = (),
    **arguments: Any,
) -> Recovery:
    """Train a smaller model for some steps towards the model as it was.

    The loss is that of `Distill`: on logits and hidden states, unless a `Distill` says otherwise.
    The Trainer of transformers runs underneath (AdamW, a rate that falls to 0 linearly, gradients clipped to norm 1),
    in place and on the device of the model; it sets the seeds of random numbers. Modes and what is trainable are
    restored at the end. For a loop of your own, or another trainer, attach `Distill`.

    Args:
        model: The model to train, which takes the batches by name.
        teacher: The model as it was: `copy.deepcopy(model)` from before the cut. Or `Distill(teacher, ...)`, with
            weights or a temperature of its own.
        batches: What the model is called with: mappings of names to tensors, or tensors of token ids. They are taken in
            random order, again and again. A mask named "attention_mask" and labels of -100 leave positions out. Where
            the text counts they need labels, unless the model is a causal language model.
        steps: Steps, at least 1, of a batch each.
        lora: Rank of low-rank updates of all linear layers, by peft, which are merged into the weights at the end (Hu
            et al. 2022; their scale is 2). None trains all parameters.
        learning_rate: The first learning rate.
        callbacks: Callbacks of the Trainer.
        arguments: Other fields of `transformers.TrainingArguments`, such as `seed=1`, `bf16=True`,
            `gradient_accumulation_steps=4` or `gradient_checkpointing=True`.

    Raises:
        ModuleNotFoundError: transformers and accelerate, or for `lora` peft, are not installed.
        SettingError: There is no batch, an argument is unknown or outside its range, or as of `Distill`.
        HeadwiseError: A loss is not finite; or as of the teacher.

    Example:
        >>> import copy, headwise as hw
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=16)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes))
        >>> teacher = copy.deepcopy(model)
        >>> pruning = hw.prune(hw.find_heads(model), {0: [1, 2], 1: [0, 3]})
        >>> print(hw.distill(model, teacher, [torch.randint(61, (4, 12))], steps=2))  # doctest: +ELLIPSIS
        2 steps: logits divergence ... to ..., hidden error ... to ... (means of 1 at either end)
    """
    require_integer("steps", steps, low=1)
    method = teacher if isinstance(teacher, Distill) else Distill(teacher)
    rows = [{"input_ids": batch} if isinstance(batch, Tensor) else dict(batch) for batch in batches]
    if not rows:
        raise SettingError("distill was given no batch; expected at least one, of tokens that the model takes.")
    if method.text:
        rows = [_label(model, row) for row in rows]
    modes = [(module, module.training) for module in model.modules()]
    try:
        with _adapting(model, lora), method.attach(find_heads(model)) as handle:
            terms = _train(model, handle, rows, steps, callbacks, {"learning_rate": learning_rate, **arguments})
    finally:
        for module, mode in modes:
            module.training = mode
    return Recovery(steps, {name: tuple(values) for name, values in terms.items()})


def _label(model: nn.Module, row: dict[str, Any]) -> dict[str, Any]:
    if LABELS in row:
        return row
    if not is_causal(type(model).__name__):
        raise SettingError(
            f"text is above 0, and a batch has no labels, from which {type(model).__name__} computes a loss; add them, "
            "or give text=0."
        )
    ids, mask = row["input_ids"], row.get(MASK)
    return {**row, LABELS: ids if mask is None else ids.masked_fill(mask == 0, -100)}


@contextmanager
def _adapting(model: nn.Module, rank: int | None) -> Iterator[None]:
    """Train low-rank updates of a rank inside the block, and merge them at its end; None trains everything."""
    if rank is None:
        yield
        return
    require_integer("lora", rank, low=1)
    try:
        from peft import LoraConfig, LoraModel
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"lora={rank} needs peft; pip install peft. ({error})") from error
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    known = {*vars(model)}
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    adapted: Any = LoraModel(model, settings, "default")
    try:
        yield
    finally:
        adapted.merge_and_unload()
        for name in {*vars(model)} - known:
            delattr(model, name)
        for parameter, wanted in trainable:
            parameter.requires_grad_(wanted)


def _train(
    model: nn.Module,
    handle: Distillation,
    rows: Sequence[dict[str, Any]],
    steps: int,
    callbacks: Sequence[Any],
    arguments: Mapping[str, Any],
) -> dict[str, list[float]]:
    """Train a model with the Trainer on a handle's loss; return the terms of each step."""
    try:
        from transformers import PrinterCallback, Trainer, TrainingArguments
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{_NEEDS} ({error})") from error
    terms: dict[str, list[float]] = {}

    class Distiller(Trainer):
        """The Trainer with the loss of distillation."""

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            output = model(**inputs)
            text = output["loss"] if handle.method.text else next(list_tensors(output)).new_zeros(())
            loss = handle.loss(text)
            if not bool(loss.isfinite()):
                raise HeadwiseError(
                    f"the loss of step {self.state.global_step + 1} is not finite; give a smaller learning rate."
                )
            found = {**handle.stats(), **({"text": text} if handle.method.text else {})}
            for name, value in found.items():
                terms.setdefault(name, []).append(float(value.detach()))
            return loss

    first = next(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder,
            "max_steps": steps,
            "per_device_train_batch_size": 1,
            "use_cpu": first.device.type == "cpu",
            "remove_unused_columns": False,
            "dataloader_pin_memory": False,
            "report_to": "none",
            "logging_strategy": "no",
            "save_strategy": "no",
            "disable_tqdm": True,
            **arguments,
        }
        try:
            settings = TrainingArguments(**options)
        except ImportError as error:
            raise ModuleNotFoundError(f"{_NEEDS} ({error})") from error
        except (TypeError, ValueError) as error:
            raise SettingError(f"TrainingArguments of transformers refuses what was given: {error}") from None
        data: Any = rows
        trainer = Distiller(
            model=model, args=settings, train_dataset=data, data_collator=_take_first, callbacks=[*callbacks]
        )
        # each loss is the mean of a batch
        trainer.model_accepts_loss_kwargs = False
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            # without what accelerate has put around its forward
            trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return terms


_NEEDS = "hw.distill runs the Trainer of transformers; pip install 'headwise[cli]', or transformers and accelerate."


def _take_first(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return rows[0]
