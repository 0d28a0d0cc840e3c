"""What a reproduction would run: its data, the folders of its runs, what is left to do, and what is refused before."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from headwise.errors import DataError, SettingError
from headwise_lab.experiment.registry import TASKS, named_task
from headwise_lab.experiment.run_folder import write_json
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers.data import find_corpus_name, name_data, read_initial_runs, with_data
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.records import Reproduced
from headwise_lab.papers.run import Plan, make_plans, report, show_list, show_plans
from lab.command import call, refused
from lab.results.synthetic_comparison import PAPER, write_comparison
from lab.sentences import write_sentences
from lab.tasks.classification.probing_toy import write_probing
from lab.tasks.glue.glue_toy import write_glue, write_model
from lab.tasks.graph2text.graph_sets import write_triples
from lab.tasks.pretraining.pretraining_toy import write_jsonl
from lab.tasks.sentence.sentence_sets import write_texts
from lab.tasks.translation.translation_text import write_corpus
from lab.tasks.translation.translation_toy import write_toy_corpus

GLUE, PROBING = REPRODUCTIONS["repulsive/table-3"], REPRODUCTIONS["diversify/table-7"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data of each task that needs some."""
    place = tmp_path_factory.mktemp("places")
    sentences = write_sentences(place / "mine.tsv", 40)
    write_glue(place / "glue")
    own = write_corpus(place / "own")
    return {
        "translation": Path(f"{own}:de-en"),
        "classification": sentences,
        "sentence": sentences,
        "probing": write_probing(place / "past_present.txt", {"va": 40, "te": 20}),
        "graph2text": write_triples(place / "triples.tsv", 40),
        "pretraining": write_jsonl(place / "text" / "docs.jsonl.gz", 40),
        "glue": place / "glue" / "RTE",
    }


def plan(name: str, out: Path, data: Path | None = None, seeds: int = 1, scale: str = "demo") -> tuple[Plan, ...]:
    return make_plans(REPRODUCTIONS[name], scale, seeds=seeds, data=data, out=out, workers=1)


def shown(name: str, plans: Sequence[Plan]) -> str:
    screen = Console(record=True, width=160)
    show_plans(REPRODUCTIONS[name], plans, screen)
    return " ".join(screen.export_text().split())


def test_a_task_finds_its_data_and_says_of_another_place_what_a_run_would(places, tmp_path):
    pytest.importorskip("nltk")
    wrong = tmp_path / "wrong"
    (wrong / "classes").mkdir(parents=True)
    for name in TASKS:
        task = named_task(name)
        scale = task.scales["demo"]
        if name in places:
            task.find(places[name], scale)
        for place in (wrong, tmp_path / "none"):
            with pytest.raises(DataError) as found:
                task.find(place, scale)
            with pytest.raises(DataError) as loaded:
                task.load(place, scale, tmp_path / "cache")
            assert str(found.value) == str(loaded.value)
            assert str(place) in str(found.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("identifier", "task"),
    [("guided/table-2", "translation"), ("repulsive/table-4", "graph2text"), ("repulsive/pretraining", "pretraining")],
)
def test_a_dry_run_refuses_the_data_of_another_task_as_the_run_does(identifier, task, places, tmp_path, capsys):
    command = ("reproduce", identifier, "--scale", "demo", "--out", str(tmp_path / "out"), "--data")
    said = refused(capsys, *command, str(places["glue"]), "--dry-run")
    assert str(places["glue"]) in said
    assert "runs to do" not in capsys.readouterr().out
    assert refused(capsys, *command, str(places["glue"])) == said
    assert call(*command, str(places[task]), "--dry-run") == 0
    assert "runs to do" in capsys.readouterr().out
    # what there is to do can be looked at before there is data
    assert call(*command[:-1], "--dry-run") == 0


def test_a_dry_run_looks_at_the_text_of_the_pre_training_before_a_table_too(places, tmp_path, capsys):
    (tmp_path / "glue").symlink_to(places["glue"].parent)
    command = ("reproduce", GLUE.id, "--scale", "demo", "--data", str(tmp_path), "--dry-run")
    (tmp_path / "prepared").mkdir()
    assert f"{tmp_path / 'prepared'} holds no text" in refused(capsys, *command)
    (tmp_path / "prepared").rmdir()
    (tmp_path / "corpora").symlink_to(places["pretraining"].parent)
    assert call(*command) == 0
    # a part that begins with another is not run without it
    said = refused(capsys, *command, "--part", "RTE after MNLI")
    assert "RTE after MNLI (begins with MNLI, which --part leaves out)" in said


