"""Compare encoding a batch of graphs at once with one graph after another: forward and backward, on AGENDA.

    python benchmarks/graph_encoder.py --data FOLDER [--scale cpu] [--graphs 32] [--out record.json]

The encoder is everything before the decoder: titles, entity names, and the blocks of graph attention. Both ways give
the same gradients, which is checked first in double precision. They are timed alternately, on one thread and on torch's
default number of threads; the result is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from headwise_lab.experiment.seeding import initialize_parameters
from headwise_lab.tasks.graph2text.data import collate, load_graphs
from headwise_lab.tasks.graph2text.model import GraphWriter
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES
from headwise_lab.tasks.graph2text.task import Graph2TextTask
from timing import console, interleaved, new_record, ratio, write

PARTS = ("title", "entities", "nodes", "neighbors", "types")
Batch = dict[str, Tensor]


def whole(model: GraphWriter, batch: Batch) -> Tensor:
    """Return a number that depends on everything the decoder would read."""
    memory = model.read(*(batch[name] for name in PARTS))
    real = memory.entities.unsqueeze(-1)
    return (memory.copies * real).square().sum() + memory.root[:, 0].sum() + memory.title[0].square().sum()


def blocks(model: GraphWriter, batch: Batch) -> Tensor:
    """Return such a number for the blocks alone, with given entities."""
    vectors = model.embedding(batch["entities"][:, 0])
    states = model.encoder(vectors, batch["nodes"], batch["neighbors"])
    return states.square().sum() + states[..., 0].sum()


def step(model: GraphWriter, batches: list[Batch], encode: Callable[[GraphWriter, Batch], Tensor]) -> None:
    """Run forward and backward for every batch."""
    model.zero_grad(set_to_none=True)
    for batch in batches:
        encode(model, batch).backward()


def gradients(model: GraphWriter) -> list[Tensor]:
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scale", default="cpu", choices=list(GRAPH_SCALES))
    parser.add_argument("--graphs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cores = torch.get_num_threads()
    scale = GRAPH_SCALES[arguments.scale]
    data = load_graphs(arguments.data, scale)
    graphs = [data.train[number] for number in range(arguments.graphs)]
    together, alone = (
        [{name: one.to(device) for name, one in collate(part).items()} for part in parts]
        for parts in ([graphs], [[one] for one in graphs])
    )
    record = new_record("graph-encoder", device) | {
        "scale": arguments.scale,
        "width": scale.width,
        "blocks": scale.layers,
        "graphs": arguments.graphs,
        "nodes": int((together[0]["nodes"] != 0).sum()),
        "rounds": arguments.rounds,
    }
    for name, encode in (("whole encoder", whole), ("blocks alone", blocks)):
        model = Graph2TextTask().model(data, scale).to(device).double().eval()
        initialize_parameters(model, 0)
        step(model, together, encode)
        found = gradients(model)
        # padding of titles adds zero to the sum of squares, since keys have no biases
        step(model, alone, encode)
        differences = [float((one - other).abs().max()) for one, other in zip(found, gradients(model), strict=True)]
        assert max(differences) < 1e-8, f"{name}: gradients differ by {max(differences)}"
        model.float().train()
        runs = {
            "batched": lambda model=model, encode=encode: step(model, together, encode),
            "one by one": lambda model=model, encode=encode: step(model, alone, encode),
        }
        record[name] = {}
        for threads in sorted({1, cores}):
            torch.set_num_threads(threads)
            seconds = interleaved(device, runs, arguments.rounds, f"{name}, {threads} threads")
            faster = ratio(seconds, "one by one", "batched")
            record[name][f"{threads} threads"] = {"times faster": faster, "seconds": seconds}
            batched, single = (1e3 * median(seconds[way]) for way in runs)
            console.print(
                f"{name}, {threads} threads: {batched:.1f} ms batched, {single:.1f} ms one by one: {faster:.1f} times"
            )
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
