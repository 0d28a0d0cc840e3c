"""Self-contained HTML pages by the template `page.html`: everything escaped, images embedded, no external resources.

A page is one file that can be mailed, opened from disk and printed. Its content security policy forbids the browser to
load anything, and to run any script except the scripts of the page's own views, which are listed by their digests.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from headwise.atomic import write_whole
from headwise.errors import HeadwiseError, SettingError, require_choice, require_integer
from headwise.input_files import encode_json

# Dots per inch of figures.
DPI = 160
ALIGNMENTS = {"l": "left", "r": "right", "c": "center"}
# Characters of a text that is long in a cell.
LONG = 60
PNG = b"\x89PNG\r\n\x1a\n"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")


class Page:
    """A page, built from top to bottom and written once.

    Example:
        >>> page = Page("Heads <of> a model")
        >>> page.table(["layer", "similarity"], [["0", "0.91"]], align="lr")
        >>> "Heads &lt;of&gt; a model" in page.render()
        True
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[dict[str, Any]] = []

    def heading(self, text: str, *, level: int = 2) -> None:
        """Add a heading; level 1 is the title."""
        require_integer("level", level, low=2, high=4)
        self._parts.append({"kind": "heading", "level": level, "text": text})

    def paragraph(self, text: str, *, kind: str = "") -> None:
        """Add a paragraph: body text, the key message ("lead"), or small print ("note")."""
        require_choice("kind", kind, ("", "lead", "note"))
        self._parts.append({"kind": "paragraph", "look": kind, "text": text})

    def code(self, text: str) -> None:
        """Add preformatted text."""
        self._parts.append({"kind": "code", "text": text})

    def table(
        self, header: Sequence[str], rows: Iterable[Sequence[str]], *, align: str = "", caption: str = ""
    ) -> None:
        """Add a table whose first column names its rows; a wide table scrolls.

        Args:
            header: One text per column.
            rows: Rows with one text per column.
            align: One letter per column: l, r or c; "" aligns the first column left and the others right.
            caption: Caption of the table.

        Raises:
            SettingError: A row or `align` has another number of columns than the header.
        """
        align, rows = align or "l" + "r" * (len(header) - 1), list(rows)
        if not header or len(align) != len(header) or set(align) - ALIGNMENTS.keys():
            raise SettingError(f"align is {align!r}; expected one of l, r, c for each of {len(header)} columns.")
        uneven = next((row for row in rows if len(row) != len(header)), None)
        if uneven is not None:
            raise SettingError(f"a row has {len(uneven)} cells; expected {len(header)}, one per column.")
        sides = [ALIGNMENTS[letter] for letter in align]
        self._parts.append({"kind": "table", "header": header, "rows": rows, "sides": sides, "caption": caption})
        # on a narrow screen a row with long texts is a block
        self._parts[-1] |= {"long": LONG, "blocks": any(len(text) > LONG for row in rows for text in row)}

    def figure(self, png: bytes, *, caption: str, alt: str) -> None:
        """Add the bytes of a PNG at the width it was drawn with, at `DPI`, or at page width if that is less.

        Raises:
            SettingError: The bytes are not a PNG file, or `alt`, for readers who cannot see it, is empty.
        """
        if not png.startswith(PNG):
            raise SettingError(f"the figure begins with {png[:8]!r}; expected the bytes of a PNG file.")
        if not alt.strip():
            raise SettingError("alt is empty; expected a description of the figure.")
        # bytes 16 to 20 of a PNG hold its width in pixels; CSS has 96 pixels per inch
        width = round(int.from_bytes(png[16:20], "big") * 96 / DPI)
        data = base64.b64encode(png).decode("ascii")
        self._parts.append({"kind": "figure", "width": width, "data": data, "caption": caption, "alt": alt})

    def view(self, name: str, data: object, *, script: str, style: str = "") -> None:
        """Add an interactive view: an empty element with an id, which a script fills from the element "<id>-data".

        The data is embedded as JSON in which no text can end or begin an element. The script is headwise's own, never
        a user's text; it must insert texts from the data as text, never as markup.

        Raises:
            SettingError: The data is not valid JSON, or the script would end its own element.
        """
        if "</" in script or "<!--" in script or "</" in style:
            raise SettingError(f"the script or style of {name} holds '</' or '<!--', which ends an element of HTML.")
        try:
            text = encode_json(data, compact=True)
        except (TypeError, ValueError, HeadwiseError) as error:
            raise SettingError(f"the data of {name} cannot be written as JSON ({error}).") from None
        for sign in "<>&":
            text = text.replace(sign, f"\\u{ord(sign):04x}")
        self._parts.append({"kind": "view", "name": name, "data": text, "script": script, "style": style})

    def render(self) -> str:
        """Return the page as HTML."""
        from jinja2 import Environment

        views = [part for part in self._parts if part["kind"] == "view"]
        digests = (base64.b64encode(hashlib.sha256(view["script"].encode()).digest()).decode() for view in views)
        allowed = "; script-src " + " ".join(f"'sha256-{digest}'" for digest in digests) if views else ""
        # the environment escapes; HTML cannot represent control characters
        environment = Environment(
            autoescape=True,
            trim_blocks=True,
            keep_trailing_newline=True,
            finalize=lambda value: CONTROL.sub("\ufffd", value) if type(value) is str else value,
        )
        template = environment.from_string(resources.files("headwise.report").joinpath("page.html").read_text("utf-8"))
        return template.render(title=self.title, parts=self._parts, views=views, allowed=allowed)

    def write(self, path: Path) -> None:
        """Write the page atomically; raises `DataError` if that fails."""
        # an unpaired surrogate cannot be encoded as UTF-8
        write_whole(path, self.render().encode("utf-8", errors="replace"))
