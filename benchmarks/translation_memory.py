"""Peak memory of preparing and batching a synthetic parallel corpus of millions of pairs.

A child process prepares the corpus and reads it as in an epoch, so that the peak is that of the data alone. The words
of a language follow Zipf's law over 400,000 forms, about 25 per line, as in WMT. Exits with a message if the peak is
above 2 GiB.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from headwise.input_files import encode_json, parse_json
from timing import console, new_record, write

FORMS, CHUNK, SEEN = 400_000, 20_000, 500
LIMIT_GIB = 2.0


def write_side(path: Path, pairs: int, words_a_line: int, seed: int) -> None:
    """Write the lines of one language."""
    generator = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyzäöüß"))
    forms = ["".join(generator.choice(letters, size)) for size in generator.integers(2, 12, size=FORMS)]
    # both sides have the same lengths, so that the length ratio removes few pairs
    lengths = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as stream:
        for start in range(0, pairs, CHUNK):
            sizes = lengths.poisson(words_a_line, min(CHUNK, pairs - start)) + 1
            ranks = np.minimum(generator.zipf(1.3, int(sizes.sum())), FORMS) - 1
            words = [forms[rank] for rank in ranks.tolist()]
            ends = np.cumsum(sizes).tolist()
            for end, size in zip(ends, sizes.tolist(), strict=True):
                stream.write(" ".join(words[end - size : end]) + ".\n")


def measure(folder: Path, vocabulary_size: int, once: bool) -> None:
    """Prepare the corpus in this process, read an epoch, and print time and memory."""
    from headwise.texts.batching import TokenBatches
    from headwise_lab.tasks.translation.corpora import Cleaning
    from headwise_lab.tasks.translation.data import collate, load_translation
    from headwise_lab.tasks.translation.files import make_folder_corpus

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2

    imported, began = peak(), time.perf_counter()
    data = load_translation(
        make_folder_corpus(folder, "aa", "bb"),
        folder,
        cache=folder / "cache",
        vocabulary_size=vocabulary_size,
        cleaning=Cleaning(ratio=1.5, once=once),
        progress=True,
    )
    prepared, prepared_peak = time.perf_counter() - began, peak()
    began = time.perf_counter()
    batches = TokenBatches(data.train.lengths, tokens=4096, seed=1)
    planned = time.perf_counter() - began
    began = time.perf_counter()
    order = iter(batches)
    first = next(order)
    ordered = time.perf_counter() - began
    began = time.perf_counter()
    seen = [first, *islice(order, SEEN - 1)]
    for batch in seen:
        collate([data.train[index] for index in batch])
    read = time.perf_counter() - began
    # an epoch touches every page of the arrays
    tokens = sum(int((side.values != 0).sum()) for side in (data.train.sources, data.train.targets))
    record = {
        "pairs": len(data.train),
        "subwords": tokens,
        "vocabulary": data.tokenizer.vocabulary_size,
        "prepare_s": round(prepared, 1),
        "plan_batches_s": round(planned, 2),
        "order_epoch_s": round(ordered, 2),
        "batches": len(batches),
        "read_batch_ms": round(1000 * read / len(seen), 2),
        "imported_gib": round(imported, 2),
        "prepared_gib": round(prepared_peak, 2),
        "peak_gib": round(peak(), 2),
    }
    print(encode_json(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4_500_000)
    parser.add_argument("--words", type=int, default=25, help="mean number of words per line")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument(
        "--once", action="store_true", help="also drop duplicate pairs, which keeps a key of each pair in memory"
    )
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        measure(arguments.child, arguments.vocabulary, arguments.once)
        return
    device = torch.device("cpu")
    record = new_record("translation-memory", device)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        for split, pairs in (("train", arguments.pairs), ("dev", 1000), ("test", 1000)):
            for number, side in enumerate(("aa", "bb")):
                write_side(folder / f"{split}.{side}", pairs, arguments.words, number + 1)
        command = [sys.executable, __file__, "--child", name, "--vocabulary", str(arguments.vocabulary)]
        output = subprocess.run(
            [*command, *(["--once"] if arguments.once else [])], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    record |= {"words a line": arguments.words, "repeated pairs dropped": arguments.once, **parse_json(output)}
    console.print_json(data=record)
    write(record, device, arguments.out)
    peak = record["peak_gib"]
    sys.exit(0 if peak <= LIMIT_GIB else f"the peak of {peak} GiB is above {LIMIT_GIB} GiB")


if __name__ == "__main__":
    main()
