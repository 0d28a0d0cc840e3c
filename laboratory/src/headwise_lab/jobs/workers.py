"""A pool of spawned one-thread worker processes, and the jobs they do.

A job that fails or crashes does not stop the others, which accelerate and torch.multiprocessing do not offer: they
start processes that train one model together. Jobs call `heartbeat()` to learn whether to save and return.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import torch

from headwise.cli.stopping import BY_SIGNAL, ignoring_stops
from headwise_lab.analyses.registry import AnalysisSettings, analyze
from headwise_lab.experiment.run_folder import Failure, Heartbeat, Job, Watch
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.importing import importing
from headwise_lab.jobs.serving import Target, serve
from headwise_lab.training import processes
from headwise_lab.training.baseline import BaselineSettings, run_baseline
from headwise_lab.training.cross_validation import gather_parts

# Seconds that a worker has to save its state after Ctrl-C, and after which one that writes nothing is named.
PATIENCE_SECONDS, SILENCE_SECONDS = 1.0, 600.0
SAVED = "stopped; every run has saved its state, give the same command again to resume."
# One thread per process: parallel runs already use every core. glibc keeps the memory of large arrays, which each step
# would otherwise get from the system anew, page by page.
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
}


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
    with importing():
        from headwise_lab.training.train import train_run

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
            1 s or at a second Ctrl-C: then the message names its run.
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
    process = context.Process(target=serve, args=(theirs, stop), daemon=True)
    with _set_environment(ENVIRONMENT), _hold_interrupts():
        process.start()
    theirs.close()
    with suppress(OSError):
        # of a process that has ended by then, `run_jobs` hears when it sends the job
        ours.send(target)
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
