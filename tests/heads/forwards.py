"""Forward passes of models of Hugging Face: inputs, settings of theirs, biases and what they return."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

import headwise as hw
from heads.families import BY_NAME


def results(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """All tensors a forward pass returns."""
    found = model(**inputs)
    values = [found] if isinstance(found, Tensor) else found.values() if hasattr(found, "values") else found
    return [value for value in values if isinstance(value, Tensor)]


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


def first_key_only(_site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
    """Head 1 sees key 0 alone."""
    bias = torch.zeros(1, call.heads, 1, call.keys)
    if call.first_key == 0:
        bias[:, 1, :, 1:] = -math.inf
    return bias


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
