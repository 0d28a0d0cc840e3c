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
from typing import Any

import torch

from headwise.errors import HeadwiseError
from headwise.lab.analyses.registry import AnalysisSettings, analyze
from headwise.lab.experiment.job import Failure, Heartbeat, Job, Watch
from headwise.lab.experiment.run_folder import LOG
from headwise.lab.experiment.settings import RunSettings
from headwise.lab.training import processes
from headwise.lab.training.baseline import BaselineSettings, run_baseline
from headwise.lab.training.cross_validation import gather_parts

Target = Callable[[Any, Path, Heartbeat], None]

# Seconds that a worker has to save its state after Ctrl-C.
PATIENCE_SECONDS = 5.0
# One thread per process: parallel runs already use every core.
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    job: Job | None = None
    gone: bool = False


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
        KeyboardInterrupt: Ctrl-C; every worker has saved its state and exited (or was killed after 5 s).
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pending, failures = list(jobs), list[Failure]()
    pool: list[_Worker] = []
    try:
        while pending or any(worker.job for worker in pool):
            while pending and len(pool) < min(workers, len(jobs)):
                pool.append(_start(context, target, stop))
            for worker in pool:
                if worker.job is None and pending:
                    worker.job = pending.pop(0)
                    worker.connection.send(worker.job)
                    watch.started(worker.job)
            wait([worker.connection for worker in pool if worker.job], timeout=0.2)
            failures += [failure for worker in pool if (failure := _collect(worker, watch)) is not None]
            pool = [worker for worker in pool if not worker.gone]
            watch.tick()
    finally:
        stop.set()
        _end(pool)
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


def _end(pool: Sequence[_Worker]) -> None:
    """Stop idle workers, give busy ones time to save, then kill the rest."""
    for worker in pool:
        with suppress(OSError):
            worker.connection.send(None)
    deadline = time.monotonic() + PATIENCE_SECONDS
    # a second Ctrl-C ends the waiting
    with suppress(KeyboardInterrupt):
        for worker in pool:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    for worker in pool:
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _serve(target: Target, connection: Connection, stop: Any) -> None:
    """Body of a worker process: do jobs until None, a stop or the end of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    heartbeat = _make_heartbeat(stop)
    with suppress(EOFError, ConnectionError):
        while (job := connection.recv()) is not None and not stop.is_set():
            failure = attempt(target, job, heartbeat)
            connection.send(failure)
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
    """Block Ctrl-C, which reaches the whole process group although only the parent handles it.

    A process started inside inherits the block from its first instruction on.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
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