def test_texts_of_another_kind_are_asked_for_before_anything_is_trained(tmp_path, capsys):
    yelp, out = write_texts(tmp_path / "yelp" / "all.tsv", 60).parent, tmp_path / "out"
    asked = ["reproduce", "repulsive/figure-5", "--scale", "demo", "--data", str(yelp), "--out", str(out)]
    for more in ((), ("--dry-run",)):
        assert "name them: --out-of-domain" in refused(capsys, *asked, *more)
        assert "absent.tsv" in refused(capsys, *asked, "--out-of-domain", str(tmp_path / "absent.tsv"), *more)
    assert not out.exists()


def test_at_the_papers_scale_each_corpus_has_its_folder(tmp_path):
    for name in ("iwslt14", "wmt14"):
        (tmp_path / name).mkdir()
    plans = plan("repulsive/table-2", tmp_path / "out", tmp_path, scale="paper")
    assert [(one.comparison.data, one.comparison.out.name) for one in plans] == [
        (tmp_path / "iwslt14", "translation-paper-iwslt14"),
        (tmp_path / "wmt14", "translation-paper-base-wmt14"),
        (tmp_path / "wmt14", "translation-paper-big-wmt14"),
    ]
    (alone,) = plan("repulsive/table-8", tmp_path / "out", tmp_path / "iwslt14", scale="paper")
    assert alone.comparison.data == tmp_path / "iwslt14"
    assert not (tmp_path / "out").exists()


def test_sets_have_folders_of_their_own_that_tables_share(tmp_path):
    table = REPRODUCTIONS["guided/table-3"]
    sets = {part.name: str(part.sizes["demo"].corpus) for part in table.parts}
    for name in sets.values():
        (tmp_path / name).mkdir()
    one, other, folds = (
        plan(f"guided/{name}", tmp_path, tmp_path) for name in ("table-3", "figure-2", "table-3-folds")
    )
    assert {own.part.name: own.comparison.data.name for own in one if own.comparison.data} == sets
    places = [own.comparison.out for own in one]
    assert places == [own.comparison.out for own in other]
    assert not {own.comparison.out for own in folds} & set(places)
    assert [(own.comparison.scale.folds, one[0].comparison.scale.folds) for own in folds] == [(10, None)] * 2
    # parsed texts are other data
    options = ScaleOptions("demo", pipeline=tmp_path)
    parsed = make_plans(table, "demo", seeds=1, data=tmp_path, out=tmp_path, workers=1, options=options)
    assert [own.comparison.out.name for own in parsed] == [f"{place.name}-{tmp_path.name}" for place in places]
    assert "classification-demo-trec" in {place.name for place in places}


def test_a_corpus_has_the_name_of_its_record_and_a_part_of_one_another(tmp_path):
    place, kept = tmp_path / "cache" / "translation-1", {"fingerprint": "1", "corpus": "wmt14", "layout": "partial"}
    place.mkdir(parents=True)
    (place / "record.json").write_text(json.dumps(kept))
    assert find_corpus_name("1", None, tmp_path / "cache") == "wmt14-partial"
    assert find_corpus_name("2", place, tmp_path / "cache") == ""
    (place / "record.json").write_text(json.dumps(kept | {"layout": "official"}))
    assert find_corpus_name("1", place, tmp_path / "elsewhere") == "wmt14"
    assert name_data(Path("a b/c:d e")) == "c_d_e"


def test_a_record_says_what_its_runs_began_with(tmp_path):
    comparison = {"task": "pretraining", "scale": "gpu", "sizes": {"steps": 6000}, "data": "ab12"}
    write_json(tmp_path / "comparison.json", comparison)
    begun = read_initial_runs(tmp_path, None, tmp_path)
    assert str(begun) == "pretraining at scale gpu (6,000 steps), data ab12"
    files = [Reproduced(GLUE, scale, {}, {}, {}, initial_runs=begun).file for scale in ("gpu", "cpu")]
    assert files == ["table-3-gpu.json", "table-3-cpu-after-pretraining-gpu.json"]


def test_a_dry_run_shows_the_runs_and_what_is_left_and_writes_nothing(tmp_path):
    corpus = write_toy_corpus(tmp_path / "pairs")
    said = shown("repulsive/table-2", plan("repulsive/table-2", tmp_path / "out", corpus, 2))
    assert "12 runs to do: no run of each size has finished" in said
    assert "svgd-relative" in said
    assert not (tmp_path / "out").exists()
    options = ScaleOptions("demo", sizes=("encoder_layers=4",))
    with pytest.raises(SettingError, match=r"are not those of scale demo: .*layers=.*; expected sizes that leave"):
        make_plans(
            REPRODUCTIONS["diversify/table-4"], "demo", seeds=1, data=corpus, out=tmp_path, workers=1, options=options
        )


