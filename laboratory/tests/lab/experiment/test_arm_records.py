"""The record of an arm, read back as the same arm, for methods of one's own too."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from headwise.errors import DataError
from headwise.heads.heads import Heads
from headwise.heads.method import Method
from headwise.nn.hooks import Handle
from headwise.routing.modules import Chunks
from headwise.similarity.penalty import Penalize
from headwise.strength import Target
from headwise_lab.experiment import arm_text
from headwise_lab.experiment.arm import Arm, named_arms
from headwise_lab.experiment.arm_text import parse_arm, record_arm, restore_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import as_record
from headwise_lab.tasks.logic.data import load_logic
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from headwise_lab.training.attach import attach_arm

RECORD = """
{"kind": "Arm", "name": "svgd-relative:layers=1+output:weight=0.5", "methods": [{"kind": "Repel", "layers": [1],
"rule": {"kind": "SVGD", "alpha": {"kind": "Relative", "ratio": 0.1}, "step_size": 0.1, "kernel": {"kind": "RBF",
"bandwidth": {"kind": "Median"}}, "smoothing": true, "prior_precision": 0.0, "data_size": 1.0, "inverse_temperature":
1.0}, "joint": false, "when": "step", "noise": "step", "every": 20}, {"kind": "Penalize", "layers": [1], "term":
{"kind": "Output"}, "weight": 0.5}], "control": "smooth:layers=1"}
"""


def test_the_record_of_an_arm_has_its_methods_with_what_is_set():
    arm = parse_arm("svgd-relative:layers=1+output:weight=0.5")
    assert json.dumps(record_arm(arm)) == RECORD.replace("\n", " ").strip()
    assert restore_arm(json.loads(RECORD)) == arm


def test_a_record_of_something_else_is_refused():
    record = record_arm(parse_arm("svgd"))
    for changes, message in (
        ({"kind": "Subclass"}, "has a 'Subclass'; expected one of .*Arm.*SVGD"),
        ({"of": 3}, "Arm cannot be built from"),
        ({"learning_rate": -1.0}, "learning_rate is -1"),
    ):
        with pytest.raises(DataError, match=message):
            restore_arm(record | changes)


def test_an_arm_is_restored_from_its_record():
    texts = (*named_arms(), "spos+position+em:layers=0/1+drophead:rate=0.3+guided:drop=rare")
    arms = [parse_arm(text) for text in texts]
    assert [restore_arm(json.loads(json.dumps(record_arm(arm)))) for arm in arms] == arms


def test_the_choice_of_kernel_is_no_part_of_an_arms_record():
    chunks = Chunks(tokens=256, fused=False)
    assert as_record(chunks) == {"kind": "Chunks", "tokens": 256, "routed": None, "compile": False}
    assert as_record(dataclasses.replace(chunks, fused=True)) == as_record(chunks)


def test_a_target_is_named_recorded_and_read_again():
    for text in ("cka-target:effective_heads=2.5,integral=0.3", "svgd-target:highest=0.4,decay=0.5"):
        arm = parse_arm(text)
        assert parse_arm(arm.name) == arm
        assert restore_arm(json.loads(json.dumps(record_arm(arm)))) == arm
        method = arm.methods[0]
        target = method.weight if isinstance(method, Penalize) else method.rule.alpha
        assert target in (Target(2.5, integral=0.3), Target(3.0, highest=0.4, decay=0.5))


@dataclasses.dataclass(frozen=True)
class Damp(Method):
    """O_h <- factor O_h, in all layers."""

    factor: float = 0.5

    def attach(self, heads: Heads) -> Handle:
        handle = Handle()
        for site in self.select(heads):
            handle.hook_before(site.expose().module, lambda _, args, kwargs: ((args[0] * self.factor,), kwargs))
        return handle


def test_a_new_method_is_one_class_and_one_line_in_the_arms(monkeypatch, tmp_path):
    arms = {**named_arms(), "damp": Arm("damp", (Damp(),))}
    monkeypatch.setattr(arm_text, "named_arms", lambda: arms)
    monkeypatch.setattr(arm_text, "_list_classes", arm_text._list_classes.__wrapped__)
    arm = parse_arm("damp:factor=0.25+output")
    assert (arm.name, arm.control) == ("output+damp:factor=0.25", "plain")
    assert restore_arm(json.loads(json.dumps(record_arm(arm)))) == arm
    scale = dataclasses.replace(
        LOGIC_SCALES["demo"], width=8, heads=2, generated_draws=1500, train_examples=96, dev_examples=24
    )
    data = load_logic(None, scale, tmp_path)
    computed = {}
    for name in ("damp:factor=0.25", "damp:factor=1.0", "plain"):
        model, methods = attach_arm(named_task("logic"), parse_arm(name), data, scale, seed=0)
        with methods.evaluating(model):
            computed[name] = model(**named_task("logic").collate([data.train[0]]))["logits"]
    assert torch.equal(computed["damp:factor=1.0"], computed["plain"])
    assert not torch.allclose(computed["damp:factor=0.25"], computed["plain"])
