"""`headwise roles`: what is printed, drawn and written is the masks, and what is missing is said."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

import headwise as hw
from headwise.cli.roles import choose_roles, find_cells, name_folder, show_roles
from lab.command import call, refused

TABLE = hw.roles.WordTable(["Old", "men", "wait", "."], [1, 2, 2, 2], ["amod", "nsubj", "ROOT", "punct"])
COUNTS = hw.roles.idf([["old", "men", "."], ["men", "."], ["wait", "."]])


def shown(table: hw.roles.WordTable, roles: hw.roles.Roles, folder: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_roles(table, roles, folder, console, command="headwise roles ...")
    return console.file.getvalue()


def grid_of(text: str, title: str) -> list[str]:
    """The rows of one printed role, its marks alone."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if title in line)
    start = lines[first].index(title)
    rows = [line[start : start + 16] for line in lines[first + 2 : first + 2 + len(TABLE)]]
    return ["".join(sign for sign in row if sign in "■□·") for row in rows]


def test_each_role_is_printed_as_its_mask(tmp_path: Path):
    text = shown(TABLE, choose_roles(TABLE, COUNTS, released=False), tmp_path)
    assert grid_of(text, "rare: 25 %") == ["■···"] * 4
    assert grid_of(text, "separator: 25 %") == ["···■"] * 4
    assert grid_of(text, "dependency: 62 %") == ["■■··", "■■■·", "·■■■", "··■■"]
    assert grid_of(text, "major: 75 %") == ["■■■·"] * 4
    assert grid_of(text, "window: 62 %") == ["■■··", "■■■·", "·■■■", "··■■"]


def test_rows_that_fall_back_are_told_from_allowed_ones(tmp_path: Path):
    table = TABLE[:3]
    (cells,) = find_cells(table, hw.roles.Roles(hw.roles.Separator()))
    assert cells.cells == ((1, 1, 1),) * 3
    assert cells.share == 0
    assert "□ □ □" in shown(table, hw.roles.Roles(hw.roles.Separator()), tmp_path)


@pytest.mark.full
def test_a_narrow_terminal_and_a_long_sentence_are_no_mess(tmp_path: Path):
    long = hw.roles.WordTable([f"w{i}" for i in range(60)], [0] * 60, ["x"] * 60)
    roles = choose_roles(long, None, released=True)
    assert "too wide for this terminal" in shown(long, roles, tmp_path, width=50)
    close = shown(long, roles, tmp_path, width=70)
    assert "■" in close
    assert max(map(len, close.splitlines()[:-1])) <= 70


@pytest.mark.full
def test_the_picture_of_a_long_text_is_bounded(tmp_path: Path):
    long = hw.roles.WordTable([f"w{i}" for i in range(200)], [0] * 200, ["x"] * 200)
    shown(long, choose_roles(long, None, released=False), tmp_path)
    (path,) = tmp_path.glob("*.png")
    height, width = matplotlib.image.imread(path).shape[:2]
    assert height < 2800
    assert width < 4000


@pytest.mark.full
def test_the_picture_and_the_page_are_whole(tmp_path: Path):
    table = hw.roles.WordTable(["<b>", "$x^2$", "&"], [0, 0, 0], ["ROOT", "amod", "punct"])
    shown(table, choose_roles(table, COUNTS, released=False), tmp_path / "new" / "folder")
    page = (tmp_path / "new" / "folder" / "roles.html").read_text(encoding="utf-8")
    assert "&lt;b&gt; $x^2$ &amp;" in page
    assert "Rare(share=0.1" in page
    assert "IDF(3 documents, 4 words)" in page
    picture = matplotlib.image.imread(tmp_path / "new" / "folder" / "roles.png")
    assert min(picture.shape[:2]) > 300
    blue = (abs(picture[..., :3] - [0x00 / 255, 0x72 / 255, 0xB2 / 255]).max(-1) < 0.02).mean()
    assert 0.02 < blue < 0.9
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["roles.html", "roles.png"]


def test_without_counts_the_rare_words_are_not_made_up(tmp_path: Path):
    roles = choose_roles(TABLE, None, released=False)
    assert roles.names == ("separator", "dependency", "major", "window")
    text = " ".join(shown(TABLE, roles, tmp_path).split())
    assert "rare: not shown" in text
    assert "--corpus FILE" in text
    assert "rare: not shown" in (tmp_path / "roles.html").read_text(encoding="utf-8")


def test_a_folder_is_named_after_the_sentence():
    assert name_folder("The old man, who bought a red car!") == "the-old-man-who-bought-a"
    assert name_folder("...") == "sentence"


def test_the_command_end_to_end_and_its_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("spacy")
    from roles import test_parser  # its toy component

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    test_parser.pipeline().to_disk("toy")
    Path("corpus.txt").write_text("the cat\n\nthe dog\n", encoding="utf-8")
    assert call("roles", "the cat sat", "--pipeline", "toy", "--corpus", "corpus.txt") == 0
    assert "rare: 33 %" in capsys.readouterr().out
    page = (tmp_path / "runs" / "roles" / "the-cat-sat" / "roles.html").read_text(encoding="utf-8")
    assert "headwise roles &#39;the cat sat&#39; --pipeline toy --corpus corpus.txt" in page
    assert "IDF(2 documents, 3 words)" in page

    Path("empty.txt").write_text("\n", encoding="utf-8")
    Path("latin.txt").write_bytes(b"caf\xe9")
    for words, said in (
        ((" ", "--pipeline", "toy"), "the sentence is empty"),
        (("a", "--pipeline", "absent"), "no spaCy pipeline could be loaded from 'absent'"),
        (("a", "--pipeline", "toy", "--corpus", "corpus.txt", "--idf", "corpus.txt"), "--corpus and --idf were both"),
        (("a", "--pipeline", "toy", "--corpus", "empty.txt"), "it holds no text"),
        (("a", "--pipeline", "toy", "--corpus", "latin.txt"), "latin.txt, line 1: not UTF-8"),
        (("a", "--pipeline", "toy", "--corpus", "absent.txt"), "absent.txt cannot be read"),
        (("a", "--pipeline", "toy", "--idf", "corpus.txt"), "corpus.txt holds no inverse"),
        (("a",), "missing option"),
    ):
        assert said in refused(capsys, "roles", *words)


def test_without_spacy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    import builtins

    original = builtins.__import__

    def without(name: str, *arguments, **settings):
        if name == "headwise.roles.spacy":
            raise ModuleNotFoundError("No module named 'spacy'", name="spacy")
        return original(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "spacy is not installed" in refused(capsys, "roles", "a", "--pipeline", "toy")
