"""The reproductions on graphs: claims, a baseline beside every seed, and their pages, done at toy size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from headwise.input_files import read_numbered_lines
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.reproduction import Part
from headwise_lab.papers.run import do_plans, make_plans, report
from headwise_lab.results.evidence import match_seeds, read_evidence
from headwise_lab.results.runs import REFERENCES
from headwise_lab.tasks.graph2text.ratings import FORM, KEY
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES
from lab.tasks.graph2text.graph_sets import write_triples

pytest.importorskip("nltk")

TINY = ("width=8", "layers=1", "epochs=1", "tokens=128", "min_count=1", "longest=12")


def test_every_arm_of_a_claim_is_run_or_a_baseline():
    for found in (one for one in REPRODUCTIONS.values() if one.task == "graph2text"):
        for scale in ("demo", "cpu", "gpu", "paper"):
            arms = found.arms_at(scale, GRAPH_SCALES)[""]
            for claim in found.claims_at(scale, GRAPH_SCALES):
                for contrast in claim.contrasts:
                    assert contrast.arm in arms
                    assert contrast.against in (*arms, *found.baselines)
    assert GRAPH_SCALES["paper"].layers == GRAPH_SCALES["cpu"].layers == 6


@pytest.mark.usefixtures("inline")
def test_the_tables_share_their_runs_and_write_form_page_and_record(tmp_path: Path):
    data = write_triples(tmp_path / "mine.tsv", 60)
    console = Console(record=True, width=200)
    options = ScaleOptions("demo", sizes=TINY)
    records = {}
    for name, seeds in (("table-5", 2), ("figure-9", 2), ("table-4", 1)):
        found = REPRODUCTIONS[f"repulsive/{name}"]
        if name == "table-4":
            # of its six arms those that the claims looked at below are about
            found = dataclasses.replace(found, parts=(Part(("plain", "svgd", "no-graph"), found.parts[0].sizes),))
        plans = make_plans(found, "demo", seeds=seeds, data=data, out=tmp_path / "runs", workers=1, options=options)
        assert do_plans(found, plans, console) == []
        report(found, "demo", plans, tmp_path / "runs", tmp_path / "record", console, "headwise reproduce")
        records[name] = json.loads((tmp_path / "record" / "results" / f"{name}-demo.json").read_text())
    (key,) = (tmp_path / "runs").rglob(KEY)
    assert (key.parent / FORM).exists()
    assert json.loads(key.read_text())["names"] == ["svgd", "plain"]
    page = (tmp_path / "runs" / "repulsive-figure-9-demo" / "outputs.html").read_text()
    references = [line for _, line in read_numbered_lines(plans[0].comparison.out / REFERENCES)]
    # what others wrote stays out of the records
    assert all((text in page) > (text in json.dumps(records["figure-9"])) for text in references[:2])
    assert len(records["table-4"]["claims"][0]["contrasts"]) == 8
    control = records["table-4"]["claims"][-1]
    assert control["contrasts"][0]["contrast"] == "plain over nearest"
    assert control["contrasts"][0]["by_seed"] == [control["contrasts"][0]["value"]]
    assert control["verdict"] == "no verdict (1 seed)"
    unasked = records["table-5"]["claims"][0]
    assert (unasked["shown"][0]["label"], unasked["shown"][0]["values"]["svgd"]) == ("win, %", "not measured")
    assert unasked["verdict"] == "no verdict (nothing measured)"
    folder = plans[0].comparison.out
    evidence = read_evidence(folder, ["plain"], [0, 1])
    assert evidence is not None
    plain, nearest = match_seeds([(evidence, "plain"), (evidence, "nearest")])
    assert sorted(plain) == sorted(nearest) == [0, 1]
    assert nearest[0] is nearest[1]
