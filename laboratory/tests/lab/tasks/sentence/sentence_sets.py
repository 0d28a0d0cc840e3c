"""Small sets of the sentence task, written to disk."""

from __future__ import annotations

from pathlib import Path

FILLERS = ("the", "a", "very", "quite", "this", "that", "food", "room", "service", "here", "was", "is")
TELLING = {"1": ("awful", "dirty"), "0": ("lovely", "clean")}


def sentence(number: int, label: str) -> str:
    """A text whose class one of its words tells."""
    words = [FILLERS[(number * 7 + place * place + number // 12) % len(FILLERS)] for place in range(3 + number % 6)]
    words.insert(number % len(words), TELLING[label][number // 2 % 2])
    return " ".join(words) + f" {number} ."


def write_texts(path: Path, count: int) -> Path:
    """A file of labels and texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{number % 2}\t{sentence(number, str(number % 2))}" for number in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_pairs(folder: Path, count: int) -> Path:
    """A folder like SNLI's, whose label is whether both texts have the same telling word."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, first in (("train", 0), ("dev", count), ("test", count + 20)):
        lines = []
        for number in range(first, first + (count if split == "train" else 20)):
            one, other = str(number % 2), str(number // 2 % 2)
            label = "entailment" if one == other else "contradiction"
            lines.append(f"{label}\t{sentence(number, one)}\t{sentence(number + 1, other)}")
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_profiles(folder: Path, authors: int = 12, tweets: int = 4) -> Path:
    """A folder like PAN's."""
    folder.mkdir(parents=True, exist_ok=True)
    truth = []
    for author in range(authors):
        age = ("18-24", "25-34")[author % 2]
        documents = "".join(
            f"<document id='{tweet}'><![CDATA[<p>tweet {tweet} of {author} &amp; friends</p>]]></document>"
            for tweet in range(tweets)
        )
        (folder / f"a{author}.xml").write_text(
            f"<author type='twitter'><documents>{documents}</documents></author>", encoding="utf-8"
        )
        truth.append(f"a{author}:::female:::{age}")
    (folder / "truth.txt").write_text("\n".join(truth) + "\n", encoding="utf-8")
    return folder
