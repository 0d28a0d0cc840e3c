"""The reader of PAN's author profiles (2013 to 2016): the tweets of each author, and the author's age.

There is one XML file per author with a document per tweet, and `truth.txt` with lines `author:::gender:::age`.
"""

import html
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from headwise.errors import DataError
from headwise.input_files import is_file, open_input, read_numbered_lines

TRUTH = "truth.txt"
BETWEEN = ":::"
# Age of authors whose age is unknown.
UNKNOWN = "xx-xx"
# tags, but not text between "<" and ">" signs
TAG = re.compile(r"</?[A-Za-z][^<>]*>")
LONG_REFERENCE = re.compile(r"&#[0-9]{100,};?")


@dataclass(frozen=True)
class Profile:
    """One tweet with its author and the author's age; `number` counts an author's tweets."""

    author: str
    age: str
    text: str
    number: int
    path: Path


@dataclass(frozen=True)
class Profiles:
    """The tweets of all authors with a known age, and the number of those without, who are left out."""

    tweets: tuple[Profile, ...]
    ageless: int


def find_truth(folder: Path) -> Path | None:
    """Return the file of the authors' ages, or None if a folder holds no profiles."""
    found = folder / TRUTH
    return found if is_file(found) and any(folder.glob("*.xml")) else None


def read_profiles(folder: Path) -> Profiles:
    """Return the tweets of all authors without markup; empty tweets and authors of age XX-XX are left out.

    Raises:
        DataError: A line of the truth is malformed, an author has no file or no age, or a file is not XML; the message
            names it.
    """
    ages = _read_ages(folder / TRUTH)
    found: list[Profile] = []
    for path in sorted(folder.glob("*.xml")):
        # later corpora append the author's language and more to the name
        author = next((name for name in (path.stem, path.stem.partition("_")[0]) if name in ages), None)
        if author is None:
            raise DataError(f"{path}: {folder / TRUTH} has no line for author {path.stem!r}; add it or take the file.")
        found += _read_tweets(path, author, ages[author])
    present = {profile.author for profile in found}
    absent = next((author for author in ages if author not in present), None)
    if absent is not None:
        raise DataError(f"{folder / TRUTH} names author {absent!r:.60}, of whom {folder} holds no tweet; add the file.")
    tweets = tuple(profile for profile in found if profile.age != UNKNOWN)
    if not tweets:
        raise DataError(f"{folder / TRUTH} knows the age of no author; expected author{BETWEEN}gender{BETWEEN}age.")
    return Profiles(tweets, sum(age == UNKNOWN for age in ages.values()))


def _read_ages(path: Path) -> dict[str, str]:
    ages: dict[str, str] = {}
    for number, line in read_numbered_lines(path):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(BETWEEN)]
        if len(fields) < 3 or not fields[0] or not fields[2]:
            raise DataError(f"{path}, line {number}: {line[:60]!r}; expected author{BETWEEN}gender{BETWEEN}age.")
        if fields[0] in ages:
            raise DataError(f"{path}, line {number}: author {fields[0]!r:.60} occurs a second time; keep one line.")
        ages[fields[0]] = fields[2].lower()
    return ages


def _read_tweets(path: Path, author: str, age: str) -> list[Profile]:
    texts = []
    try:
        with open_input(path) as stream:
            for _, element in ET.iterparse(stream):
                if element.tag == "document":
                    texts.append(_clean("".join(element.itertext())))
                    element.clear()
    except (ET.ParseError, LookupError, ValueError, OSError) as error:
        # an encoding that is not known, or of several bytes, is named in the first line
        line = error.position[0] if isinstance(error, ET.ParseError) else 1
        raise DataError(
            f"{path}, line {line}: no XML that can be read ({error}); expected UTF-8 with a document a tweet: convert "
            "the file, or fetch it again."
        ) from None
    return [Profile(author, age, text, number, path) for number, text in enumerate(texts, start=1) if text]


def _clean(text: str) -> str:
    # Python reads no number of so many digits
    whole = LONG_REFERENCE.sub("\N{REPLACEMENT CHARACTER}", TAG.sub(" ", text))
    return " ".join(html.unescape(whole).split())
