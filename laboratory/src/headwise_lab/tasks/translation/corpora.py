"""The corpora of the translation task as descriptions: languages, files of each split, cleaning, recipes.

Rules for which training pairs are kept: length in subwords, length ratio, duplicates.

Where the files of the published corpora are fetched from: pinned addresses, checksums and sizes.

The checksums of the WMT files are those TensorFlow Datasets has published with their addresses; those of Multi30k
are of the files at the named commit. A file whose checksum nobody published has no recipe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headwise.errors import DataError, require_integer, require_range
from headwise.input_files import describe_place, is_file
from headwise_lab.data.arrays import stable_key
from headwise_lab.data.downloads import Download, fetch


@dataclass(frozen=True)
class Cleaning:
    """Rules for training pairs; a pair with a blank side is always dropped.

    Lengths are in subwords, which suits languages without blanks too. (The scripts behind the published numbers count
    words for IWSLT14 and subwords for WMT.)

    Attributes:
        longest: Maximum number of subwords of a side.
        ratio: Maximum ratio of the longer to the shorter side; None for any.
        once: Whether repeated pairs are dropped.

    Raises:
        SettingError: `longest` is below 1 or `ratio` below 1.
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


STATMT = "http://www.statmt.org"
WMT = "http://data.statmt.org"
CWMT_SERVER = "ftp://cwmt-wmt:cwmt-wmt@nlp.nju.edu.cn/parallel"
MULTI30K_COMMIT = "a3d2e0d26b56f3846f66a952536ffed4e401d05a"


def _members(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, name.rpartition("/")[2]) for name in names)


MULTI30K = tuple(
    Download(
        f"https://raw.githubusercontent.com/multi30k/dataset/{MULTI30K_COMMIT}/data/task1/raw/{name}.gz", sha256, size
    )
    for name, sha256, size in (
        ("train.de", "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6", 637_044),
        ("train.en", "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f", 568_929),
        ("val.de", "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a", 24_681),
        ("val.en", "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28", 21_650),
        ("test_2016_flickr.de", "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8", 22_890),
        ("test_2016_flickr.en", "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9", 21_077),
        ("test_2017_flickr.de", "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee", 21_471),
        ("test_2017_flickr.en", "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074", 19_138),
        ("test_2017_mscoco.de", "799e4854c25d601cb6cb6be29eabe5667734c61ace2f495e03e429031a0bc338", 10_230),
        ("test_2017_mscoco.en", "aab300bfb4427697987e02cd0aacd44bfe8aa50456231b6474c08038bbed2b58", 8_844),
        ("test_2018_flickr.de", "ddd0130c7d97482dc5197a02141dae8dd79f20f03586c480d675c09a32daf608", 26_461),
        ("test_2018_flickr.en", "ef4f4844037d4c5dea75c9a8ed5fd78905967a26f67c255e230cc9780032654d", 23_514),
    )
)
EUROPARL = Download(
    f"{STATMT}/wmt13/training-parallel-europarl-v7.tgz",
    "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
    657_632_379,
    _members("training/europarl-v7.de-en.de", "training/europarl-v7.de-en.en"),
)
COMMON_CRAWL = Download(
    f"{STATMT}/wmt13/training-parallel-commoncrawl.tgz",
    "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
    918_311_367,
    _members("commoncrawl.de-en.de", "commoncrawl.de-en.en"),
)
NEWS_COMMENTARY = {
    "v9": Download(
        f"{STATMT}/wmt14/training-parallel-nc-v9.tgz",
        "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
        80_418_416,
        _members("training/news-commentary-v9.de-en.de", "training/news-commentary-v9.de-en.en"),
    ),
    "v11": Download(
        f"{WMT}/wmt16/translation-task/training-parallel-nc-v11.tgz",
        "cfe8ab047e05043476e498ee765c98e939c7b7d6d294e856344c84476b619d6a",
        75_178_032,
        _members(
            "training-parallel-nc-v11/news-commentary-v11.de-en.de",
            "training-parallel-nc-v11/news-commentary-v11.de-en.en",
        ),
    ),
    "v12": Download(
        f"{WMT}/wmt17/translation-task/training-parallel-nc-v12.tgz",
        "2b45f30ef1d550d302fd17dd3a5cbe19134ccc4c2cf50c2dae534aee600101a2",
        168_591_139,
        _members("training/news-commentary-v12.zh-en.zh", "training/news-commentary-v12.zh-en.en"),
    ),
}
UNITED_NATIONS = Download(
    "https://storage.googleapis.com/tfds-data/downloads/uncorpus/UNv1.0.en-zh.tar.gz",
    "6f9c6401d5f0a49b20661324570d99fb86822d82f974748a361e19b9b886dd49",
    1_386_685_703,
    _members("en-zh/UNv1.0.en-zh.zh", "en-zh/UNv1.0.en-zh.en"),
)
CWMT = tuple(
    Download(f"{CWMT_SERVER}/{name}.zip", sha256, size, _members(*(f"{name}/{member}" for member in members)))
    for name, sha256, size, members in (
        (
            "casia2015",
            "c939f1528f96c419e9bbffb9caad869616a969e7704ffac896e245a02aff59a9",
            98_159_063,
            ("casia2015_ch.txt", "casia2015_en.txt"),
        ),
        (
            "casict2011",
            "606adc0ccc5d8fc7c47f8589991286616342a1a379a571ce3038918731ae0182",
            166_957_775,
            ("casict-A_ch.txt", "casict-A_en.txt", "casict-B_ch.txt", "casict-B_en.txt"),
        ),
        (
            "casict2015",
            "eef8e25b297c1aff12ab24719247d3588e756d7a4e2c30d4d34fcb4d05ab1050",
            106_836_569,
            ("casict2015_ch.txt", "casict2015_en.txt"),
        ),
        (
            "datum2015",
            "654afce6731485c40ce856514ab80cd2bfd836126bcaf48cdb911ebc32b021a4",
            100_118_018,
            ("datum_ch.txt", "datum_en.txt"),
        ),
        (
            "datum2017",
            "737455c139596f4abf3b1da73bc38932b3ef9534549328eff47d867e29950ed2",
            99_278_067,
            tuple(f"Book{number}_{side}.txt" for number in range(1, 21) for side in ("cn", "en")),
        ),
        (
            "neu2017",
            "9f63020b6990cde85f5387b745e3ae37f1d6a49848b90a49bae28219fb65395f",
            148_681_171,
            ("NEU_cn.txt", "NEU_en.txt"),
        ),
    )
)


def _dev_sets(*names: str) -> Download:
    return Download(
        f"{WMT}/wmt19/translation-task/dev.tgz",
        "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
        38_654_961,
        _members(*(f"dev/{name}" for name in names)),
    )


# the German-English files of newstest are the English-German ones with the sides changed over
DEV_SETS = {
    "wmt14": _dev_sets(
        "newstest2013.en", "newstest2013.de", "newstest2014-deen-ref.en.sgm", "newstest2014-deen-src.de.sgm"
    ),
    "wmt16": _dev_sets(
        "newstest2015-deen-ref.en.sgm",
        "newstest2015-deen-src.de.sgm",
        "newstest2016-deen-ref.en.sgm",
        "newstest2016-deen-src.de.sgm",
    ),
    "wmt17": _dev_sets(
        "newsdev2017-zhen-src.zh.sgm",
        "newsdev2017-zhen-ref.en.sgm",
        "newstest2017-zhen-src.zh.sgm",
        "newstest2017-zhen-ref.en.sgm",
    ),
}


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
