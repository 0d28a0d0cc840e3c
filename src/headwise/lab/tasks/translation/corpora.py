"""The corpora of the translation task as descriptions: languages, files of each split, cleaning, recipes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headwise.errors import DataError
from headwise.input_files import describe_place, is_file
from headwise.lab.data.downloads import Download, fetch
from headwise.lab.tasks.translation.cleaning import Cleaning
from headwise.lab.tasks.translation.recipes import (
    COMMON_CRAWL,
    CWMT,
    DEV_SETS,
    EUROPARL,
    MULTI30K,
    NEWS_COMMENTARY,
    UNITED_NATIONS,
)

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
    """Return the first complete layout of a corpus in `folder`, and the files of each of its splits.

    Raises:
        DataError: No layout is complete, a split is there in part, or one file is there in two forms. The message names
            what is missing.
    """
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
    """Fetch the files of a corpus into `folder` by their recipes; what is there already is not fetched again.

    Raises:
        DataError: A file has no recipe or cannot be fetched.
    """
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
    """Return the one form of a file that is there: as named or without the folder in front, plain or gzipped.

    Raises:
        DataError: Two forms are there.
    """
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


def _same_stem(*stems: str, source: str, target: str) -> Parts:
    return tuple(Part(f"{stem}.{source}", f"{stem}.{target}") for stem in stems)


def _english_german(*stems: str) -> Parts:
    return _same_stem(*stems, source="en", target="de")


def _newstest(year: int) -> Parts:
    stem = f"dev/newstest{year}-deen"
    return (Part(f"{stem}-ref.en.sgm", f"{stem}-src.de.sgm"),)


def _iwslt14() -> Corpus:
    def german_english(*stems: str) -> Parts:
        return _same_stem(*stems, source="de", target="en")

    def official(*names: str) -> Parts:
        return tuple(Part(f"xml/{name}.de-en.de.xml", f"xml/{name}.de-en.en.xml") for name in names)

    # in the order in which they make up the test set of 6,750 lines that the field reports on
    sets = ".dev2010", "X.dev2012", ".tst2010", ".tst2011", ".tst2012"
    test = official(*(f"IWSLT14.TED{name}" for name in sets))
    return Corpus(
        "iwslt14",
        "de",
        "en",
        (
            Layout("official", german_english("train.tags.de-en"), (), test, dev_every=23),
            Layout("partial", german_english("train_part"), german_english("valid"), german_english("test")),
        ),
        Cleaning(longest=175, ratio=1.5),
        by_hand=(
            "IWSLT14 has no published checksum and so no recipe: fetch "
            "http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz yourself and unpack it there "
            "(tar xzf de-en.tgz --strip-components=1): train.tags.de-en.{de,en} and IWSLT14.TED*.xml are read as they "
            "are."
        ),
    )


def _wmt_english_german(name: str, news: str, official: tuple[Parts, Parts], test: str, news_version: str) -> Corpus:
    """Return a corpus of Europarl, Common Crawl and News Commentary; `test` is the test set of the partial layout."""
    stems = "training/europarl-v7.de-en", "commoncrawl.de-en", news
    train, dev, held_out = (_english_german(stem) for stem in ("europarl20k", "newstest2013", test))
    partial = Layout("partial", train, dev, held_out)
    return Corpus(
        name,
        "en",
        "de",
        (Layout("official", _english_german(*stems), *official), partial),
        Cleaning(longest=250, ratio=1.5),
        (EUROPARL, COMMON_CRAWL, NEWS_COMMENTARY[news_version], DEV_SETS[name]),
    )


def _wmt14() -> Corpus:
    official = _english_german("dev/newstest2013"), _newstest(2014)
    return _wmt_english_german("wmt14", "training/news-commentary-v9.de-en", official, "newstest2014.first1000", "v9")


def _wmt16() -> Corpus:
    news = "training-parallel-nc-v11/news-commentary-v11.de-en"
    return _wmt_english_german("wmt16", news, (_newstest(2015), _newstest(2016)), "newstest2015.first1000", "v11")


def _wmt17() -> Corpus:
    def chinese_english(name: str) -> Parts:
        return (Part(f"dev/{name}-zhen-src.zh.sgm", f"dev/{name}-zhen-ref.en.sgm"),)

    cwmt = [name for download in CWMT for name, _ in download.members]
    chinese, english = ([name for name in cwmt if name.endswith("_en.txt") == wanted] for wanted in (False, True))
    train = (
        *_same_stem("training/news-commentary-v12.zh-en", "en-zh/UNv1.0.en-zh", source="zh", target="en"),
        *(Part(*pair) for pair in zip(chinese, english, strict=True)),
    )
    return Corpus(
        "wmt17",
        "zh",
        "en",
        (Layout("official", train, chinese_english("newsdev2017"), chinese_english("newstest2017")),),
        Cleaning(longest=250, ratio=3.0),
        (NEWS_COMMENTARY["v12"], UNITED_NATIONS, *CWMT, DEV_SETS["wmt17"]),
    )


def _multi30k() -> Corpus:
    names = "test_2017_flickr", "test_2017_mscoco", "test_2018_flickr"
    layout = Layout(
        "official",
        _english_german("train"),
        _english_german("val"),
        _english_german("test_2016_flickr"),
        tuple((name, _english_german(name)) for name in names),
    )
    return Corpus("multi30k", "en", "de", (layout,), downloads=MULTI30K)


CORPORA: dict[str, Corpus] = {corpus.name: corpus for corpus in (_multi30k(), _iwslt14(), _wmt14(), _wmt16(), _wmt17())}
