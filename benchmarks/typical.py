"""What the measures of heads are on trained models, so that a value of one's own can be told from a usual one.

`hw.measure` of each model on the same sentences: of each measure the median over layers, the least and the most. Run by
`make bench NAME=typical ARGS="--text FILE FOLDER FOLDER"`; a folder is one of `save_pretrained`, and the file has a
sentence per line.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

import headwise as hw
from headwise.report.layer import PAIRS, LayerReport
from timing import console, new_record, write

CPU = torch.device("cpu")
ROWS = 16


def read_layer(layer: LayerReport) -> dict[str, float | None]:
    """Return the measures of a layer, means over its heads or pairs of heads."""
    return {
        "effective heads": layer.effective_heads,
        "by variance": layer.effective_heads_weighted,
        **{name: layer.mean(name) for name in PAIRS},
        "entropy": statistics.fmean(layer.entropy) if layer.entropy else None,
        "attention on the first token": statistics.fmean(layer.first) if layer.first else None,
        **{f"{name} term": value for name, value in layer.terms.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="models and their tokenizers")
    parser.add_argument("--text", type=Path, required=True, help="a sentence per line")
    parser.add_argument("--lines", type=int, default=64)
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    record = new_record("typical", CPU)
    lines = [line for line in arguments.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    models: dict[str, Any] = {}
    for folder in arguments.folders:
        model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        texts = sorted(lines[: arguments.lines], key=len)
        batches = [
            dict(tokenizer(texts[start : start + ROWS], padding=True, return_tensors="pt"))
            for start in range(0, len(texts), ROWS)
        ]
        report = hw.measure(hw.find_heads(model), batches)
        layers = [read_layer(layer) for layer in report.layers]
        found: dict[str, list[float]] = {}
        for name in layers[0]:
            values = [value for layer in layers if (value := layer[name]) is not None]
            if values:
                found[name] = [statistics.median(values), min(values), max(values)]
        heads = report.layers[0].heads
        models[folder.name] = {"layers": len(layers), "heads": heads, "measures": found}
        console.print(f"{folder.name}: {len(layers)} layers of {heads} heads")
        for name, (middle, least, most) in found.items():
            console.print(f"  {name:30} {middle:8.3f} ({least:.3f} to {most:.3f})")
    record |= {"lines": arguments.lines, "models": models}
    write(record, CPU, arguments.out)


if __name__ == "__main__":
    main()
