"""The numbers of a reproduction's runs in one file, from which everything shown of it is computed again."""

import io
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headwise.atomic import write_whole
from headwise.digests import FILES, OWN, seal
from headwise.errors import DataError
from headwise.lab.experiment.run_folder import ANALYSIS, EPOCHS, PREDICTIONS, RESULT, VOCABULARY, read_json
from headwise.lab.results.runs import COMPARISON, TEST
from headwise.strict_json import encode_json

# Texts and weights stay out: answers are kept as numbers.
_OF_RUN = (RESULT, EPOCHS, PREDICTIONS)
_NAME = re.compile(
    rf"\d+/({COMPARISON}|{TEST}|[^/]+/seed-\d+/({RESULT}|{EPOCHS}|{PREDICTIONS}|{VOCABULARY}|{ANALYSIS}[\w-]+\.json))"
)
# The suffix of archives.
ARCHIVE = ".zip"
# The same runs give the same bytes.
_DATE = (1980, 1, 1, 0, 0, 0)
_MOST_BYTES = 1 << 30


def pack_runs(folders: Iterable[tuple[Path, Iterable[Path]]]) -> bytes:
    """Return the archive of the runs of each part: answers of each item, epochs, results and analyses.

    Args:
        folders: For each part the folder of its comparison, and those of its runs inside.
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number, (comparison, runs) in enumerate(folders):
            _add(archive, f"{number}/{COMPARISON}", _seal_anew(comparison / COMPARISON, (TEST,)))
            _add(archive, f"{number}/{TEST}", (comparison / TEST).read_bytes())
            for run in sorted(runs):
                place = f"{number}/{run.relative_to(comparison).as_posix()}"
                kept = [name for name in _OF_RUN[1:] if (run / name).exists()]
                _add(archive, f"{place}/{RESULT}", _seal_anew(run / RESULT, kept))
                for name in kept:
                    _add(archive, f"{place}/{name}", (run / name).read_bytes())
                if labels := _number_labels(run / VOCABULARY):
                    _add(archive, f"{place}/{VOCABULARY}", encode_json({"labels": labels}, indent=1).encode())
                for path in sorted(run.glob(f"{ANALYSIS}*.json")):
                    _add(
                        archive, f"{place}/{path.name}", encode_json(_number_words(read_json(path)), indent=1).encode()
                    )
    return stream.getvalue()


def unpack_runs(archive: Path, place: Path) -> list[Path]:
    """Write the runs of an archive below a folder, and return the folder of each part's comparison.

    Raises:
        DataError: The file is no archive of runs, or is damaged.
    """
    try:
        with zipfile.ZipFile(archive) as found:
            members = found.infolist()
            strange = [one.filename for one in members if not _NAME.fullmatch(one.filename) or "/../" in one.filename]
            if strange or sum(one.file_size for one in members) > _MOST_BYTES:
                raise DataError(f"{archive} is no archive of runs: it holds {(strange or ['more than 1 GiB'])[0]}.")
            for one in members:
                target = place / one.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                write_whole(target, found.read(one))
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{archive} cannot be read as an archive of runs ({error}); fetch it again.") from None
    numbers = sorted({int(one.filename.partition("/")[0]) for one in members})
    return [place / str(number) for number in numbers]


def _number_words(value: Any) -> Any:
    """Return an analysis with the words of texts named by their places; its own digest no longer holds."""
    if isinstance(value, list):
        return [_number_words(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _number_words(one) for name, one in value.items() if name not in (FILES, OWN)}
    return kept | ({"words": [str(place + 1) for place in range(len(kept["words"]))]} if "words" in kept else {})


def _number_labels(path: Path) -> list[str]:
    """Return a number for each label of a vocabulary; none where there are no labels."""
    kept = read_json(path) if path.exists() else {}
    return [str(place) for place in range(len(kept.get("labels", ())))]


def _seal_anew(path: Path, names: Iterable[str]) -> bytes:
    record: Mapping[str, object] = read_json(path)
    return encode_json(seal(record, path.parent, names), indent=1).encode()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED, compresslevel=9)
