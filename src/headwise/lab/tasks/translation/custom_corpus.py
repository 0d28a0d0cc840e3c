"""Custom corpora, and what `--data` may name: a known corpus, a custom folder, or two files."""

from pathlib import Path

from headwise.errors import DataError, SettingError
from headwise.input_files import describe_place, is_file
from headwise.lab.tasks.translation.corpora import CORPORA, Corpus, Layout, Part, find_files, find_present
from headwise.lab.tasks.translation.files import SEGMENTED

DEV_NAMES = "dev", "valid", "val"
FORMS = (
    f"a folder with the files of {', '.join(CORPORA)}; FOLDER:en-de for your own train.en and train.de; "
    "or two files, my.en,my.de"
)


def find_corpus(place: Path) -> tuple[Corpus, Path]:
    """Return the corpus at a place, and the folder its files are looked for in.

    Args:
        place: A folder with the files of a known corpus; `FOLDER:en-de` for your own `train.en` and `train.de`, and
            likewise dev (or valid or val) and test; or two files aligned by line, `my.en,my.de`, source first. A split
            that is not there is cut from training; see `make_custom_corpus`.

    Raises:
        DataError: There is no such place, or it holds no corpus that is known.
        SettingError: Both sides are the same.

    Example:
        >>> try:
        ...     find_corpus(Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).partition(";")[0])
        nowhere does not exist
    """
    if place.is_dir():
        return _known_corpus(place), place
    text = str(place)
    folder, _, direction = text.rpartition(":")
    if folder and Path(folder).is_dir():
        return make_folder_corpus(Path(folder), *_sides(Path(folder), direction)), Path(folder)
    if "," in text:
        return _two_files([Path(part.strip()) for part in text.split(",")])
    raise DataError(f"{folder or place} {describe_place(Path(folder or place))}; expected {FORMS}.")


def make_custom_corpus(train: Part, source_language: str, target_language: str, **splits: Part) -> Corpus:
    """Return a corpus of custom files; a dev or test split that is not given is cut from training.

    A cut split has at most 2,000 pairs and at most a twentieth of training. Pairs are drawn by a keyed hash of the
    source line, so that no source line of a cut split is in training.

    Args:
        train: The training files; absolute, or relative to the folder given with the corpus.
        source_language: Language translated from.
        target_language: Language translated into.
        **splits: `dev=` and `test=`, and further test sets by any other name.

    Example:
        >>> make_custom_corpus(Part("my.de", "my.en"), "de", "en", test=Part("t.de", "t.en")).layouts[0].test
        (Part(source='t.de', target='t.en'),)
    """
    given = {name: (part,) for name, part in splits.items()}
    dev, test = given.pop("dev", ()), given.pop("test", ())
    layout = Layout("own", (train,), dev, test, tuple(given.items()))
    return Corpus("own", source_language, target_language, (layout,))


def make_folder_corpus(folder: Path, source_language: str, target_language: str) -> Corpus:
    """Return a corpus of a custom folder: `train.de`, `train.en` and likewise dev (or valid or val) and test.

    Raises:
        SettingError: Both languages are the same.
        DataError: A training file is missing, a split has one side only, or dev is there under two names.
    """
    sides = source_language, target_language
    if source_language == target_language:
        raise SettingError(f"source and target language are both {source_language!r}; expected two.")

    def part(name: str) -> Part | None:
        there = {side: _find_side(folder, f"{name}.{side}") for side in sides}
        source, target = there.values()
        if source and target:
            return Part(source, target)
        for side, found in there.items():
            if found:
                raise DataError(f"{folder} has {found} but no {name}.{(set(sides) - {side}).pop()}.")
        return None

    train, test = part("train"), part("test")
    if train is None:
        raise DataError(f"{folder} lacks train.{sides[0]} and train.{sides[1]}, plain or with .gz.")
    devs = {name: kept for name in DEV_NAMES if (kept := part(name))}
    if len(devs) > 1:
        both = " and ".join(f"{name}.{sides[0]}" for name in devs)
        raise DataError(f"{folder} has both {both}; expected one of them.")
    found = {"dev": next(iter(devs.values()), None), "test": test}
    used = {name for kept in (train, *found.values()) if kept for name in (kept.source, kept.target)}
    absent = [name for name, kept in found.items() if kept is None]
    others = {path.name.removesuffix(".gz") for path in folder.iterdir()} - used
    idle = sorted(name for name in others if name.endswith(SEGMENTED))
    if absent and idle:
        raise DataError(
            f"{folder} has {idle[0]} and no {' and '.join(absent)} split, which would be cut from training; call the "
            f"segments {absent[0]}.{sides[0]}.sgm and {absent[0]}.{sides[1]}.sgm, or take them away."
        )
    return make_custom_corpus(train, *sides, **{name: kept for name, kept in found.items() if kept})


def _known_corpus(folder: Path) -> Corpus:
    faults = []
    for corpus in CORPORA.values():
        try:
            find_files(corpus, folder)
        except DataError as error:
            faults.append(str(error))
        else:
            return corpus
    sides = _languages(folder)
    if len(sides) > 1:
        one, other = sides[:2]
        raise DataError(
            f"{folder} has {' and '.join(f'train.{side}' for side in sides)}; say which is translated into "
            f"which: {folder}:{one}-{other} or {folder}:{other}-{one}."
        )
    raise DataError(f"{folder} holds no corpus that is known; expected {FORMS}. {faults[0]}")


def _two_files(files: list[Path]) -> tuple[Corpus, Path]:
    if len(files) != 2 or files[0] == files[1]:
        raise DataError(
            f"{','.join(map(str, files))} are {len(files)} files, {len(set(files))} of them different; expected two: "
            "source,target, such as my.en,my.de."
        )
    for path in files:
        if find_present(path.parent, str(path.absolute())) is None:
            raise DataError(
                f"{path} {describe_place(path)}; expected a text file, plain or with .gz, one sentence a line."
            )
    names = [path.name.removesuffix(".gz") for path in files]
    names = [next((name.removesuffix(end) for end in SEGMENTED if name.endswith(end)), name) for name in names]
    endings = [name.rpartition(".")[2] for name in names]
    # a.txt and b.txt differ in what comes before the ending
    languages = endings if endings[0] != endings[1] else names
    part = Part(*(str(path.absolute()) for path in files))
    return make_custom_corpus(part, *languages), files[0].parent


def _find_side(folder: Path, name: str) -> str | None:
    """Return the name of a side that is there, as lines or as segments."""
    forms = [form for form in (name, *(f"{name}{ending}" for ending in SEGMENTED)) if find_present(folder, form)]
    if len(forms) > 1:
        raise DataError(f"{folder} has both {' and '.join(forms)}; expected one of them.")
    return forms[0] if forms else None


def _sides(folder: Path, direction: str) -> tuple[str, str]:
    """Return source and target of `en-de`; a language may contain a hyphen, as in `pt-BR-en`."""
    parts = direction.split("-")
    cuts = [("-".join(parts[:cut]), "-".join(parts[cut:])) for cut in range(1, len(parts))]
    known = _languages(folder)
    fitting = [cut for cut in cuts if set(cut) <= set(known)]
    if not cuts or not all(direction.split("-")):
        raise DataError(f"{direction!r} is no direction; expected source-target, such as {folder}:en-de.")
    return (fitting or cuts)[0]


def _languages(folder: Path) -> list[str]:
    """Return the languages there are training files of, in order."""
    names = {path.name.removesuffix(".gz") for path in folder.glob("train.*") if is_file(path)}
    return sorted(name.removeprefix("train.") for name in names if name.count(".") == 1)
