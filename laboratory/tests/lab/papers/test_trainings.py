"""Reproductions of each task from data to results at toy size: runs shared and done once, records, figures, pages."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from headwise.input_files import read_numbered_lines
from headwise.plots import sentence_heatmap, to_png
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arms
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import read_json
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers.data import with_data
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.pages import render
from headwise_lab.papers.recomputed import recompute
from headwise_lab.papers.records import record as make_record
from headwise_lab.papers.reproduction import Reproduction
from headwise_lab.papers.repulsive.glue import SVGD
from headwise_lab.papers.run import do_plans, make_plans, report, show_plans
from headwise_lab.results.cells import NONE, Grid, Number
from headwise_lab.results.evidence import match_seeds, read_evidence
from headwise_lab.results.runs import REFERENCES
from headwise_lab.tasks.glue import scales as glue_scales
from headwise_lab.tasks.graph2text.ratings import FORM, KEY
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from headwise_lab.tasks.logic.task import LogicTask
from headwise_lab.tasks.pretraining import scales as pretraining_scales
from lab.sentences import parse_without_spacy as parse_sentences
from lab.sentences import write_sentences
from lab.tasks.classification.probing_toy import write_probing
from lab.tasks.glue.glue_toy import write_glue
from lab.tasks.graph2text.graph_sets import write_triples
from lab.tasks.pretraining.pretraining_toy import TOY, write_jsonl
from lab.tasks.sentence.sentence_sets import FILLERS, write_pairs
from lab.tasks.translation.translation_toy import make_demo_smallest, parse_without_spacy, write_toy_corpus

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("inline")]

TRANSLATED = [name for name, reproduction in REPRODUCTIONS.items() if reproduction.task == "translation"]
QUICK = {"repulsive/table-2", "diversify/figure-3"}
PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "absent"))
needs_published_data = pytest.mark.skipif("HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder")


def train(study: Reproduction, place: Path, data: Path | None, seeds: int = 1, only: int | None = None, **more: Any):
    """Run a reproduction at toy size, or its first parts; return its plans, results, record, pages and screen."""
    console = Console(record=True, width=240)
    options = ScaleOptions("demo", **more)
    out, paper = place / "runs", place / "paper"
    plans = make_plans(study, "demo", seeds=seeds, data=data, out=out, workers=1, options=options)
    assert do_plans(study, plans[:only], console) == []
    found = report(study, "demo", plans, out, paper, console, f"headwise reproduce {study.id}")
    pages = render(paper)
    assert all(path.read_text() == text for path, text in pages.items())
    record = json.loads((paper / "results" / found.file).read_text())
    assert all((paper / "results" / picture["file"]).exists() for picture in record["pictures"])
    page, shown = "\n".join(pages.values()), " ".join(console.export_text().split())
    return SimpleNamespace(plans=plans, found=found, record=record, page=page, shown=shown, out=out, paper=paper)


def with_arms(study: Reproduction, *arms: str, **changes: Any) -> Reproduction:
    return dataclasses.replace(
        study, parts=tuple(dataclasses.replace(part, arms=arms) for part in study.parts), **changes
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_corpus(tmp_path_factory.mktemp("corpus") / "pairs")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TRANSLATED]
)
def test_every_reproduction_of_translation_runs_from_data_to_results(name, corpus, tmp_path, monkeypatch):
    study = REPRODUCTIONS[name]
    # what a head is worth is measured where the score is above zero
    measured = study.analysis == "redundancy"
    done = make_demo_smallest(monkeypatch, **({"epochs": 20, "train_examples": 200} if measured else {}))
    if measured:
        corpus = write_toy_corpus(tmp_path / "easy", words={"red": "rot", "dog": "hund"}, longest=8)
    parse_without_spacy(monkeypatch)
    ran = train(study, tmp_path, corpus, pipeline=corpus)
    assert ran.found.file.endswith("-demo-multi30k.json")
    scales, evidence = named_task(study.task).scales, ran.found.evidence
    claims = study.claims_at("demo", scales)
    assert [claim["statement"] for claim in ran.record["claims"]] == [claim.statement for claim in claims]
    assert all(claim.statement in ran.page for claim in claims)
    reasons = [one["reason"] for claim in ran.record["claims"] for one in claim["contrasts"]]
    assert not any("not run" in reason for reason in reasons)
    for part, names in study.arms_at("demo", scales).items():
        assert {run.arm for run in evidence[part].results.runs} == {"copy", *names}
    assert ("Ours are on other data or another size" in ran.page) == (study.published is not None)
    if study.measures:
        # a curve over parts
        assert any(one.name.endswith("-by-part") for one in ran.found.pictures) == (len(ran.plans) > 1)
        assert all(one.mean("plain", study.measures[0]) is not None for one in evidence.values())
    before = len(done)
    assert do_plans(study, ran.plans, Console(quiet=True)) == []
    assert len(done) == before


def test_a_part_is_run_alone_and_claims_that_reach_into_another_are_left_out(corpus, tmp_path, monkeypatch):
    done = make_demo_smallest(monkeypatch)
    whole = REPRODUCTIONS["repulsive/figure-3b"]

    def chosen(*parts: str):
        return make_plans(
            whole.only(parts, "demo"), "demo", seeds=1, data=corpus, out=tmp_path / "runs", workers=1,
            options=ScaleOptions("demo"),
        )  # fmt: skip

    assert [plan.part.name for plan in chosen()] == ["1 head", "2 heads", "4 heads", "8 heads", "16 heads"]
    # in the paper's order, whatever the order they were named in
    assert [plan.part.name for plan in chosen("4 heads", "1 head")] == ["1 head", "4 heads"]
    ran = train(whole.only(["2 heads"], "demo"), tmp_path, corpus)
    names = [f"2 heads: {arm.name} seed 0" for arm in ran.plans[0].comparison.arms]
    assert done == ["2 heads: copy", *names, *(f"step-time of {name}" for name in names)]
    claims = ran.record["claims"]
    assert 0 < len(claims) < len(whole.claims)
    lack = (
        "Not asked for: 1 head, 4 heads, 8 heads, 16 heads. Claims, and families of tests, are about the other parts."
    )
    assert lack in ran.page
    assert lack in ran.shown
    said = [text for claim in claims for text in [claim["verdict"], *(one["reason"] for one in claim["contrasts"])]]
    assert not any("not run" in text for text in said)
    # the other parts find what is there, and do the rest
    assert do_plans(whole, chosen("1 head", "2 heads"), Console(quiet=True)) == []
    assert [job for job in done if job.startswith("1 head")] == ["1 head: copy", "1 head: plain seed 0"]
    assert len([job for job in done if job.startswith("2 heads")]) == 1 + len(names)


def test_runs_are_shared_between_reproductions_and_nothing_is_done_twice(corpus, tmp_path, monkeypatch):
    done = make_demo_smallest(monkeypatch)
    arms = set()
    for name in ("diversify/table-2", "diversify/figure-3"):
        plans = make_plans(REPRODUCTIONS[name], "demo", seeds=1, data=corpus, out=tmp_path, workers=1)
        assert do_plans(REPRODUCTIONS[name], plans, Console(quiet=True)) == []
        arms |= {arm.name for arm in plans[0].comparison.arms}
    trained = [name for name in done if " of " not in name]
    assert sorted(trained) == sorted({"copy", *(f"{arm} seed 0" for arm in arms)})
    assert sum(name.startswith("head-vectors of") for name in done) == 4
    assert [folder.name for folder in tmp_path.glob("translation-*")] == ["translation-demo-pairs"]


@pytest.mark.slow
@needs_published_data
def test_a_reproduction_runs_on_multi30k(tmp_path, monkeypatch):
    make_demo_smallest(monkeypatch)
    ran = train(REPRODUCTIONS["repulsive/table-6"], tmp_path, PUBLISHED / "mt" / "multi30k")
    assert ran.found.data == {"": "multi30k"}
    assert "IWSLT14 De-En, Transformer-small) beside ours (multi30k, scale demo)" in ran.page
    losses = [ran.found.evidence[""].mean(arm, "NLL") for arm in ("plain", "svgd", "sgld")]
    # a model that knows nothing gives each of 300 subwords the same chance; smaller steps have barely begun
    assert all(3.0 < loss < 7.0 for loss in losses)


LOGIC = PUBLISHED / "logical_inference" / "propositionallogic"


def require_whole(record: dict[str, Any], arms: Iterable[str]) -> None:
    # the published test files have 37,361 lines of 1 to 12 operators
    assert sum(record["bins"].values()) == 37_361
    assert {row["arm"] for row in record["rows"]} == {"counts", "majority", *arms}


def make_cpu_smallest(monkeypatch: pytest.MonkeyPatch) -> Any:
    small = {"width": 8, "heads": 2, "classifier_width": 16, "epochs": 1, "train_examples": 256, "dev_examples": 80}
    toy = dataclasses.replace(LOGIC_SCALES["cpu"], name="toy", compile_routing=False, **small)
    monkeypatch.setattr(LogicTask, "scales", {**LOGIC_SCALES, "cpu": toy})
    return toy


@pytest.mark.slow
@needs_published_data
def test_arms_are_compared_on_the_published_files(tmp_path, monkeypatch):
    toy = make_cpu_smallest(monkeypatch)
    comparison = Comparison("logic", tuple(parse_arms("plain,output")), (0,), toy, tmp_path, LOGIC, workers=1)
    assert compare(comparison, Console(record=True)) == []
    require_whole(json.loads((tmp_path / "results.json").read_text()), ("plain", "output"))


@pytest.mark.slow
@needs_published_data
def test_every_arm_of_figure_4_runs_on_the_published_files(tmp_path, monkeypatch):
    make_cpu_smallest(monkeypatch)
    study = REPRODUCTIONS["diversify/figure-4"]
    console = Console(record=True, width=100)
    plans = make_plans(study, "cpu", seeds=1, data=LOGIC, out=tmp_path, workers=2)
    assert do_plans(study, plans, console) == []
    report(study, "cpu", plans, tmp_path, tmp_path / "paper", console, "headwise reproduce diversify/figure-4")
    record = json.loads((tmp_path / "diversify-figure-4-cpu" / "results.json").read_text())
    require_whole(record, study.parts[0].arms)
    assert (tmp_path / "diversify-figure-4-cpu" / "report.html").stat().st_size > 10_000
    assert "no verdict (1 seed)" in (tmp_path / "paper" / "RESULTS.md").read_text()


@pytest.mark.slow
@needs_published_data
def test_the_plain_model_of_the_demo_learns_the_published_relations(tmp_path):
    arms = tuple(parse_arms("plain"))
    comparison = Comparison("logic", arms, (0,), LOGIC_SCALES["demo"], tmp_path, LOGIC, workers=1)
    assert compare(comparison, Console(record=True)) == []
    rows = {row["arm"]: row["score"]["value"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert rows["plain"] > rows["majority"] + 0.12
    assert rows["plain"] > rows["counts"]


@pytest.fixture
def glue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reproduction:
    """Table 3 of two arms, with data and scales that fit it in the working folder."""
    write_glue(tmp_path / "data" / "glue", train=40, judged=12)
    for name in ("CoLA", "STS-B"):
        (tmp_path / "data" / "glue" / name / "train.tsv").unlink()
    write_jsonl(tmp_path / "data" / "corpora" / "docs.jsonl.gz", 120)
    demo = dataclasses.replace(TOY, name="demo", steps=4, rounds=1)
    monkeypatch.setitem(pretraining_scales.PRETRAINING_SCALES, "demo", demo)
    fine = dataclasses.replace(glue_scales.GLUE_SCALES["demo"], length=16, warmup_share=0.0)
    monkeypatch.setitem(glue_scales.GLUE_SCALES, "demo", fine)
    whole = REPRODUCTIONS["repulsive/table-3"]

    def make_claims(sets: tuple[str, ...]):
        # without the control that is not run here
        assert whole.made is not None
        return whole.made(sets)[:-1]

    before = with_arms(REPRODUCTIONS["repulsive/pretraining"], "plain", SVGD)
    monkeypatch.setitem(REPRODUCTIONS, "repulsive/pretraining", before)
    return with_arms(whole, "plain", SVGD, made=make_claims)


@pytest.mark.slow
def test_one_command_pre_trains_fine_tunes_and_says_what_cannot_be_judged(glue, tmp_path):
    data = tmp_path / "data"
    found = with_data(glue, "demo", data)
    ran = train(found, tmp_path, data)
    plans = {plan.part.name: plan for plan in ran.plans}
    assert list(plans) == ["MNLI", "RTE", "RTE after MNLI"]
    screen = Console(record=True, width=200)
    show_plans(found, ran.plans, screen)
    shown = screen.export_text()
    assert all(said in shown for said in ("pretraining-demo", "QQP (not there)", "CoLA (no train.tsv)"))
    for name, begun in (("RTE", "pretraining"), ("RTE after MNLI", "MNLI")):
        assert begun in plans[name].comparison.scale.pretrained.name
    assert ran.record["left_out"][:2] == ["CoLA (no train.tsv)", "SST-2 (not there)"]
    grid = ran.record["grids"][0]
    assert grid["header"] == ["arm", "MNLI", "RTE", "RTE after MNLI", "Avg. of 2", "Avg. of 2, RTE after MNLI"]
    results = {
        name: read_json(plan.comparison.out / "plain" / "seed-0" / "result.json") for name, plan in plans.items()
    }
    scores = {name: result["score"]["pooled"] for name, result in results.items()}
    plain = next(row for row in grid["rows"] if row[0] == "plain")
    assert plain[4]["value"] == pytest.approx((scores["MNLI"] + scores["RTE"]) / 2)
    assert plain[5]["value"] == pytest.approx((scores["MNLI"] + scores["RTE after MNLI"]) / 2)
    for said in (
        "\n* RTE: ",
        "(test is GLUE's dev file, dev is cut from training)",
        "Begins with pretraining at scale demo (4 steps), data docs ",
        "Not judged here, for want of data: CoLA (no train.tsv), SST-2 (not there), MRPC (not there)",
        "mean of MNLI, RTE after MNLI",
    ):
        assert said in ran.page
    assert str(tmp_path) not in ran.page
    assert {claim["verdict"] for claim in ran.record["claims"][:2]} == {"no verdict (1 pre-training)"}
    quoted = next(row for row in ran.record["published"]["rows"] if row[1] == "QQP" and row[0] == "ELECTRA")
    assert quoted[3:] == [{"value": 88.1, "digits": 1}, NONE]
    # everything is there: nothing is run twice
    assert all(plan.finished == plan.folders for plan in ran.plans)


def test_each_fine_tuning_has_a_pre_training_where_there_are_several(glue, tmp_path):
    data = tmp_path / "data"
    found = with_data(glue.only(("RTE",), "demo"), "demo", data)
    options = ScaleOptions("demo", sizes=("starts=2",))
    plans = make_plans(found, "demo", seeds=2, data=data, out=tmp_path / "out", workers=1, options=options)
    assert plans[0].before[0].comparison.seeds == (0, 1)
    assert do_plans(found, plans, Console(quiet=True)) == []
    assert [read_json(folder / "result.json")["start"] for folder in plans[0].folders] == [0, 1, 0, 1]


def test_tables_of_graphs_share_their_runs_and_write_form_page_and_record(tmp_path):
    pytest.importorskip("nltk")
    data = write_triples(tmp_path / "mine.tsv", 60)
    sizes = ("width=8", "layers=1", "epochs=1", "tokens=128", "min_count=1", "longest=12")
    ran = {}
    for name, seeds in (("table-5", 2), ("figure-9", 2), ("table-4", 1)):
        study = REPRODUCTIONS[f"repulsive/{name}"]
        # of the arms of table 4 those that the claims looked at below are about
        study = with_arms(study, "plain", "svgd", "no-graph") if name == "table-4" else study
        ran[name] = train(study, tmp_path, data, seeds, sizes=sizes)
    out = ran["table-4"].out
    (key,) = out.rglob(KEY)
    assert (key.parent / FORM).exists()
    assert json.loads(key.read_text())["names"] == ["svgd", "plain"]
    page = (out / "repulsive-figure-9-demo" / "outputs.html").read_text()
    folder = ran["table-4"].plans[0].comparison.out
    references = [line for _, line in read_numbered_lines(folder / REFERENCES)]
    # what others wrote stays out of the records
    assert all((text in page) > (text in json.dumps(ran["figure-9"].record)) for text in references[:2])
    claims = ran["table-4"].record["claims"]
    assert len(claims[0]["contrasts"]) == 8
    control = claims[-1]["contrasts"][0]
    assert (control["contrast"], control["by_seed"]) == ("plain over nearest", [control["value"]])
    assert claims[-1]["verdict"] == "no verdict (1 seed)"
    unasked = ran["table-5"].record["claims"][0]
    assert (unasked["shown"][0]["label"], unasked["shown"][0]["values"]["svgd"]) == ("win, %", "not measured")
    assert unasked["verdict"] == "no verdict (nothing measured)"
    evidence = read_evidence(folder, ["plain"], [0, 1])
    assert evidence is not None
    # one baseline stands beside every seed
    plain, nearest = match_seeds([(evidence, "plain"), (evidence, "nearest")])
    assert sorted(plain) == sorted(nearest) == [0, 1]
    assert nearest[0] is nearest[1]


TINY = ("width=12", "hidden=12", "epochs=1", "train_examples=48")


@pytest.mark.slow
def test_a_table_of_roles_is_run_judged_and_shown_with_its_quoted_rows(inline, tmp_path, monkeypatch):
    parse_sentences(monkeypatch)
    study = REPRODUCTIONS["guided/table-3"]
    sets = tmp_path / "sets"
    for number, part in enumerate(study.parts[:2]):
        folder = sets / str(part.sizes["demo"].corpus)
        folder.mkdir(parents=True)
        write_sentences(folder / "all.tsv", 120, seed=number)
    study = dataclasses.replace(study, parts=study.parts[:2])
    ran = train(study, tmp_path, sets, pipeline=sets, sizes=(*TINY, "head_size=3"))
    assert any(name.startswith("CR: guided seed 0") for name in inline)
    (page,) = tmp_path.rglob("guided-table-3-demo/report.html")
    assert "DiSAN* (quoted, not run)" in page.read_text(encoding="utf-8")
    rows = ran.record["published"]["rows"]
    quoted = next(row for row in rows if row[0].startswith("PSAN") and row[1] == "CR")
    assert (quoted[2], quoted[3], quoted[4]) == (NONE, {"value": 84.2, "digits": 1}, NONE)
    verdicts = {claim["verdict"] for claim in ran.record["claims"] if claim["contrasts"]}
    assert all("no verdict" in verdict or verdict == "measured, not tested" for verdict in verdicts)


def test_probing_is_run_judged_and_shown_by_category(tmp_path):
    there = ("sentence_length", "tree_depth", "bigram_shift", "subj_number")
    (tmp_path / "sets").mkdir()
    for number, name in enumerate(there):
        write_probing(tmp_path / "sets" / f"{name}.txt", {"va": 120, "te": 60}, seed=number)
    study = with_data(REPRODUCTIONS["diversify/table-7"], "demo", tmp_path / "sets")
    # the last part is not run yet
    ran = train(study, tmp_path, tmp_path / "sets", only=3, sizes=(*TINY, "heads=3", "head_size=4"))
    assert [plan.comparison.data.name for plan in ran.plans] == list(there)
    grid = ran.record["published"]
    assert grid["header"] == [
        *("task", "majority", "plain, paper", "plain, here", "output, paper", "output, here", "trunk, here"),
        *("em, paper", "em, here", "output+em, paper", "output+em, here"),
    ]
    rows = {row[0]: list(row[1:]) for row in Grid.from_record(grid).text}
    assert list(rows)[:3] == ["SeLen", "WC", "Surface: mean (SeLen)"]
    assert rows["ToCo"][1:3] == [NONE, NONE]
    scores = [ran.found.tables[part].row("em").score.value for part in ("TrDep", "BShif")]
    means = (f"{(45.77 + 50.97) / 2:.2f}", f"{100 * fmean(scores):.2f}")
    assert tuple(rows["Syntactic: mean (TrDep, BShif)"][6:8]) == means
    assert any(row[2].startswith("(") for row in rows.values())
    verdicts = [claim["verdict"] for claim in ran.record["claims"]]
    assert len(verdicts) == 7
    assert all("no verdict" in verdict for verdict in verdicts)
    for said in (
        "scores in parentheses are not significantly above chance",
        "mean (TrDep, BShif)",
        "compare the order of the arms within a task or a mean, and no number with one of the paper's",
        *("Wikipedia's and not those of SentEval", "nine tenths of va", "SOMO is one of the five tasks of the"),
    ):
        assert said in ran.page
    assert "order of the rows" not in ran.page
    # the part that was not run is named, and the runs alone, without words, give the same record again
    assert len([run for run in ran.record["missing"] if run.endswith(" in SubNm")]) == len(ran.record["missing"]) == 5
    again = make_record(recompute(ran.paper / "results" / ran.found.file, tmp_path / "again"), ran.record["command"])
    assert json.loads(json.dumps(again)) == ran.record


TEXTS = ("epochs=1", "width=8", "units=4", "attention=4", "heads=4", "hidden=6", "train_examples=40", "batch_size=16")


def write_long(path: Path) -> Path:
    """Texts long enough for attention maps, of five classes."""
    lines = [
        f"{1 + n % 5}\t" + " ".join(FILLERS[(n * place + n // 12) % 12] for place in range(24)) + f" n{n}"
        for n in range(80)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_table_1_on_pairs_with_distances_beside_the_papers(tmp_path):
    write_pairs(tmp_path / "sets" / "snli", 60)
    study = REPRODUCTIONS["repulsive/table-1"].only(("SNLI",), "demo")
    ran = train(study, tmp_path, tmp_path / "sets", sizes=TEXTS)
    assert ran.found.file == "table-1-demo.json"
    row = next(row for row in ran.record["published"]["rows"] if row[:2] == ["BiLSTM + RMA (SVGD)", "SNLI"])
    assert ran.record["published"]["header"][-2:] == ["Dist, paper", "Dist (least to most), here"]
    assert (row[2], row[-2]) == ("svgd:alpha=0.005,step_size=1.0", {"value": 1.688, "digits": 3})
    assert row[-1]["value"] > 0
    assert {"outputs-by-parameters-snli", "outputs-by-force-snli"} <= {one.name for one in ran.found.pictures}
    # the runs of another table are shared
    (plan,) = make_plans(
        REPRODUCTIONS["repulsive/table-7"].only(("SNLI",), "demo"), "demo", seeds=1, data=tmp_path / "sets",
        out=ran.out, workers=1, options=ScaleOptions("demo", sizes=TEXTS),
    )  # fmt: skip
    assert len(plan.finished) == 2


@pytest.mark.parametrize(
    ("identifier", "picture"),
    [
        ("repulsive-v1/figure-9", "attention-plain-3"),
        ("repulsive/figure-4", "reliability"),
        ("repulsive/figure-5", "entropy"),
    ],
)
def test_a_figure_is_drawn_and_recorded(identifier, picture, tmp_path):
    pytest.importorskip("spacy")
    data, other = (write_long(tmp_path / f"{name}.tsv") for name in ("long", "others"))
    ran = train(REPRODUCTIONS[identifier], tmp_path, data, sizes=TEXTS, out_of_domain=other)
    assert picture in [one.name for one in ran.found.pictures]
    assert ran.found.file.startswith("v1-" if "v1" in identifier else "figure-")


def test_a_record_holds_no_text_of_the_data_and_the_users_own_folder_does(tmp_path, monkeypatch):
    drawn: dict[bytes, list[str]] = {}

    def kept(words: list[str], rows: Any) -> object:
        figure = sentence_heatmap(words, rows)
        drawn[to_png(figure)] = words
        return figure

    monkeypatch.setattr("headwise_lab.papers.repulsive.figures.sentence_heatmap", kept)
    data = write_long(tmp_path / "long.tsv")
    ran = train(REPRODUCTIONS["repulsive/figure-1"], tmp_path, data, sizes=TEXTS)
    (one, *_) = ran.record["pictures"]
    assert one["alt"].split("'")[1].isdigit()
    assert one["caption"].endswith("Words are named by their place in the text.")
    shown = drawn[(ran.paper / "results" / one["file"]).read_bytes()]
    assert shown == [str(place + 1) for place in range(len(shown))]
    (own,) = ran.out.glob("repulsive-figure-1-*/attention-plain-1.png")
    assert set(drawn[own.read_bytes()]) <= set(data.read_text(encoding="utf-8").split())
    assert len(drawn[own.read_bytes()]) == len(shown)


def test_table_9_tells_how_much_of_the_force_lengthens_heads(tmp_path):
    write_long(tmp_path / "sets" / "yelp" / "part1.tsv")
    study = REPRODUCTIONS["repulsive/table-9"].only(("Yelp",), "demo")
    ran = train(study, tmp_path, tmp_path / "sets", sizes=TEXTS)
    (shown,) = [claim["shown"] for claim in ran.record["claims"] if "turns heads" in claim["statement"]]
    start = next(line["values"] for line in shown if "at the start" in line["label"])
    # the penalty turns heads and never lengthens them
    assert str(Number(**start["cosine-penalty:alpha=1.0,step_size=1.0"])) == "0"


def test_the_baseline_of_v1_table_6_stands_in_its_row(tmp_path):
    (tmp_path / "sets" / "cyberbullying").mkdir(parents=True)
    lines = [f"{n % 2}\t{'awful' if n % 2 else 'lovely'} {FILLERS[n % 12]} n{n}" for n in range(80)]
    (tmp_path / "sets" / "cyberbullying" / "twitter.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    study = with_arms(REPRODUCTIONS["repulsive-v1/table-6"], "plain", "cnn", claims=()).only(("Twitter",), "demo")
    ran = train(study, tmp_path, tmp_path / "sets", sizes=TEXTS)
    assert ran.found.file == "v1-table-6-demo.json"
    row = next(row for row in ran.record["published"]["rows"] if row[:2] == ["NBLR", "Twitter"])
    assert row[2:4] == ["nb-lr", {"value": 0.9105, "digits": 4}]
    assert row[4]["value"] == 1.0


def test_the_study_of_shrinking_runs_from_data_to_its_record(tmp_path):
    whole = REPRODUCTIONS["diversity/shrinking-logic"]
    study = with_arms(whole, "plain", "cka-together", claims=whole.claims[1:4:2])
    sizes = ("width=16", "heads=4", "classifier_width=16", "epochs=1", "warmup_steps=3", "generated_draws=1500")
    ran = train(study, tmp_path, None, 2, sizes=(*sizes, "train_examples=96", "dev_examples=24"))
    assert [one.name for one in ran.found.pictures] == ["shrinking"]
    assert "50% of heads" in ran.shown
    assert ran.record["grids"][0]["title"] == "loss on the test set, and what it rises by, in nats"
    assert ran.record["claims"][1]["contrasts"][0]["value"] is not None
