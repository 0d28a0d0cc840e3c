"""The worker's side of the pool: do the jobs that come, each with its output in its log, until there are no more.

It imports nothing large before it knows what it will do.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from headwise.cli.stopping import BY_SIGNAL
from headwise.errors import HeadwiseError
from headwise_lab.experiment.run_folder import LOG, Failure, Heartbeat, Job
from headwise_lab.importing import importing

# Seconds to save the state in after the parent has ended.
LEAVING_SECONDS = 2.0

Target = Callable[[Any, Path, Heartbeat], None]


def serve(connection: Connection, stop: Any) -> None:
    """Body of a worker process: receive the target, then do jobs until None, a stop or the end of the parent."""
    asked: list[int] = []
    busy, orphaned = False, threading.Event()

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        if not busy:
            os._exit(BY_SIGNAL + number)

    # the parent decides what Ctrl-C and a closed terminal mean, which reach all processes
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ask)
    threading.Thread(target=_leave_with_parent, args=(orphaned,), daemon=True).start()
    with suppress(EOFError, ConnectionError):
        with importing():
            target: Target = connection.recv()
        while (job := connection.recv()) is not None and not stop.is_set():
            busy = True
            failure = attempt(target, job, lambda: bool(asked) or stop.is_set() or orphaned.is_set())
            if asked and failure is None:
                # it has saved, and is not done
                os._exit(BY_SIGNAL + asked[0])
            connection.send(failure)
            busy = False
    # all files are closed, and a normal exit of an interpreter with torch takes seconds
    os._exit(0)


def _leave_with_parent(orphaned: threading.Event) -> None:
    """End this process soon after its parent, which may have been killed, has ended; a step may take minutes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    orphaned.set()
    time.sleep(LEAVING_SECONDS)
    os._exit(1)


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
