"""Encoding a batch of graphs at once against one graph after another: forward and backward, on graphs of AGENDA.

    python benchmarks/graph_encoder.py --data FOLDER [--scale cpu] [--graphs 32] [--out record.json]

The encoder is everything before the decoder: titles, names of entities, and the blocks of graph attention. Both ways
give the same gradients, which is checked first in double precision. They are timed in turn, and the median is taken.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from headwise.lab.models.graph_writer import GraphWriter
from headwise.lab.protocol import initialise
from headwise.lab.tasks.graph2text import Graph2TextTask
from headwise.lab.tasks.graph_data import collate, load_graphs
from headwise.lab.tasks.graph_scales import GRAPH_SCALES
from timing import new_record, write

PARTS = ("title", "entities", "nodes", "neighbours", "types")
Batch = dict[str, Tensor]


def whole(model: GraphWriter, batch: Batch) -> Tensor:
    """A number that depends on all the decoder would read."""
    memory = model.read(*(batch[name] for name in PARTS))
    real = memory.entities.unsqueeze(-1)
    return (memory.copies * real).square().sum() + memory.root[:, 0].sum() + memory.title[0].square().sum()


def blocks(model: GraphWriter, batch: Batch) -> Tensor:
    """The same of the blocks alone, whose entities are given."""
    vectors = model.embedding(batch["entities"][:, 0])
    states = model.encoder(vectors, batch["nodes"], batch["neighbours"])
    return states.square().sum() + states[..., 0].sum()


def step(model: GraphWriter, batches: list[Batch], encode: Callable[[GraphWriter, Batch], Tensor]) -> None:
    """Forward and backward of every batch."""
    model.zero_grad(set_to_none=True)
    for batch in batches:
        encode(model, batch).backward()


def gradients(model: GraphWriter) -> list[Tensor]:
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def seconds(model: GraphWriter, batches: list[Batch], encode: Callable[[GraphWriter, Batch], Tensor]) -> float:
    # on one thread the time of the processor tells more than the clock where others work on the same machine
    clock = time.process_time if batches[0]["nodes"].device.type == "cpu" else time.perf_counter
    began = clock()
    step(model, batches, encode)
    if batches[0]["nodes"].device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scale", default="cpu", choices=list(GRAPH_SCALES))
    parser.add_argument("--graphs", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="the JSON record; a new file in benchmarks/records by default")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    torch.set_num_threads(1)
    scale = GRAPH_SCALES[asked.scale]
    data = load_graphs(asked.data, scale)
    graphs = [data.train[number] for number in range(asked.graphs)]
    together, alone = (
        [{name: one.to(device) for name, one in collate(part).items()} for part in parts]
        for parts in ([graphs], [[one] for one in graphs])
    )
    record = new_record("graph-encoder", device) | {
        "scale": asked.scale,
        "width": scale.width,
        "blocks": scale.layers,
        "graphs": asked.graphs,
        "nodes": int((together[0]["nodes"] != 0).sum()),
        "clock": "process time" if device.type == "cpu" else "wall",
    }
    for name, encode in (("whole encoder", whole), ("blocks alone", blocks)):
        model = Graph2TextTask().model(data, scale).to(device).double().eval()
        initialise(model, 0)
        step(model, together, encode)
        found = gradients(model)
        # padding of titles is no state: what it adds to a sum of squares is zero, as keys have no biases
        step(model, alone, encode)
        differences = [float((one - other).abs().max()) for one, other in zip(found, gradients(model), strict=True)]
        assert max(differences) < 1e-8, f"{name}: gradients differ by {max(differences)}"
        model.float().train()
        times: dict[str, list[float]] = {"batched": [], "one by one": []}
        for turn in range(asked.repeats + 2):
            for way, batches in (("batched", together), ("one by one", alone)):
                took = seconds(model, batches, encode)
                if turn >= 2:
                    times[way].append(took)
        batched, single = (median(times[way]) for way in times)
        record[name] = {"batched_ms": 1e3 * batched, "one_by_one_ms": 1e3 * single, "times_faster": single / batched}
        print(f"{name}: {1e3 * batched:.1f} ms batched, {1e3 * single:.1f} ms one by one: {single / batched:.1f} times")
    write(record, device, asked.out)


if __name__ == "__main__":
    main()
