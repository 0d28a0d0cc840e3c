"""The reproductions on texts: their ids, settings and figures, and one of each kind done at toy size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from headwise.plots import sentence_heatmap, to_png
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.reproduction import Part, Reproduction, Size, resize_scale
from headwise_lab.papers.run import do_plans, make_plans, report
from headwise_lab.results.cells import Number
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from lab.command import refused
from lab.tasks.sentence.sentence_sets import FILLERS, write_pairs, write_texts

pytest.importorskip("spacy")

IDS = [
    *(f"repulsive/table-{name}" for name in ("1", "6-sentences", "7", "9")),
    "repulsive/strength",
    *(f"repulsive/figure-{name}" for name in ("1", "3a", "4", "5", "6", "7", "8")),
    *(f"repulsive-v1/{name}" for name in ("table-6", "figure-9", "figure-10")),
]
TINY = ("epochs=1", "width=8", "units=4", "attention=4", "heads=4", "hidden=6", "train_examples=40", "batch_size=16")


def done(identifier: str, data: Path, out: Path, other: Path | None = None, parts: tuple[str, ...] = ()) -> dict:
    """A reproduction at toy size; its record."""
    found = REPRODUCTIONS[identifier].only(parts, "demo")
    options = ScaleOptions("demo", sizes=TINY, out_of_domain=other)
    plans = make_plans(found, "demo", seeds=1, data=data, out=out / "runs", workers=1, options=options)
    console = Console(record=True, width=200)
    assert do_plans(found, plans, console) == []
    report(found, "demo", plans, out / "pages", out / "record", console, "headwise reproduce")
    (path,) = (out / "record" / "results").glob("*.json")
    return json.loads(path.read_text()) | {"file": path.name}


def write_long(path: Path) -> Path:
    """Texts long enough for attention maps, of five classes."""
    lines = [
        f"{1 + n % 5}\t" + " ".join(FILLERS[(n * place + n // 12) % 12] for place in range(24)) + f" n{n}"
        for n in range(80)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_texts_of_another_kind_are_asked_for_before_anything_is_trained(tmp_path, capsys):
    yelp = write_texts(tmp_path / "yelp" / "all.tsv", 60).parent
    asked = ["reproduce", "repulsive/figure-5", "--scale", "demo", "--data", str(yelp), "--out", str(tmp_path / "out")]
    for more in ((), ("--dry-run",)):
        assert "name them: --out-of-domain" in refused(capsys, *asked, *more)
        assert "absent.tsv" in refused(capsys, *asked, "--out-of-domain", str(tmp_path / "absent.tsv"), *more)
    assert not (tmp_path / "out").exists()


def test_every_id_is_there_once_and_every_arm_of_a_claim_is_run():
    assert set(IDS) <= set(REPRODUCTIONS)
    for identifier in IDS:
        found = REPRODUCTIONS[identifier]
        for scale in found.scales:
            arms = found.arms_at(scale, SENTENCE_SCALES)
            for claim in found.claims_at(scale, SENTENCE_SCALES):
                for contrast in claim.contrasts:
                    one, other = (contrast.parts * 2)[:2]
                    assert contrast.arm in arms[one], (identifier, contrast.arm)
                    assert contrast.against in arms[other], (identifier, contrast.against)


def test_the_papers_scale_has_the_papers_sizes():
    parts = {part.name: part for part in REPRODUCTIONS["repulsive/table-1"].parts}
    sizes = {name: resize_scale(part.sizes["paper"], SENTENCE_SCALES) for name, part in parts.items()}
    assert [(one.hidden, one.attention, one.heads) for one in sizes.values()] == [
        (2000, 350, 30),
        (3000, 350, 30),
        (4000, 150, 30),
    ]
    bullying = REPRODUCTIONS["repulsive-v1/table-6"].parts[1]
    assert resize_scale(bullying.sizes["cpu"], SENTENCE_SCALES).positive == 0.117
    assert resize_scale(Size("cpu", sets=("heads=15",)), SENTENCE_SCALES).name == "cpu-heads=15"


@pytest.mark.usefixtures("inline")
def test_table_1_on_pairs_with_distances_beside_the_papers(tmp_path):
    write_pairs(tmp_path / "sets" / "snli", 60)
    found = done("repulsive/table-1", tmp_path / "sets", tmp_path, parts=("SNLI",))
    assert found["file"] == "table-1-demo.json"
    rows = {row[0]: row for row in found["published"]["rows"] if row[1] == "SNLI"}
    header = found["published"]["header"]
    assert header[-2:] == ["Dist, paper", "Dist (least to most), here"]
    assert rows["BiLSTM + RMA (SVGD)"][2] == "svgd:alpha=0.005,step_size=1.0"
    assert rows["BiLSTM + RMA (SVGD)"][-2] == {"value": 1.688, "digits": 3}
    assert rows["BiLSTM + RMA (SVGD)"][-1]["value"] > 0
    assert {"outputs-by-parameters-snli", "outputs-by-force-snli"} <= {
        picture["file"].removeprefix("table-1-demo-").removesuffix(".png") for picture in found["pictures"]
    }
    assert all((tmp_path / "record" / "results" / picture["file"]).exists() for picture in found["pictures"])
    # the runs of another table are shared
    plans = make_plans(
        REPRODUCTIONS["repulsive/table-7"].only(("SNLI",), "demo"),
        "demo",
        seeds=1,
        data=tmp_path / "sets",
        out=tmp_path / "runs",
        workers=1,
        options=ScaleOptions("demo", sizes=TINY),
    )
    assert len(plans[0].finished) == 2


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("identifier", "picture"),
    [
        ("repulsive/figure-1", "attention-plain-1"),
        ("repulsive-v1/figure-9", "attention-plain-3"),
        ("repulsive/figure-4", "reliability"),
        ("repulsive/figure-5", "entropy"),
    ],
)
def test_a_figure_is_drawn_and_recorded(identifier, picture, tmp_path):
    data = write_long(tmp_path / "long.tsv")
    found = done(identifier, data, tmp_path, other=write_long(tmp_path / "others.tsv"))
    names = [one["file"] for one in found["pictures"]]
    assert any(name.endswith(f"-{picture}.png") for name in names), names
    assert found["file"].startswith("v1-" if "v1" in identifier else "figure-")


@pytest.mark.usefixtures("inline")
def test_a_record_holds_no_text_of_the_data_and_the_users_own_folder_does(tmp_path, monkeypatch):
    drawn: dict[bytes, list[str]] = {}

    def kept(words: list[str], rows: object) -> object:
        figure = sentence_heatmap(words, rows)
        drawn[to_png(figure)] = words
        return figure

    monkeypatch.setattr("headwise_lab.papers.repulsive.figures.sentence_heatmap", kept)
    data = write_long(tmp_path / "long.tsv")
    words = set(data.read_text(encoding="utf-8").split())
    found = done("repulsive/figure-1", data, tmp_path)
    (one, *_) = found["pictures"]
    assert one["alt"].split("'")[1].isdigit()
    assert one["caption"].endswith("Words are named by their place in the text.")
    shown = drawn[(tmp_path / "record" / "results" / one["file"]).read_bytes()]
    assert shown == [str(place + 1) for place in range(len(shown))]
    (own,) = (tmp_path / "pages").glob("repulsive-figure-1-*/attention-plain-1.png")
    assert set(drawn[own.read_bytes()]) <= words
    assert len(drawn[own.read_bytes()]) == len(shown)


@pytest.mark.usefixtures("inline")
def test_table_9_tells_how_much_of_the_force_lengthens_heads(tmp_path):
    (tmp_path / "sets").mkdir()
    write_long(tmp_path / "sets" / "yelp" / "part1.tsv")
    found = done("repulsive/table-9", tmp_path / "sets", tmp_path, parts=("Yelp",))
    (shown,) = [claim["shown"] for claim in found["claims"] if "turns heads" in claim["statement"]]
    start = next(line["values"] for line in shown if "at the start" in line["label"])
    # the penalty turns heads and never lengthens them
    assert str(Number(**start["cosine-penalty:alpha=1.0,step_size=1.0"])) == "0"


@pytest.mark.usefixtures("inline")
def test_the_baseline_of_v1_table_6_stands_in_its_row(tmp_path, monkeypatch):
    base = REPRODUCTIONS["repulsive-v1/table-6"]
    small: Reproduction = dataclasses.replace(
        base, parts=tuple(Part(("plain", "cnn"), part.sizes, part.name) for part in base.parts), claims=()
    )
    monkeypatch.setitem(REPRODUCTIONS, base.id, small)
    folder = tmp_path / "sets" / "cyberbullying"
    folder.mkdir(parents=True)
    lines = [f"{n % 2}\t{'awful' if n % 2 else 'lovely'} {FILLERS[n % 12]} n{n}" for n in range(80)]
    (folder / "twitter.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = done(base.id, tmp_path / "sets", tmp_path, parts=("Twitter",))
    assert found["file"] == "v1-table-6-demo.json"
    row = next(row for row in found["published"]["rows"] if row[0] == "NBLR" and row[1] == "Twitter")
    assert row[2:4] == ["nb-lr", {"value": 0.9105, "digits": 4}]
    assert row[4]["value"] == 1.0
