"""The papers' tables as they are written down: every arm can be put on a model, every claim is about arms that run."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch

from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.papers.claims import MEASURED, Claim, Contrast
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.reproduction import (
    Part,
    Reproduction,
    Size,
    arm_name,
    arm_names,
    resize_scale,
)
from headwise_lab.tasks.logic.task import LogicTask
from headwise_lab.tasks.translation.model import Seq2Seq, Seq2SeqConfig
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
from headwise_lab.training.attach import Methods

TRANSLATION = [f"repulsive/{name}" for name in ("table-2", "table-6", "table-8", "figure-2", "figure-3b")]
EVERY = [one for name, one in REPRODUCTIONS.items() if name in TRANSLATION or name.startswith("diversify/")]
EVERY_SCALE = [(reproduction, scale) for reproduction in EVERY for scale in reproduction.scales]
each_scale = pytest.mark.parametrize(
    ("reproduction", "scale"), EVERY_SCALE, ids=[f"{reproduction.id}-{scale}" for reproduction, scale in EVERY_SCALE]
)


def scales_of(reproduction: Reproduction):
    return named_task(reproduction.task).scales


@each_scale
def test_claims_and_rows_are_about_arms_that_are_run(reproduction, scale):
    arms = reproduction.arms_at(scale, scales_of(reproduction))
    canonical = reproduction.canonical(scale, scales_of(reproduction))
    claims = reproduction.claims_at(scale, scales_of(reproduction))
    assert claims
    for claim in claims:
        for contrast in claim.contrasts:
            one, other = contrast.parts[:2]
            assert contrast.arm in arms[one]
            assert contrast.against in arms[other]
        for shown in claim.shown:
            written = getattr(shown, "arms", None) or (shown.arm,)
            assert all(arm in arms[part] for part in shown.parts for arm in written)
    for row in reproduction.published.rows if reproduction.published else ():
        assert len(row.cells) == len(reproduction.published.columns)
        if row.part in arms:
            assert canonical(row.part, row.arm) in arms[row.part]


@pytest.mark.parametrize("reproduction", EVERY, ids=lambda reproduction: reproduction.id)
def test_every_claim_can_be_made_at_the_papers_scale(reproduction):
    claims = reproduction.claims_at("paper", scales_of(reproduction))
    assert [claim.statement for claim in claims] == [claim.statement for claim in reproduction.claims]
    for claim, written in zip(claims, reproduction.claims, strict=True):
        assert len(claim.contrasts) == len(written.contrasts)
        assert not any(contrast.is_empty for contrast in claim.contrasts)


@pytest.mark.parametrize("reproduction", EVERY, ids=lambda reproduction: reproduction.id)
def test_arms_are_told_apart_at_the_papers_scale_and_each_part_has_plain(reproduction):
    written = {part.name: part.arms for part in reproduction.parts}
    for part, names in reproduction.arms_at("paper", scales_of(reproduction)).items():
        assert len(names) == len(written[part])
        assert names[0] == "plain"


@cache
def smallest_of(scale: str, times: int, heads: int | None):
    """A model with the layers and heads of a size and no more than that."""
    model = resize_scale(Size(scale, times, heads), TRANSLATION_SCALES)
    width = 64 * (1 + (model.width > 64))
    return dataclasses.replace(model, width=width, hidden=4, vocabulary_size=8)


@pytest.mark.parametrize("scale", ["demo", "cpu", "gpu", "paper"])
@pytest.mark.parametrize("reproduction", [one for one in EVERY if one.task == "translation"], ids=lambda one: one.id)
def test_every_arm_fits_a_model_with_the_layers_and_heads_of_its_size(reproduction, scale):
    arms = reproduction.arms_at(scale, scales_of(reproduction))
    for part in reproduction.parts_at(scale):
        size = part.sizes[scale]
        model = smallest_of(size.scale, size.times, size.heads)
        for name in arms[part.name]:
            fits(name, model)


@cache
def fits(name: str, scale) -> None:
    config = Seq2SeqConfig(
        vocab_size=8,
        width=scale.width,
        hidden=scale.hidden,
        encoder_layers=scale.encoder_layers,
        decoder_layers=scale.decoder_layers,
        heads=scale.heads,
    )
    network = Seq2Seq(config)
    methods = Methods(parse_arm(name), network, network, seed=1)
    methods.repel(torch.optim.Adam(network.parameters()))


def test_encoder_and_decoder_have_as_many_layers_so_that_one_word_names_a_layer_of_both():
    assert all(scale.encoder_layers == scale.decoder_layers for scale in TRANSLATION_SCALES.values())


def test_words_in_braces_name_the_layers_of_the_model_at_hand():
    texts = ("em:layers={first}", "em:layers={two}", "em:layers={lower}", "em:layers={upper}", "em:layers={last}")
    paper, gpu, demo = (TRANSLATION_SCALES[name] for name in ("paper", "gpu", "demo"))
    assert arm_names(texts, paper) == (
        *("em:layers=0", "em:layers=0/1", "em:layers=0/1/2", "em:layers=3/4/5", "em:layers=5"),
    )
    assert arm_names(texts, gpu) == ("em:layers=0", "em:layers=0/1", "em:layers=2/3", "em:layers=3")
    assert arm_names(texts, demo) == ("em:layers=0", "em", "em:layers=1")
    assert arm_name("em:capsules={heads}", paper) == "em:capsules=4"
    assert arm_name("em:capsules={sixty-four}", paper) == "em:capsules=64"
    assert arm_name("em:capsules={sixty-four}", demo) == "em"
    one = dataclasses.replace(demo, encoder_layers=1, decoder_layers=1)
    assert arm_names(texts, one) == ("em",)


def size_of(identifier: str, part: str, scale: str) -> Size:
    return next(one for one in REPRODUCTIONS[identifier].parts if one.name == part).sizes[scale]


def test_sizes_double_and_the_papers_are_the_tasks_own():
    demo = TRANSLATION_SCALES["demo"]
    twice = resize_scale(size_of("diversify/table-5", "big", "demo"), TRANSLATION_SCALES)
    assert (twice.width, twice.hidden, twice.heads) == (2 * demo.width, 2 * demo.hidden, 2 * demo.heads)
    assert (twice.epochs, twice.encoder_layers) == (demo.epochs, demo.encoder_layers)
    assert resize_scale(size_of("repulsive/figure-3b", "4 heads", "demo"), TRANSLATION_SCALES) is demo
    assert resize_scale(size_of("repulsive/figure-3b", "8 heads", "paper"), TRANSLATION_SCALES).heads == 8
    papers = [size_of("diversify/table-5", part, "paper") for part in ("base", "big", "zh-en base")]
    assert [resize_scale(one, TRANSLATION_SCALES).name for one in papers[:2]] == ["paper-base", "paper-big"]
    assert [one.corpus for one in papers] == ["wmt14", "wmt14", "wmt17"]


SIZES = {"demo": Size("demo"), "paper": Size("paper")}


def one_part(*claims: Claim) -> Reproduction:
    parts = (Part(("plain", "em:layers={two}", "em"), SIZES), Part(("plain",), {"paper": Size("paper")}, "other"))
    return Reproduction("a/b", "", "", "translation", parts, "", claims)


def test_a_claim_says_what_a_scale_can_say():
    both = Contrast("em:layers={two}", "em")
    found = one_part(
        Claim("empty in part", (both, Contrast("em", "plain"))),
        Claim("empty", (both,)),
        Claim("elsewhere", (Contrast("plain", "plain", part="other", against_part=""),)),
    )
    by_scale = {scale: found.claims_at(scale, TRANSLATION_SCALES) for scale in ("demo", "paper")}
    assert [claim.statement for claim in by_scale["demo"]] == ["empty in part", "empty"]
    assert [str(contrast) for contrast in by_scale["demo"][0].contrasts] == ["em over plain"]
    assert by_scale["demo"][1].contrasts[0].is_empty
    assert [len(claim.contrasts) for claim in by_scale["paper"]] == [2, 1, 1]
    assert str(by_scale["paper"][2].contrasts[0]) == "plain in other over plain in "


def test_reproductions_are_listed_once_their_task_and_analysis_are_there():
    listed = {reproduction.id for reproduction in EVERY}
    assert listed <= REPRODUCTIONS.keys()
    assert MEASURED == "measured, not tested"
    assert LogicTask.name in {reproduction.task for reproduction in REPRODUCTIONS.values()}


def test_the_documentation_lists_every_reproduction_once():
    page = (Path(__file__).parents[4] / "docs" / "reproducing.md").read_text(encoding="utf-8")
    papers = tuple(f"| `{paper}/" for paper in {identifier.partition("/")[0] for identifier in REPRODUCTIONS})
    listed = [line.split("`")[1] for line in page.splitlines() if line.startswith(papers)]
    assert sorted(listed) == sorted(REPRODUCTIONS)


@pytest.mark.parametrize(
    ("table", "part", "doses"),
    [("diversify/table-1", "", "diversity/dose-translation"), ("repulsive/table-1", "SNLI", "diversity/dose-pairs")],
)
def test_tables_at_cpu_have_the_size_of_the_longer_doses(table, part, doses):
    (longer,) = [one for one in REPRODUCTIONS[doses].parts if one.name == "3x"]
    (own,) = [one for one in REPRODUCTIONS[table].parts if one.name == part]
    scales = named_task(REPRODUCTIONS[doses].task).scales
    assert resize_scale(own.sizes["cpu"], scales) == resize_scale(longer.sizes["cpu"], scales)
