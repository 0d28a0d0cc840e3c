"""The data of a reproduction's parts and the runs they begin with: names, places, and which parts have none.

The numbers of a reproduction's runs in one file, from which everything shown of it is computed again.
"""

from __future__ import annotations

import io
import lzma
import re
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise.atomic import FILES, OWN, seal, write_whole
from headwise.errors import DataError
from headwise.input_files import encode_json
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import ANALYSIS, EPOCHS, PREDICTIONS, RESULT, VOCABULARY, read_json
from headwise_lab.experiment.task import Task
from headwise_lab.papers.reproduction import Reproduction
from headwise_lab.results.runs import COMPARISON, TEST

RECORD = "record.json"
# A layout of a few files of a corpus; what was trained on it was not trained on the corpus.
PARTIAL = "partial"
# Behind the names of sets that are one file each.
FORMS = (".txt", ".txt.gz")


def name_data(data: Path | None) -> str:
    """Return what a comparison's folder calls its data: the name of the data's folder.

    >>> name_data(Path("corpora/WMT 14 (parts)")), name_data(None)
    ('WMT_14_parts', '')
    """
    return "" if data is None else re.sub(r"[^\w.+-]+", "_", data.resolve().name).strip("_")


def exists(data: Path) -> bool:
    """Return whether there is data of that name: a folder or a file, or a file with .txt or .txt.gz behind it."""
    return data.exists() or any(data.with_name(data.name + form).is_file() for form in FORMS)


def find_corpus_name(fingerprint: str, data: Path | None, cache: Path) -> str:
    """Return the name of the corpus with this fingerprint, "" where the task has no corpora."""
    # the digest of a parser follows a plus
    prepared = fingerprint.partition("+")[0]
    places = [] if data is None else [data / RECORD]
    for path in (*places, *sorted(cache.glob(f"*/{RECORD}")), *sorted(cache.glob(f"*/*/{RECORD}"))):
        found = read_json(path) if path.exists() else {}
        if isinstance(found, dict) and found.get("fingerprint") == prepared and "corpus" in found:
            return "-".join([str(found["corpus"])] + [PARTIAL] * (found.get("layout") == PARTIAL))
    return ""


# Where below --data text to pre-train on is looked for; prepared shards first.
TEXTS = ("prepared", "corpora/docs.jsonl.gz", "corpora")


def find_text(data: Path | None) -> Path | None:
    """Return the text to pre-train on in a folder of data of several kinds. Raises DataError: The folder holds none."""
    if data is None or not data.is_dir():
        return data
    found = next((data / name for name in TEXTS if (data / name).exists()), None)
    if found is None:
        raise DataError(
            f"{data} holds no text to pre-train on; expected one of {', '.join(TEXTS)} beside the sets, or name with "
            "--pretrained the --out folder of a comparison of pretraining."
        )
    return found


def find_data(reproduction: Reproduction, data: Path | None) -> Path | None:
    """Return the folder with the sets of a reproduction's parts."""
    if data is None or not reproduction.folder or not (data / reproduction.folder).is_dir():
        return data
    return data / reproduction.folder


def find_part_folder(reproduction: Reproduction, data: Path | None, corpus: str | None, scale: str) -> Path | None:
    """Return the folder of a corpus, or of all data where a part names no corpus."""
    if data is None or corpus is None:
        return data
    own, corpora = data / corpus, reproduction.corpora_at(scale)
    if len(corpora) > 1 and not exists(own):
        raise DataError(
            f"{own} does not exist; at scale {scale} {reproduction.id} takes a folder that holds "
            f"{' and '.join(corpora)}. --part runs a part alone."
        )
    return own if exists(own) else data


def require_data(task: str, data: Path | None, scale: Any) -> None:
    """Raise `DataError` unless there is a place that holds a task's data; it is not read whole."""
    if data is not None:
        named_task(task).find(data, scale)


def with_data(reproduction: Reproduction, scale: str, data: Path | None) -> Reproduction:
    """Return a reproduction with only those parts whose data is there, where it allows that.

    Its claims and means are then about these, and it lists what is missing for the others.

    Raises:
        DataError: The data of none of its parts is there.
    """
    if not reproduction.partial and reproduction.made is None:
        return reproduction
    task, place = named_task(reproduction.task), find_data(reproduction, data)
    at = replace(reproduction, parts=reproduction.parts_at(scale))
    known, absent = [part.name for part in at.parts], {}
    for part in at.parts:
        lack = "" if place is None else _find_lack(task, place, part.sizes[scale].corpus)
        if not lack and part.after in absent:
            lack = f"{part.after} is not there"
        elif not lack and part.after and part.after not in known:
            lack = f"begins with {part.after}, which --part leaves out"
        if lack:
            absent[part.name] = lack
    if not absent:
        return reproduction
    left, corpora = at.without(absent), ", ".join(at.corpora_at(scale))
    if left.parts:
        return left
    if place is not None and place.is_file():
        raise DataError(f"{place} is a file; {at.id} takes the folder that holds some of {corpora}.")
    raise DataError(
        f"{place} holds no data that {at.id} could be run on: {', '.join(left.left_out)}; expected some of {corpora}."
    )


def _find_lack(task: Task, place: Path, corpus: str | None) -> str:
    """Return what is missing from a part's data, "" for nothing."""
    if corpus is None:
        return ""
    if not exists(place / corpus):
        return "not there"
    found = task.missing_file(place / corpus)
    return f"no {found}" if found else ""


