"""Forward passes of models of Hugging Face: inputs, settings of theirs, biases and what they return."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import headwise as hw
from heads.families import BY_NAME


def results(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """All tensors a forward pass returns."""
    found = model(**inputs)
    values = [found] if isinstance(found, Tensor) else found.values() if hasattr(found, "values") else found
    return [value for value in values if isinstance(value, Tensor)]


def copies(thing: object) -> list:
    """The same thing by deep copy, pickle, and torch.save."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return [copy.deepcopy(thing), pickle.loads(pickle.dumps(thing)), torch.load(buffer, weights_only=False)]


def no_bias(_site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
    return torch.zeros(1, call.heads, 1, call.keys, dtype=call.dtype)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0


def checkpoint_activations(model: nn.Module, *, reentrant: bool) -> None:
    with warnings.catch_warnings():
        # the method has another name in newer transformers
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def require_same_gradients(name: str, step: Callable[[nn.Module], object], *, reentrant: bool = False) -> list[str]:
    """Take a step of a family with and without activation checkpointing, and return what has the same gradient."""
    gradients = []
    for checkpointing in (False, True):
        model = BY_NAME[name].build().double().train()
        without_dropout(model)
        if checkpointing:
            checkpoint_activations(model, reentrant=reentrant)
        if reentrant:
            model.enable_input_require_grads()
        step(model)
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    plain, again = gradients
    assert plain.keys() == again.keys()
    for key, gradient in plain.items():
        torch.testing.assert_close(again[key], gradient)
    assert any(gradient.any() for gradient in plain.values())
    return list(plain)


def first_key_only(_site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
    """Head 1 sees key 0 alone."""
    bias = torch.zeros(1, call.heads, 1, call.keys)
    if call.first_key == 0:
        bias[:, 1, :, 1:] = -math.inf
    return bias


def slanted(_site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
    """A bias of its own for each head and key."""
    drawn = torch.linspace(-2, 3, call.heads * call.keys, dtype=call.dtype)
    return drawn.view(1, call.heads, 1, call.keys)


def weighed(output: Tensor) -> Tensor:
    """A loss that a final normalization does not make constant."""
    return (output * torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)).mean()


def generator(name: str) -> nn.Module:
    import transformers

    model = BY_NAME[name].build()
    classes = {"T5": "T5ForConditionalGeneration", "BART": "BartForConditionalGeneration", "Marian": "MarianMTModel"}
    if name in classes:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = getattr(transformers, classes[name])(model.config).eval()
    with torch.no_grad():
        # random embeddings of one scale make every token as likely: generation would hang on rounding
        for parameter in model.parameters():
            parameter.mul_(1.7)
    return model


def prompt(name: str) -> dict[str, Tensor]:
    inputs = BY_NAME[name].inputs()
    return {key: value for key, value in inputs.items() if not key.startswith("decoder")}
