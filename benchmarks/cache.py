"""What a budget for each key/value head costs a trained language model, beside other caches of the same bytes.

A model reads a context, its cache is made smaller, and the loss is taken on what follows:

- text: 128 tokens of WikiText-2 after 1,920;
- copying: 72 of 80 random tokens, whose first 8 come again at the end of 2,000 tokens of text that contain them;
- number: five digits, asked for at the end of 600 tokens of text that contain them.

Heads are scored on the validation set and on copies of other random tokens; the test set chooses nothing. Of kvpress
(`--kvpress`, if it is installed), presses see the context without the question, as in its own pipeline, and keep all
that follows. Then the bytes, and the time of a token, after 8,192 tokens. Run by
`make bench NAME=cache ARGS="--model FOLDER --data FOLDER"`; the model is a folder of `save_pretrained`.
"""

from __future__ import annotations

import argparse
import gzip
import inspect
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

import headwise as hw
from headwise.shrinking import KVBudget
from timing import console, interleaved, new_record, ratio, write

CPU = torch.device("cpu")
SINK, WINDOW = 4, 256
DRAWS = 5
# Tokens that are read, in pieces, and that follow.
PIECE, CONTEXT, AFTER, LONG = 512, 1920, 128, 8192
COPIED, CUE, LOOKED = 80, 8, 600
WHOLE, QUESTION = "whole cache", "The secret number is"


@dataclass(frozen=True)
class Item:
    """A context, what follows it, and how many of the last tokens are scored."""

    context: Tensor
    after: Tensor
    scored: int


def read_tokens(path: Path, tokenizer: Any) -> Tensor:
    """Return the tokens of a file of WikiText-2."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        text = "".join(line for line in lines if line.strip())
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def make_items(tokens: Tensor, tokenizer: Any, count: int) -> dict[str, list[Item]]:
    """Return the items of the three works; each lies in another part of the text."""
    generator = torch.Generator().manual_seed(1)
    encode = partial(tokenizer.encode, add_special_tokens=False, return_tensors="pt")
    works: dict[str, list[Item]] = {"text": [], "copying": [], "number": []}
    for part in tokens[: count * (len(tokens) // count)].view(count, -1):
        text, filler, short = part[: CONTEXT + AFTER], part[-CONTEXT:], part[-LOOKED:]
        works["text"].append(Item(text[:CONTEXT], text[CONTEXT:], AFTER))
        copied = torch.randint(len(tokenizer), (COPIED,), generator=generator)
        place = int(torch.randint(CONTEXT // 8, CONTEXT // 2, (), generator=generator))
        context = torch.cat([filler[:place], copied, filler[place:]])
        works["copying"].append(Item(context, copied, COPIED - CUE))
        digits = "".join(map(str, torch.randint(10, (5,), generator=generator).tolist()))
        place = int(torch.randint(LOOKED // 8, LOOKED // 2, (), generator=generator))
        told = encode(f" {QUESTION} {digits}. ")[0]
        asked, answer = encode(f" {QUESTION} ".rstrip())[0], encode(f" {digits}")[0]
        context = torch.cat([short[:place], told, short[place:]])
        works["number"].append(Item(context, torch.cat([asked, answer]), len(answer)))
    return works


def run(model: Any, tokens: Tensor, cache: Any, start: int = 0, **settings: Any) -> Tensor:
    """Return the logits of tokens after what a cache has."""
    # its name in transformers before 5.20
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    places = torch.arange(start, start + len(tokens))[None]
    return model(tokens[None], position_ids=places, **{name: cache}, use_cache=True, **settings).logits[0]


def count_bytes(cache: Any) -> int:
    """Return the bytes that a cache holds."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(one.numel() * one.element_size() for layer in cache.layers for one in (layer.keys, layer.values))


@contextmanager
def pressed(model: Any, press: Any, cache: Any) -> Iterator[None]:
    """Have kvpress make the cache smaller; newer transformers do not tell its hook the cache and the positions."""
    if press is None:
        yield
        return
    hook = press.forward_hook

    def told(module: Any, inputs: Any, settings: dict[str, Any], output: Any) -> Any:
        places = torch.arange(settings["hidden_states"].shape[1])
        return hook(module, inputs, {**settings, "past_key_values": cache, "cache_position": places}, output)

    press.forward_hook = told
    try:
        with press(model):
            yield
    finally:
        press.forward_hook = hook


@torch.no_grad()
def score(model: Any, item: Item, cache: Any, press: Any = None) -> tuple[float, float, int]:
    """Return the loss of the scored tokens, the share that is right, and the bytes after the context."""
    with pressed(model, press, cache):
        last = run(model, item.context, cache, logits_to_keep=1)
    size = count_bytes(cache)
    logits = torch.cat([last, run(model, item.after[:-1], cache, len(item.context))]) if len(item.after) > 1 else last
    logits, wanted = logits[-item.scored :], item.after[-item.scored :]
    return float(F.cross_entropy(logits, wanted)), float((logits.argmax(-1) == wanted).double().mean()), size


