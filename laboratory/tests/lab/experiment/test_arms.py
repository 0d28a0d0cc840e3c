"""Arms: their texts, names, controls and records."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from headwise.errors import DataError, SettingError
from headwise.gating.gates import MixtureOfHeads, SigmoidGate
from headwise.heads.heads import Heads
from headwise.heads.method import Method
from headwise.heads.scores.mixing import MixHeads
from headwise.kernels import IMQ, RBF, Fixed, NormalizedRBF, ReleasedMedian
from headwise.nn.hooks import Handle
from headwise.repulsion.repel import Repel
from headwise.repulsion.rules import SPOS, SVGD
from headwise.routing.aggregate import Aggregate
from headwise.routing.modules import Chunks, EMRouting, Trunk
from headwise.similarity.invariant import CKA, SpanOverlap
from headwise.similarity.penalty import Penalize
from headwise.similarity.terms import Output, Subspace, Sum
from headwise.strength import Relative, Target
from headwise_lab.experiment import arm_text
from headwise_lab.experiment.arm import (
    ROLES,
    Arm,
    DropHeads,
    GateHeads,
    Guided,
    LengthenQueries,
    Orthogonalize,
    OtherModel,
    PairHeads,
    Widen,
    combine,
    named_arms,
)
from headwise_lab.experiment.arm_text import list_settings, parse_arm, parse_arms, record_arm, restore_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import as_record
from headwise_lab.tasks.logic.data import load_logic
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from headwise_lab.training.attach import attach_arm


def test_the_named_arms_hold_the_papers_settings():
    arms = named_arms()
    assert arms["plain"] == Arm("plain", control=None)
    assert arms["svgd"].find(Repel).rule == SVGD(alpha=0.01, step_size=0.1, kernel=RBF())
    assert arms["smooth"].find(Repel).rule == SVGD(alpha=0.0, step_size=0.1, kernel=RBF())
    assert arms["scaled"].find(Repel).rule == SVGD(alpha=0.0, step_size=0.1, smoothing=False)
    assert isinstance(arms["svgd-relative"].find(Repel).rule.alpha, Relative)
    assert isinstance(arms["spos"].find(Repel).rule, SPOS)
    assert parse_arm("bilstm:learning_rate=0.1").methods == (OtherModel("bilstm"),)
    assert arms["svgd-normalized"].find(Repel).rule.kernel == NormalizedRBF()
    assert arms["output"].methods == (Penalize(Output(), weight=1.0),)
    assert arms["em"].methods == (Aggregate(EMRouting(iterations=3, capsules=None)),)


CONTROLS = {
    "plain": "scaled frobenius subspace position output subspace-relative position-relative output-relative "
    "squared-cosine cka hsic correlation determinant span map cka-target cka-together cosine-penalty cosine-repulsion "
    "drophead trunk talking gated-constant gated-elements-constant mixture-all paired wider queries-longer "
    "queries-faster muon random-mask bilstm cnn no-graph output:weight=0.5 mixture:active=none random-mask:roles=rare",
    "scaled": "smooth svgd-function svgd-span sgld svgd:smoothing=false",
    "smooth": "svgd svgd-relative svgd-target svgd-normalized spos svgd:alpha=0.5,learning_rate=0.1",
    "trunk": "simple em output+em",
    "drophead": "drophead-scheduled",
    "gated-constant": "gated",
    "gated-elements-constant": "gated-elements",
    "mixture-random": "mixture",
    "mixture-all": "mixture-random",
    "paired": "differential",
    "muon": "muon-heads",
    "random-mask": "guided",
    "guided": "shuffled-parse guided:drop=major guided:random=rare/window guided:shuffled=major,learning_rate=0.1",
    "smooth:step_size=0.2,kinds=self": "svgd:alpha=0.5,step_size=0.2,kinds=self",
    "trunk:layers=0/1,kinds=self": "em:iterations=2,layers=0/1,kinds=self",
    "trunk:layers=0/1": "output:kinds=self+em:layers=0/1",
    "smooth+trunk": "svgd+em",
    "random-mask:roles=window": "guided:roles=window",
    "random-mask:roles=rare/major,released=true": "guided:roles=rare/major,released=true",
    "guided:roles=rare/major": "guided:roles=rare/major,drop=rare",
    "guided:roles=dependency": "shuffled-parse:roles=dependency",
    "trunk+random-mask": "em+guided",
    "smooth+guided": "svgd+guided:drop=rare",
    "muon:momentum=0.9": "muon-heads:momentum=0.9",
    "gated-constant:scale=1.0": "gated:scale=1.0",
    "mixture-random:shared=2,active=3": "mixture:shared=2,active=3",
    "mixture-all:shared=2": "mixture-random:shared=2,active=3",
    "drophead:rate=0.2": "drophead-scheduled:rate=0.2,start=0.3",
    "trunk+gated-constant": "em+gated",
}


def test_every_arm_is_judged_against_the_arm_that_differs_in_one_thing():
    expected = {name: control for control, names in CONTROLS.items() for name in names.split()}
    assert {name: parse_arm(name).control for name in expected} == expected
    assert [parse_arm(name).name for name in expected] == [*expected]
    assert {*named_arms()} - {*expected} == {"plain"}
    assert named_arms()["plain"].control is None
    assert parse_arm("random-mask").find(Guided).random == ROLES
    assert parse_arm("shuffled-parse").find(Guided).shuffled == ("dependency", "major")
    assert parse_arm("output+guided").find(Guided) == named_arms()["guided"].find(Guided)


def test_rivals_are_written_with_their_settings_and_come_back_from_their_records():
    for text, method in {
        "talking": MixHeads(),
        "talking:weights=false": MixHeads(weights=False),
        "muon:momentum=0.9": Orthogonalize(per_head=False, momentum=0.9),
        "muon-heads": Orthogonalize(per_head=True),
        "gated:scale=1.0": GateHeads(SigmoidGate(scale=1.0)),
        "gated-elements-constant": GateHeads(SigmoidGate("element", token=False)),
        "mixture:shared=2,active=3,balance=0.0": GateHeads(MixtureOfHeads(2, 3, balance=0.0)),
        "mixture:active=none": GateHeads(MixtureOfHeads(1, None)),
        "mixture-random": GateHeads(MixtureOfHeads(1, 2, routing="random")),
        "differential": PairHeads(second=True),
        "paired": PairHeads(second=False),
        "wider:units=7": Widen(7),
        "queries-longer:drawn=12.0": LengthenQueries(12.0),
        "drophead-scheduled:rate=0.2,start=0.3": DropHeads(0.2, start=0.3),
        "drophead:rate=0.2": DropHeads(0.2),
    }.items():
        arm = parse_arm(text)
        assert arm.methods == (method,)
        assert arm.name == text
        assert restore_arm(json.loads(json.dumps(record_arm(arm)))) == arm


def test_combining_arms_does_what_each_does():
    arms = named_arms()
    assert arms["svgd"] + arms["em"] == parse_arm("svgd+em")
    assert combine([arms["plain"], arms["em"]]) == arms["em"]
    arm = parse_arm("em:iterations=2,layers=0+svgd:alpha=0.5,layers=1+output:weight=0.25,layers=1")
    assert arm.name == "svgd:alpha=0.5,layers=1+output:weight=0.25,layers=1+em:iterations=2,layers=0"
    assert arm.methods == (
        Repel(SVGD(alpha=0.5), layers=(1,)),
        Penalize(Output(), weight=0.25, layers=(1,)),
        Aggregate(EMRouting(iterations=2), layers=(0,)),
    )
    # a rule and a term act in the place that one of them names
    arm = parse_arm("svgd:layers=0/1+output:kinds=self")
    assert [(method.layers, method.kinds) for method in arm.methods] == [((0, 1), ("self",))] * 2
    # penalties are added with their weights, if they have one strength
    arm = parse_arm("output:weight=0.5+subspace:weight=2")
    assert arm.methods == (Penalize(Sum(((2.0, Subspace()), (0.5, Output()))), weight=1.0),)
    assert parse_arm("cka+span").methods == (Penalize(Sum(((1.0, CKA()), (1.0, SpanOverlap())))),)


def test_a_setting_goes_into_its_field_with_its_type():
    for text, field, value in (
        ("svgd:alpha=0.5", "alpha", 0.5),
        ("svgd:alpha=1e+2", "alpha", 100.0),
        ("svgd:step_size=0.3", "step_size", 0.3),
        ("svgd:smoothing=false", "smoothing", False),
        ("svgd:kernel=imq", "kernel", IMQ()),
        ("svgd:kernel=imq,bandwidth=0.5", "kernel", IMQ(bandwidth=Fixed(0.5))),
        ("svgd:bandwidth=released", "kernel", RBF(bandwidth=ReleasedMedian())),
        ("svgd-relative:ratio=0.3", "alpha", Relative(0.3)),
        ("spos:inverse_temperature=1e6", "inverse_temperature", 1e6),
    ):
        assert getattr(parse_arm(text).find(Repel).rule, field) == value, text
    for text, changed in (
        ("em:capsules=8,activation=false", {"capsules": 8, "activation": False}),
        ("em:capsules=none", {}),
        ("em:inverse_temperature=0.5/2", {"inverse_temperature": (0.5, 2.0)}),
    ):
        assert parse_arm(text).methods == (Aggregate(EMRouting(**changed)),)
    arm = parse_arm("cka:of=contributions,sketch=4,ratio=0.5")
    assert arm.methods == (Penalize(CKA(of="contributions", sketch=4), weight=Relative(0.5)),)
    assert parse_arm(arm.name) == restore_arm(record_arm(arm)) == arm
    assert parse_arm("span:projection=query").methods == (Penalize(SpanOverlap("query")),)


def test_the_name_leaves_out_what_is_default_and_reads_back_as_the_same_arm():
    assert parse_arm("svgd:alpha=0.01,step_size=0.1").name == "svgd"
    assert parse_arm("svgd:step_size=0.2,alpha=0.010").name == "svgd:step_size=0.2"
    assert parse_arm("trunk:capsules=4").methods == (Aggregate(Trunk(capsules=4)),)
    assert parse_arm("svgd:alpha=2").folder == "svgd@alpha=2.0"
    assert parse_arm("em:layers=0/1,kinds=self").folder == "em@layers=0_1,kinds=self"


NUMBERS = st.floats(min_value=1e-6, max_value=0.9)
VALUES = {
    "kernel": st.sampled_from(["rbf", "imq", "cosine", "normalized-rbf", "radial-rbf"]),
    "bandwidth": st.sampled_from(["median", "released", "0.25"]),
    "votes": st.sampled_from(["shared-trunk", "per-head", "distinct-capsules"]),
    "layers": st.sampled_from(["all", "0", "0/1"]),
    "kinds": st.sampled_from(["all", "self", "decoder/cross"]),
    "projections": st.sampled_from(["all", "query", "key/value"]),
    "kind_weights": st.sampled_from(["none", "1/0.5/0.5"]),
    "smoothing": st.sampled_from(["true", "false"]),
    "activation": st.sampled_from(["true", "false"]),
    "relu": st.sampled_from(["true", "false"]),
    "iterations": st.integers(1, 5).map(str),
    "capsules": st.sampled_from(["none", "4"]),
    "softmax_over": st.sampled_from(["capsules", "heads"]),
    "floor": st.just("1e-05"),
    "roles": st.sampled_from(["rare/window/major", "major/dependency/rare/window"]),
    "drop": st.just("rare"),
    "random": st.just("window"),
    "shuffled": st.just("major"),
    "released": st.sampled_from(["true", "false"]),
    "debiased": st.sampled_from(["true", "false"]),
    "effective_heads": st.floats(1.0, 8.0).map(repr),
    "matched": st.sampled_from(["true", "false"]),
    "of": st.sampled_from(["outputs", "contributions"]),
    "projection": st.sampled_from(["query", "output"]),
    "sketch": st.integers(0, 5).map(str),
    "logits": st.sampled_from(["true", "false"]),
    # neither matrix is refused
    "weights": st.just("true"),
    "momentum": st.floats(0.0, 0.99).map(repr),
    "shared": st.integers(0, 3).map(str),
    "active": st.sampled_from(["1", "4"]),
    "units": st.integers(1, 40).map(str),
    "grouping": st.sampled_from(["within", "across"]),
}


@given(st.data())
@limits(max_examples=60)
def test_any_settings_of_any_arm_print_as_a_text_that_gives_the_arm_back(data):
    name = data.draw(st.sampled_from(list(named_arms())))
    drawn = {}
    for setting in list_settings(named_arms()[name]):
        value = VALUES.get(setting, NUMBERS.map(repr))
        if setting == "inverse_temperature" and name == "em":
            value = st.just("0.5/2.5")
        if data.draw(st.booleans()):
            drawn[setting] = data.draw(value)
    if drawn.get("kernel") == "cosine":
        drawn.pop("bandwidth", None)
    if name in ("subspace", "subspace-relative", "span", "map") or drawn.get("of") == "contributions":
        # terms on values, and on contributions, have no groups
        drawn.pop("grouping", None)
    if drawn.get("votes") in ("per-head", "distinct-capsules"):
        drawn.pop("relu", None)
    shuffled = data.draw(st.permutations(list(drawn)))
    text = name + (":" + ",".join(f"{s}={drawn[s]}" for s in shuffled) if drawn else "")
    arm = parse_arm(text)
    assert parse_arm(str(arm)) == arm
    assert parse_arms(f"svgd+em,{arm},drophead+simple")[1] == arm


WRONG = [
    ("svdg", r"there is no arm 'svdg'; did you mean svgd"),
    ("nothing-like-it", r"there is no arm 'nothing-like-it'; choose \(all: plain, "),
    (
        "svgd:alfa=1",
        r"arm svgd has no setting 'alfa'; it has alpha, step_size, kernel, bandwidth, .*learning_rate, dropout\.",
    ),
    ("svgd:alpha=big", r"svgd:alpha is 'big'; expected a number\."),
    ("svgd:alpha=-1", r"alpha"),
    ("em:iterations=2.5", r"em:iterations is '2\.5'; expected an integer\."),
    ("em:activation=maybe", r"em:activation is 'maybe'; expected true or false\."),
    (
        "svgd:kernel=laplace",
        r"svgd:kernel is 'laplace'; expected one of rbf, imq, cosine, normalized-rbf, radial-rbf\.",
    ),
    ("svgd:layers=first", r"svgd:layers is 'first'; expected an integer\."),
    ("svgd:kinds=selfish", r"kinds is 'selfish'"),
    ("svgd:projections=output", r"projections is 'output'"),
    ("output:kind_weights=1/2", r"kind_weights is \(1\.0, 2\.0\); expected one number for each"),
    ("svgd:alpha", r"'alpha' in arm 'svgd:alpha' is not of the form setting=value\."),
    ("svgd:alpha=0.5,alpha=0.1", r"arm 'svgd:alpha=0.5,alpha=0.1' sets alpha to 0.5 and to 0.1; two arms are"),
    ("svgd+spos", r"svgd\+spos: both set rule; an arm has one\."),
    ("simple+em", r"simple\+em: both set aggregation; an arm has one\."),
    ("em:learning_rate=0.1+svgd:learning_rate=0.2", r"both set learning rate; an arm has one\."),
    ("smooth:alpha=1", r"arm smooth has no setting 'alpha'"),
    ("plain:learning_rate=0", r"learning_rate is 0\.0; expected"),
    (r"output+cka", r"output\+cka: both set the strength of the penalty"),
    ("cka:of=weights", "of is 'weights'"),
    ("svgd+bilstm", "bilstm has no heads, so nothing combines with it"),
    ("guided+random-mask", r"guided\+random-mask: both set guided"),
    ("random-mask:drop=rare", "arm random-mask has no setting 'drop'"),
    ("talking:logits=false,weights=false", "expected logits, weights or both"),
    ("muon:per_head=true", "muon has no setting 'per_head'"),
    ("gated:token=false", "has no setting"),
    ("mixture-all:active=2", "has no setting"),
    ("drophead:start=0.1", "has no setting"),
    ("differential:second=false", "has no setting"),
    ("muon+muon-heads", "both set muon"),
    ("gated+mixture", "both set gates"),
    ("paired+differential", "both set pairs"),
    ("svgd,plain,svgd:alpha=0.01", "arm svgd is given twice"),
]


def test_a_wrong_arm_is_refused_in_one_sentence():
    for text, message in WRONG:
        with pytest.raises(SettingError, match=message) as caught:
            parse_arms(text)
        assert "\n" not in str(caught.value)


def test_an_arm_is_a_frozen_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        named_arms()["plain"].name = "other"
    with pytest.raises(SettingError, match=r"DropHeads\.rate is 1"):
        Arm("x", (DropHeads(1.0),))
    with pytest.raises(SettingError, match=r"methods has \['DropHeads', 'DropHeads'\]; expected at most one"):
        Arm("x", (DropHeads(0.1), DropHeads(0.2)))
    with pytest.raises(SettingError, match=r"rule and term act on layers \(0,\) and None, kinds None and None"):
        Arm("x", (Repel(SVGD(), layers=(0,)), Penalize(Output())))


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
