"""Write self-contained HTML pages: everything escaped, images embedded, no external resources.

A page is one file that can be mailed, opened from disk and printed. Its content security policy forbids the browser to
load anything, and to run any script except those of the page's own views, which are listed by their digests.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from headwise.atomic import write_whole
from headwise.errors import HeadwiseError, SettingError, require_integer
from headwise.input_files import encode_json

# Dots per inch of figures.
DPI = 160

ALIGNMENTS = {"l": "left", "r": "right", "c": "center"}
PNG = b"\x89PNG\r\n\x1a\n"


class Page:
    """A page, built from top to bottom and written once.

    Args:
        title: Title of the page, also its first heading.

    Example:
        >>> page = Page("Heads <of> a model")
        >>> page.table(["layer", "similarity"], [["0", "0.91"]], align="lr")
        >>> "Heads &lt;of&gt; a model" in page.render()
        True
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []
        self._scripts: dict[str, str] = {}
        self._styles: dict[str, str] = {}

    def heading(self, text: str, *, level: int = 2) -> None:
        """Add a heading; level 1 is the title."""
        require_integer("level", level, low=2, high=4)
        self._parts.append(f"<h{level}>{_escape(text)}</h{level}>")

    def paragraph(self, text: str, *, kind: str = "") -> None:
        """Add a paragraph.

        Args:
            text: Text of the paragraph.
            kind: "" for body text, "lead" for the key message, "note" for small print.
        """
        if kind not in ("", "lead", "note"):
            raise SettingError(f"kind is {kind!r}; expected '', 'lead' or 'note'.")
        self._parts.append(f'<p class="{kind}">{_escape(text)}</p>' if kind else f"<p>{_escape(text)}</p>")

    def code(self, text: str) -> None:
        """Add preformatted text."""
        self._parts.append(f'<pre tabindex="0"><code>{_escape(text)}</code></pre>')

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
        align = align or "l" + "r" * (len(header) - 1)
        if not header or len(align) != len(header) or set(align) - ALIGNMENTS.keys():
            raise SettingError(f"align is {align!r}; expected one of l, r, c for each of {len(header)} columns.")
        classes = [ALIGNMENTS[letter] for letter in align]
        body = []
        for row in rows:
            if len(row) != len(header):
                raise SettingError(f"a row has {len(row)} cells; expected {len(header)}, one per column.")
            first, *others = zip(classes, row, strict=True)
            body.append(
                "<tr>" + _make_cell("th", *first, scope="row") + "".join(_make_cell("td", *cell) for cell in others)
            )
        head = "".join(_make_cell("th", kind, text, scope="col") for kind, text in zip(classes, header, strict=True))
        title = f"<caption><div>{_escape(caption)}</div></caption>" if caption else ""
        self._parts.append(
            f'<div class="scroll" role="region" aria-label="{_escape(caption or self.title)}" tabindex="0">'
            f"<table>{title}<thead><tr>{head}</tr></thead>\n<tbody>"
            + "</tr>\n".join([*body, ""])
            + "</tbody></table></div>"
        )

    def figure(self, png: bytes, *, caption: str, alt: str) -> None:
        """Add a figure at the width it was drawn with, at `DPI` dots per inch, or at page width if that is less.

        Args:
            png: The bytes of a PNG file.
            caption: Caption of the figure.
            alt: Description for readers who cannot see it.

        Raises:
            SettingError: The bytes are not a PNG file, or `alt` is empty.
        """
        if not png.startswith(PNG):
            raise SettingError(f"the figure begins with {png[:8]!r}; expected the bytes of a PNG file.")
        if not alt.strip():
            raise SettingError("alt is empty; expected a description of the figure.")
        data = base64.b64encode(png).decode("ascii")
        # bytes 16 to 20 of a PNG hold its width in pixels; CSS has 96 pixels per inch
        width = round(int.from_bytes(png[16:20], "big") * 96 / DPI)
        self._parts.append(
            f'<figure><div class="scroll" tabindex="0"><img width="{width}" alt="{_escape(alt)}" '
            f'src="data:image/png;base64,{data}"></div><figcaption>{_escape(caption)}</figcaption></figure>'
        )

    def view(self, name: str, data: object, *, script: str, style: str = "") -> None:
        """Add an interactive view: an empty element that a script fills from data.

        The data is embedded as JSON in which no text can end or begin an element. The script must insert texts from it
        as text, never as markup.

        Args:
            name: Id of the element; the data is in the element with this id and "-data" appended.
            data: Anything `strict_json.encode_json` accepts.
            script: Source of the script; headwise's own, never a user's text.
            style: Style sheet of the view.

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
        self._scripts[name], self._styles[name] = script, style
        label = _escape(name)
        self._parts.append(
            f'<section id="{label}"><noscript><p class="note">This view needs JavaScript.</p></noscript></section>\n'
            f'<script type="application/json" id="{label}-data">{text}</script>'
        )

    def render(self) -> str:
        """Return the page as HTML."""
        title = _escape(self.title)
        digests = (hashlib.sha256(script.encode()).digest() for script in self._scripts.values())
        allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        scripts = f"; script-src {allowed}" if allowed else ""
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            '<meta http-equiv="Content-Security-Policy" '
            f"content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'{scripts}\">\n"
            f"<title>{title}</title>\n<style>{STYLE}{''.join(self._styles.values())}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
            + "\n".join(self._parts)
            + "\n</main>\n"
            + "".join(f"<script>{script}</script>\n" for script in self._scripts.values())
            + "</body>\n</html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the page atomically.

        Raises:
            DataError: The file cannot be written.
        """
        # an unpaired surrogate cannot be encoded as UTF-8
        write_whole(path, self.render().encode("utf-8", errors="replace"))


