"""A command in a process of its own whose n-th write fails, or is the last thing that the process does.

A module of its own, because that process imports it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
from safetensors import SafetensorError

import headwise_lab.probing.run
import headwise_lab.training.train
import headwise_lab.tune  # noqa: F401  imported once, and not by each process
from headwise.cli import main, roles
from headwise_lab.data.downloads import Download
from headwise_lab.jobs import pool
from headwise_lab.jobs.serving import attempt
from headwise_lab.tasks.logic import task as logic
from headwise_lab.tasks.translation import corpora
from headwise_lab.tasks.translation.task import TranslationTask
from lab.sentences import parsed
from lab.tasks.lm.lm_toy import TOY as LM_TOY
from lab.tasks.logic.logic_toy import TOY
from lab.tasks.translation.translation_toy import SMALLEST

KILLED, STUCK = 9, 120.0
# What the toy of a server serves.
SERVED = Path("served") / "corpus.zip"
WRITING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
CHANGES = ("os.rename", "os.mkdir", "os.link")
REMOVALS = ("os.remove", "os.rmdir")


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit code.
        said: What it wrote to stderr.
        met: Whether the fault was met.
    """

    code: int
    said: str
    met: bool


def run(place: Path, arguments: Sequence[str], fault: Callable[[str, Path | None], None] | None = None) -> Ended:
    """Run a command in a folder, in a process forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.faults"])
    said, met = place.with_name(f"{place.name}.said"), place.with_name(f"{place.name}.met")
    met.unlink(missing_ok=True)
    process = context.Process(target=call, args=(place, tuple(arguments), fault, said, met))
    # the server that forks it imports from there
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}):
        process.start()
    process.join(STUCK)
    code = process.exitcode
    process.kill()
    assert code is not None, f"{arguments} hangs"
    return Ended(code, said.read_text(), met.exists())


def call(place: Path, arguments: Sequence[str], fault: Any, said: Path, met: Path) -> None:
    torch.set_num_threads(1)
    os.chdir(place)
    for descriptor, shown in ((1, os.devnull), (2, said)):
        os.dup2(os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    make_small()
    if fault is not None:
        watch(place, dataclasses.replace(fault, met=met))
    try:
        main.main(list(arguments))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    # the process needs no end of its own
    os._exit(code)


def make_small() -> None:
    """Make the demos toys, download from the folder, parse without a parser, and do jobs in this process."""
    logic.LogicTask.scales = {**logic.LOGIC_SCALES, "demo": dataclasses.replace(TOY, name="demo")}
    TranslationTask.scales = {**TranslationTask.scales, "demo": SMALLEST}
    from headwise_lab.tasks.lm.task import LmTask

    LmTask.scales = {**LmTask.scales, "demo": dataclasses.replace(LM_TOY, name="demo")}
    if SERVED.is_file():
        content = SERVED.read_bytes()
        served = Download(
            SERVED.resolve().as_uri(), hashlib.sha256(content).hexdigest(), len(content), (("a/train.de", "train.de"),)
        )
        corpora.CORPORA = {"multi30k": dataclasses.replace(corpora.CORPORA["multi30k"], downloads=(served,))}
    roles.load_parser = lambda _pipeline: lambda texts: [parsed(text.split()) for text in texts]

    def run_jobs(target: Any, jobs: Any, _workers: int, watched: Any) -> list[Any]:
        failures = []
        for job in jobs:
            watched.started(job)
            failure = attempt(target, job, lambda: False)
            watched.ended(job, failure)
            failures += [] if failure is None else [failure]
        return failures

    pool.run_jobs = run_jobs


@dataclasses.dataclass
class Fault:
    """What happens at the n-th write below a folder.

    Attributes:
        number: Which one, from 1.
        kills: Whether the process ends there, with half a file; otherwise the write raises.
        met: A file that tells that it happened.
    """

    number: int
    kills: bool
    met: Path | None = None
    seen: int = 0

    def strike(self, path: Path | None, error: Exception) -> None:
        """Count a write, and let the n-th fail."""
        self.seen += 1
        if self.seen != self.number:
            return
        self.met.touch()
        if self.kills:
            if path is not None:
                with contextlib.suppress(OSError), path.open("ab") as stream:
                    stream.write(b"half")
            os._exit(KILLED)
        raise error


def watch(place: Path, fault: Fault) -> None:
    """Have a fault look at every write below a folder."""
    root = str(place.resolve())

    def below(path: Any) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.path.realpath(os.fsdecode(path)).startswith(root)

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and below(given[0]):
            mode, flags = given[1], given[2]
            if set("wax+") & set(mode or "") or (mode is None and isinstance(flags, int) and flags & WRITING):
                fault.strike(Path(os.fsdecode(given[0])), make_full(given[0]))
        elif (event in CHANGES or (fault.kills and event in REMOVALS)) and below(given[0]):
            fault.strike(None, make_full(given[0]))

    sys.addaudithook(hear)
    sync, save, serialize = os.fsync, torch.save, safetensors.torch.serialize_file

    def failing_sync(handle: int) -> None:
        fault.strike(None, OSError(5, "Input/output error"))
        sync(handle)

    def failing_save(value: Any, target: Any, *given: Any, **named: Any) -> None:
        fault.strike(Path(target) if below(target) else None, RuntimeError("PytorchStreamWriter failed writing file"))
        save(value, target, *given, **named)

    def failing_serialize(tensors: Any, target: Any, *given: Any, **named: Any) -> None:
        fault.strike(Path(target), SafetensorError("Error while serializing: I/O error: No space left on device"))
        serialize(tensors, target, *given, **named)

    os.fsync, torch.save, safetensors.torch.serialize_file = failing_sync, failing_save, failing_serialize


def make_full(path: Any) -> OSError:
    return OSError(28, "No space left on device", os.fsdecode(path))
