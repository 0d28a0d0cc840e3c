"""Whatever is attached serves each thread alone, leaves a model as it was to the object, and is used alike."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from cases import cases, tiers
from heads.attentions import SeparateAttention
from heads.calling import CallingAttention
from heads.families import BY_NAME, CORE, FAMILIES, sweep
from heads.family import Family
from heads.forwards import results, without_dropout
from headwise.heads.scores.mixing import pair_decoder_heads
from roles.guided import square

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated"),
]


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
    first = handle.handles[0] if isinstance(handle, hw.attached.Attached) else handle
    model = first.model if isinstance(first, hw.routing.Aggregation) else first.heads.model
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


def bias(site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
    positions = call.query_positions.to(call.dtype)[:, None] - torch.arange(call.keys, dtype=call.dtype)
    return torch.sin(positions * 0.7 + site.layer).expand(1, call.heads, -1, -1)


def repelled(heads: hw.Heads) -> Any:
    return hw.repel(heads, hw.SVGD(), torch.optim.SGD(heads.model.parameters(), lr=0.1))


def in_blocks(heads: hw.Heads) -> Any:
    blocks = hw.heads.head_blocks(heads)
    blocks.attach(torch.optim.SGD(list(blocks), lr=0.1))
    return blocks


def mixture(heads: hw.Heads) -> Any:
    return drawn(hw.gate_heads(heads, hw.gating.MixtureOfHeads(shared=1, active=1, balance=0.1)))


def together(heads: hw.Heads) -> Any:
    methods = (
        hw.MixHeads(),
        hw.GateHeads(hw.gating.SigmoidGate(), layers=(1,)),
        hw.Tap(outputs=True),
        hw.DropHeads(0.0),
    )
    run = hw.attach(heads, hw.Penalize(hw.similarity.CKA(), weight=0.5), hw.Repel(hw.SVGD()), *methods)
    run.attach(heads.model, torch.optim.SGD(heads.model.parameters(), lr=0.1))
    return run


def read_together(run: hw.attached.Attached) -> list[Tensor]:
    captures = [capture for taps in run.of(hw.Taps) for capture in taps.read()]
    return [run.loss(torch.ones(())), *(own for capture in captures for own in capture.read if own is not None)]


ATTACHMENTS = {
    "gates": Attachment(lambda heads: drawn(hw.gate_heads(heads, hw.gating.SigmoidGate())), parts=True),
    "gates of features": Attachment(
        lambda heads: drawn(hw.gate_heads(heads, hw.gating.SigmoidGate("element"))), parts=True
    ),
    "mixture of heads": Attachment(mixture, lambda handle: [handle.balance()], trains=True, parts=True),
    "talking heads": Attachment(lambda heads: drawn(hw.mix_heads(heads)), parts=True),
    "dropped heads": Attachment(lambda heads: hw.drop_heads(heads, 0.0), trains=True),
    "ablation": Attachment(lambda heads: hw.ablate(heads, 1)),
    "bias": Attachment(lambda heads: hw.bias_heads(heads, bias)),
    "guide": Attachment(lambda heads: hw.guide(square(heads))),
    "aggregators": Attachment(
        lambda heads: drawn(hw.aggregate(heads, hw.routing.Residual(hw.routing.EMRouting(votes=hw.routing.PerHead())))),
        parts=True,
    ),
    "outputs": taps("outputs"),
    "values": taps("values"),
    "weights": taps("weights"),
    "mean weights": taps("mean_weights"),
    "everything beside": taps("outputs", "values", "weights", "mean_weights", beside=True),
    "CKA": penalty(hw.similarity.CKA()),
    "Subspace": penalty(hw.similarity.Subspace()),
    "Position": penalty(hw.similarity.Position()),
    "Position recomputed": penalty(hw.similarity.Position(recompute=True)),
    "MapCosine": penalty(hw.similarity.MapCosine()),
    "a penalty that trains": Attachment(
        lambda heads: hw.Disagreement(heads, hw.similarity.CKA(), training_only=True),
        lambda handle: [handle()],
        trains=True,
    ),
    "repulsion": Attachment(repelled, trains=True),
    "blocks": Attachment(in_blocks, trains=True),
    "methods together": Attachment(together, read_together, trains=True, parts=True),
}
ONE_OF_EACH_KIND = (
    "gates", "talking heads", "dropped heads", "ablation", "bias", "guide", "aggregators", "everything beside",
    "Position", "repulsion", "blocks", "methods together",
)  # fmt: skip
# Each method as a value, and its own call.
VALUES = {
    "gates": hw.GateHeads(hw.gating.SigmoidGate()),
    "talking heads": hw.MixHeads(),
    "dropped heads": hw.DropHeads(0.3, seed=4),
    "ablation": hw.Ablate((1,)),
    "bias": hw.BiasHeads(bias),
    "aggregators": hw.Aggregate(hw.routing.Residual(hw.routing.EMRouting(votes=hw.routing.PerHead()))),
    "outputs": hw.Tap(outputs=True),
    "CKA": hw.Penalize(hw.similarity.CKA()),
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
    layers: list[Any] = [nn.TransformerEncoderLayer(12, 4, 16, 0.0, batch_first=True) for _ in range(2)]
    for layer in layers:
        layer.self_attn = hw.nn.MultiheadAttention(12, 4, batch_first=True)
    return Stack(layers).eval()


class Stack(nn.Module):
    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, src: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        for layer in self.layers:
            src = layer(src, src_key_padding_mask=src_key_padding_mask)
        return src


class Decoding(nn.Module):
    """A prompt, and its continuation over the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = BY_NAME["GPT-2"].build()

    def forward(self, input_ids: Tensor, prompt: Tensor) -> Tensor:
        begun = self.decoder(input_ids[:, : int(prompt)], use_cache=True)
        return self.decoder(input_ids[:, int(prompt) :], past_key_values=begun.past_key_values)[0]