def test_the_cost_is_told_from_finished_runs_of_the_same_size(tmp_path):
    name = "diversify/figure-4"
    plans = plan(name, tmp_path, seeds=5)
    with pytest.raises(DataError, match=rf"no run of {name} at scale demo is finished"):
        report(REPRODUCTIONS[name], "demo", plans, tmp_path, tmp_path / "paper", Console(quiet=True), "command")
    assert not (tmp_path / "paper").exists()
    write_comparison(plans[0].comparison.out, PAPER, items=20, seeds=(0, 1))
    # 43 seconds a run in what was drawn, 7 arms x 2 seeds of 8 x 5 done
    assert "26 runs to do: about 0.3 hours" in shown(name, plans)
    screen = Console(record=True, width=160)
    show_list(tmp_path, "demo", screen)
    lines = screen.export_text().splitlines()
    (row,) = [line for line in lines if name in line]
    assert re.search(r"8 x 2 +0\.2 ", row)
    # nothing is said of what nobody has run
    assert any(re.fullmatch(r"\S+/table-2 +\d+ x \d+ +\D+", line) for line in lines)


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """Some of the sets of probing, and of GLUE, with text to pre-train on."""
    write_glue(tmp_path / "data" / "glue", train=40, judged=12)
    write_jsonl(tmp_path / "data" / "corpora" / "docs.jsonl.gz", 4)
    for name in ("sentence_length", "tree_depth", "bigram_shift", "subj_number"):
        write_probing(tmp_path / "data" / f"{name}.txt", {"va": 12, "te": 6})
    return tmp_path / "data"


def test_a_part_without_data_is_left_out_of_parts_claims_and_means(sets):
    found = with_data(PROBING, "cpu", sets)
    assert [part.name for part in found.parts] == ["SeLen", "TrDep", "BShif", "SubNm"]
    assert found.left_out == tuple(f"{name} (not there)" for name in ("WC", "ToCo", "Tense", "ObjNm", "SOMO", "CoIn"))
    claims = found.claims_at("cpu", named_task("probing").scales)
    over = {contrast.over for claim in claims for contrast in claim.contrasts}
    assert over == {("SeLen", "TrDep", "BShif", "SubNm"), ("SeLen",), ("TrDep", "BShif"), ("SubNm",), ()}
    single = [contrast for claim in claims for contrast in claim.contrasts if not contrast.over]
    assert [contrast.part for contrast in single] == ["SubNm"]
    assert with_data(PROBING, "cpu", None) is PROBING
    # what begins with a set that is not there is left out too
    (sets / "glue" / "MNLI" / "train.tsv").unlink()
    lacking = with_data(GLUE, "demo", sets)
    assert {"MNLI (no train.tsv)", "RTE after MNLI (MNLI is not there)"} <= set(lacking.left_out)
    judged = {part for claim in lacking.claims for one in claim.contrasts for part in one.parts}
    assert judged <= {part.name for part in lacking.parts}


def test_what_no_reproduction_could_be_run_on_is_refused(sets, tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "glue").symlink_to(sets / "glue")
    for name in ("iwslt14", "wmt14"):
        (tmp_path / "none" / name).mkdir()
    begun = ScaleOptions("demo", pretrained=write_model(tmp_path / "model"))

    def make(study, data: Path, scale: str = "demo", options: ScaleOptions | None = None):
        return make_plans(study, scale, seeds=1, data=data, out=tmp_path / "out", workers=1, options=options)

    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: with_data(PROBING, "cpu", tmp_path / "none"),
            r"no data that diversify/table-7 .* expected some of sentence_length, word",
        ),
        (
            lambda: with_data(PROBING, "cpu", sets / "tree_depth.txt"),
            r"tree_depth.txt is a file; diversify/table-7 takes the folder that holds",
        ),
        (
            lambda: with_data(GLUE, "demo", tmp_path / "none"),
            r"could be run on: CoLA \(not there\), SST-2 .*expected some of",
        ),
        (
            lambda: make(dataclasses.replace(GLUE, after=""), tmp_path / "none"),
            "CoLA does not exist; at scale demo repulsive/table-3 takes a folder",
        ),
        (
            lambda: make(REPRODUCTIONS["diversify/table-5"], tmp_path / "none", "paper"),
            r"wmt17 does not exist; at scale paper .* takes a folder that holds wmt14 and wmt17\.",
        ),
        (
            lambda: make(GLUE, tmp_path / "bare"),
            "bare holds no text to pre-train on; expected one of prepared, corpora",
        ),
        (
            lambda: make(GLUE, sets, options=begun),
            "model is no comparison of pretraining; expected for repulsive/table-3",
        ),
        (
            lambda: make(GLUE.only(("RTE after MNLI",), "demo"), sets),
            "begins with the runs of MNLI, which is not among the parts to run",
        ),
    ]
    for refuse, said in cases:
        with pytest.raises(DataError, match=said):
            refuse()
    assert not (tmp_path / "out").exists()