def _make_cell(tag: str, kind: str, text: str, *, scope: str = "") -> str:
    scoped = f' scope="{scope}"' if scope else ""
    return f'<{tag}{scoped} class="{kind}">{_escape(text)}</{tag}>'


def _escape(text: str) -> str:
    """Escape text for HTML; control characters, which HTML cannot represent, become a visible replacement."""
    shown = "".join("\ufffd" if ord(letter) < 32 and letter not in "\t\n" else letter for letter in text)
    return escape(shown, quote=True)


STYLE = """
:root { --paper: #fdfdfc; --ink: #1c1d1f; --soft: #5d6168; --line: #dcdde0; --tint: #f3f3f1; --accent: #0b5fa5; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e4e5e7; --soft: #a0a5ad; --line: #34383e; --tint: #1f2226; --accent: #7ab8f5; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55; -webkit-text-size-adjust: 100%;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; font-size: 16px; }
main { max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.75rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .4rem; }
h4 { font-size: 1rem; font-weight: 500; color: var(--soft); margin: 1.25rem 0 .3rem; }
p { max-width: 44rem; margin: 0 0 .9rem; overflow-wrap: break-word; }
p.lead { font-size: 1.125rem; }
p.note { font-size: .875rem; color: var(--soft); }
.scroll { overflow-x: auto; margin: .9rem 0 1.1rem; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; line-height: 1.25rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: .875rem; padding: 0 0 .4rem; }
caption div { position: sticky; left: 0; display: inline-block; max-width: min(44rem, calc(100vw - 4.5rem)); }
th, td { padding: .375rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 17rem; overflow-wrap: anywhere; }
td.right:last-child { white-space: nowrap; min-width: 0; }
thead th { border-bottom: 2px solid var(--line); color: var(--soft); font-weight: 600; vertical-align: bottom;
  white-space: normal; }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--paper); }
tbody tr:hover > * { background: var(--tint); }
.left { text-align: left; } .right { text-align: right; } .center { text-align: center; }
th:first-child { padding-left: 0; }
figure { margin: 1.2rem 0 1.6rem; }
figure img { display: block; min-width: 32rem; max-width: 100%; height: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 6px; }
figure .scroll { margin: 0; }
figcaption { max-width: 44rem; margin-top: .5rem; font-size: .875rem; color: var(--soft); }
pre { background: var(--tint); border-radius: 6px; padding: .75rem 1rem; overflow-x: auto; font-size: .85rem;
  line-height: 1.5; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
a { color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@media print { body { font-size: 11pt; } .scroll { overflow: visible; } h2 { break-after: avoid; } }
"""
