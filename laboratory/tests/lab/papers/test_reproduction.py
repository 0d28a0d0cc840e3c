"""Reproductions end to end: runs shared and done once, records, figures, and the RESULTS.md of each paper."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import matplotlib.axes
import pytest
from rich.console import Console

from headwise.errors import DataError, SettingError
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers import run as reproduce
from headwise_lab.papers.data import find_corpus_name, name_data
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.figures import draw_curve
from headwise_lab.papers.pages import render
from headwise_lab.papers.records import Reproduced, build_published_grid
from headwise_lab.papers.reproduction import Column, PaperRow, Part, Published, Reproduction, Size
from headwise_lab.papers.run import Plan, do_plans, make_plans, report, show_list, show_plans
from headwise_lab.results.cells import NONE, Grid
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.runs import read_results
from headwise_lab.results.table import make_table
from lab.results.synthetic_comparison import PAPER, Drawn, write_comparison
from lab.tasks.translation.translation_toy import make_demo_smallest, parse_without_spacy, write_toy_corpus

PAPERS = Path(__file__).parents[4] / "laboratory" / "papers"
TRANSLATED = [name for name, reproduction in REPRODUCTIONS.items() if reproduction.task == "translation"]
QUICK = {"repulsive/table-2", "diversify/figure-3"}


def console() -> Console:
    return Console(record=True, width=160)


def plans_of(
    name: str,
    out: Path,
    data: Path | None = None,
    seeds: int = 5,
    scale: str = "demo",
    options: ScaleOptions | None = None,
) -> tuple[Plan, ...]:
    return make_plans(REPRODUCTIONS[name], scale, seeds=seeds, data=data, out=out, workers=1, options=options)


def written(name: str, out: Path, plans: tuple[Plan, ...], paper: Path, screen: Console, scale: str = "demo"):
    return report(REPRODUCTIONS[name], scale, plans, out, paper, screen, f"headwise reproduce {name}")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_corpus(tmp_path_factory.mktemp("corpus") / "pairs")


def test_a_reproduction_writes_its_record_and_the_page_of_the_paper(tmp_path):
    plans = plans_of("diversify/figure-4", tmp_path)
    write_comparison(plans[0].comparison.out, PAPER, bins=range(1, 13), items=60)
    screen = console()
    written("diversify/figure-4", tmp_path, plans, tmp_path / "paper", screen)
    page = read_pages(tmp_path / "paper")
    record = json.loads((tmp_path / "paper" / "results" / "figure-4-demo.json").read_text())
    assert "Aggregation performs better on long" in screen.export_text()
    for claim in record["claims"]:
        assert claim["statement"] in page
        assert claim["verdict"] in page
    assert "headwise reproduce diversify/figure-4" in page
    assert "**Not finished: 5 runs** (svgd-relative seed 0, " in page
    # the folder's other arms belong to other comparisons
    assert "svgd:alpha=3" not in page
    assert (tmp_path / "diversify-figure-4-demo" / "report.html").exists()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TRANSLATED]
)
def test_every_reproduction_of_translation_runs_from_data_to_results(name, corpus, tmp_path, monkeypatch):
    reproduction = REPRODUCTIONS[name]
    # what a head is worth is measured where the score is above zero
    measured = reproduction.analysis == "redundancy"
    done = make_demo_smallest(monkeypatch, **({"epochs": 20, "train_examples": 200} if measured else {}))
    if measured:
        corpus = write_toy_corpus(tmp_path / "easy", words={"red": "rot", "dog": "hund"}, longest=8)
    parse_without_spacy(monkeypatch)
    plans = plans_of(name, tmp_path, corpus, seeds=1, options=ScaleOptions("demo", pipeline=corpus))
    screen = console()
    assert do_plans(reproduction, plans, screen) == []
    found = written(name, tmp_path, plans, tmp_path / "paper", screen)
    page = read_pages(tmp_path / "paper")
    (kept,) = (tmp_path / "paper" / "results").glob("*-demo-multi30k.json")
    for claim in reproduction.claims_at("demo", found_scales(reproduction)):
        assert claim.statement in page
    assert not any(
        "not run" in one["reason"] for claim in json.loads(kept.read_text())["claims"] for one in claim["contrasts"]
    )
    for part, names in reproduction.arms_at("demo", found_scales(reproduction)).items():
        assert {run.arm for run in found.evidence[part].results.runs} == {"copy", *names}
    if reproduction.published is not None:
        assert "Ours are on other data or another size" in page
    if reproduction.measures:
        # a curve over parts
        assert any(one.name.endswith("-by-part") for one in found.pictures) == (len(plans) > 1)
        assert all((tmp_path / "paper" / "results" / found.picture_file(one)).exists() for one in found.pictures)
        assert all(found.evidence[part].mean("plain", reproduction.measures[0]) is not None for part in found.evidence)
    before = len(done)
    assert do_plans(reproduction, plans, screen) == []
    assert len(done) == before


def found_scales(reproduction: Reproduction):
    return reproduce.named_task(reproduction.task).scales


@pytest.mark.skipif("HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with Multi30k")
def test_a_reproduction_runs_on_multi30k(tmp_path, monkeypatch):
    make_demo_smallest(monkeypatch)
    name, data = "repulsive/table-6", Path(os.environ["HEADWISE_DATA"]) / "mt" / "multi30k"
    plans = plans_of(name, tmp_path, data, seeds=1)
    screen = console()
    assert do_plans(REPRODUCTIONS[name], plans, screen) == []
    found = written(name, tmp_path, plans, tmp_path / "paper", screen)
    assert found.data == {"": "multi30k"}
    assert "IWSLT14 De-En, Transformer-small) beside ours (multi30k, scale demo)" in read_pages(tmp_path / "paper")
    losses = [found.evidence[""].mean(arm, "NLL") for arm in ("plain", "svgd", "sgld")]
    # a model that knows nothing gives each of 300 subwords the same chance; smaller steps have barely begun
    assert all(3.0 < loss < 7.0 for loss in losses)


def test_a_part_is_run_alone_and_claims_that_reach_into_another_are_left_out(corpus, tmp_path, monkeypatch):
    done = make_demo_smallest(monkeypatch)
    name, screen = "repulsive/figure-3b", console()
    whole = REPRODUCTIONS[name]

    def chosen(*parts: str) -> tuple[Plan, ...]:
        return make_plans(whole.only(parts, "demo"), "demo", seeds=1, data=corpus, out=tmp_path, workers=1)

    every = [plan.part.name for plan in chosen()]
    assert every == ["1 head", "2 heads", "4 heads", "8 heads", "16 heads"]
    # in the paper's order, whatever the order they were named in
    assert [plan.part.name for plan in chosen("4 heads", "1 head")] == ["1 head", "4 heads"]
    plans = chosen("2 heads")
    assert do_plans(whole, plans, screen) == []
    names = [f"2 heads: {arm.name} seed 0" for arm in plans[0].comparison.arms]
    assert done == ["2 heads: copy", *names, *(f"step-time of {name}" for name in names)]
    report(whole.only(["2 heads"], "demo"), "demo", plans, tmp_path, tmp_path / "paper", screen, "headwise reproduce")
    (kept,) = (tmp_path / "paper" / "results").glob("*.json")
    claims = json.loads(kept.read_text())["claims"]
    assert 0 < len(claims) < len(whole.claims)
    lack = (
        "Not asked for: 1 head, 4 heads, 8 heads, 16 heads. Claims, and families of tests, are about the other parts."
    )
    assert lack in read_pages(tmp_path / "paper")
    assert lack in " ".join(screen.export_text().split())
    said = [text for claim in claims for text in [claim["verdict"], *(one["reason"] for one in claim["contrasts"])]]
    assert not any("not run" in text for text in said)
    # the other parts find what is there, and do the rest
    assert do_plans(whole, chosen("1 head", "2 heads"), screen) == []
    assert [job for job in done if job.startswith("1 head")] == ["1 head: copy", "1 head: plain seed 0"]
    assert len([job for job in done if job.startswith("2 heads")]) == 1 + len(plans[0].comparison.arms)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("repulsive/table-2", "bigg", r"part is 'bigg'; expected .*base.*big"),
        # Transformer-small is a part at the paper's scale alone
        ("repulsive/table-2", "small", r"part is 'small'; expected .*base.*big"),
        ("repulsive/table-6", "small", r"part is 'small'; repulsive/table-6 has one part alone: leave --part out\."),
        ("repulsive/table-6", "", r"part is ''; repulsive/table-6 has one part alone"),
    ],
)
def test_a_part_that_is_not_there_is_refused(name, part, message):
    with pytest.raises(SettingError, match=message):
        REPRODUCTIONS[name].only([part], "demo")


def test_sizes_that_change_what_an_arm_means_are_refused(corpus, tmp_path):
    options = ScaleOptions("demo", sizes=("encoder_layers=4",))
    with pytest.raises(SettingError, match=r"are not those of scale demo: .*layers=.*; expected sizes that leave"):
        make_plans(
            REPRODUCTIONS["diversify/table-4"],
            "demo",
            seeds=1,
            data=corpus,
            out=tmp_path,
            workers=1,
            options=options,
        )


def test_runs_are_shared_between_reproductions_and_nothing_is_done_twice(corpus, tmp_path, monkeypatch):
    done = make_demo_smallest(monkeypatch)
    for name in ("diversify/table-2", "diversify/figure-3"):
        assert do_plans(REPRODUCTIONS[name], plans_of(name, tmp_path, corpus, seeds=1), console()) == []
    trained = [name for name in done if " of " not in name]
    assert len(trained) == len(set(trained))
    arms = {arm.name for name in ("diversify/table-2", "diversify/figure-3") for arm in arms_of(name, tmp_path, corpus)}
    assert set(trained) == {"copy", *(f"{arm} seed 0" for arm in arms)}
    assert sum(name.startswith("head-vectors of") for name in done) == 4
    (folder,) = tmp_path.glob("translation-*")
    assert folder.name == "translation-demo-pairs"


def arms_of(name: str, out: Path, corpus: Path):
    return plans_of(name, out, corpus, seeds=1)[0].comparison.arms


def test_at_the_papers_scale_each_corpus_has_its_folder(tmp_path):
    for name in ("iwslt14", "wmt14"):
        (tmp_path / name).mkdir()
    plans = plans_of("repulsive/table-2", tmp_path / "out", tmp_path, scale="paper")
    assert [plan.comparison.data for plan in plans] == [tmp_path / name for name in ("iwslt14", "wmt14", "wmt14")]
    names = [plan.comparison.out.name for plan in plans]
    assert names == ["translation-paper-iwslt14", "translation-paper-base-wmt14", "translation-paper-big-wmt14"]
    alone = plans_of("repulsive/table-8", tmp_path / "out", tmp_path / "iwslt14", scale="paper")
    assert alone[0].comparison.data == tmp_path / "iwslt14"
    missing = r"wmt17 does not exist; at scale paper diversify/table-5 takes a folder that holds wmt14 and wmt17\."
    with pytest.raises(DataError, match=missing):
        plans_of("diversify/table-5", tmp_path / "out", tmp_path, scale="paper")
    assert not (tmp_path / "out").exists()


def test_a_corpus_has_the_name_of_its_record_and_a_part_of_one_another(tmp_path):
    place = tmp_path / "cache" / "translation-1"
    place.mkdir(parents=True)
    (place / "record.json").write_text(json.dumps({"fingerprint": "1", "corpus": "wmt14", "layout": "partial"}))
    assert find_corpus_name("1", None, tmp_path / "cache") == "wmt14-partial"
    assert find_corpus_name("2", place, tmp_path / "cache") == ""
    (place / "record.json").write_text(json.dumps({"fingerprint": "1", "corpus": "wmt14", "layout": "official"}))
    assert find_corpus_name("1", place, tmp_path / "elsewhere") == "wmt14"
    assert name_data(Path("a b/c:d e")) == "c_d_e"


def published(tmp_path, data="iwslt14", scale="paper", size="demo"):
    """A reproduction with two parts, one of which the scale demo does not have, on drawn answers of the size demo."""
    sizes = {"demo": Size("demo"), "paper": Size(size, corpus="iwslt14")}
    parts = Part(("plain", "output"), sizes, "one"), Part(("plain",), {"paper": sizes["paper"]}, "two")
    columns = (
        Column("BLEU"),
        Column("Speed", "step time", per_second=True),
        Column("Para.", "parameters"),
        Column("more"),
    )
    rows = (
        PaperRow("theirs", "plain", ("34.4", "1.5", "88M", ""), "one"),
        PaperRow("theirs too", "output", ("", "1.2", "+1M", "9.9"), "one"),
        PaperRow("elsewhere", "plain", ("30", "2", "90M", ""), "two"),
    )
    found = Reproduction("a/b", "t", "s", "translation", parts, "e", (), Published("IWSLT14", columns, rows))
    folder = write_comparison(tmp_path / "runs", (Drawn("plain", None), Drawn("output")), items=20)
    evidence = {"one": Evidence(read_results(folder))}
    tables = {"one": make_table(evidence["one"].results)}
    return Reproduced(found, scale, {"one": data}, evidence, tables)


def test_the_papers_numbers_stand_beside_ours(tmp_path):
    grid = build_published_grid(published(tmp_path, scale="demo"))
    assert grid.header == (
        *("the paper's row", "part", "arm", "BLEU, paper", "BLEU, here", "Speed, paper"),
        *("step time over plain, paper", "step time over plain, here"),
        *("Para., paper", "parameters, here", "more, paper"),
    )
    plain, output, elsewhere = grid.text
    assert plain[:4] == ("theirs", "one", "plain", "34.4")
    assert plain[5:7] == ("1.5", "1.00")
    assert output[2:4] == ("output", NONE)
    assert output[5:7] == ("1.2", "1.25")
    assert output[8:] == ("+1M", "181,319", "9.9")
    assert elsewhere == ("elsewhere", "two", NONE, "30", NONE, "2", "1.00", NONE, "90M", NONE, NONE)
    assert Grid.from_record(json.loads(json.dumps(grid.to_record()))) == grid


def test_numbers_compare_only_on_the_papers_data_and_size(tmp_path):
    assert published(tmp_path).is_the_papers
    assert not published(tmp_path, data="iwslt14-partial").is_the_papers
    assert not published(tmp_path, scale="demo").is_the_papers
    assert not published(tmp_path, size="paper").is_the_papers, "runs of another size than the scale's, as with --set"


def test_a_curve_is_drawn_over_parts_and_not_over_one(tmp_path, monkeypatch):
    evidence, tables = {}, {}
    for place, part in enumerate(("2 heads", "4 heads")):
        arms = (Drawn("plain", None), *([Drawn("svgd")] if place else []))
        results = read_results(write_comparison(tmp_path / part, arms, items=20, seeds=(0, 1)))
        numbers = {(arm.name, seed): {"NLL": 2.0 + place + seed / 10} for arm in arms for seed in (0, 1)}
        evidence[part], tables[part] = Evidence(results, numbers), make_table(results)
    picture = draw_curve("NLL", evidence, tables)
    assert picture.alt == "plain: 2 heads 2.050, 4 heads 3.050; svgd: 4 heads 3.050"
    assert picture.png.startswith(b"\x89PNG")
    assert draw_curve("NLL", {"2 heads": evidence["2 heads"]}, {"2 heads": tables["2 heads"]}) is None
    assert draw_curve("absent", evidence, tables) is None
    assert picture.caption == "NLL by part: each dot a seed, each line an arm's means, its band from seed to seed."
    sets = {"Twitter": evidence["2 heads"], "Wikipedia": evidence["4 heads"]}
    named = dict(zip(sets, tables.values(), strict=True))
    lines: list[int] = []
    draw = matplotlib.axes.Axes.plot

    def seen(axes: matplotlib.axes.Axes, x: list[float], *rest: Any, **look: Any) -> object:
        lines.append(len(x))
        return draw(axes, x, *rest, **look)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", seen)
    assert draw_curve("NLL", sets, named).caption == "NLL by part: each dot a seed, each large mark an arm's mean."
    assert set(lines) == {1}, "sets have no order that a line could follow"
    draw_curve("NLL", evidence, tables)
    assert 2 in lines


def test_a_dry_run_shows_the_runs_and_what_is_left_and_writes_nothing(corpus, tmp_path):
    screen = console()
    show_plans(REPRODUCTIONS["repulsive/table-2"], plans_of("repulsive/table-2", tmp_path / "out", corpus, 2), screen)
    shown = screen.export_text()
    assert "12 runs to do: no run of each size has finished" in shown
    assert "svgd-relative" in shown
    assert not (tmp_path / "out").exists()


def test_the_cost_is_told_from_finished_runs_of_the_same_size(tmp_path):
    plans = plans_of("diversify/figure-4", tmp_path)
    write_comparison(plans[0].comparison.out, PAPER, items=20, seeds=(0, 1))
    screen = console()
    show_plans(REPRODUCTIONS["diversify/figure-4"], plans, screen)
    # 43 seconds a run in what was drawn, 7 arms x 2 seeds of 8 x 5 done
    assert "26 runs to do: about 0.3 hours" in screen.export_text().replace("\n", " ")
    screen = console()
    show_list(tmp_path, "demo", screen)
    shown = screen.export_text().splitlines()
    rows = [line for line in shown if "diversify/figure-4" in line]
    assert "8 x 2" in rows[0]
    assert "0.2" in rows[0]
    # nothing is said of what nobody has run
    assert any(re.fullmatch(r"\S+/table-2 +\d+ x \d+ +\D+", line) for line in shown)


def test_what_has_no_finished_run_has_no_report(tmp_path):
    plans = plans_of("diversify/figure-4", tmp_path)
    with pytest.raises(DataError, match=r"no run of diversify/figure-4 at scale demo is finished"):
        written("diversify/figure-4", tmp_path, plans, tmp_path / "paper", console())
    assert not (tmp_path / "paper").exists()


def test_a_damaged_record_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no record"):
        render(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "figure-9-cpu.json").write_text("{}")
    with pytest.raises(DataError, match=r"figure-9-cpu\.json is not the record of a reproduction"):
        render(tmp_path)


@pytest.mark.parametrize("paper", sorted({path.parent.parent for path in PAPERS.glob("*/results/*.json")}), ids=str)
def test_the_pages_of_each_paper_are_what_its_records_say(paper):
    assert {path: path.read_text() for path in [paper / "RESULTS.md", *(paper / "results").glob("*.md")]} == render(
        paper
    )


def read_pages(paper: Path) -> str:
    """All pages of a paper, which are what its records say."""
    pages = render(paper)
    assert all(path.read_text() == text for path, text in pages.items())
    return "\n".join(pages.values())
