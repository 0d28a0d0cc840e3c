"""The command `headwise probe`: encode sentences once, fit classifiers, print and write the results."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import joblib
import numpy as np
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

from headwise.atomic import hold, write_whole
from headwise.errors import DataError, SettingError
from headwise.texts.frozen import Frozen
from headwise.texts.progress import make_bars
from headwise_lab.data.arrays import digest
from headwise_lab.data.probing_files import PROBES
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.registry import named_task
from headwise_lab.frozen.vectors import Encodings, encodings, fingerprint
from headwise_lab.probing.figures import (
    NOTE,
    draw_heads,
    draw_layers,
    make_heads_grid,
    make_layers_grid,
    make_sets_grid,
)
from headwise_lab.probing.fit import FORM, Fitted
from headwise_lab.probing.probe import (
    Chosen,
    ProbedTask,
    Vectors,
    choose_sentences,
    judge_probes,
    probe_vectors,
)
from headwise_lab.probing.request import CONFIG, NONE, ProbeRequest, choose_folder, choose_vectors
from headwise_lab.results.runs import COMPARISON

ENCODINGS, WORDS, TEXT = "encodings", "words", "probe.md"


def probe_model(
    frozen: Frozen,
    files: Sequence[tuple[str, Path]],
    request: ProbeRequest,
    out: Path | None,
    cache: Path,
    workers: int,
    console: Console,
    command: str,
) -> list[ProbedTask]:
    """Probe a model on each task whose result is not in `out` yet, then show all of them.

    All checks are made before anything is written to `out`, by default `choose_folder`.

    Args:
        frozen: The model.
        files: Name and file of each task.
        request: What to probe and how.
        out: Folder of results, figures and text; finished tasks are not repeated.
        cache: Folder of encoded sentences.
        workers: Number of classifiers fitted in parallel.
        console: The console.
        command: The command as typed.

    Raises:
        DataError: The model cannot be probed, or a file cannot be read or written.
        SettingError: `out` holds a model, or results of other settings or sentences, or a layer or head does not exist.
    """
    out = choose_folder(frozen.name, request) if out is None else out
    with hold(out):
        _require_free(out, cache)
        model = fingerprint(frozen)
        record = {"model": model, "form": FORM, **asdict(request)}
        run_folder.require_same(out / run_folder.SETTINGS, record)
        vectors = choose_vectors(frozen, request)
        finished = {name: task for name, path in files if (task := _read_finished(out, name, path)) is not None}
        left = [_prepare(name, path, request, cache) for name, path in files if name not in finished]
        if frozen.note:
            console.print(frozen.note, highlight=False, markup=False)
        run_folder.claim(out, record)
        for task, sentences, chosen in left:
            with make_bars(console=console) as bars:
                bar = bars.add_task(f"{task.title}: encoding", total=len(sentences))
                found = encodings(
                    frozen,
                    sentences,
                    cache / ENCODINGS,
                    model=model,
                    heads=request.heads != NONE,
                    advance=lambda done, bars=bars, bar=bar: bars.update(bar, advance=done),
                )
                bars.update(bar, completed=len(sentences))
                finished[task.task] = _probe(task, found, chosen, vectors, request, workers, bars)
            run_folder.write_json(out / f"{task.task}.json", finished[task.task].record())
        tasks = [finished[name] for name, _ in files]
        _show(tasks, out, console, frozen.name, command)
    return tasks


def _require_free(out: Path, cache: Path) -> None:
    """Refuse the cache, and a folder of a model or of runs."""
    if out.resolve() == cache.resolve():
        raise SettingError(f"{out} is the folder of --cache, which may be removed; choose another --out.")
    settings = out / run_folder.SETTINGS
    held = [out / name for name in (CONFIG, run_folder.WEIGHTS, COMPARISON) if (out / name).exists()]
    if settings.exists() and "classifier" not in run_folder.read_json(settings):
        held.append(settings)
    if held:
        raise SettingError(f"{out} holds a model or runs ({held[0].name}); choose another --out for the results.")


def _read_finished(out: Path, name: str, path: Path) -> ProbedTask | None:
    """Return the stored result of a task, or None; it must be of the same data."""
    place = out / f"{name}.json"
    if not place.exists():
        return None
    try:
        task = ProbedTask.read(run_folder.read_json(place))
    except ValidationError as error:
        first = error.errors()[0]
        fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(f"{place} is not the result of a probe ({fault}); delete it and probe again.") from None
    data = digest("", [path])
    if task.data != data:
        raise SettingError(
            f"{place} is about other sentences (digest {task.data}) than those of {path} (digest {data}); choose "
            "another --out, or name the data it was made from."
        )
    return task


def _prepare(name: str, path: Path, request: ProbeRequest, cache: Path) -> tuple[ProbedTask, list[str], Chosen]:
    """Return a task without results, its sentences, and their splits."""
    task = named_task("probing")
    data = task.load(path, task.scales["paper"], cache / WORDS)
    numbers, chosen = choose_sentences(data, request.sentences, path)
    majority = float(np.mean(chosen.labels["test"] == np.bincount(chosen.labels["train"]).argmax()))
    found = ProbedTask(
        task=name,
        data=digest("", [path]),
        title=PROBES.get(name, name),
        labels=len(data.labels),
        **{split: len(places) for split, places in chosen.places.items()},
        majority=majority,
        said=data.summary(),
        found=(),
    )
    return found, [data.sentences[number] for number in numbers], chosen


def _probe(
    task: ProbedTask,
    found: Encodings,
    chosen: Chosen,
    vectors: Sequence[Vectors],
    request: ProbeRequest,
    workers: int,
    bars: Progress,
) -> ProbedTask:
    bar = bars.add_task(f"{task.title}: classifiers", total=len(vectors))
    jobs = (joblib.delayed(probe_vectors)(found, chosen, one, request.classifier) for one in vectors)
    fitted: list[tuple[Vectors, Fitted]] = []
    results = cast(Iterable[Fitted], joblib.Parallel(n_jobs=workers, return_as="generator")(jobs))
    for one, result in zip(vectors, results, strict=True):
        fitted.append((one, result))
        bars.update(bar, advance=1)
    # of a thousand classes the most frequent one may not occur in test at all
    return replace(task, found=judge_probes(fitted, test=task.test, majority=max(task.majority, 1.0 / task.labels)))


def _show(tasks: Sequence[ProbedTask], out: Path, console: Console, name: str, command: str) -> None:
    lines = [f"# What {name} tells of sentences", "", "```console", f"$ {command}", "```", ""]
    for grid in (make_layers_grid(tasks), make_heads_grid(tasks), make_sets_grid(tasks)):
        if grid is not None:
            console.print(grid)
            lines += [grid.to_markdown(), ""]
    short = [(task, sum(not one.converged for one in task.found)) for task in tasks]
    limits = [
        f"{task.title}: {count} of {len(task.found)} classifiers ended at their limit of iterations."
        for task, count in short
        if count
    ]
    for note in (NOTE, *limits):
        console.print(note, highlight=False, markup=False)
        lines += [note, ""]
    for picture in (draw_layers(tasks), draw_heads(tasks)):
        if picture is not None:
            write_whole(out / f"{picture.name}.png", picture.png)
            lines += [f"![{picture.alt}]({picture.name}.png)", "", picture.caption, ""]
    sizes = [f"{task.title}: {task.train:,} train, {task.dev:,} dev, {task.test:,} test. {task.said}" for task in tasks]
    run_folder.write_text(out / TEXT, "\n".join([*lines, *(f"- {size}" for size in sizes), ""]))
    console.print(f"written to {out / TEXT}, with figures", soft_wrap=True, markup=False, highlight=False)
