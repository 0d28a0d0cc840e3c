"""Running jobs elsewhere: on Slurm by submitit, or on Ray. Accelerate launches one training, and submits no jobs.

Both libraries are optional. Every process must see the folders under the same paths.
"""

import dataclasses
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headwise.errors import SettingError, require_choice
from headwise_lab.experiment.run_folder import Failure, Job, Watch
from headwise_lab.jobs.serving import attempt
from headwise_lab.jobs.workers import do_job

LAUNCHERS = ("local", "slurm", "ray")
POLL_SECONDS = 0.2
AGAIN = "give the same command again."
# The error of a process that died may contain its whole log.
LONGEST_REASON = 200


@dataclass(frozen=True)
class Launcher:
    """Where runs are done: on this machine, or by an engine with its options.

    Attributes:
        name: "local" for a pool of processes on this machine, "slurm" or "ray".
        options: For Slurm, parameters of submitit's executor (slurm_partition, timeout_min, gpus_per_node, ...), or
            cluster="local" for local processes started by submitit; for Ray, `address` and options of its tasks
            (num_cpus, num_gpus, ...).

    Raises:
        SettingError: The launcher is unknown, or "local" was given options.
    """

    name: str = "local"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("launcher", self.name, LAUNCHERS)
        if self.name == "local" and self.options:
            raise SettingError(f"launcher local takes no options; got {', '.join(self.options)}.")


LOCAL = Launcher()


class Submitted(Protocol):
    """A submitted job."""

    def done(self) -> bool:
        """Return whether it has ended or failed, without waiting."""
        ...

    def result(self) -> Failure | None:
        """Return the result of `do_one`; raises if its process died."""
        ...

    def cancel(self) -> None:
        """End it."""
        ...


class Engine(Protocol):
    """Runs jobs elsewhere."""

    def submit(self, function: Callable[[Job], Failure | None], job: Job) -> Submitted:
        """Submit `function(job)`."""
        ...

    def close(self) -> None:
        """Release its resources."""
        ...


def do_one(job: Job) -> Failure | None:
    """Do a job in the process it was sent to, with its log in its folder."""
    return attempt(do_job, job, lambda: False)


def open_engine(launcher: Launcher, out: Path) -> Engine:
    """Return the engine of a launcher that is not local.

    Args:
        launcher: The launcher.
        out: A folder for the engine's own files.

    Raises:
        SettingError: Its library is not installed or rejects an option.
    """
    return _Slurm(launcher.options, out) if launcher.name == "slurm" else _Ray(launcher.options)


def run_elsewhere(engine: Engine, jobs: Sequence[Job], at_once: int, watch: Watch) -> list[Failure]:
    """Submit jobs to an engine in order, a limited number at once, and return the failures.

    A job whose process died or was preempted is a failure; its checkpoint is in its folder, and the same command
    resumes it.

    Args:
        engine: The engine; closed at the end.
        jobs: The jobs.
        at_once: Maximum number of jobs submitted at once.
        watch: Notified when a job starts and ends, and ticked in between.

    Raises:
        KeyboardInterrupt: Ctrl-C; submitted jobs were canceled.
    """
    pending, failures = [_resolve_paths(job) for job in jobs], list[Failure]()
    shown = {place.folder: job for place, job in zip(pending, jobs, strict=True)}
    running: list[tuple[Job, Submitted]] = []
    try:
        while pending or running:
            while pending and len(running) < at_once:
                job = pending.pop(0)
                running.append((job, engine.submit(do_one, job)))
                watch.started(shown[job.folder])
            still = []
            for job, submitted in running:
                if not submitted.done():
                    still.append((job, submitted))
                    continue
                failure = _read_outcome(shown[job.folder], submitted)
                failures += [] if failure is None else [failure]
                watch.ended(shown[job.folder], failure)
            running = still
            watch.tick()
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt as error:
        error.args = ("stopped; submitted runs were canceled and resume from their last checkpoints: " + AGAIN,)
        raise
    finally:
        for _, submitted in running:
            submitted.cancel()
        engine.close()
    return failures


