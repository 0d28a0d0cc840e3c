"""The request of a probe, checked before anything is encoded: tasks, layers, heads, classifier and folder."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import DataError, SettingError
from headwise.input_files import is_file
from headwise.texts.frozen import Frozen
from headwise_lab.data.arrays import digest
from headwise_lab.data.probing_files import FORMS, PROBES, find_probing_file
from headwise_lab.experiment import run_folder
from headwise_lab.frozen.vectors import find_shape
from headwise_lab.probing.fit import Classifier
from headwise_lab.probing.probe import EMBEDDINGS, Vectors
from headwise_lab.results.runs import COMPARISON

CONFIG = "config.json"
ALL, NONE = "all", "none"
# Default number of sentences per task.
SENTENCES = 10_000
# Names that results of tasks cannot have.
TAKEN = {Path(name).stem for name in (run_folder.SETTINGS, COMPARISON, CONFIG)}
# Maximum length of the options in the name of a folder.
LONGEST = 120


@dataclass(frozen=True)
class ProbeRequest:
    """The options `layers` and `heads`, the classifier, and the number of sentences per task, None for all."""

    layers: str
    heads: str
    classifier: Classifier
    sentences: int | None

    def __post_init__(self) -> None:
        # equal requests share a folder
        for name in ("layers", "heads"):
            object.__setattr__(self, name, getattr(self, name).replace(" ", ""))


def choose_folder(name: str, request: ProbeRequest) -> Path:
    """Return the default folder of results, named after the model and the options that are not the defaults.

    >>> choose_folder("bert", ProbeRequest("emb,5", "none", Classifier(), 10_000)).name
    'bert-layers_emb,5-heads_none'
    """
    chosen = {
        "layers": (request.layers, ALL),
        "heads": (request.heads, ALL),
        "classifier": (request.classifier.kind, Classifier().kind),
        "sentences": (request.sentences or ALL, SENTENCES),
        "seed": (request.classifier.seed, Classifier().seed),
    }
    options = "-".join(f"{option}_{value}" for option, (value, usual) in chosen.items() if value != usual)
    # a file name has at most 255 bytes
    options = options if len(options) <= LONGEST else digest(options)
    return Path("runs") / "probe" / "-".join(filter(None, (name, options)))


def find_task_files(data: Path, wanted: Iterable[str]) -> list[tuple[str, Path]]:
    """Return name and file of each task: of "all", those that the folder has.

    Raises:
        DataError: The folder has no file of a task.
        SettingError: Tasks are named together with "all" or with one file, or a file has the name of another output.
    """
    names = list(dict.fromkeys(wanted))
    if ALL in names and len(names) > 1:
        raise SettingError(f"--task is {','.join(names)!r}; expected all, or names of files without it.")
    if is_file(data):
        name = data.name.partition(".")[0]
        if names not in ([ALL], [name]):
            raise SettingError(
                f"--data is one file, {data}, and --task is {','.join(names)}; name its folder, or omit --task."
            )
        if name in TAKEN:
            raise SettingError(f"--data is {data.name}, and its results cannot be called {name}.json; rename the file.")
        return [(name, data)]
    if names == [ALL]:
        names = [name for name in PROBES if any(is_file(data / f"{name}{form}") for form in FORMS)]
        if not names:
            raise DataError(f"{data} holds no probing file; expected e.g. {next(iter(PROBES))}.txt, plain or .gz.")
    return [(name, find_probing_file(data / name)) for name in names]


def parse_layers(text: str, count: int) -> list[Vectors]:
    """Return the layers of an option, of a model with so many: all, none, or names as in "emb,0,5".

    Raises:
        SettingError: A name is no layer of the model.

    >>> [str(one) for one in parse_layers("all", 2)], [one.layer for one in parse_layers("emb,1", 2)]
    (['emb', '0', '1'], [-1, 1])
    """
    known = {EMBEDDINGS: -1, **{str(layer): layer for layer in range(count)}}
    if text in (ALL, NONE):
        return [Vectors(layer) for layer in known.values() if text == ALL]
    names = [name.strip() for name in text.split(",")]
    _require_known("layers", names, known, f"some of {', '.join(known)}")
    return [Vectors(known[name]) for name in dict.fromkeys(names)]


def parse_heads(text: str, counts: Sequence[int]) -> list[Vectors]:
    """Return the heads of an option, given those of each layer: all, none, or heads and sets as in "3.5,3.5+4.0".

    Raises:
        SettingError: A name is no head of the model.

    >>> [str(one) for one in parse_heads("0.1,0.1+1.0", (2, 2))], len(parse_heads("all", (2, 2)))
    (['0.1', '0.1+1.0'], 4)
    """
    known = {f"{layer}.{head}": (layer, head) for layer, count in enumerate(counts) for head in range(count)}
    if text in (ALL, NONE):
        return [Vectors(heads=(place,)) for place in known.values() if text == ALL]
    last = [*known][-1] if known else "none: it has no heads that can be read"
    found: dict[frozenset[tuple[int, int]], Vectors] = {}
    for piece in text.split(","):
        names = [name.strip() for name in piece.split("+")]
        _require_known("heads", names, known, f"LAYER.HEAD from 0.0 to {last}")
        places = tuple(dict.fromkeys(known[name] for name in names))
        found.setdefault(frozenset(places), Vectors(heads=places))
    return list(found.values())


def _require_known(option: str, names: Iterable[str], known: Container[str], expected: str) -> None:
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        raise SettingError(f"--{option} has {wrong!r}; expected all, none, or {expected}.")


def choose_vectors(frozen: Frozen, request: ProbeRequest) -> list[Vectors]:
    """Return the inputs of classifiers, layers first.

    Raises:
        DataError: The model cannot be read in this way.
        SettingError: A layer or head does not exist, or nothing is requested.
    """
    if (request.layers, request.heads) == (NONE, NONE):
        raise SettingError("--layers and --heads are both none; expected layers or heads to probe.")
    shape = find_shape(frozen)
    if shape.layers is None and request.layers != NONE:
        raise SettingError(
            f"--layers is {request.layers!r}, and the tokens of {frozen.name} have no state in each layer; give "
            "--layers none to probe its heads."
        )
    return [*parse_layers(request.layers, shape.layers or 0), *parse_heads(request.heads, shape.heads)]
