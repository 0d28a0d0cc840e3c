"""Cost of headwise in a training step of Transformer-base, relative to unmodified torch in the same process.

All variants of a table run interleaved, and medians are compared. The plain model runs twice per round, so that the A/A
ratio shows the noise of the machine. On a CPU the ratios are of CPU time, which does not count what others compute
there, with those of wall time beside. Embeddings start as in practice, with a deviation of 0.02: wide ones, tied to the
output, are certain of the token they are given, and make gradients too small for normal numbers, on which a CPU is many
times slower. Such a step is refused. Run by `make bench`; `floors.py` compares the same methods with their bytes.

On CUDA (`--device cuda`) the forward pass is in bf16, batches have 8,192 tokens, times come from CUDA events, and
repulsion is also measured in whole steps.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headwise as hw
from headwise.repulsion.groups import find_groups
from headwise.repulsion.rules import Rule
from headwise.repulsion.step import apply_rule
from headwise.routing.modules import build
from timing import console, default_device, interleaved_clocks, new_record, ratio, write

VOCABULARY, WIDTH, HEADS, LAYERS, INNER = 10_000, 512, 8, 6, 2048
# Standard deviation of the embeddings at first, and the largest share of subnormal numbers in any gradient of a step.
DEVIATION = 0.02
MOST_SUBNORMAL = 0.01
ALPHA = 0.01
RULE = hw.SVGD(alpha=ALPHA)
# sentences x tokens
SHAPES = {"cpu": "32x64,4x512", "cuda": "128x64,16x512"}
# Largest step time wanted on CUDA, relative to a plain step.
TARGETS = {"svgd, all layers": 1.01, "output": 1.02, "em in 2 encoder layers": 1.10}
MODULE_TOKENS = 2048
# Whether the forward pass is also in bf16 on a CPU; on CUDA it always is.
HALF = False
COMPILE = True
# Whether whole steps with repulsion are also timed on a CPU.
WHOLE_STEPS = False


Seconds = dict[str, list[float]]


class Translation(nn.Module):
    """Embeddings, an unmodified `nn.Transformer` of base shape, and the output layer tied to the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=DEVIATION)
        self.transformer = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=target.device)
        states = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=causal, tgt_is_causal=True)
        return F.cross_entropy(F.linear(states, self.embedding.weight).flatten(0, 1), target.flatten())


class _Subnormal(TorchDispatchMode):
    """Finds the largest share of subnormal numbers in what an operator of torch returns."""

    share = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
                size = tensor.detach().abs()
                tiny = (size > 0) & (size < torch.finfo(size.dtype).tiny)
                self.share = max(self.share, int(tiny.sum()) / size.numel())
        return result


def measure_subnormal(model: Translation, source: Tensor, target: Tensor) -> float:
    """Return the share of subnormal numbers in that gradient of a step, also of a hidden state, where it is largest."""
    loss = model(source, target)
    with _Subnormal() as counted:
        loss.backward()
    model.zero_grad(set_to_none=True)
    return counted.share


def require_normal(share: float) -> None:
    """Refuse to time a model whose gradients are too small for normal numbers."""
    if share > MOST_SUBNORMAL:
        raise SystemExit(
            f"{share:.1%} of a gradient is subnormal numbers, more than {MOST_SUBNORMAL:.0%}, and a CPU would be timed "
            "on those. Initialize the model as one that is trained."
        )


