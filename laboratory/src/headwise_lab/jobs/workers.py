"""The loop that does jobs on an engine, and the engine of this machine: a pool of spawned one-thread processes.

A job that fails or crashes does not stop the others: a process that dies breaks a pool of joblib or of
concurrent.futures with all its jobs. Jobs call `heartbeat()` to learn whether to save and return.
"""

import multiprocessing
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Protocol

import torch
from typing_extensions import override

from headwise.cli.stopping import BY_SIGNAL, ignoring_stops
from headwise_lab.analyses.registry import AnalysisSettings, analyze
from headwise_lab.experiment.run_folder import Failure, Heartbeat, Job, Watch
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.importing import importing
from headwise_lab.jobs.serving import Target, serve
from headwise_lab.training import processes
from headwise_lab.training.baseline import BaselineSettings, run_baseline
from headwise_lab.training.cross_validation import gather_parts

POLL_SECONDS = 0.2
# Seconds that a worker has to save its state after Ctrl-C, and after which one that writes nothing is named.
PATIENCE_SECONDS, SILENCE_SECONDS = 1.0, 600.0
AGAIN = "give the same command again."
SAVED = "stopped; every run has saved its state, give the same command again to resume."
# The error of a process that died may contain its whole log.
LONGEST_REASON = 200
# One thread per process: parallel runs already use every core. glibc keeps the memory of large arrays, which each step
# would otherwise get from the system anew, page by page.
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
}


def do_job(settings: RunSettings | BaselineSettings | AnalysisSettings, folder: Path, heartbeat: Heartbeat) -> None:
    """Do one job on one thread in its folder; see `train_run`, `run_baseline` and `analyze`."""
    torch.set_num_threads(1)
    if isinstance(settings, AnalysisSettings):
        analyze(settings, folder)
    elif isinstance(settings, BaselineSettings):
        run_baseline(settings, folder)
        gather_parts(settings, folder)
    else:
        # Hugging Face's Trainer takes seconds to import, and only arms need it
        with importing():
            from headwise_lab.training.train import train_run

        train_run(settings, folder, heartbeat)
        processes.by_first(lambda: gather_parts(settings, folder))


class Submitted(Protocol):
    """A submitted job, as a future of submitit is one."""

    def done(self) -> bool:
        """Return whether it has ended or failed, without waiting."""
        ...

    def result(self) -> Failure | None:
        """Return its failure, if any; raises if its process died."""
        ...

    def cancel(self) -> None:
        """End it."""
        ...


class Engine(ABC):
    """Does jobs in other processes."""

    @abstractmethod
    def submit(self, job: Job) -> Submitted:
        """Submit a job."""

    @abstractmethod
    def end(self, running: Mapping[Job, Submitted]) -> str:
        """End what is running and release all resources; return what that means for the jobs."""

    @abstractmethod
    def wait(self, watch: Watch) -> None:
        """Wait until a job may have ended."""


def run_on(engine: Engine, jobs: Sequence[Job], at_once: int, watch: Watch) -> list[Failure]:
    """Do jobs on an engine in their order, a limited number at once, and return the failures.

    The checkpoint of a job whose process died, or was preempted, is in its folder: the same command resumes it.

    Args:
        engine: The engine; ended at the end.
        jobs: The jobs.
        at_once: Maximum number of jobs submitted at once.
        watch: Notified when a job starts and ends, and ticked in between.

    Raises:
        KeyboardInterrupt: Ctrl-C or a signal to end; the message says where jobs resume.
    """
    pending, failures = list(jobs), list[Failure]()
    running: dict[Job, Submitted] = {}
    try:
        while pending or running:
            while pending and len(running) < at_once:
                running[pending[0]] = engine.submit(pending[0])
                watch.started(pending.pop(0))
            engine.wait(watch)
            for job in [job for job, submitted in running.items() if submitted.done()]:
                failure = _read_outcome(job, running.pop(job))
                failures += [] if failure is None else [failure]
                watch.ended(job, failure)
            watch.tick()
    except KeyboardInterrupt as error:
        error.args = (engine.end(running),)
        raise
    except BaseException:
        engine.end(running)
        raise
    engine.end(running)
    return failures


