"""The tables as they are written down: every claim is about arms that run, and every arm can be put on a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from headwise.errors import SettingError
from headwise_lab.data.probing_files import PROBES
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.papers.claims import Claim, Contrast
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.diversity.doses import METHODS, RATIOS, name_doses
from headwise_lab.papers.reproduction import Part, Reproduction, Size, arm_name, arm_names, resize_scale
from headwise_lab.papers.repulsive.glue import SVGD, average_sets
from headwise_lab.papers.run import make_plans
from headwise_lab.tasks.translation.model import Seq2Seq, Seq2SeqConfig
from headwise_lab.training.attach import Methods

EVERY_SCALE = [(one, scale) for one in REPRODUCTIONS.values() for scale in one.scales]
TRANSLATION = named_task("translation").scales


def scales_of(reproduction: Reproduction) -> Any:
    return named_task(reproduction.task).scales


def part_of(identifier: str, name: str = "") -> Part:
    return next(part for part in REPRODUCTIONS[identifier].parts if part.name == name)


def size_of(identifier: str, part: str, scale: str) -> Any:
    reproduction = REPRODUCTIONS[identifier]
    return resize_scale(part_of(identifier, part).sizes[scale], scales_of(reproduction))


def test_claims_numbers_and_rows_are_about_arms_that_are_run():
    wrong, asked = [], 0
    for one, scale in EVERY_SCALE:
        arms = one.arms_at(scale, scales_of(one))
        canonical, claims = one.canonical(scale, scales_of(one)), one.claims_at(scale, scales_of(one))
        used = [(part, arm) for claim in claims for shown in claim.shown for part in shown.parts for arm in shown.arms]
        for contrast in (contrast for claim in claims for contrast in claim.contrasts):
            used += zip(contrast.sides, (contrast.arm, contrast.against), strict=True)
            used += [(part, arm) for part in contrast.over for arm in (contrast.arm, contrast.against)]
            used += [(contrast.part, arm) for arm in contrast.doses]
        for row in one.published.rows if one.published else ():
            if len(row.cells) != len(one.published.columns):
                wrong.append((one.id, row))
            known = row.part in arms and row.arm and row.arm not in named_task(one.task).baselines
            used += [(row.part, canonical(row.part, row.arm))] if known else []
        asked += len(used)
        wrong += [(one.id, scale, *place) for place in used if place[1] not in (*arms[place[0]], *one.baselines)]
        wrong += [(one.id, scale, part) for part, names in arms.items() if not names[0].startswith("plain")]
        wrong += [] if claims else [(one.id, scale, "has no claims")]
    assert not wrong
    assert asked > 3000


def test_at_the_papers_scale_every_claim_can_be_made_and_arms_are_told_apart():
    wrong = []
    for one in (one for one in REPRODUCTIONS.values() if "paper" in one.scales):
        made = one.claims_at("paper", scales_of(one))
        arms, parts = one.arms_at("paper", scales_of(one)), one.parts_at("paper")
        wrong += [(one.id, part.name) for part in parts if len(arms[part.name]) != len(part.arms)]
        if len(parts) == len(one.parts):
            counts = [[(claim.statement, len(claim.contrasts)) for claim in claims] for claims in (made, one.claims)]
            wrong += [] if counts[0] == counts[1] else [(one.id, *counts)]
        wrong += [(one.id, str(c)) for claim in made for c in claim.contrasts if c.is_empty]
    assert not wrong


def list_fits() -> dict[str, set[tuple[str, Any]]]:
    """Each arm of a table of translation by the scale it first comes at, with the smallest model of its size."""
    found: dict[str, set[tuple[str, Any]]] = {"demo": set(), "cpu": set(), "gpu": set(), "paper": set()}
    for one, scale in EVERY_SCALE:
        if one.task == "translation":
            for part, names in one.arms_at(scale, TRANSLATION).items():
                size = resize_scale(next(own for own in one.parts if own.name == part).sizes[scale], TRANSLATION)
                shape = (64 * (1 + (size.width > 64)), size.encoder_layers, size.decoder_layers, size.heads)
                found[scale] |= {(name, shape) for name in names}
    return found


def try_on(fits: set[tuple[str, Any]]) -> None:
    for name, (width, encoder_layers, decoder_layers, heads) in sorted(fits):
        sizes = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers, "heads": heads}
        network = Seq2Seq(Seq2SeqConfig(vocab_size=8, width=width, hidden=4, **sizes))
        Methods(parse_arm(name), network, network, seed=1).repel(torch.optim.Adam(network.parameters()))


def test_every_arm_fits_a_model():
    smallest = {name: (name, shape) for name, shape in sorted(list_fits()["demo"], reverse=True)}
    assert len(smallest) > 50
    # the full test tries all
    try_on({*sorted(smallest.values())[::4]})


@pytest.mark.slow
def test_every_arm_fits_a_model_with_the_layers_and_heads_of_its_size():
    try_on(set.union(*list_fits().values()))


def test_words_in_braces_name_the_layers_of_the_model_at_hand():
    texts = ("em:layers={first}", "em:layers={two}", "em:layers={lower}", "em:layers={upper}", "em:layers={last}")
    paper, gpu, demo = (TRANSLATION[name] for name in ("paper", "gpu", "demo"))
    assert arm_names(texts, paper) == (
        *("em:layers=0", "em:layers=0/1", "em:layers=0/1/2", "em:layers=3/4/5", "em:layers=5"),
    )
    assert arm_names(texts, gpu) == ("em:layers=0", "em:layers=0/1", "em:layers=2/3", "em:layers=3")
    assert arm_names(texts, demo) == ("em:layers=0", "em", "em:layers=1")
    assert arm_name("em:capsules={heads}", paper) == "em:capsules=4"
    assert [arm_name("em:capsules={sixty-four}", one) for one in (paper, demo)] == ["em:capsules=64", "em"]
    assert arm_names(texts, dataclasses.replace(demo, encoder_layers=1, decoder_layers=1)) == ("em",)
    # one word names a layer of both
    assert all(scale.encoder_layers == scale.decoder_layers for scale in TRANSLATION.values())


def test_sizes_double_and_the_papers_are_the_tasks_own():
    demo = TRANSLATION["demo"]
    twice = size_of("diversify/table-5", "big", "demo")
    assert (twice.width, twice.hidden, twice.heads) == (2 * demo.width, 2 * demo.hidden, 2 * demo.heads)
    assert (twice.epochs, twice.encoder_layers) == (demo.epochs, demo.encoder_layers)
    assert size_of("repulsive/figure-3b", "4 heads", "demo") is demo
    assert size_of("repulsive/figure-3b", "8 heads", "paper").heads == 8
    assert [size_of("diversify/table-5", part, "paper").name for part in ("base", "big")] == ["paper-base", "paper-big"]
    assert REPRODUCTIONS["diversify/table-5"].corpora_at("paper") == ("wmt14", "wmt17")
    texts = [size_of("repulsive/table-1", part, "paper") for part in ("Age", "Yelp", "SNLI")]
    sizes = [(one.hidden, one.attention, one.heads) for one in texts]
    assert sizes == [(2000, 350, 30), (3000, 350, 30), (4000, 150, 30)]
    bullying = REPRODUCTIONS["repulsive-v1/table-6"].parts[1].name
    assert size_of("repulsive-v1/table-6", bullying, "cpu").positive == 0.117
    assert resize_scale(Size("cpu", sets=("heads=15",)), named_task("sentence").scales).name == "cpu-heads=15"
    # a head for each of five roles, and three free ones
    assert {size_of("guided/table-2", "", scale).heads for scale in REPRODUCTIONS["guided/table-2"].scales} == {8}
    assert named_task("graph2text").scales["paper"].layers == named_task("graph2text").scales["cpu"].layers == 6
    assert named_task("pretraining").scales["paper"].steps == 1_000_000
    for scale, epochs in (("cpu", 5), ("gpu", 10), ("paper", 10)):
        glue = [part.name for part in REPRODUCTIONS["repulsive/table-3"].parts]
        longer = [part for part in glue if size_of("repulsive/table-3", part, scale).epochs == epochs]
        assert longer == ["STS-B", "RTE", "RTE after MNLI"]
    for table, part, doses in (
        ("diversify/table-1", "", "diversity/dose-translation"),
        ("repulsive/table-1", "SNLI", "diversity/dose-pairs"),
    ):
        assert size_of(table, part, "cpu") == size_of(doses, "3x", "cpu")


def test_a_claim_says_what_a_scale_can_say():
    both = Contrast("em:layers={two}", "em")
    sizes = {"demo": Size("demo"), "paper": Size("paper")}
    parts = Part(("plain", "em:layers={two}", "em"), sizes), Part(("plain",), {"paper": Size("paper")}, "other")
    claims = (
        Claim("empty in part", (both, Contrast("em", "plain"))),
        Claim("empty", (both,)),
        Claim("elsewhere", (Contrast("plain", "plain", part="other", against_part=""),)),
    )
    found = Reproduction("a/b", "", "", "translation", parts, "", claims)
    demo, paper = (found.claims_at(scale, TRANSLATION) for scale in ("demo", "paper"))
    assert [(claim.statement, *map(str, claim.contrasts)) for claim in demo] == [
        ("empty in part", "em over plain"),
        ("empty", "em over em"),
    ]
    assert demo[1].contrasts[0].is_empty
    assert [len(claim.contrasts) for claim in paper] == [2, 1, 1]
    assert str(paper[2].contrasts[0]) == "plain in other over plain in "


def test_a_part_that_is_not_there_is_refused():
    alone = r"repulsive/table-6 has one part alone: leave --part out\."
    for name, part, message in (
        ("repulsive/table-2", "bigg", r"part is 'bigg'; expected .*base.*big"),
        # Transformer-small is a part at the paper's scale alone
        ("repulsive/table-2", "small", r"part is 'small'; expected .*base.*big"),
        ("repulsive/table-6", "small", rf"part is 'small'; {alone}"),
        ("repulsive/table-6", "", rf"part is ''; {alone}"),
    ):
        with pytest.raises(SettingError, match=message):
            REPRODUCTIONS[name].only([part], "demo")


def test_a_contrast_is_narrowed_to_the_parts_that_are_there_on_both_of_its_sides():
    less = Contrast("em", "plain", over=("Three", "Four"))
    whole = Contrast("em", "plain", over=("One", "Two"), less=less)
    found = whole.within({"Two", "Three"})
    assert (found.over, found.less and found.less.over, found.parts) == (("Two",), ("Three",), ("Two", "Three"))
    # of a side without parts nothing can be said: it asks for a part that no reproduction with several has
    assert all("" in whole.within(known).parts for known in ({"One"}, {"Four"}))


def test_the_documentation_lists_every_reproduction_once():
    page = (Path(__file__).parents[4] / "docs" / "reproducing.md").read_text(encoding="utf-8")
    papers = tuple(f"| `{paper}/" for paper in {identifier.partition("/")[0] for identifier in REPRODUCTIONS})
    listed = [line.split("`")[1] for line in page.splitlines() if line.startswith(papers)]
    assert sorted(listed) == sorted(REPRODUCTIONS)


def test_the_papers_means_follow_from_its_cells():
    glue, probing, guided = (
        REPRODUCTIONS[name] for name in ("repulsive/table-3", "diversify/table-7", "guided/table-3")
    )
    assert glue.published is not None
    assert probing.published is not None
    assert guided.published is not None
    printed = {arm: [float(row.cells[0]) for row in glue.published.rows if row.arm == arm] for arm in ("plain", SVGD)}
    # GLUE both ways: RTE alone, and RTE after MNLI in its place
    assert [round(float(np.mean(scores[:8])), 1) for scores in printed.values()] == [80.0, 80.2]
    second = [[*scores[:7], scores[8]] for scores in printed.values()]
    assert [round(float(np.mean(scores)), 1) for scores in second] == [80.5, 81.3]
    means = {
        "Surface": ("96.69", "97.56", "97.15", "97.71"),
        "Syntactic": ("59.77", "61.44", "60.26", "61.78"),
        "Semantic": ("73.38", "73.34", "74.76", "75.08"),
    }
    assert [part.name for part in probing.parts] == list(PROBES.values())
    assert {name: len(parts) for name, parts in probing.groups.items()} == {"Surface": 2, "Syntactic": 3, "Semantic": 5}
    for category, row in means.items():
        for place, mean in enumerate(row):
            cells = [
                [float(one.cells[0]) for one in probing.published.rows if one.part == part][place]
                for part in probing.groups[category]
            ]
            # the paper cuts some digits off
            assert fmean(cells) == pytest.approx(float(mean), abs=0.016)
    rows = {(row.part, row.name): (row.arm, *row.cells) for row in (*probing.published.rows, *guided.published.rows)}
    assert len(rows) == 4 * 10 + 7 * 6
    assert rows["TrDep", "Combine"] == ("output+em:layers={two}", "46.93")
    assert rows["SST", "Transformer-Guided-Attn"] == ("guided", "84.2")
    assert rows["MR", "PSAN* (quoted, not run)"] == ("", "80.0")


def test_claims_about_glue_are_those_of_the_paper_about_the_sets_there_are():
    table = REPRODUCTIONS["repulsive/table-3"]
    assert table.made is not None
    sets = tuple(part.name for part in table.parts)
    assert sets == ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "RTE after MNLI")
    assert list(average_sets(sets)) == ["Avg. of 8", "Avg. of 8, RTE after MNLI"]
    whole, few = table.made(sets), table.made(("CoLA", "SST-2", "RTE"))
    assert [one.part for one in whole[1].contrasts] == [
        "CoLA",
        "MRPC",
        "STS-B",
        "QQP",
        "MNLI",
        "QNLI",
        "RTE after MNLI",
    ]
    assert len(whole[0].contrasts) == 2
    # RTE fine-tuned alone falls in the paper
    assert [one.part for one in few[1].contrasts] == ["CoLA"]
    assert few[1].statement.endswith("(1 of these seven are here: CoLA).")
    assert "Avg. of 3" in few[0].statement


def test_studies_of_doses_have_a_slope_for_each_method_budget_and_number():
    assert np.diff(np.log(RATIOS)) == pytest.approx([np.log(RATIOS[-1] / RATIOS[0]) / (len(RATIOS) - 1)] * 4, rel=0.03)
    for name in ("logic", "translation", "pairs", "questions"):
        study = REPRODUCTIONS[f"diversity/dose-{name}"]
        arms = study.arms_at("demo", scales_of(study))
        assert set(arms) == {"1x", "3x"}
        assert tuple(arm for arm in arms["1x"] if arm.startswith("cka")) == name_doses("cka")
        sizes = {part.name: part.sizes["cpu"].sets for part in study.parts}
        (scale,) = {part.sizes["cpu"].scale for part in study.parts}
        assert scale == ("demo" if study.task in ("logic", "translation") else "cpu")
        assert sizes == {"1x": (), "3x": (f"epochs={3 * scales_of(study)[scale].epochs}",)}
        assert study.parts[0].sizes["demo"].sets == ()
        assert sum(len(one.contrasts) for one in study.claims_at("demo", scales_of(study))) >= 4 * (len(METHODS) - 1)


def test_language_models_are_compared_with_their_control_or_with_plain(tmp_path: Path):
    study = REPRODUCTIONS["diversity/lm"]
    plain = [one for claim in study.claims for one in claim.contrasts if "plain attention" in claim.statement]
    others = [one for claim in study.claims for one in claim.contrasts if one not in plain]
    heads, scores = ([one for one in others if one.measure == name] for name in ("effective_heads", None))
    assert len(heads) == len(scores) == 7
    assert len(heads) + len(scores) == len(others)
    assert all(one.against == parse_arm(one.arm).control for one in others)
    assert {(one.against, one.measure) for one in plain} == {("plain", None)}
    # of two numbers of heads, effective heads are no comparison
    assert not any(one.arm == "differential" and one.against == "plain" for one in heads)
    # each method has a verdict of its own
    assert all(len(claim.contrasts) == 1 for claim in study.claims)
    (tmp_path / "text.txt").write_text("a text\n" * 20)
    for scale in ("demo", "cpu", "gpu"):
        more = {"seeds": 5, "data": tmp_path / "text.txt", "out": tmp_path, "workers": 1}
        (plan,) = make_plans(study, scale, **more)
        names = [arm.name for arm in plan.comparison.arms]
        assert len(names) == 13
        assert all(parse_arm(name).control in (None, *names) for name in names)
        sizes: Any = plan.comparison.scale
        assert sizes.heads % 2 == sizes.key_value_heads % 2 == 0, "heads are paired"
        assert sizes.key_value_heads < sizes.heads
        (shrunk,) = make_plans(REPRODUCTIONS["diversity/shrinking-lm"], scale, **more)
        merged: Any = shrunk.comparison.scale
        assert merged.key_value_heads == merged.heads, "there are some to merge"


def test_only_language_models_have_claims_about_merging():
    for name in ("logic", "questions", "translation", "lm"):
        study = REPRODUCTIONS[f"diversity/shrinking-{name}"]
        measures = {one.measure for claim in study.claims for one in claim.contrasts}
        assert ("loss_added_kv_heads_50" in measures) == (study.task == "lm")
        assert "loss_added_heads_50" in measures
        arms = ("plain", "output-relative", "cka", "svgd-span", "scaled", "cka-together")
        assert study.arms_at("cpu", scales_of(study))[""] == arms
