"""Whatever a command writes is there as a whole or not at all, at whichever write it fails or is killed."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwise.atomic import PARTIAL, SEAL, hold, require_folder_unchanged
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.run_folder import require_intact
from headwise_lab.tasks.graph2text.ratings import read_items, write_rating
from lab.cli.tiny_models import write_models
from lab.faults import KILLED, SERVED, Fault, run
from lab.tasks.classification.probing_toy import write_probing
from lab.tasks.graph2text.rated import write_answers, write_pair
from lab.tasks.lm.lm_toy import write_documents
from lab.tasks.translation.translation_toy import write_toy_corpus

# Each command is a process, and begins again for each of its writes.
pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[3]
# What differs from one call to the next: what takes time, names a time or a drawn name, or holds the digest of such.
DIFFERENT = re.compile(
    rf"shrinking\.|report\.html|\.png|log\.txt|(results?|progress|tuned|tree_depth)\.json|headwise\.json|{SEAL}"
)
DRAWN = re.compile(r"(?<=headwise)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Command:
    """A command that writes a place.

    Attributes:
        words: What is typed.
        out: The place.
        earlier: What is typed before, with another result in the same place; () for nothing.
        whole: Whether the place appears at once; else its files do, one by one.
    """

    words: tuple[str, ...]
    out: str = "out"
    earlier: tuple[str, ...] = ()
    whole: bool = True


TEXT = ("--text", "models/text.txt")
OUT = ("--out", "out")
ONE_RUN = ("--arms", "plain", "--seeds", "1", "--workers", "1")
PROBED = ("--layers", "0", "--heads", "none", "--workers", "1", "--sentences", "0")
KEPT = ("--from", str(ROOT / "laboratory" / "papers" / "diversity"))
RATE = ("rate", "rated/svgd/seed-0", "rated/plain/seed-0", "--data", "graphs.tsv", *OUT, "--items", "3")
INSPECT = ("inspect", "models/bert", *OUT, "--shown", "2", "--text")
COMMANDS = {
    "prune": Command(("prune", "models/llama", *TEXT, *OUT, "--lines", "8", "--by", "random")),
    "prune for headwise": Command(("prune", "models/bert", *TEXT, *OUT, "--lines", "8", "--by", "random")),
    "merge": Command(("merge", "models/llama", *TEXT, *OUT, "--lines", "8", "--kv-heads", "2")),
    "inspect": Command((*INSPECT, "models/few.txt"), earlier=(*INSPECT, "models/fewer.txt")),
    "roles": Command(
        ("roles", "a dog sees two cats", "--pipeline", "none", *OUT),
        earlier=("roles", "cats see a dog", "--pipeline", "none", *OUT),
    ),
    "prepare translation": Command(("prepare", "translation", "--data", "pairs", *OUT)),
    "prepare lm": Command(("prepare", "lm", "--data", "docs.jsonl", *OUT)),
    "prepare pretraining": Command(("prepare", "pretraining", "--data", "docs.jsonl", *OUT)),
    "show": Command(("show", "compared", "--page", "pages/page.html"), "pages"),
    "ratings": Command(("ratings", "rating/rating-key.json", "rating/saved.json", "--record"), "rated", whole=False),
    "reproduce": Command(("reproduce", "diversity/tuned-pairs", *KEPT, "--scale", "cpu", *OUT), whole=False),
    "download": Command(("download", "multi30k", *OUT), whole=False),
    "rate": Command(RATE, earlier=RATE),
    "probe": Command(("probe", "models/bert", "--data", "probing", *OUT, "--cache", "cache", *PROBED), whole=False),
    "compare": Command(("compare", "logic", *ONE_RUN, *OUT), whole=False),
    "tune": Command(("tune", "logic", "output", "--draws", "1", "--workers", "1", *OUT), whole=False),
}
# Every so many writes of some; every write of all is slow.
QUICK = (("inspect", 9), ("prepare translation", 29))
# What is unpacked for `reproduce` is many files written alike.
SLOW = [pytest.param(name, 17 if name == "reproduce" else 1, marks=pytest.mark.slow) for name in COMMANDS]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    root = tmp_path_factory.mktemp("given")
    write_models(root / "models")
    lines = (root / "models" / "text.txt").read_text().splitlines()
    (root / "models" / "few.txt").write_text("\n".join(lines[:4]))
    (root / "models" / "fewer.txt").write_text("\n".join(lines[4:7]))
    write_toy_corpus(root / "pairs")
    write_documents(root / "docs.jsonl", 250)
    (root / "served").mkdir()
    with zipfile.ZipFile(root / SERVED, "w") as archive:
        archive.writestr("a/train.de", "ein Haus\n" * 999)
    (root / "probing").mkdir()
    write_probing(root / "probing" / "tree_depth.txt", {"tr": 60, "va": 20, "te": 30}, seed=0)
    one, other, graphs = write_pair(root / "rated", root / "graphs.tsv")
    (root / "rating").mkdir()
    form, _ = write_rating(
        root / "rating", read_items(one, other, graphs), (one, other), ("svgd", "plain"), count=3, seed=1
    )
    write_answers(root / "rating" / "saved.json", form, "one", lambda _item: "A")
    (root / "pages").mkdir()
    assert run(root, ("compare", "logic", *ONE_RUN, "--out", "compared")).code == 0
    return root


def list_files(place: Path) -> dict[str, str]:
    """The digest of each file below a place, hidden ones as well."""
    paths = sorted(path for path in place.rglob("*") if path.is_file() and "events" not in path.parts)
    names = [DRAWN.sub("", path.relative_to(place).as_posix()) for path in paths]
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in zip(names, paths, strict=True)}


def list_same(files: dict[str, str]) -> dict[str, str]:
    """The files that another call of the command makes to the bit; of others the name."""
    return {name: "" if DIFFERENT.search(name) else digest for name, digest in files.items()}


def assert_whole(command: Command, out: Path, before: dict[str, str], expected: dict[str, str]) -> None:
    """What a command that failed has left is what was there before, or a result as a whole."""
    if not command.whole:
        for path in out.rglob("*.json"):
            if not any(part.startswith((".", "checkpoint-")) for part in path.relative_to(out).parts):
                json.loads(path.read_text())
        for path in out.rglob(run_folder.RESULT):
            require_intact(path.parent)
        return
    # the next process that writes a file takes over what a killed one has left
    found = {name: digest for name, digest in list_files(out).items() if not name.endswith(PARTIAL)}
    if found != before:
        assert list_same(found) == list_same(expected)
        require_folder_unchanged(out)


def assert_one_sentence(said: str) -> None:
    lines = [line for line in said.splitlines() if line.startswith("headwise: ")]
    assert "Traceback" not in said, said
    assert lines, said


@pytest.mark.parametrize("kills", [True, False], ids=["killed", "failing"])
@pytest.mark.parametrize(("name", "step"), [*QUICK, *SLOW])
def test_a_write_that_fails_or_is_the_last_leaves_nothing_half(
    name: str, step: int, kills: bool, given: Path, tmp_path: Path
):
    command = COMMANDS[name]
    start, work = tmp_path / "start", tmp_path / "work"
    shutil.copytree(given, start)
    if command.earlier:
        assert run(start, command.earlier).code == 0
    before = list_files(start / command.out)
    shutil.copytree(start, work)
    whole = run(work, command.words)
    assert whole.code == 0, whole.said
    expected, shown = list_files(work / command.out), sorted(path.name for path in work.iterdir())
    for number in itertools.count(1, step):
        shutil.rmtree(work)
        shutil.copytree(start, work)
        ended = run(work, command.words, Fault(number, kills))
        assert_whole(command, work / command.out, before, expected)
        if not kills and ended.code:
            assert_one_sentence(ended.said)
            # what can be resumed is kept
            assert not (work / ".out.partial").exists()
        if kills and ended.met:
            assert ended.code == KILLED
        again = run(work, command.words) if ended.code else ended
        # a folder that was whole before the process was killed is not written again
        if again.code == 0 or "is not an empty folder" not in again.said:
            assert again.code == 0, (number, again.said)
        assert list_same(list_files(work / command.out)) == list_same(expected), number
        assert sorted(path.name for path in work.iterdir()) == shown, number
        if not ended.met:
            break
    assert number >= 3


def test_a_place_that_another_process_writes_is_refused_until_that_has_ended(given: Path, tmp_path: Path):
    work, command = shutil.copytree(given, tmp_path / "work"), COMMANDS["prune"]
    with hold(work / "out"):
        refused = run(work, command.words)
    assert refused.code == 2
    assert refused.said.strip().endswith("wait until that has ended, or choose another place.")
    assert run(work, command.words).code == 0
    require_folder_unchanged(work / "out")


def test_a_sealed_folder_that_was_changed_is_refused(given: Path, tmp_path: Path):
    work = shutil.copytree(given, tmp_path / "work")
    assert run(work, COMMANDS["prune"].words).code == 0
    assert run(work, ("inspect", "out", "--text", "models/few.txt", "--out", "seen")).code == 0
    whole = shutil.copytree(work / "out", tmp_path / "whole")
    changes: dict[str, Callable[[Path], object]] = {
        "model.safetensors": lambda path: path.write_bytes(flip(path.read_bytes())),
        "tokenizer.json": lambda path: path.unlink(),
        "model-00002.safetensors": lambda path: path.write_bytes(b"half"),
        SEAL: lambda path: path.write_bytes(flip(path.read_bytes())),
    }
    for name, change in changes.items():
        shutil.rmtree(work / "out")
        change(shutil.copytree(whole, work / "out") / name)
        for words in (("inspect", "out", "--text", "models/few.txt"), ("prune", "out", *TEXT)):
            ended = run(work, (*words, "--out", "again"))
            assert ended.code == 2
            assert f"out/{name}" in ended.said
            assert ended.said.count("\n") == 1
            assert not (work / "again").exists()


def flip(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