def _read_outcome(job: Job, submitted: Submitted) -> Failure | None:
    try:
        failure = submitted.result()
    except Exception as error:
        told = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        return Failure(job, f"its process ended ({told}); run the same command again to resume.", refused=False)
    return None if failure is None else replace(failure, job=job)


def run_jobs(target: Target, jobs: Sequence[Job], workers: int, watch: Watch) -> list[Failure]:
    """Do jobs on up to `workers` processes of this machine; `target` is a function at the top level of a module.

    After Ctrl-C every worker has saved its state and exited, or was killed after 1 s or at a second Ctrl-C.
    """
    return run_on(_Pool(target), jobs, workers, watch)


@dataclass(eq=False)
class _Worker:
    """A process of the pool, and the job that it does."""

    process: SpawnProcess
    connection: Connection
    job: Job | None = None
    # when its job last wrote a file, and when that was noticed; None once its silence was told
    written: int = 0
    heard: float | None = 0.0

    def done(self) -> bool:
        return self.connection.poll()

    def result(self) -> Failure | None:
        job, self.job = self.job, None
        assert job is not None
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            ended = f"was ended by signal {-code}" if code and code < 0 else f"ended with {code}"
            reason = f"its process {ended}; out of memory? Run the same command again to resume."
            return Failure(job, reason, refused=False)

    def cancel(self) -> None:
        self.process.kill()


class _Pool(Engine):
    def __init__(self, target: Target) -> None:
        self.target, self.workers = target, list[_Worker]()
        self.context = multiprocessing.get_context("spawn")
        with _hold_interrupts():
            # starts a process of multiprocessing's own, which a closed terminal would end
            self.stop = self.context.Event()

    @override
    def submit(self, job: Job) -> _Worker:
        while True:
            self.workers = [one for one in self.workers if one.job is not None or one.process.exitcode is None]
            worker = next((one for one in self.workers if one.job is None), None) or self._start()
            try:
                worker.connection.send(job)
            except OSError:
                # it ended while it had nothing to do
                self.workers.remove(worker)
                continue
            worker.job, worker.heard = job, time.monotonic()
            return worker

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=serve, args=(theirs, self.stop), daemon=True)
        with processes.environment(**ENVIRONMENT), _hold_interrupts():
            process.start()
        self.workers.append(_Worker(process, ours))
        theirs.close()
        with suppress(OSError):
            # that it has ended by then is heard when it is sent a job
            ours.send(self.target)
        return self.workers[-1]

    @override
    def wait(self, watch: Watch) -> None:
        busy = [worker for worker in self.workers if worker.job is not None]
        wait([worker.connection for worker in busy], timeout=POLL_SECONDS)
        for worker in busy:
            assert worker.job is not None
            with suppress(OSError):
                written = max((path.stat().st_mtime_ns for path in worker.job.folder.iterdir()), default=0)
                if written != worker.written:
                    worker.written, worker.heard = written, time.monotonic()
            silence = 0.0 if worker.heard is None else time.monotonic() - worker.heard
            if silence > SILENCE_SECONDS:
                watch.silent(worker.job, round(silence / 60))
                worker.heard = None

    @override
    def end(self, running: Mapping[Job, Submitted]) -> str:
        """Stop idle workers, give busy ones time to save and kill the rest; name the jobs of those."""
        self.stop.set()
        for worker in self.workers:
            with suppress(OSError):
                worker.connection.send(None)
        deadline, interrupt = time.monotonic() + PATIENCE_SECONDS, None
        try:
            for worker in self.workers:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt as error:
            # a second Ctrl-C ends the waiting
            interrupt = error
        with ignoring_stops():
            killed = [worker for worker in self.workers if worker.process.is_alive()]
            for worker in killed:
                worker.process.kill()
            for worker in killed:
                worker.process.join()
        if interrupt is not None and not running:
            interrupt.args = (SAVED,)
            raise interrupt
        saved = (0, BY_SIGNAL + signal.SIGTERM)
        cut = [worker.job.name for worker in self.workers if worker.job and worker.process.exitcode not in saved]
        if not cut:
            return SAVED
        return (
            f"stopped; {', '.join(cut)} had not saved and resume{'s' * (len(cut) == 1)} from the last checkpoint, "
            f"other runs from where they were: {AGAIN}"
        )


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
