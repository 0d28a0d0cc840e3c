"""The record of an arm: flat, with its keys in order, and read back as the same arm."""

from __future__ import annotations

import dataclasses
import json

import pytest

from headwise.disagreement.penalty import Penalize
from headwise.routing.modules import Chunks
from headwise.strength import Target
from headwise_lab.experiment.arm import named_arms
from headwise_lab.experiment.arm_text import parse_arm, record_arm, restore_arm
from headwise_lab.experiment.run_folder import as_record


def test_records_of_arms_without_the_later_methods_have_the_keys_they_had():
    found = set(record_arm(parse_arm("drophead:rate=0.2+svgd")))
    assert not found & {"drophead_start", "gates", "pairs", "wider", "talking", "muon"}
    assert record_arm(parse_arm("drophead-scheduled"))["drophead_start"] == 0.1


# As written by revision 1e8b0fb.
RECORD = """
{"kind": "Arm", "name": "svgd-relative:layers=1+output:weight=0.5", "rule": {"kind": "SVGD", "alpha": {"kind":
"Relative", "ratio": 0.1}, "step_size": 0.1, "kernel": {"kind": "RBF", "bandwidth": {"kind": "Median"}}, "smoothing":
true, "prior_precision": 0.0, "data_size": 1.0, "inverse_temperature": 1.0}, "layers": [1],
"kinds": null, "projections": null, "term": {"kind": "Output"}, "penalty_weight": 0.5,
"kind_weights": null, "aggregation": null, "aggregation_layers": null, "aggregation_kinds": null, "drophead": 0.0,
"guided": null, "model": null, "learning_rate": null, "control": "smooth:layers=1"}
"""


def test_the_record_of_an_arm_is_flat_and_has_all_keys_in_their_old_order():
    arm = parse_arm("svgd-relative:layers=1+output:weight=0.5")
    assert json.dumps(record_arm(arm)) == RECORD.replace("\n", " ").strip()
    assert restore_arm(json.loads(RECORD)) == arm


@pytest.mark.parametrize("text", [*named_arms(), "spos+position+em:layers=0/1+drophead:rate=0.3+guided:drop=rare"])
def test_an_arm_is_restored_from_its_record(text):
    arm = parse_arm(text)
    assert restore_arm(json.loads(json.dumps(record_arm(arm)))) == arm


def test_the_choice_of_kernel_is_no_part_of_an_arms_record():
    chunks = Chunks(tokens=256, fused=False)
    assert as_record(chunks) == {"kind": "Chunks", "tokens": 256, "routed": None, "compile": False}
    assert as_record(dataclasses.replace(chunks, fused=True)) == as_record(chunks)


@pytest.mark.parametrize("text", ["cka-target:effective_heads=2.5,integral=0.3", "svgd-target:highest=0.4,decay=0.5"])
def test_a_target_is_named_recorded_and_read_again(text: str):
    arm = parse_arm(text)
    assert parse_arm(arm.name) == arm
    assert restore_arm(json.loads(json.dumps(record_arm(arm)))) == arm
    method = arm.methods[0]
    target = method.weight if isinstance(method, Penalize) else method.rule.alpha
    assert target in (Target(2.5, integral=0.3), Target(3.0, highest=0.4, decay=0.5))
