"""Running jobs elsewhere: on Slurm by submitit, or on Ray. Accelerate launches one training, and submits no jobs.

Both libraries are optional. Every process must see the folders under the same paths.
"""

import dataclasses
import importlib
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from headwise.errors import SettingError, require_choice
from headwise_lab.experiment.run_folder import Failure, Job, Watch
from headwise_lab.jobs.serving import attempt
from headwise_lab.jobs.workers import AGAIN, POLL_SECONDS, Engine, Submitted, do_job

LAUNCHERS = ("local", "slurm", "ray")


@dataclass(frozen=True)
class Launcher:
    """Where runs are done: on this machine, or by an engine with its options.

    Attributes:
        name: "local" for a pool of processes on this machine, "slurm" or "ray".
        options: For Slurm, parameters of submitit's executor (slurm_partition, timeout_min, gpus_per_node, ...), or
            cluster="local" for local processes started by submitit; for Ray, `address` and options of its tasks
            (num_cpus, num_gpus, ...).
    """

    name: str = "local"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("launcher", self.name, LAUNCHERS)
        if self.name == "local" and self.options:
            raise SettingError(f"launcher local takes no options; got {', '.join(self.options)}.")


LOCAL = Launcher()


def do_one(job: Job) -> Failure | None:
    """Do a job in the process it was sent to, with its log in its folder."""
    return attempt(do_job, job, lambda: False)


def open_engine(launcher: Launcher, out: Path) -> Engine:
    """Return the engine of a launcher that is not local, with a folder for its own files.

    Raises:
        SettingError: Its library is not installed or rejects an option.
    """
    return _Slurm(launcher.options, out) if launcher.name == "slurm" else _Ray(launcher.options)


def _resolve_paths(job: Job) -> Job:
    """Return a job whose paths mean the same in another working directory."""
    settings: Any = job.settings
    places = {name: getattr(settings, name, None) for name in ("data", "cache")}
    changed: dict[str, Any] = {name: _resolve(place) for name, place in places.items() if isinstance(place, Path)}
    scale: Any = getattr(settings, "scale", None)
    if scale is not None:
        # what is no file is an installed package
        files = {
            field.name: file.resolve()
            for field in dataclasses.fields(scale)
            if isinstance(file := getattr(scale, field.name), Path) and file.exists()
        }
        changed["scale"] = dataclasses.replace(scale, **files)
    settings = dataclasses.replace(settings, **changed) if changed else settings
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


class Elsewhere(Engine):
    """An engine whose jobs run in another working directory, perhaps on another machine."""

    @abstractmethod
    def send(self, job: Job) -> Submitted:
        """Submit a job with absolute paths."""

    def close(self) -> None:
        """Release what the engine holds: nothing by default."""

    @override
    def submit(self, job: Job) -> Submitted:
        return self.send(_resolve_paths(job))

    @override
    def wait(self, watch: Watch) -> None:
        time.sleep(POLL_SECONDS)

    @override
    def end(self, running: Mapping[Job, Submitted]) -> str:
        for submitted in running.values():
            submitted.cancel()
        self.close()
        return f"stopped; submitted runs were canceled and resume from their last checkpoints: {AGAIN}"


class _Slurm(Elsewhere):
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

    @override
    def send(self, job: Job) -> Submitted:
        return self._executor.submit(do_one, job)


class _Ray(Elsewhere):
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

    @override
    def send(self, job: Job) -> Submitted:
        reference = self._remote(do_one).remote(job)
        future = reference.future()
        # a future of Ray cannot end its task
        future.cancel = lambda: self._ray.cancel(reference, force=True)
        return future

    @override
    def close(self) -> None:
        if self._own:
            self._ray.shutdown()
