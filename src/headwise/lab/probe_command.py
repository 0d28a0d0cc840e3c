"""The command `headwise probe`: what the layers and heads of a frozen model tell of sentences.

Owns the order: read, encode once, fit with a progress bar, print, write; and the files, by which it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import joblib
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headwise.checks import DataError
from headwise.lab import runs
from headwise.lab.encodings import encodings, fingerprint
from headwise.lab.frozen_model import Frozen
from headwise.lab.grids import markdown_of, terminal_grid
from headwise.lab.probe import (
    NONE,
    Chosen,
    ProbedTask,
    Vectors,
    choose_sentences,
    heads_asked,
    judged,
    layers_asked,
    probe_vectors,
    sentences_of,
)
from headwise.lab.probe_pictures import NOTE, heads_grid, heads_picture, layers_grid, layers_picture, sets_grid
from headwise.lab.probing_fit import Classifier, Fitted
from headwise.lab.tasks.probing_data import load_probing
from headwise.lab.tasks.probing_files import FORMS, PROBES, probing_file
from headwise.lab.tasks.probing_scales import PROBING_SCALES
from headwise.page import write_whole

__all__ = ["Asked", "probe_model", "task_files"]

ENCODINGS, WORDS, TEXT = "encodings", "words", "probe.md"


@dataclass(frozen=True)
class Asked:
    """What is probed and how.

    Attributes:
        layers: As `probe.layers_asked` takes them.
        heads: As `probe.heads_asked` takes them.
        classifier: What is fitted.
        sentences: Sentences of a task; None for all.
    """

    layers: str
    heads: str
    classifier: Classifier
    sentences: int | None


def probe_model(
    frozen: Frozen,
    files: Sequence[tuple[str, Path]],
    asked: Asked,
    out: Path,
    cache: Path,
    workers: int,
    console: Console,
    command: str,
) -> list[ProbedTask]:
    """Probe a model on each task whose result is not in `out` yet, then show all of them.

    Args:
        frozen: The model.
        files: Name and file of each task.
        asked: What is probed and how.
        out: Folder of results, figures and text; what is finished there is not done again.
        cache: Folder of encoded sentences.
        workers: Classifiers fitted side by side.
        console: Where everything is shown.
        command: The command as it was typed.

    Raises:
        DataError: The model cannot be probed, or a file cannot be read or written.
        SettingError: `out` holds results of other settings, or a layer or head is not there.
    """
    if frozen.note:
        console.print(frozen.note, highlight=False)
    model = fingerprint(frozen)
    runs.claim(out, {"model": model, **asdict(asked)})
    tasks = []
    for name, path in files:
        place = out / f"{name}.json"
        if not place.exists():
            runs.write_json(place, _probed(frozen, model, name, path, asked, cache, workers, console).record())
        tasks.append(_read(place))
    _show(tasks, out, console, frozen.name, command)
    return tasks


def task_files(data: Path, wanted: Iterable[str]) -> list[tuple[str, Path]]:
    """Return name and file of each task: of "all", those that the folder has.

    Raises:
        DataError: The folder has no file of a task.
    """
    names = list(wanted)
    if data.is_file():
        return [(data.name.partition(".")[0], data)]
    if names == ["all"]:
        names = [name for name in PROBES if any((data / f"{name}{form}").is_file() for form in FORMS)]
        if not names:
            raise DataError(f"{data} holds no probing file; expected some as {next(iter(PROBES))}.txt, plain or .gz.")
    return [(name, probing_file(data / name)) for name in names]


def _probed(
    frozen: Frozen, model: str, name: str, path: Path, asked: Asked, cache: Path, workers: int, console: Console
) -> ProbedTask:
    data = load_probing(path, PROBING_SCALES["paper"], cache / WORDS)
    numbers, chosen = choose_sentences(data, asked.sentences, path)
    probe = PROBES.get(name)
    title = name if probe is None else probe.title
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(f"{title}: encoding", total=len(numbers))
        found = encodings(
            frozen,
            sentences_of(data, numbers),
            cache / ENCODINGS,
            model=model,
            heads=asked.heads != NONE,
            advance=lambda done: bars.update(bar, advance=done),
        )
        vectors = [*layers_asked(asked.layers, len(found.layers) - 1), *heads_asked(asked.heads, found.counts)]
        bars.update(bar, completed=len(numbers))
        bar = bars.add_task(f"{title}: classifiers", total=len(vectors))
        jobs = (joblib.delayed(probe_vectors)(found, chosen, one, asked.classifier) for one in vectors)
        fitted: list[tuple[Vectors, Fitted]] = []
        for one, result in zip(vectors, _in_parallel(jobs, workers), strict=True):
            fitted.append((one, result))
            bars.update(bar, advance=1)
    majority = _majority(chosen)
    return ProbedTask(
        task=name,
        title=title,
        labels=len(data.labels),
        **{split: len(places) for split, places in chosen.places.items()},
        majority=majority,
        said=data.summary(),
        # of a thousand classes the most frequent one may not occur in test at all
        found=judged(fitted, test=len(chosen.places["test"]), majority=max(majority, 1.0 / len(data.labels))),
    )


def _in_parallel(jobs: Iterable[Any], workers: int) -> Iterable[Fitted]:
    return cast(Iterable[Fitted], joblib.Parallel(n_jobs=workers, return_as="generator")(jobs))


def _majority(chosen: Chosen) -> float:
    most = np.bincount(chosen.labels["train"]).argmax()
    return float(np.mean(chosen.labels["test"] == most))


def _read(place: Path) -> ProbedTask:
    try:
        return ProbedTask.read(runs.read_json(place))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{place} is no result of a probe ({error}); delete it and probe again.") from None


def _show(tasks: Sequence[ProbedTask], out: Path, console: Console, name: str, command: str) -> None:
    lines = [f"# What {name} tells of sentences", "", "```console", f"$ {command}", "```", ""]
    for grid in (layers_grid(tasks), heads_grid(tasks), sets_grid(tasks)):
        if grid is not None:
            console.print(terminal_grid(grid))
            lines += [markdown_of(grid), ""]
    console.print(NOTE, highlight=False)
    lines += [NOTE, ""]
    for picture in (layers_picture(tasks), heads_picture(tasks)):
        if picture is not None:
            write_whole(out / f"{picture.name}.png", picture.png)
            lines += [f"![{picture.alt}]({picture.name}.png)", "", picture.caption, ""]
    sizes = [f"{task.title}: {task.train:,} train, {task.dev:,} dev, {task.test:,} test. {task.said}" for task in tasks]
    runs.write_text(out / TEXT, "\n".join([*lines, *(f"- {size}" for size in sizes), ""]))
    console.print(f"written to {out / TEXT}, with figures", soft_wrap=True, markup=False, highlight=False)
