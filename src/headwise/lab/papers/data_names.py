"""What the data of a comparison is called: in the name of its folder, and in a record that others read.

Owns both names. Must not read data, only the record beside prepared data.
"""

from __future__ import annotations

import re
from pathlib import Path

from headwise.lab.experiment.run_folder import read_json

RECORD = "record.json"
# A layout of a few files of a corpus; what was trained on it was not trained on the corpus.
PARTIAL = "partial"
# Behind the names of sets that are one file each.
FORMS = (".txt", ".txt.gz")


def folder_word(data: Path | None) -> str:
    """Return what a comparison's folder calls its data: the name of the data's folder.

    >>> folder_word(Path("corpora/WMT 14 (parts)")), folder_word(None)
    ('WMT_14_parts', '')
    """
    return "" if data is None else re.sub(r"[^\w.+-]+", "_", data.resolve().name).strip("_")


def is_there(data: Path) -> bool:
    """Return whether there is data of that name: a folder or a file, or a file with .txt or .txt.gz behind it."""
    return data.exists() or any(data.with_name(data.name + form).is_file() for form in FORMS)


def corpus_name(fingerprint: str, data: Path | None, cache: Path) -> str:
    """Return the name of the corpus with this fingerprint, "" where the task has no corpora.

    Args:
        fingerprint: Of the data.
        data: The data's folder, which may be prepared data itself.
        cache: Folder that prepared data is kept in.
    """
    # what stands behind a plus is the digest of a parser
    prepared = fingerprint.partition("+")[0]
    places = [] if data is None else [data / RECORD]
    for path in (*places, *sorted(cache.glob(f"*/{RECORD}")), *sorted(cache.glob(f"*/*/{RECORD}"))):
        found = read_json(path) if path.exists() else {}
        if isinstance(found, dict) and found.get("fingerprint") == prepared and "corpus" in found:
            return "-".join([str(found["corpus"])] + [PARTIAL] * (found.get("layout") == PARTIAL))
    return ""
