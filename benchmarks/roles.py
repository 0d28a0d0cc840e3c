"""Cost of making role masks, relative to an epoch, and of a guided step, relative to a step with padding masks.

Steps of all variants run interleaved in one process; the result is the median over rounds of the ratio within a round.
The reference has the same kind of mask, one per head, that only masks padding. It runs twice per round, so that the A/A
ratio shows the noise of the machine; the unmodified model is also timed. Run by `make bench NAME=roles`.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn

import headwise as hw
from timing import console, default_device, interleaved, new_record, ratio, write

WORDS, WIDTH, HEADS, LAYERS, INNER, BATCH = 20_000, 96, 6, 2, 256, 32
MARKS, RELATIONS = ",;.?!", ("nsubj", "obj", "amod", "advmod", "det", "case", "punct", "obl", "conj")
PADDING, AGAIN, GUIDED, PLAIN = "padding in every head", "padding in every head, again", "five roles", "model as it is"
SHARE, TARGET = 0.10, 1.05


class Classifier(nn.Module):
    """A linear classifier on the mean of the states of an unmodified `nn.TransformerEncoder`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        states = self.encoder(self.embedding(tokens), src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)
        return self.output(states.sum(1) / (~padding).sum(1, keepdim=True))


def sentence(words: int, rng: random.Random) -> hw.roles.WordTable:
    """Return a sentence with realistic word frequencies, a random tree, occasional punctuation and a final period."""
    chosen = [int(WORDS ** rng.random()) for _ in range(words - 1)]
    texts = [rng.choice(MARKS) if rng.random() < 0.08 else f"w{number}" for number in chosen]
    heads = [rng.randrange(words) for _ in range(words)]
    return hw.roles.WordTable([*texts, "."], heads, [rng.choice(RELATIONS) for _ in range(words)])


def ids(tables: list[hw.roles.WordTable]) -> Tensor:
    length = max(map(len, tables))
    rows = [[1 + hash(word) % (WORDS - 1) for word in table.words] + [0] * (length - len(table)) for table in tables]
    return torch.tensor(rows)


def step(model: nn.Module, tokens: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)


def making(device: torch.device, sentences: int, rounds: int) -> dict[str, float]:
    """Return the median seconds to make the masks of some sentences, and to train an epoch on them."""
    rng = random.Random(0)
    tables = [sentence(min(56, max(2, round(rng.gauss(20, 9)))), rng) for _ in range(sentences)]
    roles = hw.roles.Roles.paper(hw.roles.idf(tables))
    batches = [tables[i : i + BATCH] for i in range(0, sentences, BATCH)]
    model = Classifier().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    encoded = [(ids(batch).to(device), torch.randint(0, 2, (len(batch),), device=device)) for batch in batches]

    def make() -> None:
        for batch in batches:
            roles(batch, HEADS)

    def train() -> None:
        for tokens, labels in track(encoded, "an epoch", console=console, transient=True):
            step(model, tokens, labels, optimizer)

    seconds = interleaved(device, {"masks": make, "epoch": train}, rounds, "masks and epochs")
    return {name: statistics.median(values) for name, values in seconds.items()}


def guiding(device: torch.device, length: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a forward and backward pass of each variant at one length."""
    rng = random.Random(length)
    tables = [sentence(length if index % 2 else length // 2, rng) for index in range(BATCH if length < 100 else 8)]
    mask = hw.roles.Roles.paper(hw.roles.idf(tables))(tables, HEADS).to(device)
    tokens, labels = ids(tables).to(device), torch.zeros(len(tables), dtype=torch.long, device=device)
    runs: dict[str, Callable[[], None]] = {}
    for name in (PADDING, AGAIN, GUIDED, PLAIN):
        torch.manual_seed(0)
        model = Classifier().to(device).train()
        guidance = hw.guide(hw.find_heads(model)) if name != PLAIN else None
        given = mask if name == GUIDED else mask.without(*mask.names)

        def run(
            model: nn.Module = model, guidance: hw.roles.Guidance | None = guidance, given: hw.roles.HeadMask = given
        ) -> None:
            if guidance is not None:
                guidance(given)
            step(model, tokens, labels)

        runs[name] = run
    return interleaved(device, runs, rounds, f"steps at length {length}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--sentences", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    device = default_device()
    record = new_record("roles", device)
    record |= {"width": WIDTH, "heads": HEADS, "layers": LAYERS, "batch": BATCH, "sentences": arguments.sentences}

    made = making(device, arguments.sentences, max(1, arguments.rounds // 10))
    record["seconds"] = made
    share = made["masks"] / made["epoch"]
    record["share"] = share
    console.print(
        f"masks of {arguments.sentences:,} sentences: {made['masks']:.2f} s, an epoch of {LAYERS} layers "
        f"{made['epoch']:.2f} s, share {share:.3f}   (target {SHARE})"
    )
    record["ratio"], record["step seconds"] = {}, {}
    for length in (32, 256):
        seconds = guiding(device, length, arguments.rounds)
        ratios = {name: ratio(seconds, name, PADDING) for name in seconds if name != PADDING}
        record["ratio"][str(length)], record["step seconds"][str(length)] = ratios, seconds
        console.print(f"length {length}, {arguments.rounds} rounds; step time relative to {PADDING!r}")
        for name, value in ratios.items():
            console.print(f"  {name:<32} {value:8.4f}" + (f"   (target {TARGET})" if name == GUIDED else ""))
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
