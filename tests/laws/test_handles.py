"""Whatever is attached serves each thread alone, leaves a model as it was to the object, and is used alike."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.heads.pairing import pair_decoder_heads
from heads.calling import CallingAttention
from heads.families import BY_NAME
from heads.forwards import results, without_dropout
from roles.guided import square

# stock encoders say so once
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@dataclass(frozen=True)
class Attachment:
    """Something to attach.

    Attributes:
        attach: Attaches it, and returns its handle.
        read: What it has read in the forward just made.
        trains: Whether it acts in training mode alone.
        parts: Whether copies of the model keep it.
    """

    attach: Callable[[hw.Heads], Any]
    read: Callable[[Any], Any] = lambda _handle: []
    trains: bool = False
    parts: bool = False


def drawn(handle: Any) -> Any:
    """The handle, with new parameters that do something."""
    model = handle.model if isinstance(handle, hw.Aggregation) else handle.heads.model
    new = [p for name, p in model.named_parameters() if any(w in name for w in ("head_gates", "head_mixer", "gamma"))]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for parameter in new:
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return handle


def taps(*names: str, **settings: Any) -> Attachment:
    def read(handle: hw.Taps) -> list[Tensor]:
        return [t for c in handle.read() for t in (*c.read, c.key_keep, c.query_keep) if t is not None]

    return Attachment(lambda heads: hw.Taps(heads, **dict.fromkeys(names, True), **settings), read)


def penalty(term: Any, **settings: Any) -> Attachment:
    return Attachment(lambda heads: hw.Disagreement(heads, term, **settings), lambda handle: [handle()])


def bias(site: hw.Site, call: hw.ScoreCall) -> Tensor:
    positions = call.query_positions.to(call.dtype)[:, None] - torch.arange(call.keys, dtype=call.dtype)
    return torch.sin(positions * 0.7 + site.layer).expand(1, call.heads, -1, -1)


def repelled(heads: hw.Heads) -> Any:
    return hw.repel(torch.optim.SGD(heads.model.parameters(), lr=0.1), heads, hw.SVGD())


def in_blocks(heads: hw.Heads) -> Any:
    blocks = hw.head_blocks(heads)
    blocks.attach(torch.optim.SGD(list(blocks), lr=0.1))
    return blocks


def mixture(heads: hw.Heads) -> Any:
    return drawn(hw.gate_heads(heads, hw.MixtureOfHeads(shared=1, active=2, balance=0.1)))


ATTACHMENTS = {
    "gates": Attachment(lambda heads: drawn(hw.gate_heads(heads, hw.SigmoidGate())), parts=True),
    "gates of features": Attachment(lambda heads: drawn(hw.gate_heads(heads, hw.SigmoidGate("feature"))), parts=True),
    "mixture of heads": Attachment(mixture, lambda handle: [handle.balance()], trains=True, parts=True),
    "talking heads": Attachment(lambda heads: drawn(hw.mix_heads(heads)), parts=True),
    "dropped heads": Attachment(lambda heads: hw.drop_heads(heads, 0.0), trains=True),
    "ablation": Attachment(lambda heads: hw.ablate(heads, 1)),
    "bias": Attachment(lambda heads: hw.bias_heads(heads, bias)),
    "guide": Attachment(lambda heads: hw.guide(square(heads))),
    "aggregators": Attachment(
        lambda heads: drawn(hw.aggregate(heads, hw.Residual(hw.EMRouting(votes=hw.PerHead())))), parts=True
    ),
    "outputs": taps("outputs"),
    "values": taps("values"),
    "weights": taps("weights"),
    "mean weights": taps("mean_weights"),
    "everything beside": taps("outputs", "values", "weights", "mean_weights", beside=True),
    "CKA": penalty(hw.CKA()),
    "Subspace": penalty(hw.Subspace()),
    "Position": penalty(hw.Position()),
    "Position recomputed": penalty(hw.Position(recompute=True)),
    "MapCosine": penalty(hw.MapCosine()),
    "a penalty that trains": Attachment(
        lambda heads: hw.Disagreement(heads, hw.CKA(), training_only=True), lambda handle: [handle()], trains=True
    ),
    "repulsion": Attachment(repelled, trains=True),
    "blocks": Attachment(in_blocks, trains=True),
}


def encoder() -> nn.Module:
    torch.manual_seed(2)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 16, 0.0, batch_first=True), 2).eval()


def draw_inputs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[seed % 2, 5 - seed :] = True
    return {"src": torch.randn(2, 5, 12, generator=generator), "src_key_padding_mask": padding}


def paired_llama() -> nn.Module:
    model = BY_NAME["Llama"].build()
    for site in hw.find_heads(model):
        pair_decoder_heads(site, site.layer + 1)
    return model


def low_rank() -> nn.Module:
    torch.manual_seed(2)
    model = get_peft_model(BY_NAME["BERT"].build(), LoraConfig(target_modules=["query", "value"], lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def ours() -> nn.Module:
    torch.manual_seed(2)
    layers = [nn.TransformerEncoderLayer(12, 4, 16, 0.0, batch_first=True) for _ in range(2)]
    for layer in layers:
        layer.self_attn = hw.nn.MultiheadAttention(12, 4, batch_first=True)
    return Stack(layers).eval()


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, src: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        for layer in self.layers:
            src = layer(src, src_key_padding_mask=src_key_padding_mask)
        return src


def of_family(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]:
    def draw(seed: int) -> dict[str, Tensor]:
        inputs = BY_NAME[name].inputs(padded=seed == 1)
        return inputs if seed == 1 else {key: tensor.flip(0) for key, tensor in inputs.items()}

    return BY_NAME[name].build, draw


def alone(make: Callable[[], nn.Module], width: int) -> Any:
    def draw(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return {"x": torch.randn(2, 6, width).to(next(make().parameters()).dtype)}

    return make, draw


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "torch": (encoder, draw_inputs),
    "ours": (ours, draw_inputs),
    **{name: of_family(name) for name in ("torch.nn.Transformer", "BERT", "ALBERT", "DeBERTa-v3", "BART", "T5")},
    "Llama, paired": (paired_llama, of_family("Llama")[1]),
    "LoRA": (low_rank, of_family("BERT")[1]),
    "called": alone(CallingAttention, 12),
    "WavLM": of_family("WavLM"),
}


def run(model: nn.Module, handle: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    if isinstance(handle, hw.Guidance):
        first = next(iter(inputs.values()))
        drawn = torch.Generator().manual_seed(int(first.double().abs().sum() * 1000))
        roles = torch.rand(first.shape[0], 2, first.shape[1], first.shape[1], generator=drawn) < 0.5
        mask = hw.HeadMask(roles, None, handle.heads.sites[0].num_heads, (1, 0))
        return results(model, {**inputs, "role_mask": mask})
    return results(model, inputs)


@contextmanager
def in_step(barrier: threading.Barrier) -> Iterator[None]:
    """Every call of a module waits, before and after, until the other thread has come as far."""

    def wait(*_: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            barrier.wait(timeout=20)

    hooks = [register_module_forward_pre_hook(wait), register_module_forward_hook(wait)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", MODELS)
def test_two_threads_compute_and_read_what_each_does_alone(name: str):
    wrong = []
    for what, attachment in ATTACHMENTS.items():
        build, draw = MODELS[name]
        model = build()
        try:
            handle = attachment.attach(hw.find_heads(model))
        except hw.HeadwiseError:
            continue
        model.train(attachment.trains)
        without_dropout(model)
        found: list[Any] = [None, None]

        def serve(model: nn.Module, handle: Any, inputs: dict[str, Tensor], attachment: Attachment) -> list[Tensor]:
            with torch.set_grad_enabled(attachment.trains):
                outputs = run(model, handle, inputs)
                return [tensor.detach() for tensor in (*outputs, *attachment.read(handle))]

        inputs = [draw(seed) for seed in (1, 2)]
        expected = [serve(model, handle, one, attachment) for one in inputs]
        barrier = threading.Barrier(2)

        def work(index: int, *rest: Any, found: list = found, barrier: threading.Barrier = barrier) -> None:
            try:
                found[index] = serve(*rest)
            except hw.HeadwiseError as error:
                found[index] = error
            except BaseException as error:
                found[index] = error
                raise
            finally:
                barrier.abort()

        with in_step(barrier):
            threads = [
                threading.Thread(target=work, args=(index, model, handle, one, attachment))
                for index, one in enumerate(inputs)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for own, other in zip(expected, found, strict=True):
            if isinstance(other, hw.HeadwiseError):
                continue
            same = isinstance(other, list) and len(own) == len(other)
            if not same or not all(torch.equal(a, b) for a, b in zip(own, other, strict=True)):
                wrong.append((what, other if isinstance(other, Exception) else "differs"))
    assert not wrong