def keep_bytes(budget: KVBudget, share: float, length: int) -> KVBudget:
    """Return the budget that leaves a share of the bytes after a context: full heads keep it, the others its ends."""
    budget = replace(budget, window=min(WINDOW, length // 8))
    near = (budget.sink + budget.window) / length
    return replace(budget, keep=(share - near) / (1 - near))


def draw(budget: KVBudget, seed: int) -> KVBudget:
    """Return the budget with heads drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {layer: torch.rand(len(heads), generator=generator) for layer, heads in budget.scores.items()}
    return replace(budget, scores={layer: tuple(heads.tolist()) for layer, heads in drawn.items()})


# Makes an empty cache, and perhaps a press, for the item of a number with a context of a length.
Way = Callable[[int, int], tuple[Any, Any]]


def list_ways(budget: KVBudget, share: float, kvpress: Any) -> dict[str, Way]:
    """Return the ways to keep a share of the bytes."""

    def scored(_item: int, length: int) -> tuple[Any, Any]:
        return keep_bytes(budget, share, length).cache(), None

    def at_random(item: int, length: int) -> tuple[Any, Any]:
        return draw(keep_bytes(budget, share, length), item % DRAWS).cache(), None

    def last(_item: int, length: int) -> tuple[Any, Any]:
        return replace(budget, keep=0.0, window=round(share * length) - SINK).cache(), None

    def press(name: str, _item: int, _length: int) -> tuple[Any, Any]:
        return DynamicCache(), getattr(kvpress, f"{name}Press")(compression_ratio=1 - share)

    def duo(_item: int, length: int) -> tuple[Any, Any]:
        kept = keep_bytes(budget, share, length)
        found = kvpress.DuoAttentionPress(head_compression_ratio=1 - kept.keep)
        found.post_init_from_model = lambda _model: None
        found.sink_size, found.recent_size = kept.sink, kept.window
        full = [[head in kept.full[layer] for head in range(len(heads))] for layer, heads in kept.scores.items()]
        found.streaming_mask = ~torch.tensor(full)
        return DynamicCache(), found

    ways: dict[str, Way] = {"kv_budget": scored, "heads at random": at_random, "last positions alone": last}
    if kvpress is not None:
        ways |= {f"kvpress {name}": partial(press, name) for name in ("SnapKV", "ExpectedAttention")}
        ways["kvpress DuoAttention, the same heads"] = duo
    return ways


def summarize(found: Sequence[tuple[float, float, int]]) -> dict[str, float]:
    """Return the means of losses, of what is right, and of bytes."""
    loss, right, size = (statistics.fmean(column) for column in zip(*found, strict=True))
    return {"loss": loss, "right": right, "bytes": size}


def describe(works: Mapping[str, Mapping[str, float]], whole: Mapping[str, Mapping[str, float]]) -> str:
    """Return the losses of works against those with the whole cache, in a line."""
    return "; ".join(
        f"{work} {one['loss']:.3f} nats ({one['loss'] - whole[work]['loss']:+.3f}), {one['right']:.2f} right, "
        f"{one['bytes'] / whole[work]['bytes']:.2f} of the bytes"
        for work, one in works.items()
    )


def measure_long(model: Any, tokens: Tensor, caches: Mapping[str, Any], rounds: int) -> dict[str, dict[str, float]]:
    """Return the bytes of caches after a long context, and the time of a token against the first."""
    for cache in caches.values():
        for start in track(range(0, LONG - rounds - 1, PIECE), "reading", console=console, transient=True):
            part = tokens[start : min(start + PIECE, LONG - rounds - 1)]
            run(model, part, cache, start, logits_to_keep=1)
    sizes = {name: count_bytes(cache) for name, cache in caches.items()}
    places = dict.fromkeys(caches, LONG - rounds - 1)

    def step(name: str) -> None:
        run(model, tokens[places[name]][None], caches[name], places[name])
        places[name] += 1

    seconds = interleaved(CPU, {name: partial(step, name) for name in caches}, rounds, "timing")
    first = next(iter(caches))
    return {
        name: {"bytes": sizes[name], "of the bytes": sizes[name] / sizes[first], "time": ratio(seconds, name, first)}
        for name in caches
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal model and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder with valid.raw.gz and test.raw.gz")
    parser.add_argument("--items", type=int, default=16, help="items of each work")
    parser.add_argument("--texts", type=int, default=4, help="texts of 1,024 tokens on which heads are scored")
    parser.add_argument("--rounds", type=int, default=31, help="rounds of timing, of a token each")
    parser.add_argument("--kvpress", action="store_true", help="run kvpress beside it")
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    record = new_record("cache", CPU)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    kvpress = None
    if arguments.kvpress:
        import kvpress  # pyright: ignore[reportMissingImports]
    texts = read_tokens(arguments.data / "valid.raw.gz", tokenizer)
    tokens = read_tokens(arguments.data / "test.raw.gz", tokenizer)
    batches = [row[None] for row in texts[: arguments.texts * 1024].view(arguments.texts, -1)]
    with torch.enable_grad():
        budget = hw.kv_budget(hw.find_heads(model), batches, sink=SINK, window=WINDOW)
    works = make_items(tokens, tokenizer, arguments.items)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    plan: dict[str, Way] = {WHOLE: lambda _item, _length: (DynamicCache(), None)}
    for share in (0.5, 0.25):
        plan |= {f"{share:.0%}, {name}": way for name, way in list_ways(budget, share, kvpress).items()}
    for name, way in plan.items():
        rows[name] = {}
        for work, items in works.items():
            numbered = track(list(enumerate(items)), f"{name}: {work}", console=console, transient=True)
            rows[name][work] = summarize(
                [score(model, item, *way(number, len(item.context))) for number, item in numbered]
            )
        console.print(f"{name}: {describe(rows[name], rows[WHOLE])}", soft_wrap=True)
    caches = {WHOLE: DynamicCache(), "kv_budget, a quarter of the heads": replace(budget, keep=0.25).cache()}
    long = measure_long(model, tokens, caches, arguments.rounds)
    for name, row in long.items():
        console.print(
            f"{name}: {row['bytes'] / 1e6:.1f} MB after {LONG:,} tokens ({row['of the bytes']:.2f}), "
            f"{row['time']:.2f} of the time of a token",
            soft_wrap=True,
        )
    record |= {"items": arguments.items, "sink": SINK, "window": WINDOW, "works": rows, "long": long}
    write(record, CPU, arguments.out)


if __name__ == "__main__":
    main()
