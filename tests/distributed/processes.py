"""Processes of one gloo group that run functions of the tests, each function in all of them at once.

They meet through a file, so no port is taken, and are started once: importing torch takes longer than most tests. They
are daemons and end with the tests; after a failure or a silence they are ended and the next test has new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TIMEOUT_SECONDS = 120


class Processes:
    """A group of some size, started when first asked for something."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: list[tuple[Any, Connection]] = []
        self._meeting: TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *given: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
        """Return what a function at the top level of a module returns in each process, by rank."""
        if not self._members:
            self._start()
        for _, connection in self._members:
            connection.send((function, given))
        answers = []
        for rank, (process, connection) in enumerate(self._members):
            if not connection.poll(timeout):
                self.end()
                raise TimeoutError(f"process {rank} of {self.size} was silent for {timeout} s in {function.__name__}")
            try:
                answers.append(connection.recv())
            except EOFError:
                process.join()
                self.end()
                raise ChildProcessError(f"process {rank} of {self.size} ended with {process.exitcode}") from None
        asked = ", ".join(map(str, (function.__name__, *given)))
        failures = [f"process {rank}, {asked}:\n{told}" for rank, (fine, told) in enumerate(answers) if not fine]
        if failures:
            # a collective that one of them has left may still be waited for
            self.end()
            raise AssertionError("\n".join(failures))
        return [told for _, told in answers]

    def end(self) -> None:
        """End the processes; the next `run` starts others."""
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()
        self._members = []
        if self._meeting is not None:
            self._meeting.cleanup()
            self._meeting = None

    def _start(self) -> None:
        self._meeting = TemporaryDirectory(prefix="headwise-tests-")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            meeting = str(Path(self._meeting.name) / "store")
            process = context.Process(target=_serve, args=(rank, self.size, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))


def _serve(rank: int, size: int, meeting: str, connection: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # no name of this machine has to resolve
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # as a launcher has it
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            function, given = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*given))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)
