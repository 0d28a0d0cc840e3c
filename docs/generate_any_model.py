"""Writes the tables of docs/any-model.md from those that the tests of layouts run over: `make api`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [path for path in map(str, (ROOT / "src", ROOT / "tests", ROOT / "docs")) if path not in sys.path]

import torch  # noqa: E402
from generate_pages import fill  # noqa: E402

import headwise as hw  # noqa: E402
from heads.families import FAMILIES  # noqa: E402
from heads.family import Family  # noqa: E402
from heads.refused import REFUSED  # noqa: E402
from heads.written import WRITTEN, Written, capture, find  # noqa: E402

PAGE = Path(__file__).parent / "any-model.md"


def render() -> str:
    """Return the page as it is, with its tables made anew."""
    return fill(PAGE.read_text("utf-8"), {"families": _supported(), "written": _written(), "refused": _refused()})


def _supported() -> str:
    lines = ["| family | attention | layout | heads | weights, bias | note |", "|---|---|---|---|---|---|"]
    lines += [_family(family) for family in FAMILIES]
    return "\n".join(lines)


def _reaches(family: Family) -> bool:
    """Return whether a forward of a family gives the weights of its heads."""
    model = family.build()
    try:
        with hw.Taps(hw.find_heads(model), weights=True):
            model(**family.inputs())
    except hw.errors.HeadwiseError:
        return False
    return True


def _family(family: Family) -> str:
    sites = hw.find_heads(family.build()).sites
    kinds = dict.fromkeys(site.kind for site in sites)
    layouts = dict.fromkeys(site.layout for site in sites)
    counts = dict.fromkeys(
        str(s.num_heads) if s.num_heads == s.key_value_heads else f"{s.num_heads}/{s.key_value_heads}" for s in sites
    )
    reached = "yes" if _reaches(family) else "refused"
    cells = (family.name, ", ".join(kinds), ", ".join(layouts), ", ".join(counts), reached, family.note)
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _written() -> str:
    lines = ["| attention | form | read | heads | weights |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_form, WRITTEN)])


def _form(form: Written) -> str:
    if form.refused:
        return f"| {form.name} | {form.form} | refused: {form.refused} | - | - |"
    model = form.build()
    heads = find(form, model)
    (site,) = heads.sites
    read = f"with the row that is printed, `{form.row}`" if form.row else f"as it is: {site.layout}"
    grouped = "" if site.num_heads == site.key_value_heads else f"/{site.key_value_heads}"
    with torch.no_grad():
        reached = "refused" if capture(heads, model, form.inputs()) is None else "yes"
    return f"| {form.name} | {form.form} | {read} | {site.num_heads}{grouped} | {reached} |"


def _refused() -> str:
    lines = ["| what | for example in | why | what to do |", "|---|---|---|---|"]
    lines += [f"| {entry.name} | {entry.families} | {entry.why} | {entry.way_out} |" for entry in REFUSED]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
