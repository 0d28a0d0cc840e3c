"""The corpora of the translation task as descriptions: languages, files of each split, cleaning, recipes.

Rules for which training pairs are kept: length in subwords, length ratio, duplicates. `corpora.toml` has the published
corpora and where their files are fetched from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.errors import DataError, require_integer, require_range
from headwise.input_files import describe_place, is_file
from headwise_lab.data.arrays import stable_key
from headwise_lab.data.downloads import Download, fetch
from headwise_lab.experiment.scale import read_task_file


@dataclass(frozen=True)
class Cleaning:
    """Rules for training pairs; a pair with a blank side is always dropped.

    Lengths are in subwords, which suits languages without blanks too. (The scripts behind the published numbers count
    words for IWSLT14 and subwords for WMT.)

    Attributes:
        longest: Maximum number of subwords of a side.
        ratio: Maximum ratio of the longer to the shorter side; None for any.
        once: Whether repeated pairs are dropped.
    """

    longest: int = 250
    ratio: float | None = None
    once: bool = False

    def __post_init__(self) -> None:
        require_integer("longest", self.longest, low=1)
        if self.ratio is not None:
            require_range("ratio", self.ratio, low=1.0)


class Sieve:
    """Applies the rules to one pair after another and counts what they drop.

    Attributes:
        read: Pairs seen.
        dropped: How many each reason dropped: "blank", "too long", "ratio", "repeated".

    Example:
        >>> sieve = Sieve(Cleaning(longest=4, ratio=2.0))
        >>> sieve.keeps("a b", "c", 2, 1), sieve.keeps("a b c", "d", 3, 1), sieve.keeps("a b c d e", "f", 5, 1)
        (True, False, False)
        >>> sieve.read, dict(sieve.dropped)
        (3, {'ratio': 1, 'too long': 1})
    """

    def __init__(self, cleaning: Cleaning) -> None:
        self.cleaning = cleaning
        self.read = 0
        self.dropped: Counter[str] = Counter()
        # a 64-bit key a pair: 4.5 million take about 0.4 GB
        self._seen: set[int] = set()

    def keeps(self, source: str, target: str, source_length: int, target_length: int) -> bool:
        """Return whether a pair is kept, given its texts and its lengths in subwords."""
        self.read += 1
        reason = self._reason(source, target, source_length, target_length)
        if reason is not None:
            self.dropped[reason] += 1
        return reason is None

    def _reason(self, source: str, target: str, source_length: int, target_length: int) -> str | None:
        shorter, longer = sorted((source_length, target_length))
        if shorter == 0:
            return "blank"
        if longer > self.cleaning.longest:
            return "too long"
        if self.cleaning.ratio is not None and longer > self.cleaning.ratio * shorter:
            return "ratio"
        if self.cleaning.once:
            key = stable_key(source, target)
            if key in self._seen:
                return "repeated"
            self._seen.add(key)
        return None


Files = dict[str, tuple[tuple[Path, Path], ...]]


@dataclass(frozen=True)
class Part:
    """Two files aligned by line.

    Attributes:
        source: Name of the source side below the corpus's folder, plain or with `.gz`; a folder in front may be absent.
        target: Name of the target side.
    """

    source: str
    target: str


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Layout:
    """One arrangement of the files of a corpus in a folder.

    Attributes:
        name: Its name in the record of a run.
        train: Files of the training split, in order.
        dev: Files of the dev split; none cuts it from training.
        test: Files of the test split; none cuts it from training.
        further: Further test sets by name, prepared if their files are present.
        dev_every: Where dev is cut: every n-th training pair goes to it; 0 draws pairs by a keyed hash instead.
    """

    name: str
    train: Parts
    dev: Parts = ()
    test: Parts = ()
    further: tuple[tuple[str, Parts], ...] = ()
    dev_every: int = 0


@dataclass(frozen=True)
class Corpus:
    """A parallel corpus.

    Attributes:
        name: Its name.
        source_language: Language translated from, as in the file names.
        target_language: Language translated into.
        layouts: Possible layouts; the first complete one is used.
        cleaning: Rules for its training pairs.
        downloads: Recipes of its files.
        by_hand: Advice on files without a recipe.
    """

    name: str
    source_language: str
    target_language: str
    layouts: tuple[Layout, ...]
    cleaning: Cleaning = field(default_factory=Cleaning)
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""


def find_files(corpus: Corpus, folder: Path) -> tuple[Layout, Files]:
    """Return the first complete layout of a corpus in `folder`, and the files of each of its splits."""
    if not folder.is_dir():
        raise DataError(
            f"{folder} {describe_place(folder)}; expected a folder with the files of {corpus.name}.{_advice(corpus)}"
        )
    faults: list[str] = []
    for layout in corpus.layouts:
        found: Files = {}
        missing: list[str] = []
        for split, parts in _splits(layout):
            paths = [(find_present(folder, part.source), find_present(folder, part.target)) for part in parts]
            absent = [
                name
                for part, pair in zip(parts, paths, strict=True)
                for name, path in zip((part.source, part.target), pair, strict=True)
                if path is None
            ]
            if absent and len(absent) < 2 * len(parts):
                raise DataError(
                    f"{folder} has some files of the {split} split ({corpus.name}, layout {layout.name}) but lacks "
                    f"{_listing(absent)}; add or take away."
                )
            if not absent:
                found[split] = tuple((source, target) for source, target in paths if source and target)
            elif split in ("train", "dev", "test"):
                missing += absent
        if not missing:
            return layout, found
        faults.append(f"{_listing(missing)} (layout {layout.name})")
    raise DataError(f"{folder} lacks {'; or '.join(faults)}; expected each plain or with .gz.{_advice(corpus)}")


def fetch_corpus(corpus: Corpus, folder: Path, *, progress: bool = False) -> None:
    """Fetch the files of a corpus into `folder` by their recipes; what is there already is not fetched again."""
    if not corpus.downloads:
        raise DataError(f"{corpus.name}: {corpus.by_hand or 'it has no recipe.'}")
    for download in corpus.downloads:
        fetch(download, folder, progress=progress)


def _splits(layout: Layout) -> Iterator[tuple[str, Parts]]:
    yield "train", layout.train
    for name, parts in (("dev", layout.dev), ("test", layout.test), *layout.further):
        if parts:
            yield name, parts


def find_present(folder: Path, name: str) -> Path | None:
    """Return the one form of a file that is there: as named or without the folder in front, plain or gzipped."""
    names = (name,) if Path(name).is_absolute() else (name, Path(name).name)
    places = dict.fromkeys(folder / form for form in names)
    forms = [form for place in places for form in (place, place.with_name(f"{place.name}.gz")) if is_file(form)]
    if len(forms) > 1:
        raise DataError(f"{forms[0]} and {forms[1]} are both there; expected one of them: take the other away.")
    return forms[0] if forms else None


def _listing(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} ... {names[-1]} ({len(names)} files)"


def _advice(corpus: Corpus) -> str:
    return f" {corpus.by_hand}" if corpus.by_hand else ""


def _read_corpora() -> dict[str, Corpus]:
    found = read_task_file(Path(__file__).with_name("corpora.toml"))
    downloads = {
        name: Download(**{**one, "members": tuple((path, Path(path).name) for path in one.get("members", ()))})
        for name, one in found["downloads"].items()
    }
    return {name: _read_corpus(name, one, downloads) for name, one in found["corpora"].items()}


def _read_corpus(name: str, given: Mapping[str, Any], downloads: Mapping[str, Download]) -> Corpus:
    layouts = tuple(
        Layout(
            layout["name"],
            **{split: _pair(layout.get(split, ())) for split in ("train", "dev", "test")},
            further=tuple((split, _pair(pairs)) for split, pairs in layout.get("further", {}).items()),
            dev_every=layout.get("dev_every", 0),
        )
        for layout in given["layouts"]
    )
    recipes = tuple(downloads[one] for one in given.get("downloads", ()))
    cleaning = Cleaning(**given.get("cleaning", {}))
    sides = given["source_language"], given["target_language"]
    return Corpus(name, *sides, layouts, cleaning, recipes, given.get("by_hand", ""))


def _pair(names: Iterable[tuple[str, str]]) -> Parts:
    return tuple(Part(*pair) for pair in names)


CORPORA = _read_corpora()
