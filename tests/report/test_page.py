from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cases import cases
from headwise.atomic import write_whole
from headwise.errors import DataError, SettingError
from headwise.report.html import Page

HOSTILE = "<script>alert('x')</script> & \"quoted\" </td></style> $x$ \x00"


def png() -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\0\0\0")) + chunk(b"IEND", b"")
    )


class Reader(HTMLParser):
    """Collects tags, attributes and text, and whether every opened element is closed."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page: Page) -> Reader:
    reader = Reader()
    reader.feed(page.render())
    reader.close()
    assert not reader.open
    return reader


def full_page(text: str) -> Page:
    page = Page(text)
    page.heading(text)
    page.heading(text, level=3)
    page.paragraph(text, kind="lead")
    page.paragraph(text)
    page.code(text)
    page.table([text, text], [[text, text]], align="lr", caption=text)
    page.figure(png(), caption=text, alt=text)
    return page


def test_hostile_text_stays_text_wherever_it_is_put():
    benign, hostile = read(full_page("benign")), read(full_page(HOSTILE))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in benign.tags]
    shown = HOSTILE.replace("\x00", "\ufffd")
    assert "".join(hostile.text).count(shown) == "".join(benign.text).count("benign")
    assert next(attributes["alt"] for tag, attributes in hostile.tags if tag == "img") == shown


def test_a_page_runs_no_script_and_fetches_nothing():
    reader = read(full_page("text"))
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in reader.tags}
    for _, attributes in reader.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "href"]
        assert (attributes.get("src") or "data:").startswith("data:")
    assert "url(" not in full_page("text").render()
    policy = next(found["content"] for _, found in reader.tags if found.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy


def test_a_table_aligns_its_columns_and_names_its_rows():
    page = Page("t")
    page.table(["arm", "accuracy"], [["plain", "98.1"]])
    reader = read(page)
    cells = [(tag, found["class"], found.get("scope")) for tag, found in reader.tags if tag in ("th", "td")]
    assert cells == [("th", "left", "col"), ("th", "right", "col"), ("th", "left", "row"), ("td", "right", None)]


def test_a_picture_is_as_wide_as_it_was_drawn():
    page = Page("t")
    # the first chunk begins with width and height
    page.figure(png()[:16] + (1600).to_bytes(4, "big") + png()[20:], caption="", alt="ten inches")
    assert '<img width="960" alt="ten inches"' in page.render()


@cases(
    ("add", "message"),
    [
        (lambda page: page.table(["a", "b"], [["1"]]), "a row has 1 cells; expected 2"),
        (lambda page: page.table(["a", "b"], [["1", "2", "3"]]), "a row has 3 cells; expected 2"),
        (lambda page: page.table(["a", "b"], [], align="l"), "align is 'l'; expected"),
        (lambda page: page.table(["a"], [], align="x"), "align is 'x'; expected"),
        (lambda page: page.table([], []), "align is 'l'; expected"),
        (lambda page: page.figure(b"GIF89a", caption="", alt="a"), "expected the bytes of a PNG"),
        (lambda page: page.figure(png(), caption="", alt=" "), "alt is empty"),
        (lambda page: page.heading("x", level=1), "level is 1"),
        (lambda page: page.paragraph("x", kind="big"), "kind is 'big'"),
        (lambda page: page.view("view", {}, script="'</script>'"), "ends an element"),
        (lambda page: page.view("view", {}, script="<!--"), "ends an element"),
        (lambda page: page.view("view", {}, script="", style="</style>"), "ends an element"),
        (lambda page: page.view("view", {"nan": float("nan")}, script=""), "cannot be written as JSON"),
    ],
)
def test_what_fits_no_page_is_refused(add: Callable[[Page], None], message: str):
    with pytest.raises(SettingError, match=message):
        add(Page("t"))


def test_writing_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text("old")
    page = Page("half a pair \ud800")
    page.write(path)
    assert path.read_bytes().startswith(b"<!DOCTYPE html>")
    assert [found.name for found in tmp_path.iterdir()] == ["page.html"]


def test_a_failed_write_is_one_sentence_and_keeps_the_old_file(tmp_path: Path):
    with pytest.raises(DataError, match=r"missing.*cannot be written \(No such file"):
        Page("t").write(tmp_path / "missing" / "page.html")
    folder = tmp_path / "page.html"
    folder.mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        write_whole(folder, b"new")
    assert [found.name for found in tmp_path.iterdir()] == ["page.html"]