def draw_prompt(seed: int) -> dict[str, Tensor]:
    return {"input_ids": BY_NAME["GPT-2"].inputs()["input_ids"].flip(seed - 1), "prompt": torch.tensor(seed + 2)}


def of_family(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]:
    def draw(seed: int) -> dict[str, Tensor]:
        inputs = BY_NAME[name].inputs(padded=seed == 1)
        return inputs if seed == 1 else {key: tensor.flip(0) for key, tensor in inputs.items()}

    return BY_NAME[name].build, draw


class WrittenOut(SeparateAttention):
    """Its softmax is written out."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.split(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.join((query @ key.mT / 2).softmax(-1) @ value))


class WrittenAndCalled(WrittenOut):
    """Its softmax is written out, and another function attends."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.split(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        if x.dim() < 3:
            return super().forward(x)
        return self.o_proj(self.join(F.scaled_dot_product_attention(query, key, value)))


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
    "GPT-2 with a cache": (Decoding, draw_prompt),
    "called": alone(CallingAttention, 12),
    "written out": alone(WrittenOut, 12),
    "written and called": alone(WrittenAndCalled, 12),
    "WavLM": of_family("WavLM"),
}

TIERS = dict.fromkeys(("torch", "GPT-2 with a cache"), ()) | dict.fromkeys(
    ("BERT", "written out", "DeBERTa-v3", "T5"), pytest.mark.full
)
QUICK_AND_SLOW = [pytest.param(name, marks=TIERS.get(name, pytest.mark.slow)) for name in MODELS]


def run(model: nn.Module, handle: Any, inputs: dict[str, Any]) -> list[Tensor]:
    if isinstance(handle, hw.roles.Guidance):
        first = next(iter(inputs.values()))
        drawn = torch.Generator().manual_seed(int(first.double().abs().sum() * 1000))
        roles = torch.rand(first.shape[0], 2, first.shape[1], first.shape[1], generator=drawn) < 0.5
        mask = hw.roles.HeadMask(roles, None, handle.heads.sites[0].num_heads, (1, 0))
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