@dataclass(frozen=True)
class InitialRuns:
    """A comparison whose runs others begin with.

    Attributes:
        task: Its task.
        scale: Its scale.
        steps: Steps of a run; None where the task counts none.
        data: Name of its data, "" where that is not known, and its fingerprint.
    """

    task: str
    scale: str
    steps: int | None
    data: str

    def __str__(self) -> str:
        steps = "" if self.steps is None else f" ({self.steps:,} steps)"
        return f"{self.task} at scale {self.scale}{steps}, data {self.data}"


def require_initial_runs(place: Path, task: str, reproduction: str) -> None:
    """Raise `DataError` unless the folder holds a comparison of this task."""
    if _read_comparison(place).get("task") != task:
        raise DataError(
            f"{place} is no comparison of {task}; expected for {reproduction} the --out folder of one, with arms. To "
            f"fine-tune a single model: headwise compare glue --pretrained {place}"
        )


def read_initial_runs(place: Path, data: Path | None, cache: Path) -> InitialRuns:
    """Return a comparison that others begin with. Raises DataError: The folder holds none."""
    record = _read_comparison(place)
    try:
        task, scale, fingerprint = (str(record[name]) for name in ("task", "scale", "data"))
        steps = record["sizes"].get("steps")
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{place / COMPARISON} is not the record of a comparison; make it again.") from None
    named = f"{find_corpus_name(fingerprint, data, cache)} {fingerprint}".strip()
    return InitialRuns(task, scale, None if steps is None else int(steps), named)


def _read_comparison(place: Path) -> dict[str, Any]:
    found = read_json(place / COMPARISON) if (place / COMPARISON).is_file() else {}
    return found if isinstance(found, dict) else {}


# Members of an archive. Texts and weights stay out: answers are kept as numbers.
_NAME = re.compile(
    rf"\d+/({COMPARISON}|{TEST}|[^/\0]+/seed-\d+/({RESULT}|{EPOCHS}|{PREDICTIONS}|{VOCABULARY}|{ANALYSIS}[\w-]+\.json))"
)
# The folder of archives in the folder of a paper's notes, beside its records, and their suffix.
ARCHIVES = "archives"
ARCHIVE = ".tar.xz"
_MOST_BYTES = 1 << 30


def find_archive(record: Path) -> Path:
    """Return the path of a record's archive.

    >>> find_archive(Path("diversity/results/dose-logic-cpu.json")).as_posix()
    'diversity/archives/dose-logic-cpu.tar.xz'
    """
    return record.parents[1] / ARCHIVES / f"{record.stem}{ARCHIVE}"


def pack_runs(folders: Iterable[tuple[Path, Iterable[Path]]]) -> bytes:
    """Return the archive of each part's runs: answers of each item, epochs, results and analyses.

    Given are the folder of each part's comparison, and those of its runs inside.
    """
    files: dict[str, bytes] = {}
    for number, (comparison, runs) in enumerate(folders):
        files[f"{number}/{COMPARISON}"] = _seal_anew(comparison / COMPARISON, (TEST,))
        files[f"{number}/{TEST}"] = (comparison / TEST).read_bytes()
        for run in runs:
            place = f"{number}/{run.relative_to(comparison).as_posix()}"
            kept = [name for name in (EPOCHS, PREDICTIONS) if (run / name).exists()]
            files[f"{place}/{RESULT}"] = _seal_anew(run / RESULT, kept)
            files |= {f"{place}/{name}": (run / name).read_bytes() for name in kept}
            vocabulary = read_json(run / VOCABULARY) if (run / VOCABULARY).exists() else {}
            if labels := [str(label) for label in range(len(vocabulary.get("labels", ())))]:
                files[f"{place}/{VOCABULARY}"] = encode_json({"labels": labels}, indent=1).encode()
            for path in run.glob(f"{ANALYSIS}*.json"):
                files[f"{place}/{path.name}"] = encode_json(_number_words(read_json(path)), indent=1).encode()
    return pack_files(files)


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Return an archive of files; the same files give the same bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return lzma.compress(stream.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def unpack_runs(archive: Path, place: Path) -> list[Path]:
    """Write the runs of an archive below a folder, and return the folder of each part's comparison.

    Raises:
        DataError: The file is no archive of runs, or is damaged.
    """
    try:
        with lzma.open(archive) as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise DataError(f"{archive} is no archive of runs: it holds more than 1 GiB.")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as found:
            files: dict[str, bytes] = {}
            for one in found:
                # a sparse file has zeros that are not in the archive
                file = found.extractfile(one) if one.isreg() and not one.issparse() else None
                if file is None or not _NAME.fullmatch(one.name) or "/../" in one.name:
                    raise DataError(f"{archive} is no archive of runs: it holds {one.name}.")
                files[one.name] = file.read()
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise DataError(f"{archive} cannot be read as an archive of runs ({error}); fetch it again.") from None
    for name, content in files.items():
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content)
    return [place / str(number) for number in sorted({int(name.partition("/")[0]) for name in files})]


def _number_words(value: Any) -> Any:
    """Return an analysis with the words of texts named by their places; its own digest no longer holds."""
    if isinstance(value, list):
        return [_number_words(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _number_words(one) for name, one in value.items() if name not in (FILES, OWN)}
    return kept | ({"words": [str(place + 1) for place in range(len(kept["words"]))]} if "words" in kept else {})


def _seal_anew(path: Path, names: Iterable[str]) -> bytes:
    record: Mapping[str, object] = read_json(path)
    return encode_json(seal(record, path.parent, names), indent=1).encode()
