"""A pool of spawned one-thread worker processes, and the jobs they do.

A job that fails or crashes does not stop the others, which accelerate and torch.multiprocessing do not offer: they
start processes that train one model together. Jobs call `heartbeat()` to learn whether to save and return.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from headwise.errors import HeadwiseError
from headwise.lab.analyses.registry import AnalysisSettings, analyze
from headwise.lab.experiment.job import Failure, Heartbeat, Job, Watch
from headwise.lab.experiment.run_folder import LOG
from headwise.lab.experiment.settings import RunSettings
from headwise.lab.stopping import BY_SIGNAL, ignoring_stops
from headwise.lab.training import processes
from headwise.lab.training.baseline import BaselineSettings, run_baseline
from headwise.lab.training.cross_validation import gather_parts

Target = Callable[[Any, Path, Heartbeat], None]

# Seconds that a worker has to save its state after Ctrl-C, and after which one that writes nothing is named.
PATIENCE_SECONDS, SILENCE_SECONDS = 5.0, 600.0
# One thread per process: parallel runs already use every core.
SAVED = "stopped; every run has saved its state, give the same command again to resume."
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    job: Job | None = None
    gone: bool = False
    # when its job last wrote a file, and when that was noticed; None once its silence was told
    written: int = 0
    heard: float | None = 0.0


def do_job(settings: RunSettings | BaselineSettings | AnalysisSettings, folder: Path, heartbeat: Heartbeat) -> None:
    """Do one job on one thread in its folder; see `train_run`, `run_baseline` and `analyze`."""
    torch.set_num_threads(1)
    if isinstance(settings, BaselineSettings):
        run_baseline(settings, folder)
        gather_parts(settings, folder)
        return
    if isinstance(settings, AnalysisSettings):
        analyze(settings, folder)
        return
    # Hugging Face's Trainer takes seconds to import, and only arms need it
    from headwise.lab.training.train import train_run

    train_run(settings, folder, heartbeat)
    processes.by_first(lambda: gather_parts(settings, folder))


def run_jobs(target: Target, jobs: Sequence[Job], workers: int, watch: Watch) -> list[Failure]:
    """Run every job in its order on up to `workers` processes and return the failures.

    Args:
        target: A function at the top level of a module, called as target(settings, folder, heartbeat).
        jobs: The jobs, in order of priority.
        workers: Number of processes, at least 1.
        watch: Notified when a job starts and ends, and ticked in between.

    Returns:
        One failure for each job that failed.

    Raises:
        KeyboardInterrupt: Ctrl-C or a signal to end; every worker has saved its state and exited, or was killed after
            5 s or at a second Ctrl-C: then the message names its run.
    """
    context = multiprocessing.get_context("spawn")
    with _hold_interrupts():
        # starts a process of multiprocessing's own, which a closed terminal would end
        stop = context.Event()
    pending, failures = list(jobs), list[Failure]()
    pool: list[_Worker] = []
    try:
        while pending or any(worker.job for worker in pool):
            while pending and len(pool) < min(workers, len(jobs)):
                pool.append(_start(context, target, stop))
            for worker in pool:
                if worker.job is None and pending:
                    try:
                        worker.connection.send(pending[0])
                    except OSError:
                        # it ended while it had nothing to do
                        worker.gone = True
                        continue
                    worker.job, worker.heard = pending.pop(0), time.monotonic()
                    watch.started(worker.job)
            wait([worker.connection for worker in pool if worker.job], timeout=0.2)
            failures += [failure for worker in pool if (failure := _collect(worker, watch)) is not None]
            pool = [worker for worker in pool if not worker.gone]
            for worker in pool:
                _listen(worker, watch)
            watch.tick()
    except KeyboardInterrupt as error:
        stop.set()
        cut, _ = _end(pool)
        error.args = (_describe_cut(cut),)
        raise
    except BaseException:
        stop.set()
        _end(pool)
        raise
    stop.set()
    _, interrupt = _end(pool)
    if interrupt is not None:
        # nothing was running any more
        interrupt.args = (SAVED,)
        raise interrupt
    return failures


def _start(context: SpawnContext, target: Target, stop: Any) -> _Worker:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(target, theirs, stop), daemon=True)
    with _set_environment(dict.fromkeys(ONE_THREAD, "1")), _hold_interrupts():
        process.start()
    theirs.close()
    return _Worker(process, ours)


def _collect(worker: _Worker, watch: Watch) -> Failure | None:
    """Collect the result of a worker, or notice that its process ended; return the failure, if any."""
    job = worker.job
    if job is None or not worker.connection.poll():
        return None
    try:
        failure = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        worker.gone = True
        code = worker.process.exitcode
        reason = f"its process was ended by signal {-code}" if code and code < 0 else f"its process ended with {code}"
        failure = Failure(job, f"{reason}; out of memory? Run the same command again to resume.", refused=False)
    worker.job = None
    watch.ended(job, failure)
    return failure


def _listen(worker: _Worker, watch: Watch) -> None:
    """Tell once of a job that has written nothing for long."""
    if worker.job is None:
        return
    with suppress(OSError):
        written = max((path.stat().st_mtime_ns for path in worker.job.folder.iterdir()), default=0)
        if written != worker.written:
            worker.written, worker.heard = written, time.monotonic()
    silence = 0.0 if worker.heard is None else time.monotonic() - worker.heard
    if silence > SILENCE_SECONDS:
        watch.silent(worker.job, round(silence / 60))
        worker.heard = None


def _describe_cut(jobs: Sequence[Job]) -> str:
    if not jobs:
        return SAVED
    names = ", ".join(job.name for job in jobs)
    return (
        f"stopped; {names} had not saved and resume{'s' * (len(jobs) == 1)} from the last checkpoint, other runs from "
        "where they were: give the same command again."
    )


def _end(pool: Sequence[_Worker]) -> tuple[list[Job], KeyboardInterrupt | None]:
    """Stop idle workers, give busy ones time to save and kill the rest; return the jobs of those, and an interrupt."""
    for worker in pool:
        with suppress(OSError):
            worker.connection.send(None)
    deadline = time.monotonic() + PATIENCE_SECONDS
    interrupt = None
    try:
        for worker in pool:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt as error:
        # a second Ctrl-C ends the waiting
        interrupt = error
    with ignoring_stops():
        killed = [worker for worker in pool if worker.process.is_alive()]
        for worker in killed:
            worker.process.kill()
        for worker in killed:
            worker.process.join()
    saved = (0, BY_SIGNAL + signal.SIGTERM)
    cut = [worker.job for worker in pool if worker.job is not None and worker.process.exitcode not in saved]
    return cut, interrupt


def _serve(target: Target, connection: Connection, stop: Any) -> None:
    """Body of a worker process: do jobs until None, a stop or the end of the parent."""
    asked: list[int] = []
    busy = False

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        if not busy:
            os._exit(BY_SIGNAL + number)

    # the parent decides what Ctrl-C and a closed terminal mean, which reach all processes
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ask)
    heard = _make_heartbeat(stop)
    with suppress(EOFError, ConnectionError):
        while (job := connection.recv()) is not None and not stop.is_set():
            busy = True
            failure = attempt(target, job, lambda: bool(asked) or heard())
            if asked and failure is None:
                # it has saved, and is not done
                os._exit(BY_SIGNAL + asked[0])
            connection.send(failure)
            busy = False
    # all files are closed, and a normal exit of an interpreter with torch takes seconds
    os._exit(0)


def _make_heartbeat(stop: Any) -> Heartbeat:
    parent = multiprocessing.parent_process()
    seen = time.monotonic()

    def heartbeat() -> bool:
        nonlocal seen
        if stop.is_set():
            return True
        if parent is not None and time.monotonic() - seen > 1.0:
            seen = time.monotonic()
            return not parent.is_alive()
        return False

    return heartbeat


def attempt(target: Target, job: Job, heartbeat: Heartbeat) -> Failure | None:
    """Do a job in this process with its output in its log; return the failure, if any."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with _redirect_output(job.folder / LOG):
        try:
            target(job.settings, job.folder, heartbeat)
        except HeadwiseError as error:
            traceback.print_exc()
            return Failure(job, str(error), refused=True)
        except Exception as error:
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            return Failure(job, f"{type(error).__name__}: {first}", refused=False)
    return None


@contextmanager
def _redirect_output(path: Path) -> Iterator[None]:
    """Append everything written to stdout and stderr to a file, also from C."""
    saved = [os.dup(1), os.dup(2)]
    with path.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in enumerate(saved, start=1):
            os.dup2(copy, descriptor)
            os.close(copy)


@contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Block Ctrl-C and a closed terminal, which reach the whole process group although only the parent handles them.

    A process started inside inherits the block from its first instruction on.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _set_environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