def serve(model: nn.Module, handle: Any, inputs: dict[str, Tensor], attachment: Attachment) -> list[Tensor]:
    """What a forward returns, and what is read in it."""
    with torch.set_grad_enabled(attachment.trains):
        outputs = run(model, handle, inputs)
        return [tensor.detach() for tensor in (*outputs, *attachment.read(handle))]


def race(works: list[Callable[[], list[Tensor]]]) -> list[Any]:
    """What each returns or raises, all in threads of their own that run in step."""
    found: list[Any] = [None] * len(works)
    barrier = threading.Barrier(len(works))

    def work(index: int) -> None:
        try:
            found[index] = works[index]()
        except Exception as error:
            found[index] = error
        finally:
            barrier.abort()

    with in_step(barrier):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_two_threads_compute_and_read_what_each_does_alone(name: str):
    build, draw = MODELS[name]
    wrong, inputs = [], [draw(1), draw(2)]
    for what, attachment in ATTACHMENTS.items():
        model = build()
        try:
            handle = attachment.attach(hw.find_heads(model))
        except hw.errors.LayoutError:
            continue
        model.train(attachment.trains)
        without_dropout(model)
        if hasattr(getattr(model, "config", None), "layerdrop"):
            model.config.layerdrop = 0.0
        works = [partial(serve, model, handle, one, attachment) for one in inputs]
        try:
            expected = [work() for work in works]
        except (hw.errors.MaskError, hw.errors.NotFired):  # a cache
            continue
        for own, other in zip(expected, race(works), strict=True):
            if isinstance(other, hw.errors.HeadwiseError):
                continue
            if not isinstance(other, list) or len(own) != len(other) or not equal(own, other):
                wrong.append((what, other if isinstance(other, Exception) else "differs"))
    assert not wrong


@sweep(FAMILIES, CORE)
def test_what_changes_a_layer_is_refused_when_it_is_attached_or_runs(family: Family):
    for name in ("gates", "mixture of heads", "talking heads", "dropped heads", "ablation", "aggregators"):
        attachment, model = ATTACHMENTS[name], family.build()
        try:
            handle = attachment.attach(hw.find_heads(model))
        except hw.errors.LayoutError:
            continue
        model.train(attachment.trains)
        serve(model, handle, family.inputs(), attachment)


def overtake(works: list[Callable[[], list[Tensor]]], place: int) -> list[Any]:
    """What two threads return or raise, where the first ends while the second is in its call of module `place`."""
    found: list[Any] = [None, None]
    both, ended = threading.Barrier(2), threading.Event()
    calls: Counter[str] = Counter()

    def wait(*_: Any) -> None:
        name = threading.current_thread().name
        calls[name] += 1
        if calls[name] == place + 1:
            with suppress(threading.BrokenBarrierError):
                both.wait(timeout=20)
            if name == "1":
                ended.wait(timeout=20)

    def work(index: int) -> None:
        try:
            found[index] = works[index]()
        except Exception as error:
            found[index] = error
        finally:
            both.abort()
            if index == 0:
                ended.set()

    hook = register_module_forward_pre_hook(wait)
    threads = [threading.Thread(target=work, args=(index,), name=str(index)) for index in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        hook.remove()
    return found


@pytest.mark.full
@cases("name", ["written out", "written and called"])
@cases("what", [what for what, attachment in ATTACHMENTS.items() if not attachment.trains])
def test_a_first_forward_that_ends_inside_another_leaves_it_alone(what: str, name: str):
    build, draw = MODELS[name]
    inputs, attachment = [draw(1), draw(2)], ATTACHMENTS[what]

    def prepare() -> list[Callable[[], list[Tensor]]]:
        torch.manual_seed(7)
        model = build().eval()
        handle = attachment.attach(hw.find_heads(model))
        return [partial(serve, model, handle, one, attachment) for one in inputs]

    try:
        expected = [work() for work in prepare()]
    except hw.errors.LayoutError:
        return
    for place in range(len([*build().modules()])):
        for own, other in zip(expected, overtake(prepare(), place), strict=True):
            assert not isinstance(other, Exception), (place, other)
            assert equal(own, other)


def describe(owner: Any) -> dict[str, Any]:
    """What an object holds, and what each dictionary in it does, by identity."""
    plain = (int, float, str, tuple, type(None))
    held = {name: value if isinstance(value, plain) else id(value) for name, value in vars(owner).items()}
    inner = {
        name: [(key, id(one)) for key, one in value.items()]
        for name, value in vars(owner).items()
        if type(value) in DICTS
    }
    return {"type": type(owner), "held": held, "inner": inner}


DICTS = (dict, OrderedDict)


def snapshot(model: nn.Module) -> dict[str, Any]:
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        owners[name] = module
        if (config := getattr(module, "config", None)) is not None:
            owners[f"{name} config"] = config
    return {name: (id(owner), describe(owner)) for name, owner in owners.items()}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in before | after
        if before.get(name) != after.get(name)
    ]