def _read_outcome(job: Job, submitted: Submitted) -> Failure | None:
    try:
        failure = submitted.result()
    except Exception as error:
        told = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        reason = f"its process ended ({told}); run the same command again to resume."
        return Failure(job, reason, refused=False)
    return None if failure is None else dataclasses.replace(failure, job=job)


def _resolve_paths(job: Job) -> Job:
    """Return a job whose paths mean the same in another working directory."""
    settings: Any = job.settings
    places = {name: getattr(settings, name, None) for name in ("data", "cache")}
    absolute: dict[str, Any] = {name: _resolve(place) for name, place in places.items() if isinstance(place, Path)}
    scale = getattr(settings, "scale", None)
    if dataclasses.is_dataclass(scale) and not isinstance(scale, type):
        files = {field.name: getattr(scale, field.name) for field in dataclasses.fields(scale)}
        # what is no file is an installed package
        found = {name: file.resolve() for name, file in files.items() if isinstance(file, Path) and file.exists()}
        absolute["scale"] = dataclasses.replace(scale, **found)
    settings = dataclasses.replace(settings, **absolute) if absolute else settings
    return dataclasses.replace(job, folder=job.folder.resolve(), settings=settings)


def _resolve(path: Path) -> Path:
    """Return an absolute path, or both of two files as one."""
    if path.exists() or "," not in path.name:
        return path.resolve()
    return Path(",".join(str(Path(one).resolve()) for one in str(path).split(",")))


def _import_library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise SettingError(
            f"launcher {extra} needs {name}, which is not installed; pip install 'headwise-lab[{extra}]'."
        ) from None


class _Slurm:
    """Slurm by submitit, which writes its files next to the runs."""

    def __init__(self, options: Mapping[str, Any], out: Path) -> None:
        submitit = _import_library("submitit", "slurm")
        given = {"cluster": "slurm", **options}
        try:
            self._executor = submitit.AutoExecutor(folder=str(out / ".submitit"), cluster=given.pop("cluster"))
            usual = {"name": "headwise", "cpus_per_task": 1, "timeout_min": 24 * 60}
            self._executor.update_parameters(**{**usual, **given})
        except (NameError, TypeError, ValueError, RuntimeError) as error:
            raise SettingError(f"launcher slurm: submitit refused ({error})") from None

    def submit(self, function: Callable[[Job], Failure | None], job: Job) -> Submitted:
        """Submit to the queue."""
        return self._executor.submit(function, job)

    def close(self) -> None:
        """Nothing is held."""


class _Ray:
    """The Ray cluster at `address`, or one started on this machine."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._ray = _import_library("ray", "ray")
        given = dict(options)
        address = given.pop("address", None)
        self._own = not self._ray.is_initialized()
        try:
            if self._own:
                own = {} if address is None else {"address": address}
                self._ray.init(include_dashboard=False if address is None else None, log_to_driver=False, **own)
            # a job that died is reported, not restarted silently
            self._remote = self._ray.remote(**{"num_cpus": 1, "max_retries": 0, **given})
        except (ValueError, TypeError, ConnectionError) as error:
            raise SettingError(f"launcher ray: Ray refused ({error})") from None

    def submit(self, function: Callable[[Job], Failure | None], job: Job) -> Submitted:
        """Start a task."""
        return _RayTask(self._ray, self._remote(function).remote(job))

    def close(self) -> None:
        """Stop the cluster if it was started here."""
        if self._own:
            self._ray.shutdown()


class _RayTask:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def done(self) -> bool:
        """Return whether its value or error is available."""
        return bool(self._ray.wait([self._reference], timeout=0)[0])

    def result(self) -> Failure | None:
        """Return its value."""
        return self._ray.get(self._reference)

    def cancel(self) -> None:
        """End its process."""
        self._ray.cancel(self._reference, force=True)
