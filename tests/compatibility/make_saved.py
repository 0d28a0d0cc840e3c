"""Make the folder `saved` beside this file with revision 1e8b0fb of headwise, and with no other.

    git worktree add ../headwise-1e8b0fb 1e8b0fb
    PYTHONPATH=../headwise-1e8b0fb/src .venv/bin/python tests/compatibility/make_saved.py

It takes about four minutes: one run is suspended for 100 seconds before it is interrupted, so that its training time
tells a resumed run from one started over.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import headwise as hw

REVISION = "1e8b0fb"
SOURCE = Path(hw.__file__).resolve().parents[1]
SAVED = Path(__file__).resolve().parent / "saved"
# Not kept: the same commands make these again from the rest.
DRAWN = ("report.html", "heads.html", "figures", "encoded", "*.png")
# The files that a resumed run is compared by.
ENDED = ("epochs.jsonl", "model.safetensors", "result.json")
SUSPENDED_SECONDS = 100.0

LOGIC = {
    "width": 8,
    "heads": 2,
    "layers": 1,
    "classifier_width": 8,
    "epochs": 2,
    "warmup_steps": 3,
    "generated_draws": 1500,
    "train_examples": 128,
    "dev_examples": 40,
}
TEXTS = {"width": 8, "heads": 2, "head_size": 4, "hidden": 8, "layers": 1, "epochs": 2, "warmup_steps": 3}
LINES = {
    "width": 8,
    "hidden": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "heads": 2,
    "vocabulary_size": 280,
    "tokens": 128,
    "learning_rate": 0.03,
    "epochs": 20,
    "averaged": 2,
    "warmup_steps": 10,
    "beams": 2,
    "compile_routing": "false",
}
STOPPED = LINES | {"dropout": 0.1, "tokens": 32, "accumulation": 2, "epochs": 4, "averaged": 3}
ROLES = "roles=rare/window"


def command(task: str, arms: str, seeds: int, sizes: Mapping[str, object], out: str, *more: str) -> list[str]:
    """Return the arguments of `headwise` for a comparison."""
    words = ["compare", task, "--arms", arms, "--seeds", str(seeds), "--workers", "1", "--out", out]
    return [*words, *(word for size in sizes.items() for word in ("--set", "=".join(map(str, size)))), *more]


COMMANDS = {
    "logic": command("logic", "plain,svgd+em:capsules=4", 2, LOGIC, "logic", "--redundancy", "--step-time"),
    "classification": command(
        "classification",
        f"plain,guided:{ROLES}",
        1,
        TEXTS,
        "classification",
        *("--data", "texts.tsv"),
    ),
    "folds": command("classification", "plain", 1, TEXTS, "folds", *("--folds", "3", "--data", "texts.tsv")),
    "translation": command(
        "translation", "plain,output:kinds=cross", 1, LINES, "translation", *("--data", "corpus:de-en")
    ),
    "stopped": command("translation", "spos:kinds=self+drophead", 1, STOPPED, "stopped", *("--data", "corpus:de-en")),
}
# The runs whose models are inspected.
RUNS = {
    "logic": "logic/svgd+em@capsules=4/seed-0",
    "classification": f"classification/guided@{ROLES.replace('/', '_')}/seed-0",
    "translation": "translation/output@kinds=cross/seed-0",
}


def main() -> None:
    """Make everything in a temporary folder, and then replace `saved`."""
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=SOURCE, capture_output=True, text=True, check=True)
    if not revision.stdout.startswith(REVISION):
        sys.exit(f"{SOURCE} is of revision {revision.stdout.strip()}; expected {REVISION}.")
    torch.set_num_threads(1)
    # commands are given relative names, so that no saved file holds an absolute path
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        here = Path()
        (here / "commands.json").write_text(json.dumps(COMMANDS, indent=1) + "\n")
        save_encoder(here)
        save_pickle(here)
        save_bert(here)
        save_repulsion(here)
        hw.idf([["a", "good", "film"], ["A", "film"], ["a", "plot"], ["rain"]]).save(here / "idf.json")
        write_texts(here)
        for name in ("logic", "classification", "folds", "translation"):
            headwise(*COMMANDS[name])
        for name, run in RUNS.items():
            headwise("inspect", run, "--text", f"{name}.txt", "--out", f"inspected/{name}")
        headwise("probe", RUNS["classification"], "--data", "past_present.txt", "--out", "probed", "--cache", "encoded")
        stop(here / "stopped")
        end(here)
        for drawn in DRAWN:
            for path in list(here.rglob(drawn)):
                path.unlink() if path.is_file() else shutil.rmtree(path)
        shutil.rmtree(SAVED, ignore_errors=True)
        shutil.copytree(here, SAVED)


def headwise(*arguments: str) -> None:
    """Run a command of this revision to its end."""
    subprocess.run([sys.executable, "-m", "headwise", *arguments], env=environment(), check=True)


def environment() -> dict[str, str]:
    """Return the environment of a command: one thread, and this revision of headwise."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def save_encoder(place: Path) -> None:
    """Save an encoder of torch with an aggregator of each kind, what it answers, and what its heads do."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=5, enable_nested_tensor=False).eval()
    settings = (
        hw.SimpleRouting(iterations=2, votes=hw.PerHead()),
        hw.EMRouting(capsules=4, votes=hw.DistinctCapsules()),
        hw.Trunk(capsules=2),
        hw.Gate(),
        hw.Residual(hw.EMRouting()),
    )
    heads = hw.find_heads(encoder)
    for number, setting in enumerate(settings):
        hw.aggregate(heads.layer(number), setting)
    moved(encoder)
    hw.save(encoder, place / "encoder")
    batch, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [4], [2]])
    with torch.no_grad():
        output = encoder(batch, src_key_padding_mask=padding)
    torch.save({"input": batch, "padding": padding, "output": output}, place / "encoder.pt")
    report = hw.measure(
        encoder,
        hw.find_heads(encoder),
        [batch],
        score=lambda output, batch: -(output - batch).square().mean((1, 2)),
        score_name="likeness",
        roles=lambda _: hw.Roles(hw.Separator(), hw.Window(3))([hw.WordTable.split("a , b c .")] * 3, num_heads=2),
    )
    report.save(place / "report.json")


def save_bert(place: Path) -> None:
    """Save a BERT with aggregators as models of transformers are saved, and what it answers."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 8}
    bert = BertModel(BertConfig(vocab_size=20, num_hidden_layers=2, **sizes)).eval()
    heads = hw.find_heads(bert)
    hw.aggregate(heads.layer(0), hw.EMRouting())
    hw.aggregate(heads.layer(1), hw.Residual(hw.SimpleRouting(capsules=4)))
    moved(bert)
    bert.save_pretrained(place / "bert")
    tokens, mask = torch.randint(0, 20, (2, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with torch.no_grad():
        output = bert(tokens, attention_mask=mask).last_hidden_state
    torch.save({"input_ids": tokens, "attention_mask": mask, "output": output}, place / "bert.pt")


def save_pickle(place: Path) -> None:
    """Pickle a whole encoder that is tapped and has aggregators, with what it answers."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False).eval()
    heads = hw.find_heads(encoder)
    hw.aggregate(heads.layer(1), hw.EMRouting(capsules=4))
    hw.aggregate(heads.layer(2), hw.Gate())
    moved(encoder)
    batch = torch.randn(3, 5, 8)
    with torch.no_grad(), hw.Taps(hw.find_heads(encoder), outputs=True, values=True, weights=True):
        torch.save({"input": batch, "output": encoder(batch), "model": encoder}, place / "pickle.pt")


def moved(model: nn.Module) -> None:
    """Move every parameter: some begin where they change no output."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def save_repulsion(place: Path) -> None:
    """Save a repulsion with its model and optimizer after two steps, and where two more steps lead."""
    torch.manual_seed(2)
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rule = hw.SPOS(alpha=0.5, inverse_temperature=1e4)
    repulsion = hw.repel(optimizer, hw.find_heads(model), rule, seed=7)
    repulsion.strength = 0.5
    batch = torch.randn(4, 5, 8)
    take_steps(model, optimizer, batch)
    states = {"model": model, "optimizer": optimizer, "repulsion": repulsion}
    kept = {name: cloned(owner.state_dict()) for name, owner in states.items()}
    take_steps(model, optimizer, batch)
    torch.save({**kept, "batch": batch, "after": dict(model.state_dict())}, place / "repulsion.pt")


def cloned(state: object) -> object:
    """Return a copy of a state that later steps leave alone."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, Mapping):
        return {name: cloned(value) for name, value in state.items()}
    return [cloned(value) for value in state] if isinstance(state, list) else state


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """Train for two steps to return the batch in reverse order."""
    for _ in range(2):
        optimizer.zero_grad()
        (model(batch) - batch.flip(1)).square().mean().backward()
        optimizer.step()


def write_texts(place: Path) -> None:
    """Write the data: labeled sentences, a parallel corpus, texts to inspect with and sentences to probe with."""
    draw = random.Random(3)
    words = {"ein": "a", "hund": "dog", "läuft": "runs", "über": "across", "die": "the", "wiese": "meadow"}

    def sentence(label: str, told: Mapping[str, str]) -> str:
        said = draw.choices(("a", "film", "it", "is", "plot", "very", "rain"), k=draw.randint(3, 8))
        said.insert(draw.randrange(len(said) + 1), told[label])
        return " ".join(said) + " ."

    feelings, tenses = {"pos": "fine", "neg": "dull"}, {"PAST": "went", "PRES": "goes"}
    labels = draw.choices(tuple(feelings), k=150)
    (place / "texts.tsv").write_text("".join(f"{label}\t{sentence(label, feelings)}\n" for label in labels))
    (place / "classification.txt").write_text("a fine plot .\nit is very dull .\nfilm\n")
    (place / "logic.txt").write_text("( not ( a ( and b ) ) )\n( a ( or ( not b ) ) )\n")
    (place / "translation.txt").write_text("ein hund läuft.\nüber die wiese.\n")
    partitions = ["tr"] * 40 + ["va"] * 15 + ["te"] * 20
    (place / "past_present.txt").write_text(
        "".join(
            f"{partition}\t{label}\t{sentence(label, tenses)}\n"
            for partition, label in zip(partitions, draw.choices(tuple(tenses), k=len(partitions)), strict=True)
        )
    )
    (place / "corpus").mkdir()
    for name, count in (("train", 60), ("dev", 6), ("test", 8)):
        lines = [draw.choices(tuple(words), k=draw.randint(2, 8)) for _ in range(count)]
        (place / "corpus" / f"{name}.de").write_text("".join(f"{' '.join(line)}.\n" for line in lines))
        lines = [[words[word] for word in line] for line in lines]
        (place / "corpus" / f"{name}.en").write_text("".join(f"{' '.join(line)}.\n" for line in lines))


def stop(out: Path) -> None:
    """Start a comparison, suspend it after the second epoch of its run, and interrupt it in the third."""
    with subprocess.Popen(
        [sys.executable, "-m", "headwise", *COMMANDS["stopped"]], env=environment(), start_new_session=True
    ) as process:
        wait_for(lambda: bool(checkpoint_steps(out)), process)
        (epoch,) = checkpoint_steps(out)
        wait_for(lambda: checkpoint_steps(out) == [2 * epoch], process)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(SUSPENDED_SECONDS)
        os.killpg(process.pid, signal.SIGCONT)
        # the last checkpoint is now old, so that the run saves one at once
        wait_for(lambda: checkpoint_steps(out) > [2 * epoch], process)
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    (step,) = checkpoint_steps(out)
    assert 2 * epoch + 1 < step < 3 * epoch - 1


def checkpoint_steps(out: Path) -> list[int]:
    """Return the steps of a comparison's checkpoints."""
    return sorted(int(path.name.rpartition("-")[2]) for path in out.glob("*/seed-0/checkpoint-*"))


def wait_for(there: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until `there` is true, while the process lives."""
    while not there():
        assert process.poll() is None
        time.sleep(0.001)


def end(place: Path) -> None:
    """Resume a copy of the stopped comparison, and keep what its run ends with in the folder `ended`."""
    with tempfile.TemporaryDirectory(dir=place) as copy, contextlib.chdir(copy):
        for name in ("stopped", "corpus"):
            shutil.copytree(f"../{name}", name)
        headwise(*COMMANDS["stopped"])
        (run,) = (path.parent for path in Path("stopped").glob("*/seed-0/epochs.jsonl"))
        Path("../ended").mkdir()
        for file in ENDED:
            shutil.copyfile(run / file, Path("../ended", file))


if __name__ == "__main__":
    main()