class FastLayers(TorchDispatchMode):
    """Counts the layers that torch computes in C++."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._transformer_encoder_layer_fwd.default
        return func(*args, **(kwargs or {}))


def evaluate(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[list[Tensor], int]:
    model.eval()
    with torch.no_grad(), FastLayers() as fast:
        return results(model, inputs), fast.count


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def list_copies(model: nn.Module) -> list[nn.Module]:
    made = [copy.deepcopy(model)]
    with suppress(RuntimeError):  # torch pickles no parametrized module
        made.append(pickle.loads(pickle.dumps(model)))
    return made


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_removing_gives_back_each_object_and_the_fast_path(name: str):
    build, draw = MODELS[name]
    model, inputs, wrong = build(), draw(1), []
    heads = hw.find_heads(model)
    (expected, fast), stock, modes = (
        evaluate(model, inputs),
        copy.deepcopy(model),
        [m.training for m in model.modules()],
    )
    assert (fast > 0) == (name in ("torch", "torch.nn.Transformer"))
    before, types = snapshot(model), [type(module) for module in model.modules()]
    for what, attachment in ATTACHMENTS.items():
        for failing in (False, True):
            try:
                with attachment.attach(heads) as handle:
                    twins = [] if attachment.parts else list_copies(model)
                    model.train(attachment.trains)
                    if failing:
                        model(nonsense=True)
                    run(model, handle, inputs)
            except (hw.errors.HeadwiseError, TypeError, ValueError):
                twins = []
            for module, mode in zip(model.modules(), modes, strict=True):
                module.training = mode
            wrong += [f"{what}: {line}" for line in differences(before, snapshot(model))]
            again = evaluate(model, inputs)
            if not equal(again[0], expected) or again[1] != fast:
                wrong.append(f"{what}: computes otherwise afterwards, {again[1]} of {fast} layers in C++")
            for twin in twins:
                if [type(module) for module in twin.modules()] != types:
                    wrong.append(f"{what}: a copy has other types")
                evaluate(twin, inputs)  # hooks that do nothing go
                (found, count) = evaluate(twin, inputs)
                if not equal(found, evaluate(stock, inputs)[0]) or count != fast:
                    wrong.append(f"{what}: a copy computes otherwise, {count} of {fast} layers in C++")
    assert not wrong, "\n".join(wrong)[:3000]


@pytest.mark.parametrize("names", [ONE_OF_EACH_KIND, pytest.param(tuple(ATTACHMENTS), marks=pytest.mark.full)], ids=len)
def test_two_handles_give_everything_back_in_each_order(names: tuple[str, ...]):
    model, inputs, wrong = encoder(), draw_inputs(1), []
    attachments = {name: ATTACHMENTS[name] for name in names}
    heads = hw.find_heads(model)
    (expected, fast), before = evaluate(model, inputs), snapshot(model)
    for first, one in attachments.items():
        for second, other in attachments.items():
            for turn in (1, -1):
                handles: list[Any] = []
                with suppress(hw.errors.HeadwiseError):
                    handles.append(one.attach(heads))
                    handles.append(other.attach(heads))
                for handle in handles[::turn]:
                    handle.remove()
                wrong += [f"{first}, {second}, {turn}: {line}" for line in differences(before, snapshot(model))]
                if wrong:
                    break
        again = evaluate(model, inputs)
        assert equal(again[0], expected)
        assert again[1] == fast
    assert not wrong, "\n".join(wrong)[:3000]


def act(model: nn.Module, handle: Any, attachment: Attachment) -> None:
    """Have a handle do what it is for, once."""
    model.train(attachment.trains)
    run(model, handle, draw_inputs(1))[0].square().mean().backward()
    attachment.read(handle)
    for repulsion in (handle, *(handle.of(hw.repulsion.Repulsion) if isinstance(handle, hw.attached.Attached) else ())):
        if isinstance(repulsion, hw.repulsion.Repulsion):
            repulsion._attachments[0].optimizer.step()


@tiers("what", [*ONE_OF_EACH_KIND], [name for name in ATTACHMENTS if name not in ONE_OF_EACH_KIND])
def test_every_handle_is_used_alike(what: str):
    attachment = ATTACHMENTS[what]

    def attach() -> tuple[nn.Module, Any]:
        model = encoder()
        return model, attachment.attach(hw.find_heads(model))

    # a block in which it never acted
    model, handle = attach()
    assert handle.attached is True
    with pytest.raises(hw.errors.NotFired):
        handle.check()
    with pytest.raises(hw.errors.NotFired), handle as entered:
        assert entered is handle
    assert handle.attached is False
    handle.remove()
    # one in which it did
    model, handle = attach()
    with handle:
        act(model, handle, attachment)
        handle.check()
    handle.remove()
    # one that failed, and one in which it was removed
    model, handle = attach()
    with pytest.raises(ZeroDivisionError), handle:
        raise ZeroDivisionError
    assert not handle.attached
    model, handle = attach()
    with handle:
        handle.remove()
        handle.remove()
    # a copy is attached to nothing, and takes nothing off
    model, handle = attach()
    twin = copy.deepcopy(handle)
    assert twin.attached is False
    twin.remove()
    act(model, handle, attachment)
    handle.check()


@cases("what", VALUES)
def test_a_method_as_a_value_does_what_its_own_call_does(what: str):
    computed = []
    own = partial(hw.drop_heads, rate=0.3, seed=4) if what == "dropped heads" else ATTACHMENTS[what].attach
    for attach in (own, lambda heads: drawn(hw.attach(heads, VALUES[what]))):
        model = encoder()
        torch.manual_seed(6)
        handle = attach(hw.find_heads(model))
        model.train(what in ("dropped heads", "CKA"))
        outputs = run(model, handle, draw_inputs(1))
        computed.append([*outputs, handle.loss(outputs[0].square().mean())])
        # the other layer alone, and then none
        handle.remove()
        with (
            suppress(hw.errors.NotFired),
            hw.attach(hw.find_heads(model), dataclasses.replace(VALUES[what], layers=(1,))) as one,
        ):
            found = one.handles[0]
            sites = getattr(found, "heads", getattr(found, "replaced", ()))
            assert len(sites) == 1
    assert equal(*computed)
    plain = encoder().train(what in ("dropped heads", "CKA"))
    assert equal(results(plain, draw_inputs(1)), computed[0][:-1]) == (what in ("outputs", "CKA"))


@pytest.mark.full
def test_heads_that_nothing_repels_any_more_leave_no_object_behind():
    def count() -> Counter[str]:
        for _ in range(3):
            gc.collect()
        return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())

    def drop(rule: Any, stepped: bool, removed: bool) -> None:
        model = encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = hw.repel(hw.find_heads(model), rule, optimizer)
        model.train()
        model(**draw_inputs(1)).square().mean().backward()
        if stepped:
            optimizer.step()
        if removed:
            handle.remove()

    found = []
    for _ in range(3):
        for rule in (hw.SVGD(), hw.SVGD(alpha=hw.Target(effective_heads=3.0))):
            for case in ((True, True), (True, False), (False, True), (False, False)):
                for _ in range(4):
                    drop(rule, *case)
        found.append(count())
    # what is made once is no rest
    assert not {name: number for name, number in (found[2] - found[1]).items() if number >= 4}