class Variant:
    """One way to train the model."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        attach: Callable[[Translation], Callable[[], Tensor]],
        rule: Rule | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = Translation().to(device)
        self.penalty = attach(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if rule is not None:
            hw.repel(hw.find_heads(self.model), rule, self.optimizer)

    def step(self, source: Tensor, target: Tensor) -> None:
        with torch.autocast(source.device.type, torch.bfloat16, enabled=HALF or source.is_cuda):
            loss = self.model(source, target) + self.penalty()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def no_penalty(_model: Translation) -> Callable[[], Tensor]:
    zero = torch.zeros(())
    return lambda: zero


def with_penalty(term: hw.similarity.Output | hw.similarity.Position) -> Callable[[Translation], Callable[[], Tensor]]:
    return lambda model: hw.Disagreement(hw.find_heads(model), term)


def with_em(layers: int) -> Callable[[Translation], Callable[[], Tensor]]:
    def attach(model: Translation) -> Callable[[], Tensor]:
        # on CUDA the routing is one Triton program and needs no torch.compile
        chunks = hw.routing.Chunks(compile=COMPILE and next(model.parameters()).device.type == "cpu")
        hw.aggregate(hw.find_heads(model).kind("self").layers(*range(layers)), hw.routing.EMRouting(chunks=chunks))
        return no_penalty(model)

    return attach


def naive_output(model: Translation) -> Callable[[], Tensor]:
    """Return the penalty as a double loop over pairs of heads, written directly from the paper."""
    taps = hw.Taps(hw.find_heads(model), outputs=True)

    def penalty() -> Tensor:
        total = torch.zeros(())
        for capture in taps.read():
            assert capture.outputs is not None
            heads = capture.outputs.unbind(2)
            pairs = [F.cosine_similarity(a, b, dim=-1).mean() for a in heads for b in heads]
            total = total + torch.stack(pairs).mean() / 18
        return total

    return penalty


def naive_svgd(model: nn.Module) -> None:
    """SVGD by double loops over pairs of heads, one projection at a time."""
    for head_slice in hw.find_heads(model).slices():
        theta = head_slice.of(head_slice.parameter.detach()).flatten(1)
        assert head_slice.parameter.grad is not None
        gradient = head_slice.of(head_slice.parameter.grad)
        flat, count = gradient.flatten(1).clone(), head_slice.heads
        distances = sorted(
            math.sqrt(float((theta[i] - theta[j]).square().sum())) for i in range(count) for j in range(i)
        )
        middle = len(distances) // 2
        bandwidth = statistics.median([distances[middle], distances[~middle]]) ** 2 / math.log(count)
        for i in range(count):
            new = torch.zeros_like(flat[i])
            for j in range(count):
                difference = theta[i] - theta[j]
                kernel = math.exp(-float(difference.square().sum()) / bandwidth)
                new += kernel * flat[j] - ALPHA * 2 / bandwidth * kernel * difference
            gradient[i].copy_((new * RULE.step_size / count).view_as(gradient[i]))


def model_table(
    device: torch.device, batch: int, length: int, rounds: int, naive: bool, only: list[str]
) -> dict[str, object]:
    """Return step times relative to plain, and the share of a step spent in `apply()`."""
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(VOCABULARY, (batch, length), generator=generator).to(device) for _ in range(2))
    attachments: dict[str, Callable[[Translation], Callable[[], Tensor]]] = {
        "plain": no_penalty,
        "plain again": no_penalty,
        "output": with_penalty(hw.similarity.Output()),
        "position": with_penalty(hw.similarity.Position()),
        "em in 2 encoder layers": with_em(2),
        "em in 6 encoder layers": with_em(6),
    }
    rules: dict[str, Rule] = {}
    if device.type == "cuda" or WHOLE_STEPS:
        # on a CPU the noise of a long step hides the repulsion, so apply() is timed alone there
        attachments |= {
            "svgd, all layers": no_penalty,
            "position, recomputed": with_penalty(hw.similarity.Position(recompute=True)),
        }
        rules["svgd, all layers"] = RULE
    if naive:
        attachments["output by double loops"] = naive_output
    if only:
        attachments = {name: attach for name, attach in attachments.items() if "plain" in name or name in only}
    require_normal(measure_subnormal(Translation().to(device), source, target))
    variants = {name: Variant(name, device, attach, rules.get(name)) for name, attach in attachments.items()}
    plain = variants["plain"]
    heads = hw.find_heads(plain.model)
    everything = find_groups(heads, joint=False)
    first = find_groups(heads.kind("self").layer(0), joint=False)
    runs: dict[str, Callable[[], object]] = {
        name: (lambda variant=variant: variant.step(source, target)) for name, variant in variants.items()
    }
    # apply() alone, on the gradients of the plain model's last step, interleaved with the steps
    runs["svgd apply, 54 groups"] = lambda: apply_rule(RULE, everything, strength=1.0, scale=None)
    runs["svgd apply, first encoder layer"] = lambda: apply_rule(RULE, first, strength=1.0, scale=None)
    if naive:
        runs["svgd apply by double loops, 54 groups"] = lambda: naive_svgd(plain.model)
    wall, cpu = interleaved_clocks(device, runs, rounds, f"batch {batch} x {length}")
    seconds = choose_clock(device, wall, cpu)
    # after all its steps
    subnormal = measure_subnormal(plain.model, source, target)
    require_normal(subnormal)
    return {
        "batch": batch,
        "length": length,
        "rounds": rounds,
        "share of subnormal numbers": subnormal,
        "plain step seconds": statistics.median(wall["plain"]),
        "plain step CPU seconds": statistics.median(cpu["plain"]),
        "ratio to plain": {name: ratio(seconds, name, "plain") for name in runs},
        "ratio of wall time": {name: ratio(wall, name, "plain") for name in runs},
    }


def choose_clock(device: torch.device, wall: Seconds, cpu: Seconds) -> Seconds:
    """Return the times that tell what a run costs: of the CPU where it computes, of the events on CUDA."""
    return cpu if device.type == "cpu" else wall


def module_table(device: torch.device, tokens: int, rounds: int) -> dict[str, object]:
    """Compare EM and simple routing with the same votes under uniform weights: forward and backward of one module."""
    settings = {
        "trunk": hw.routing.Trunk(),
        "trunk again": hw.routing.Trunk(),
        "em": hw.routing.EMRouting(chunks=hw.routing.Chunks(compile=COMPILE)),
        "em, not compiled": hw.routing.EMRouting(),
        "simple": hw.routing.SimpleRouting(chunks=hw.routing.Chunks(compile=COMPILE)),
    }
    modules: dict[str, nn.Module] = {"output projection": nn.Linear(WIDTH, WIDTH).to(device)}
    for name, setting in settings.items():
        modules[name] = build(setting, HEADS, WIDTH // HEADS, WIDTH).to(device)
    heads = torch.randn(tokens, WIDTH, device=device, requires_grad=True)
    kept = {}
    for name, module in modules.items():
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(weigh, sizes), lambda tensor: tensor):
            module(heads)
        kept[name] = sum(sizes)
    runs = {name: (lambda module=module: module(heads).sum().backward()) for name, module in modules.items()}
    seconds = choose_clock(device, *interleaved_clocks(device, runs, rounds, f"one module, {tokens} tokens"))
    return {
        "tokens": tokens,
        "rounds": rounds,
        "trunk milliseconds": 1e3 * statistics.median(seconds["trunk"]),
        "ratio to trunk": {name: ratio(seconds, name, "trunk") for name in runs},
        "bytes kept for backward": kept,
        "bytes of the input": heads.numel() * heads.element_size(),
    }


def weigh(sizes: list[int], tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        sizes.append(tensor.numel() * tensor.element_size())
    return tensor


def heading(device: torch.device) -> dict:
    """Return the header of the record, with the targets."""
    return new_record("overhead", device) | {
        "cuda": device.type == "cuda",
        "wanted on CUDA, of a plain step": TARGETS,
    }


def show(record: dict) -> None:
    for table in record["models"]:
        shape = f"batch {table['batch']} x {table['length']}"
        seconds, rounds = table["plain step seconds"], table["rounds"]
        console.print(f"\n[bold]Transformer-base, {shape}[/bold]: plain step {seconds:.2f} s, {rounds} rounds")
        console.print(f"largest share of subnormal numbers in a gradient: {table['share of subnormal numbers']:.2%}")
        console.print("step time relative to plain (by wall time)")
        for name, value in table["ratio to plain"].items():
            target = f"   target: at most {TARGETS[name]:.2f}" if name in TARGETS and record["cuda"] else ""
            console.print(f"  {name:<42} {value:8.4f} ({table['ratio of wall time'][name]:.4f}){target}")
    if "module" not in record:
        return
    table = record["module"]
    console.print(f"\n[bold]One module, {table['tokens']} tokens[/bold], forward and backward; time relative to trunk")
    for name, value in table["ratio to trunk"].items():
        kept = table["bytes kept for backward"][name] / 2**20
        console.print(f"  {name:<42} {value:8.3f}   saves {kept:6.1f} MiB for backward")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default=default_device().type)
    parser.add_argument("--shapes", help=f"batches as sentences x tokens, for example 32x64 (default: {SHAPES})")
    parser.add_argument("--skip-naive", action="store_true", help="skip the implementations by double loops")
    parser.add_argument("--only", action="append", default=[], help="time only this variant and plain; repeatable")
    parser.add_argument(
        "--out",
        type=Path,
        help="the JSON record; if torch sees no GPU, the record says so (default: a new file in benchmarks/records)",
    )
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        if arguments.out:
            write({**heading(torch.device("cpu")), "not run on CUDA": "torch sees no GPU"}, device, arguments.out)
        parser.error("--device is cuda, but torch sees no GPU; use --device cpu.")
    record = heading(device)
    if not arguments.only:
        record["module"] = module_table(device, MODULE_TOKENS, 3 * arguments.rounds)
    record["models"] = []
    for number, shape in enumerate((arguments.shapes or SHAPES[device.type]).split(",")):
        batch, length = map(int, shape.split("x"))
        # another shape tells nothing more of double loops
        naive = number == 0 and not arguments.skip_naive and not arguments.only
        record["models"].append(model_table(device, batch, length, arguments.rounds, naive, arguments.only))
    show(record)
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
