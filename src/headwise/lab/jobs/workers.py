"""A pool of spawned one-thread processes for runs: a run that fails or crashes does not stop the others.

Owns processes, their log files and the way they are told to stop. Must not know what a job does: the target
is a function (settings, folder, heartbeat), and asks `heartbeat()` now and then whether it should save and
return.
"""

from __future__ import annotations

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

from headwise.errors import HeadwiseError
from headwise.lab.experiment.job import Failure, Heartbeat, Job, Watch
from headwise.lab.experiment.run_folder import LOG

Target = Callable[[Any, Path, Heartbeat], None]

# How long a worker has, after Ctrl-C, to save where it is before it is ended.
PATIENCE_SECONDS = 5.0
# One thread a process: the runs side by side already use every core.
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    job: Job | None = None
    gone: bool = False


def run_jobs(target: Target, jobs: Sequence[Job], workers: int, watch: Watch) -> list[Failure]:
    """Run every job in its order on up to `workers` processes and return the failures.

    Args:
        target: A function at the top level of a module, called as target(settings, folder, heartbeat).
        jobs: The jobs, the most wanted first.
        workers: Number of processes, at least 1.
        watch: Told when a job starts and ends, and ticked in between.

    Returns:
        One failure for each job that failed; the others ended well.

    Raises:
        KeyboardInterrupt: Ctrl-C; every worker has saved where it is and ended (or was ended after 5 s).
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
    with _environment(dict.fromkeys(ONE_THREAD, "1")), _interrupts_held():
        process.start()
    theirs.close()
    return _Worker(process, ours)


def _collect(worker: _Worker, watch: Watch) -> Failure | None:
    """Take a worker's answer if there is one, or notice that its process is gone; return the failure if it is one."""
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
        failure = Failure(job, f"{reason}; out of memory? Run the same command again to go on.", refused=False)
    worker.job = None
    watch.ended(job, failure)
    return failure


def _end(pool: Sequence[_Worker]) -> None:
    """Let idle workers go, give busy ones the time to save, then end what is left."""
    for worker in pool:
        with suppress(OSError):
            worker.connection.send(None)
    deadline = time.monotonic() + PATIENCE_SECONDS
    # A second Ctrl-C means: now.
    with suppress(KeyboardInterrupt):
        for worker in pool:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    for worker in pool:
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _serve(target: Target, connection: Connection, stop: Any) -> None:
    """Body of a worker process: one job after the other until None, a stop or the end of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    heartbeat = _heartbeat(stop)
    with suppress(EOFError, ConnectionError):
        while (job := connection.recv()) is not None and not stop.is_set():
            failure = attempt(target, job, heartbeat)
            connection.send(failure)
    # every file is closed by now, and taking down an interpreter that holds torch takes seconds
    os._exit(0)


def _heartbeat(stop: Any) -> Heartbeat:
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
    """Do a job in this process, what it prints in its log, and return its failure if it fails."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with _logged(job.folder / LOG):
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
def _logged(path: Path) -> Iterator[None]:
    """Send everything written to the two standard streams to the end of a file, from C as well."""
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
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back: it reaches the whole process group, but only the parent decides what it means.

    A process started inside inherits the held signal, so that it is deaf from its first instruction on.
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
def _environment(values: dict[str, str]) -> Iterator[None]:
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
