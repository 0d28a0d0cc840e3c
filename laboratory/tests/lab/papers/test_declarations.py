"""Tables and figures as data: one is added, run and judged by text alone; a misspelling is refused with its place."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from headwise.errors import SettingError
from headwise_lab.papers.claims import Contrast, Shown, show_step_times
from headwise_lab.papers.declarations import SIZES, parse_file, read_file
from headwise_lab.papers.reproduction import Column, PaperRow, Size
from headwise_lab.papers.run import make_plans, report
from lab.results.synthetic_comparison import Drawn, write_comparison

KNOWN = tomllib.loads(SIZES.read_text(encoding="utf-8"))
TABLE = """
[words]
longest = "em:layers={two}"

[lists]
sets = [{ set = "one", alpha = "1" }, { set = "two", alpha = "0.5" }]

["mine/table-1"]
title = "A table of mine"
source = "mine"
task = "classification"
extra = "nothing"
arms = "plain <output|em>:kinds=self {longest} svgd:alpha={alpha}"
sizes = "set"
scales = ["demo", "cpu"]
parts = [{ each = "sets", name = "{set}", corpus = "{set}", sets = ["epochs=2"] }]
groups = { Both = ["one", "two"] }

["mine/table-1".published]
on = "data of mine"
columns = ["accuracy", { title = "Dist", measure = "distance" }]
rows = [["Plain", "plain"]]

["mine/table-1".published.cells]
one = [["1.0", "2.0"]]

[["mine/table-1".claims]]
states = "EM is better."
compare = [
  "em:kinds=self > plain",
  { each = "sets", arms = "svgd:alpha={alpha} > plain", in = "{set}", by = "distance" },
]
in = "all"
shows = [
  { step_times = "plain", in = "Both" },
  { number = "OE", label = "OE", arms = "plain", in = "one", digits = 3, scale = 100 },
  { least = "NLL", arms = "plain", in = "all" },
]

["mine/table-2"]
like = "mine/table-1"
title = "Another"
sizes = "SICK"
scales = []
parts = [{ name = "one", folds = 10, sets = ["heads=2"] }, { name = "two" }]
"""


def test_a_table_has_what_its_text_says():
    first, second = parse_file(TABLE, KNOWN).values()
    one, two = first.parts
    assert one.arms == ("plain", "output:kinds=self", "em:kinds=self", "em:layers={two}", "svgd:alpha=1")
    assert (two.name, two.arms[-1]) == ("two", "svgd:alpha=0.5")
    assert two.sizes == {name: Size(name, corpus="two", sets=("epochs=2",)) for name in ("demo", "cpu")}
    (claim,) = first.claims
    assert claim.contrasts == (
        *(Contrast("em:kinds=self", "plain", part=part) for part in ("one", "two")),
        Contrast("svgd:alpha=1", "plain", part="one", measure="distance"),
        Contrast("svgd:alpha=0.5", "plain", part="two", measure="distance"),
    )
    assert claim.shown == (
        *(show_step_times(("plain",), part) for part in ("one", "two")),
        Shown("OE", ("plain",), ("one",), "OE", 3, 100),
        Shown("NLL", ("plain",), ("one", "two"), least=True),
    )
    assert first.published is not None
    assert first.published.columns == (Column("accuracy"), Column("Dist", measure="distance"))
    assert first.published.rows == (PaperRow("Plain", "plain", ("1.0", "2.0"), "one"),)
    assert (second.title, second.extra, second.claims[0].statement) == ("Another", "nothing", "EM is better.")
    assert second.parts[0].sizes["cpu"] == Size("cpu", corpus="sick", folds=10, sets=("epochs=12", "heads=2"))


OWN = """
["mine/accuracy"]
title = "Which methods help"
source = "Mine, Table 1"
task = "logic"
extra = "nothing"
arms = "plain output em"
sizes = "demo"
published = { on = "data of mine", columns = ["accuracy"], rows = [["Plain", "plain", "80.1"], ["EM", "em", "99.9"]] }

[["mine/accuracy".claims]]
states = "Each method helps."
compare = "output em > plain"
"""


def test_a_table_is_run_judged_and_shown_from_its_file_alone(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(OWN)
    (table,) = read_file(tmp_path / "mine.toml").values()
    plans = make_plans(table, "demo", seeds=5, data=None, out=tmp_path / "runs", workers=1)
    arms = (Drawn("plain", None), Drawn("output", effect=0.8), Drawn("em", effect=0.8))
    write_comparison(plans[0].comparison.out, arms, items=60)
    found = report(table, "demo", plans, tmp_path / "runs", tmp_path / "paper", Console(quiet=True), "command")
    assert [one.verdict for one in found.judged] == ["better, by less than published"]
    page = (tmp_path / "paper" / "RESULTS.md").read_text()
    for said in ("## mine/accuracy at scale demo: Which methods help", "| Each method helps. |", "| EM | em | 99.9 |"):
        assert said in page
    assert (tmp_path / "paper" / "results" / "accuracy-demo.json").exists()


REFUSED = [
    ("title =", "titel =", "mine.toml, mine/table-1, title: Field required"),
    ('sizes = "set"', 'sizes = "sett"', "mine.toml, mine/table-1: 'sett' is not defined"),
    ('each = "sets", name', 'each = "setts", name', "'setts' is not defined"),
    ('like = "mine/table-1"', 'like = "mine/table-7"', "'mine/table-7' is not defined"),
    ("states = ", "state = ", r"claims\.0\.states: Field required"),
    ("digits = 3", 'digits = "three"', r"shows\.1\.digits: .*integer.*three"),
    ("folds = 10", "fold = 10", r"parts\.0\.fold: Extra inputs"),
    ('"em:kinds=self > plain"', '"em:kinds=self plain"', "expected arms = .* or doses = "),
    ('"em:kinds=self > plain"', '"a > b > c"', "expected arms = .* or doses = "),
    ('in = "all"\nshows', 'in = "three"\nshows', "part is 'three'; expected one of one, two"),
    ('rows = [["Plain", "plain"]]', 'rows = [["Plain"]]', "published: .*expected rows of name, arm"),
    ('one = [["1.0", "2.0"]]', 'one = [["1.0"]]', "expected 2 cells for each row in one"),
    ('like = "mine/table-1"', 'like = "mine/table-2"', "is like mine/table-2, which is like it"),
    ('sets = [{ set = "one"', 'sets = ["one", { set = "one"', r"sets\.0: .*dictionary"),
    ('longest = "em', 'longest = 3 # "em', "longest: .*string"),
    (
        "parts = [{ each",
        'functions = { drawn = "data:os.system" }\nparts = [{ each',
        "function is 'data:os.system'",
    ),
    (
        "parts = [{ each",
        'functions = { drawn = { call = "repulsive.figures:OutputPages", x = 1 } }\nparts = [{ each',
        "cannot be called",
    ),
    ("parts = [{ each", 'functions = { drown = "diversity.doses:draw_heads" }\nparts = [{ each', "functions.drown"),
    ('["mine/table-2"]', '["table-2"]', "has the table 'table-2'; expected an id of its own"),
    ('["mine/table-2"]', '["old/table-1"]', "has the table 'old/table-1'; expected an id of its own"),
    ("[words]", "words = 1\n[word]", "words|word"),
]


def test_what_is_misspelled_is_refused_with_its_place():
    for old, new, said in REFUSED:
        assert old in TABLE
        with pytest.raises(SettingError, match=said):
            parse_file(TABLE.replace(old, new), KNOWN, "mine.toml", taken=["old/table-1"])
