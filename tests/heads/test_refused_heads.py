"""What is no head, or is something else or stale where heads, rows or a view are expected, is refused in a sentence."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.attentions import (
    BlendedAttention,
    FusedAttention,
    LinearAttention,
    MixedHeadsAttention,
    PointwiseGates,
    SeparateAttention,
    ShuffledAttention,
    StridedAttention,
    SwappedAttention,
)
from heads.families import BY_NAME
from heads.own import HEADS, SIZE, ListAttention, ParameterAttention
from heads.refused import REFUSED, Refused
from heads.wrappers import Linear8bit, wrap
from headwise.heads import find as finding
from headwise.heads.heads import Heads
from headwise.heads.layouts.parameters import Axes
from headwise.heads.view import HeadAxes, HeadView, check_head_views

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))
LAYOUT, SETTING = hw.errors.LayoutError, hw.errors.SettingError
find, rows = hw.find_heads, hw.layouts
GONE = object()
# A message, and what it answers.
Refusals = list[tuple[str, Callable[[], Any]]]


def change(model: nn.Module, **changes: Any) -> nn.Module:
    """The model with other attributes, or without those that are `GONE`."""
    for name, value in changes.items():
        if value is GONE:
            delattr(model, name)
        else:
            setattr(model, name, value)
    return model


def separate(**changes: Any) -> nn.Module:
    return change(SeparateAttention(), **changes)


def holding(**modules: nn.Module) -> nn.Module:
    return change(nn.Module(), **modules)


def script(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        # torch.jit itself is deprecated
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def named(name: str, module: nn.Module) -> nn.Module:
    """The module under a class of this name."""
    module.__class__ = type(name, (type(module),), {})
    return module


def linears(*names: str, width: int = 4) -> dict[str, nn.Module]:
    return {name: nn.Linear(width, width) for name in names}


def lazy(model: nn.Module, name: str) -> nn.Module:
    return change(model, **{name: nn.LazyLinear(getattr(model, name).out_features)})


TRANSFORMER = find(nn.Transformer(8, 2, 2, 2, 16, batch_first=True))
ENCODER = find(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
THREE = {name: nn.Parameter(torch.zeros(8, 2, 4)) for name in "qkv"}
UNNAMED = r"holds query, key and value projections but neither .*give its number of heads, find_heads"
FIND: Refusals = [
    (r"several places.*first with \.kind", lambda: TRANSFORMER.layer(0)),
    (r"layer 7.*layers \[0, 1\]", lambda: TRANSFORMER.kind("self").layer(7)),
    ("no attention named like 'head'", lambda: TRANSFORMER.where("head")),
    (
        r"(?s)odd_attention: Odd with w1\.weight \[4, 4\].*find_heads\(model",
        lambda: find(holding(odd_attention=named("Odd", holding(**linears("w1", "w2", "w3", "w4"))))),
    ),
    ("20 rows do not divide into heads of 3 rows", lambda: find(separate(head_dim=3))),
    ("4 query and 3 key heads of 5 rows and 20 value rows", lambda: find(separate(k_proj=nn.Linear(12, 15)))),
    (UNNAMED, lambda: find(separate(head_dim=GONE, num_heads=GONE))),
    (
        "second: DeformableAttention",
        lambda: find(holding(first=separate(), second=named("DeformableAttention", holding(**linears("value_proj"))))),
    ),
    (
        r"Relative with q \[8, 2, 4\]",
        lambda: find(holding(first=separate(), second=named("Relative", holding(**THREE)))),
    ),
    (
        "holds query_global in addition to k_proj, q_proj, v_proj",
        lambda: find(separate(query_global=nn.Linear(12, 20))),
    ),
    (r"holds conv1d .*exclude=", lambda: find(separate(conv1d=nn.Conv1d(12, 12, 3)))),
    ("holds q_extra in add", lambda: find(separate(q_extra=nn.LazyLinear(3)))),
    (r"(?s)no attention heads .*\(model\): FusedAttention", lambda: find(change(FusedAttention(), proj=None))),
    (r"70 rows .* for 4 query heads of 5 rows", lambda: find(change(FusedAttention(), qkv=nn.Linear(12, 70)))),
    (
        "the model .* no output projection was found",
        lambda: hw.ablate(find(BY_NAME["BERT"].build().encoder.layer[0].attention.self), 0),
    ),
    (
        r"1: RecursiveScriptModule is compiled by torch\.jit",
        lambda: find(nn.Sequential(separate(), script(nn.MultiheadAttention(12, 3)))),
    ),
    (
        r"^MultiheadAttention is compiled by torch\.jit.*torch\.jit\.script",
        lambda: find(script(nn.MultiheadAttention(12, 3))),
    ),
    (
        r"^0 \(SeparateAttention\): its q_proj\.weight has no shape.*once",
        lambda: find(nn.Sequential(lazy(separate(), "q_proj"))),
    ),
    (
        r"^0 \(SeparateAttention\): its o_proj\.weight has no shape.*once",
        lambda: find(nn.Sequential(lazy(separate(), "o_proj"))),
    ),
    (
        r"^the model \(Module\): its w_q has no shape before the first forward",
        lambda: find(holding(**{name: nn.UninitializedParameter() for name in ("w_q", "w_k", "w_v")})),
    ),
    ("LazyLinear with weight of no shape yet", lambda: find(holding(x_proj=nn.LazyLinear(3)))),
    (
        r"qkv\.weight: row 5 is read as part of its query heads and of its key",
        lambda: find(FusedAttention(interleaved=True), Overlapping("mine", ("qkv",), ("proj",), interleaved=True)),
    ),
    (UNNAMED, lambda: find(holding(layers=nn.ModuleList([*ListAttention().heads[:3], nn.Identity()])))),
    (UNNAMED, lambda: find(holding(layers=nn.ModuleList([*ListAttention(size=10).heads[:3]])))),
    (UNNAMED, lambda: find(uneven())),
]
FIND_SETTINGS: Refusals = [
    ("projection is 'output'", lambda: TRANSFORMER.projection("output")),
    (r"projection\(\) was given nothing", TRANSFORMER.projection),
    ("was given nothing", ENCODER.layers),
    ("layer is '0'", lambda: ENCODER.layers("0")),
    ("layer is True", lambda: ENCODER.layers(True)),
    ("pattern is 3; .* site names, such as 'decoder", lambda: ENCODER.where(3)),
    (r"kind\(\) was given nothing; expected some of self, decoder, cross", ENCODER.kind),
    (
        r"order is \('query', 'key'\); expected key, query, value",
        lambda: rows.FusedLinear("mine", ("qkv",), ("proj",), order=("query", "key")),
    ),
    ("as the query has its own projection", lambda: rows.FusedLinear("mine", ("kv",), ("proj",), query=("q",))),
    (r"model is .*; expected a torch\.nn\.Module, the loaded", lambda: find("bert")),
    ("model is Linear; expected", lambda: find(nn.Linear)),
    ("model is a NoneType; expected", lambda: find(None)),
    (
        "layouts holds <class .*SeparateLinears.*expected layout rows, for example find_heads",
        lambda: find(separate(), rows.SeparateLinears),
    ),
    ("layouts holds <class .*TorchMultihead", lambda: find(separate(), (rows.SeparateLinears(), rows.TorchMultihead))),
    ("layouts holds 'torch'", lambda: find(separate(), "torch")),
    ("layouts holds None", lambda: find(separate(), None)),
    ("layouts is empty; expected at least one layout row", lambda: find(separate(), ())),
    (r"query is 'wq'; expected a tuple of names, such as \('wq',\)", lambda: rows.SeparateLinears(query="wq")),
    ("output is 'o'; expected a tuple", lambda: rows.FusedLinear("mine", ("qkv",), "o")),
    ("exclude holds 3; expected shell patterns", lambda: find(separate(), exclude=3)),
]


class Overlapping(hw.layouts.FusedLinear):
    def site(self, model, name, module):
        site = super().site(model, name, module)
        return site and replace(site, slices=(replace(site.slices[0], start=1), *site.slices[1:]))


def uneven() -> nn.Module:
    model = ListAttention()
    model.heads[1].key = nn.Linear(10, 2)
    return model


def own(*args: Any, **settings: Any) -> ParameterAttention:
    return ParameterAttention(*args, **settings)


def unread(method: Callable[[Heads], Any]) -> Callable[[], Any]:
    row = rows.SeparateParameters(axes="h d e", output_axes="h e d")
    return lambda: method(find(own("h d e", "h e d"), row))


def repelled(freeze: bool) -> None:
    model = own("h d e")
    heads, optimizer = find(model, rows.SeparateParameters(axes="h d e")), sgd(model)
    model.W_K = model.W_K.requires_grad_(False) if freeze else None
    hw.repel(heads, hw.SVGD(), optimizer)


PROJECTED = "W_O is the parameter W_O, which its forward uses itself; outputs of"
FOUR = linears("q_proj", "k_proj", "v_proj", "o_proj", width=12)
OWN: Refusals = [
    (
        r"W_Q of shape \(12, 12\) can be read with 4 heads as '\(h e\) d' and 'd \(h e\)'; name its",
        lambda: find(own("(h e) d", width=HEADS * SIZE)),
    ),
    ("as 'h d e' and 'e d h'; name its axes", lambda: find(own("h d e", head_size=HEADS, width=HEADS * HEADS))),
    (
        r"as 'p \(h e\) d' and 'p d \(h e\)'; name its axes",
        lambda: find(own("p (h e) d", packed=True, head_size=2, width=2 * HEADS)),
    ),
    (r"W_Q of shape \(4, 10, 3\) fits no order of axes with 4 heads", lambda: find(own("h d e", "h e d"))),
    (
        "does not have the axes 'h e d' with .*h = 3",
        lambda: find(own("h d e"), rows.SeparateParameters(axes="h e d", num_heads=3)),
    ),
    (
        r"W_Q of shape \(4, 10, 3\) does not have the axes '\(h e\) d'",
        lambda: find(own("h d e"), rows.SeparateParameters(axes="(h e) d")),
    ),
    (
        "does not have the axes 'p d e h' with p = 3, .*h = 4",
        lambda: find(own("h d e"), rows.FusedParameter(fused=("W_Q",), axes="p d e h")),
    ),
    (
        "has 4 heads along h, not 4 of the queries and as many",
        lambda: find(own("h d e"), rows.FusedParameter(fused=("W_Q",), axes="h d e")),
    ),
    (
        r"does not hold query heads of 3 features as 'h d e'",
        lambda: find(
            change(own("h d e"), kv=nn.Parameter(torch.zeros(8, 10, 3)), W_Q=nn.Parameter(torch.zeros(4, 10, 2))),
            rows.FusedParameter(fused=("kv",), order=("key", "value"), query=("W_Q",), axes="h d e"),
        ),
    ),
    (PROJECTED, unread(lambda heads: hw.Disagreement(heads, hw.similarity.Output()))),
    (PROJECTED, unread(lambda heads: hw.ablate(heads, 0))),
    (PROJECTED, unread(lambda heads: hw.aggregate(heads, hw.routing.SimpleRouting(capsules=2)))),
    ("no module computes values of its heads", unread(lambda heads: hw.Disagreement(heads, hw.similarity.Subspace()))),
    (
        "attention weights and biases of heads are reached in",
        unread(lambda heads: hw.Disagreement(heads, hw.similarity.Position())),
    ),
    ("W_K does not require a gradient", lambda: repelled(True)),
    ("W_K is no longer a parameter of ParameterAttention", lambda: repelled(False)),
    ("name its axes, or num_heads, in the row", lambda: find(change(own("h d e"), num_heads=GONE))),
    (UNNAMED + r"\(model, num_heads=8\)", lambda: find(holding(**FOUR))),
    (
        "num_heads=2 fits no attention: the modules found say 3 heads themselves",
        lambda: find(holding(**FOUR, heads=3), num_heads=2),
    ),
    ("12 rows do not divide into heads", lambda: find(holding(**FOUR), rows.SeparateLinears(num_heads=5))),
]
OWN_SETTINGS: Refusals = [
    *(
        ("axes is ", lambda axes=axes: Axes.read(axes))
        for axes in ("h d", "h d e e", "x h d e", "h (d e)", "", None, 3, "b h d e")
    ),
    ("axes is 'h d'", lambda: rows.FusedParameter(axes="h d")),
    ("output_axes is 3; expected a", lambda: rows.SeparateParameters(output_axes=3)),
    (
        "p is for one parameter of several projections, a FusedParameter",
        lambda: rows.SeparateParameters(axes="p h d e"),
    ),
    ("order is", lambda: rows.FusedParameter(order=("query", "key"))),
    *(("num_heads is", lambda wrong=wrong: find(separate(), num_heads=wrong)) for wrong in (0, -1, True, 2.0, "3")),
    *(
        ("num_heads is", lambda wrong=wrong: rows.SeparateLinears(num_heads=wrong))
        for wrong in (0, -1, True, 2.0, "3", ...)
    ),
]


def view(*args: Any, **settings: Any) -> HeadView:
    owner = nn.Module()
    shape = args[0] if isinstance(args[0], tuple) else (18, 4)
    owner.weight = nn.Parameter(torch.zeros(shape))
    return HeadView("key", "a.w", owner, "weight", *args[isinstance(args[0], tuple) :], **settings)


def checked(*args: Any, **settings: Any) -> Callable[[], None]:
    return lambda: check_head_views([view(*args, **settings)])


def stacked(start: int = 0) -> HeadView:
    parts = [nn.Linear(5, 2) for _ in range(3)]
    members = [HeadView("query", f"{i}.weight", part, "weight", 1, 2) for i, part in enumerate(parts)]
    return HeadView.stack("heads.*.weight", nn.ModuleList(parts), [*members[:2], replace(members[2], start=start)])


def run_of_falcon() -> Tensor:
    query = find(BY_NAME["Falcon, 40B and 180B"].build()).slices()[0]
    return query.of(query.parameter)


QUANTIZED = {"obstacle": "is quantized; use the full weights"}
APART = {"axes": HeadAxes(0, 2, 1, 0)}
VIEW: Refusals = [
    (r"a\.w: a tensor of shape \(5, 17\).*expected 18", lambda: view(2, 3, start=6).features(torch.zeros(5, 17))),
    (r"shape \(3, 3\) was given to be", lambda: view(2, 3).of(torch.zeros(3, 3))),
    (
        r"a\.w of Linear is not a plain floating-point matrix \(found nothing\)",
        lambda: check_head_views([HeadView("key", "a.w", nn.Linear(4, 18), "w", 2, 3)]),
    ),
    (r"found torch\.float32 of shape \(6, 2, 2\)", checked((6, 2, 2), 2, 3)),
    ("6 heads of 3 rows from 3 every 3 do not fit the 18 of the weight", checked(6, 3, start=3)),
    ("2 heads of 3 rows from 0 every 2 do not fit", checked(2, 3, stride=2)),
    (r"4 heads of 2 rows .* do not fit axes \(0, 2, 1, 0\) of \(3, 5, 2\)", checked((3, 5, 2), 4, 2, **APART)),
    ("from 1 every 1 do not fit", checked((3, 5, 2), 3, 2, start=1, **APART)),
    (r"not a plain floating-point tensor of 3 axes \(found .* \(6, 5\)\)", checked((6, 5), 3, 2, **APART)),
    ("3 heads of 2 rows from 0 every 1 in steps of 2 do not fit", checked((6, 5), 3, 2, stride=1, step=2)),
    (r"^a\.w is quantized; use the full weights\.$", lambda: view(2, 3, **QUANTIZED).parameter),
    (r"^a\.w is quantized; use the full weights\.$", lambda: view(2, 3, **QUANTIZED).of(torch.zeros(18, 4))),
    (r"heads\.\*\.weight are 3 parameters, one for each head; read them with", lambda: stacked().parameter),
    ("1 heads of 2 rows from 1", lambda: check_head_views([stacked(1)])),
    ("its query heads lie in 2 runs", run_of_falcon),
]


def verified(model: nn.Module, inputs: Any = (X,), *, arranged: bool = False, **slices: Any) -> Callable[[], Any]:
    """Proves the heads of a model, with other settings of its query, and without the cheap experiment before."""

    def prove() -> None:
        with pytest.MonkeyPatch.context() as patched:
            if not arranged:
                patched.setattr(finding, "require_arranged", lambda *_: None)
            heads = find(model)
        (site, *_) = heads.sites
        misread = replace(site, slices=(replace(site.slices[0], **slices), *site.slices[1:]))
        hw.verify(Heads(model, (misread,)) if slices else heads, inputs)

    return prove


class Noisy(SeparateAttention):
    def join(self, heads: Tensor) -> Tensor:
        return super().join(heads) * torch.rand(())


class Divided(SeparateAttention):
    def join(self, heads: Tensor) -> Tensor:
        return super().join(heads) / 0.0


class Around(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x


META = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).to("meta")
VERIFY: Refusals = [
    (r"self_attn: its in_proj_weight is on the meta device.*load the weights", verified(META, (X.to("meta"),))),
    *(
        (f"misreads {kind.__name__}: {said}", verified(kind()))
        for kind, said in (
            (StridedAttention, "changing the query features of head 0"),
            (ShuffledAttention, "changing the query features of head 0"),
            (SwappedAttention, "changing the query of one token changed the output at 6 positions"),
            (BlendedAttention, "changing the query of one token changed the output at 6 positions"),
            (PointwiseGates, "changing the key of one token changed the output at 1 positions"),
            (LinearAttention, "changing the query features of head 0 changed"),
            (MixedHeadsAttention, "changing the query features of head 0 changed the heads of heads 1, 2, 3"),
        )
    ),
    ("no site could be verified", verified(separate(o_proj=GONE))),
    ("its heads are not finite", verified(Divided())),
    ("two results", verified(Noisy())),
    ("4 heads of 5 rows from 3 every 5 do not fit the 20 of the weight", verified(separate(), start=3)),
]
VERIFY_SETTINGS: Refusals = [
    *(
        (r"inputs is a .*; expected what the model is called", verified(separate(), given))
        for kind, given in (("a tensor", X), ("text", "text"), ("a number", 3))
    )
]
VERIFY_NOTFIRED: Refusals = [("0 was not reached", verified(Around(SeparateAttention())))]
VERIFY_HEADWISEERROR: Refusals = [(r"could not be run on the given inputs \(TypeError", verified(separate(), {"y": X}))]


def stale(changed: Callable[[nn.Module], Any], act: Callable[[Heads], Any]) -> Callable[[], Any]:
    def call() -> None:
        model = nn.Sequential(wrap(SeparateAttention(), "q_proj"), SeparateAttention())
        heads = find(model)
        changed(model)
        act(heads)

    return call


def prove(heads: Heads) -> None:
    hw.verify(heads, (X,))


def penalize(heads: Heads) -> None:
    hw.Disagreement(heads, hw.similarity.Output())


STALE: Refusals = [
    (
        r"^1\.v_proj\.weight .* a Linear8bit has taken its place",
        stale(lambda m: wrap(m[1], "v_proj", wrapper=Linear8bit), prove),
    ),
    (
        r"^1\.k_proj\.weight .* a Linear has taken its place",
        stale(lambda m: setattr(m[1], "k_proj", nn.Linear(12, 20)), prove),
    ),
    (
        r"^1\.k_proj\.weight is not where the model calls it anymore\. Wrap",
        stale(lambda m: delattr(m[1], "k_proj"), prove),
    ),
    (
        r"^1\.v_proj\.weight is no longer a parameter of ParametrizedLinear.*call find_heads again",
        stale(lambda m: nn.utils.parametrizations.weight_norm(m[1].v_proj), prove),
    ),
    (
        r"^0\.q_proj\.base_layer\.weight is not where the model calls it anymore",
        stale(lambda m: setattr(m[0], "q_proj", m[0].q_proj.base_layer), penalize),
    ),
    (
        r"^1 \(SeparateAttention\) is no longer part of the model",
        stale(lambda m: m.__setitem__(1, SeparateAttention()), penalize),
    ),
    (
        r"1\.k_proj\.weight has 15 rows, and had 20 when its heads were found",
        stale(lambda m: setattr(m[1].k_proj, "weight", nn.Parameter(m[1].k_proj.weight[5:])), penalize),
    ),
]
TABLE = [(LAYOUT, *one) for one in (*FIND, *OWN, *VIEW, *VERIFY, *STALE)]
TABLE += [(SETTING, *one) for one in (*FIND_SETTINGS, *OWN_SETTINGS, *VERIFY_SETTINGS)]
TABLE += [(hw.errors.NotFired, *one) for one in VERIFY_NOTFIRED]
TABLE += [(hw.errors.HeadwiseError, *one) for one in VERIFY_HEADWISEERROR]


@cases(("error", "message", "call"), TABLE)
def test_it_is_refused_in_a_sentence(error: type[Exception], message: str, call: Callable[[], Any]):
    with pytest.raises(error, match=message):
        call()


# every public function that takes heads
TAKES_HEADS = {
    "repel": lambda model, heads: hw.repel(heads, hw.SVGD(), sgd(model)),
    "jitter": lambda _, heads: hw.repulsion.jitter(heads, 1e-3),
    "verify": lambda _, heads: hw.verify(heads, (X,)),
    "Disagreement": lambda _, heads: hw.Disagreement(heads, hw.similarity.Output()),
    "aggregate": lambda _, heads: hw.aggregate(heads, hw.routing.SimpleRouting(capsules=4)),
    "Taps": lambda _, heads: hw.Taps(heads, outputs=True),
    "ablate": lambda _, heads: hw.ablate(heads, 0),
    "importance": lambda _, heads: hw.importance(heads, lambda: 1.0),
    "bias_heads": lambda _, heads: hw.bias_heads(heads, torch.zeros(1, 4, 1, 6)),
}


@cases("function", TAKES_HEADS)
def test_functions_of_heads_refuse_something_else_and_heads_found_before_a_layer_was_wrapped(function: str):
    model = SeparateAttention().eval()
    heads, before = find(model), copy.deepcopy(model.state_dict())
    for given, said in ((model, "a SeparateAttention"), (heads.sites, "a tuple"), (hw.Heads, "the class")):
        with pytest.raises(SETTING, match=rf"heads is {said}.*expected heads of a model: hw\.find_heads\(model\)"):
            TAKES_HEADS[function](model, given)
    assert str(before) == str(model.state_dict())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    wrap(model, "q_proj", "v_proj")
    with pytest.raises(LAYOUT, match=r"q_proj\.weight is not where the model calls it.*LoraLinear.*then call find_he"):
        TAKES_HEADS[function](model, heads)
    assert len(find(model)) == 1


def test_changes_that_leave_the_layers_in_their_place_are_no_reason_to_refuse():
    model = nn.Sequential(nn.Sequential(SeparateAttention()), SeparateAttention()).eval()
    heads = find(model)
    model[0] = nn.Sequential(model[0])  # checkpoint wrappers do this to whole layers
    wrap(model[1], "o_proj")  # read by its place, not by its weights
    model.to(torch.float64).load_state_dict(model.state_dict())
    torch.compile(model, backend="eager")
    assert len(hw.verify(heads, (X.double(),)).sites) == 2
    hw.aggregate(heads.where("0.0"), hw.routing.SimpleRouting(capsules=4))
    hw.repel(heads, hw.SVGD(), sgd(model))


@cases("family", ["BERT", "GPT-2", "T5"])
def test_a_family_wrapped_too_late_is_refused(family: str):
    model = BY_NAME[family].build()
    heads = find(model)
    parent, _, name = heads.sites[-1].slices[2].name.removesuffix(".weight").rpartition(".")
    wrap(model.get_submodule(parent), name)
    with pytest.raises(LAYOUT, match="a LoraLinear has taken its place"):
        hw.Taps(heads, values=True)


@cases("refused", REFUSED)
def test_find_heads_refuses_with_its_candidates(refused: Refused):
    model = refused.build()
    with pytest.raises(hw.errors.LayoutError, match="(?s)" + refused.found) as refusal:
        hw.find_heads(model)
    named = [
        name for name, _ in model.named_modules() if name and re.search(rf"\b{re.escape(name)}\b", str(refusal.value))
    ]
    assert named
    assert "exclude=(" in str(refusal.value) or "a row of your own" in str(refusal.value)


def test_a_row_of_ones_own_reads_the_projections_of_irregular_heads_and_verify_disproves_them():
    entry = next(refused for refused in REFUSED if refused.name == "differential attention")
    row = hw.layouts.SeparateLinears("mine")
    heads = hw.find_heads(entry.build(), row)
    assert [site.layout for site in heads] == ["mine", "mine"]
    with pytest.raises(hw.errors.LayoutError, match=r"layout 'mine' .* misreads DiffLlamaAttention"):
        hw.verify(heads, entry.inputs())


def test_what_is_left_out_is_named_by_a_pattern_that_matches_nothing_else():
    from transformers import MiniMaxConfig, MiniMaxModel

    from heads.family import LLAMA

    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = MiniMaxConfig(**{**LLAMA, "num_hidden_layers": 3}, head_dim=8, layer_types=kinds, num_local_experts=2)
    model = MiniMaxModel(config)
    with pytest.raises(hw.errors.LayoutError, match="MiniMaxLightningAttention is linear attention") as refusal:
        hw.find_heads(model)
    left_out = ("layers.0.self_attn", "layers.2.self_attn")
    assert f"exclude={left_out!r}" in str(refusal.value).replace(",))", "))")
    assert [site.name for site in hw.find_heads(model, exclude=left_out)] == ["layers.1.self_attn"]


def test_the_softmax_layers_of_a_hybrid_are_found_and_proved_when_the_others_are_left_out():
    entry = next(refused for refused in REFUSED if refused.families.startswith("Qwen3-Next"))
    heads = hw.find_heads(entry.build(), exclude=("*.linear_attn",))
    (site,) = heads.sites
    assert (site.name, site.layout, site.layer) == ("layers.1.self_attn", "separate gated", 1)
    assert hw.verify(heads, entry.inputs()).sites == (site.name,)
