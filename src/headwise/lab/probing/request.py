"""What a probe is asked: tasks, layers, heads and classifier, and the folder its results lie in.

Owns the refusal of what contradicts itself or is not there, before a sentence is encoded. Must not probe anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import DataError, SettingError
from headwise.lab.data.arrays import digest
from headwise.lab.data.probing_files import FORMS, PROBES, find_probing_file
from headwise.lab.experiment import run_folder
from headwise.lab.experiment.frozen import Frozen
from headwise.lab.frozen.vectors import shape_of
from headwise.lab.probing.fit import Classifier
from headwise.lab.probing.probe import ALL, NONE, Vectors, heads_asked, layers_asked
from headwise.lab.results.runs import COMPARISON

CONFIG = "config.json"
# Sentences of a task unless the command says.
SENTENCES = 10_000
# Files that a folder of results, of a model or of runs has beside results.
TAKEN = {Path(name).stem for name in (run_folder.SETTINGS, COMPARISON, CONFIG)}
# Letters of what is asked for in the name of a folder.
LONGEST = 120


@dataclass(frozen=True)
class Asked:
    """What is probed and how.

    Attributes:
        layers: As `probe.layers_asked` takes them; spaces are left out.
        heads: As `probe.heads_asked` takes them; likewise.
        classifier: What is fitted.
        sentences: Sentences of a task; None for all.
    """

    layers: str
    heads: str
    classifier: Classifier
    sentences: int | None

    def __post_init__(self) -> None:
        # what means the same is the same probe, in the same folder
        for name in ("layers", "heads"):
            object.__setattr__(self, name, getattr(self, name).replace(" ", ""))


def default_folder(name: str, asked: Asked) -> Path:
    """Return the folder of results where none is named: after the model and what is asked for other than by default.

    >>> default_folder("bert", Asked("emb,5", "none", Classifier(), 10_000)).name
    'bert-layers_emb,5-heads_none'
    """
    chosen = {
        "layers": (asked.layers, ALL),
        "heads": (asked.heads, ALL),
        "classifier": (asked.classifier.kind, Classifier().kind),
        "sentences": (asked.sentences or ALL, SENTENCES),
        "seed": (asked.classifier.seed, Classifier().seed),
    }
    words = [f"{option}_{value}" for option, (value, usual) in chosen.items() if value != usual]
    said = "-".join(words)
    # a file system takes 255 bytes of a name, and sets of heads may be many
    return Path("runs") / "probe" / "-".join(filter(None, (name, said if len(said) <= LONGEST else digest(said))))


def task_files(data: Path, wanted: Iterable[str]) -> list[tuple[str, Path]]:
    """Return name and file of each task: of "all", those that the folder has.

    Raises:
        DataError: The folder has no file of a task.
        SettingError: Tasks are named beside "all", or beside one file; or a file has the name of what lies beside the
            results.
    """
    names = list(dict.fromkeys(wanted))
    if ALL in names and len(names) > 1:
        raise SettingError(f"--task is {','.join(names)!r}; expected all, or names of files without it.")
    if data.is_file():
        name = data.name.partition(".")[0]
        if names not in ([ALL], [name]):
            raise SettingError(
                f"--data is one file, {data}, and --task asks for {','.join(names)}; name its folder, or leave --task "
                "out."
            )
        if name in TAKEN:
            raise SettingError(f"--data is {data.name}, and its results cannot be called {name}.json; rename the file.")
        return [(name, data)]
    if names == [ALL]:
        names = [name for name in PROBES if any((data / f"{name}{form}").is_file() for form in FORMS)]
        if not names:
            raise DataError(f"{data} holds no probing file; expected some as {next(iter(PROBES))}.txt, plain or .gz.")
    return [(name, find_probing_file(data / name)) for name in names]


def vectors_asked(frozen: Frozen, asked: Asked) -> list[Vectors]:
    """Return what classifiers read, layers first.

    Raises:
        DataError: The model cannot be read so.
        SettingError: A layer or head is not there, or nothing is asked for.
    """
    if (asked.layers, asked.heads) == (NONE, NONE):
        raise SettingError("--layers and --heads are both none; expected layers or heads to probe.")
    shape = shape_of(frozen)
    if shape.layers is None and asked.layers != NONE:
        raise SettingError(
            f"--layers is {asked.layers!r}, and the tokens of {frozen.name} have no state in each layer; give --layers "
            "none to probe its heads."
        )
    return [*layers_asked(asked.layers, shape.layers or 0), *heads_asked(asked.heads, shape.heads)]
