"""What cannot be pruned or merged is refused in a sentence, and the model is as it was; what it says to do works."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from heads.families import BY_NAME
from heads.own import ListAttention
from heads.shared import build as shared_keys
from headwise.errors import HeadwiseError, LayoutError, SettingError, ShapeError
from headwise.gating import SigmoidGate
from headwise.shrinking.alignment import KeyFreedom, group_by_similarity, group_in_order
from headwise.shrinking.merge import refit_output
from shrinking.cutting import evenly
from shrinking.planted import HEADS, build, tokens
from shrinking.test_compared import INPUTS, build_other
from shrinking.test_prune import Tied

X = torch.randn(2, 6, 12)


def find(name: str = "BERT") -> hw.Heads:
    return hw.find_heads(BY_NAME[name].build())


def own(dtype: torch.dtype = torch.float32) -> hw.Heads:
    return hw.find_heads(SeparateAttention().to(dtype).eval())


def shared() -> hw.Heads:
    return hw.find_heads(Tied().eval())


def llama() -> hw.Heads:
    return hw.find_heads(build("Llama", HEADS))


def olmo() -> hw.Heads:
    config = transformers.Olmo2Config(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, eos_token_id=2
    )
    return hw.find_heads(transformers.Olmo2Model(config))


def mixed() -> hw.Heads:
    heads = find()
    hw.mix_heads(heads)
    return hw.find_heads(heads.model)


def tied() -> hw.Heads:
    layers = (heads := llama()).model.model.layers
    layers[1].self_attn.v_proj.weight = layers[0].self_attn.v_proj.weight
    return hw.find_heads(heads.model)


def adapted() -> hw.Heads:
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    return hw.find_heads(peft.get_peft_model(build("Llama", HEADS), config))


def prune(**given: Any) -> Callable[[hw.Heads], object]:
    return lambda heads: hw.prune(heads, **given)


def keep(numbers: Any, share: float = 0.5) -> Callable[[hw.Heads], object]:
    return lambda heads: hw.prune(heads, keep=share, importance={site.name: numbers for site in heads})


def merge(**given: Any) -> Callable[[hw.Heads], object]:
    return lambda heads: hw.merge(heads, **{"groups": 2, **given})


def train(call: Callable[..., object], optimizer: Callable[[Any], Any]) -> Callable[[hw.Heads], object]:
    return lambda heads: call(heads, optimizer=optimizer(heads.model.parameters()))


def flat(_parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(2, 2).parameters())


FIRST = "encoder.layer.0.attention.self"
HALVES = {0: [1]}
PRUNED: list[tuple[Callable[[], hw.Heads], Callable[[hw.Heads], object], type[Exception], str]] = [
    (find, prune(removed=0.5), SettingError, r"removed is 0\.5; expected the heads to remove by layer or name"),
    (find, prune(removed={}), SettingError, "names no head"),
    (find, prune(removed={0: []}), SettingError, "names no head"),
    (find, prune(removed={0: [4]}), SettingError, f"head of {FIRST} is 4; expected an integer of .* at most 3"),
    (find, prune(removed={0: [1.0]}), SettingError, r"is 1\.0; expected an integer"),
    (find, prune(removed={0: 1}), SettingError, "are 1; expected a list of integers"),
    (find, prune(removed={0: "1"}), SettingError, "are '1'; expected a list of integers"),
    (find, prune(removed={"encoder": [1]}), SettingError, "'encoder'; expected a layer, or one of 2 names: 'encoder.l"),
    (find, prune(removed={0: [1], FIRST: [2]}), SettingError, "twice"),
    (find, prune(removed={1: [0, 1, 2, 3]}), SettingError, "would lose all its 4 heads"),
    (find, prune(removed={5: [0]}), LayoutError, "no attention in layer 5"),
    (find, prune(removed=HALVES, optimizer=[]), SettingError, "optimizer is a list; expected the torch optimizer"),
    (find, lambda heads: hw.prune(heads.model, HALVES), SettingError, "expected heads of a model"),
    (find, prune(), SettingError, "expected either the heads to remove, or keep"),
    (find, prune(removed=HALVES, keep=0.5), SettingError, "expected either"),
    (find, prune(removed=HALVES, importance={}), SettingError, "expected either"),
    (find, prune(keep=0.5), SettingError, "keep needs importance"),
    (find, prune(keep=0.0, importance={}), SettingError, "keep is 0.0; expected a finite number"),
    (find, prune(keep=1.2, importance={}), SettingError, "keep is 1.2"),
    (find, prune(keep=0.5, importance={"other": [1.0]}), SettingError, "has no entry 'encoder.layer.0"),
    (find, keep([1.0] * 3), ShapeError, r"has shape \(3,\); expected \(4,\)"),
    (find, keep([*"abcd"]), SettingError, r"is \['a', 'b', 'c', 'd'\]; expected 4 numbers"),
    (find, keep(None), SettingError, "is None; expected 4 numbers, one for each head"),
    (find, keep([float("nan")] * 4), HeadwiseError, "holds NaN or infinity"),
    (own, prune(removed=HALVES, inputs=X), SettingError, r"^inputs is a Tensor; expected what .*, \(x,\)"),
    (own, prune(removed=HALVES, inputs="x"), SettingError, r"^inputs is a str; expected what .*, \(x,\)"),
    (own, prune(removed=HALVES, inputs=(torch.randn(2, 6, 13),)), HeadwiseError, r"run on the given .*\(RuntimeError"),
    (partial(find, "Llama"), train(partial(hw.prune, removed=HALVES), flat), SettingError, "no parameter of the Llama"),
    (partial(find, "Llama"), prune(removed={0: [0]}), LayoutError, "leave 1 of group 0, 2 of group 1; remove whole"),
    (shared, prune(removed={0: [0, 3], 1: [0, 2]}, inputs=(X,)), LayoutError, r"is shared by .* would keep different"),
    (shared, prune(removed={1: [1]}, inputs=(X,)), LayoutError, r"is shared by .* would keep different"),
    (mixed, prune(removed=HALVES), LayoutError, "has head_mixer, made for all heads; remove them"),
    (olmo, prune(removed=HALVES), LayoutError, r"q_norm\.weight normalizes all heads together"),
]
MERGED: list[tuple[Callable[[], hw.Heads], Callable[[hw.Heads], object], type[Exception], str]] = [
    (llama, merge(groups=3), SettingError, "8 heads do not make that many equal groups; expected one of 1, 2, 4"),
    (llama, merge(groups=8), SettingError, "groups is 8, and model.layers.0.self_attn has 8 key/value heads; expected"),
    (llama, merge(groups=0), SettingError, "groups is 0; expected an integer"),
    (llama, merge(alignment="rotated"), SettingError, "alignment is 'rotated'"),
    (llama, merge(grouping="random"), SettingError, "grouping is 'random'"),
    (llama, merge(refit=2), SettingError, "refit is 2"),
    (llama, merge(batches=[]), SettingError, "batches is empty"),
    (llama, merge(batches=["text"]), SettingError, "a batch is a str; expected a tensor"),
    (
        own,
        merge(groups=1, batches=[(X[:, :2],)]),
        SettingError,
        "sequences of 2 tokens; expected at least 3",
    ),
    (llama, merge(optimizer=3), SettingError, "optimizer is a int"),
    (llama, train(partial(hw.merge, groups=2), flat), SettingError, "AdamW given as optimizer holds no parameter"),
    (llama, lambda heads: hw.merge(heads.model, 2), SettingError, "expected heads of a model"),
    (partial(find, "Gemma"), merge(groups=1), SettingError, "has 1 key/value heads; expected fewer"),
    (tied, merge(), LayoutError, r"v_proj\.weight is model\.layers\.1\.self_attn\.v_proj\.weight too"),
]


@cases(("make", "call", "error", "message"), [*PRUNED, *MERGED])
def test_what_cannot_be_done_is_refused_and_nothing_changed(make: Any, call: Any, error: type, message: str):
    heads = make()
    before = {name: tensor.clone() for name, tensor in heads.model.state_dict().items()}
    with pytest.raises(error, match=message):
        call(heads)
    after = heads.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    found = [(site.name, site.num_heads, site.key_value_heads) for site in hw.find_heads(heads.model)]
    assert found == [(site.name, site.num_heads, site.key_value_heads) for site in heads]


ZEROS = torch.zeros(2, 2).double()


@cases(
    ("call", "error", "message"),
    [
        (lambda: group_in_order(6, 4), SettingError, "groups is 4, and 6 heads do not make .* expected one of 1, 2, 3"),
        (lambda: group_by_similarity(torch.rand(6, 6), 7), SettingError, "groups is 7; expected .* at most 6"),
        (lambda: group_by_similarity(torch.rand(6, 5), 3), ShapeError, "similarity has shape"),
        (lambda: group_by_similarity(torch.full((4, 4), float("nan")), 2), HeadwiseError, "similarity holds NaN"),
        (lambda: refit_output(torch.eye(3), torch.zeros(2, 3), torch.zeros(3, 2)), ShapeError, "moments has shape"),
        (lambda: refit_output(torch.eye(2), torch.zeros(2, 3), torch.zeros(3, 2), 0), SettingError, "ridge is 0"),
        (lambda: KeyFreedom(3), SettingError, "rotary is 3; expected an even number"),
        *(
            (partial(refit_output, ZEROS + one, torch.zeros(2, 3).double(), torch.zeros(3, 2)), HeadwiseError, "refit")
            for one in (0.0, float("nan"), float("inf"))
        ),
    ],
)
def test_numbers_that_mean_nothing_are_refused(call: Callable[[], object], error: type, message: str):
    with pytest.raises(error, match=message):
        call()


class Mingled(SeparateAttention):
    """Its W_O has a name that no row knows."""

    def __init__(self) -> None:
        super().__init__()
        self.mingle = self.o_proj
        del self.o_proj
        # no module, and so no layer that a row could name
        self.__dict__["o_proj"] = self.mingle.__call__


class Halves(nn.Module):
    """Calls its second attention when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SeparateAttention(), SeparateAttention()])

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        for layer in self.layers if both else self.layers[:1]:
            x = layer(x)
        return x


def moonshine() -> hw.Heads:
    counts: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    sizes = {f"{stack}_{name}": count for stack in ("encoder", "decoder") for name, count in counts.items()}
    few: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    config = transformers.MoonshineConfig(**few, **sizes, pad_token_id=0, decoder_start_token_id=1)
    return hw.find_heads(transformers.MoonshineForConditionalGeneration(config).eval())


def eager() -> hw.Heads:
    heads = find()
    heads.model.set_attn_implementation("eager")
    return heads


def attached(attach: Callable[[hw.Heads], Any]) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: ((heads := find()).model, attach(heads))


def detach(made: tuple[nn.Module, Any]) -> None:
    model, handle = made
    handle.remove()
    hw.prune(hw.find_heads(model), HALVES)
    with hw.gate_heads(hw.find_heads(model), SigmoidGate()):
        model(**BY_NAME["BERT"].inputs())


def delete_first(heads: hw.Heads) -> None:
    model, size = heads.model, heads.sites[0].head_size
    del model.heads[0]
    smaller = nn.Linear(model.proj.in_features - size, model.proj.out_features)
    smaller.weight.data.copy_(model.proj.weight[:, size:])
    model.proj = smaller
    hw.verify(hw.find_heads(model), (torch.randn(2, 5, 10),))


def merge_lora(call: Callable[[hw.Heads], object]) -> Callable[[hw.Heads], object]:
    return lambda heads: call(hw.find_heads(heads.model.merge_and_unload()))


def name_mingle(heads: hw.Heads) -> None:
    row = hw.layouts.SeparateLinears(output=("mingle",))
    hw.prune(hw.find_heads(heads.model, (row, *hw.layouts.LAYOUTS)), HALVES, inputs=(X,))


def use_sdpa(heads: hw.Heads) -> None:
    heads.model.set_attn_implementation("sdpa")
    hw.merge(heads, 2, batches=[BY_NAME["BERT"].inputs()])


def ablate(name: str) -> Callable[[hw.Heads], object]:
    def call(heads: hw.Heads) -> None:
        with hw.ablate(heads, 1):
            heads.model(**BY_NAME[name].inputs())

    return call


def of(name: str) -> Callable[[], hw.Heads]:
    return partial(find, name)


def on(name: str, groups: int = 1, **given: Any) -> Callable[[hw.Heads], object]:
    return lambda heads: hw.merge(heads, groups, batches=[BY_NAME[name].inputs()], **given)


T5 = [f"encoder.block.{layer}.layer.0.SelfAttention" for layer in range(2)]
LAYERS = {0: [1], 1: [1]}
OWN = {
    "WavLM": "hands its weights to torch's function",
    "BitNet": "through a BitNetRMSNorm before W_O",
    "Bloom": "is given ALiBi slopes",
}
UNSHARED = "Gemma 4 with one that lends nothing"
# What the message tells, how the refused model is made, the refused call, and the one that works then.
REMEDIES: list[tuple[str, Callable[[], Any], Callable[[Any], object], Callable[[Any], object]]] = [
    *(
        (f"{why}.*; {remedy}", of(name), call, ablate(name))
        for name, why in OWN.items()
        for remedy, call in (
            ("use hw.ablate", lambda heads: hw.prune(heads, evenly(heads))),
            ("leave its heads as they are, and select the others", on(name)),
        )
    ),
    (
        r"has head_gates, made for all heads; remove them \(remove\(\) of their handle\) first, and attach new ones",
        attached(lambda heads: hw.gate_heads(heads, SigmoidGate())),
        lambda made: hw.prune(hw.find_heads(made[0]), HALVES, inputs=BY_NAME["BERT"].inputs()),
        detach,
    ),
    (
        r"SimpleAggregator as its output.*; remove it \(remove\(\) of its handle\) first, and call hw.aggregate after",
        attached(lambda heads: hw.aggregate(heads, hw.routing.SimpleRouting())),
        lambda made: hw.prune(hw.find_heads(made[0]), HALVES),
        detach,
    ),
    (
        "keeps its heads in a list of modules; delete them there, and their columns of the output projection, and find",
        lambda: hw.find_heads(ListAttention()),
        prune(removed={0: [0]}, inputs=(torch.randn(2, 5, 10),)),
        delete_first,
    ),
    (
        r"has no output projection that was found; name it in a layout row of your own \(output=...\)",
        lambda: hw.find_heads(Mingled()),
        prune(removed=HALVES, inputs=(X,)),
        name_mingle,
    ),
    (
        "would leave 0, 2, 2, 2 in them; remove equally many of each",
        of("CodeGen"),
        prune(removed={0: [0, 1]}),
        prune(removed={0: [0, 2, 4, 6]}),
    ),
    (
        "so all of them must lose the same heads",
        of("T5"),
        prune(removed={T5[0]: [0]}),
        prune(removed=dict.fromkeys(T5, (0,))),
    ),
    (
        "remove all query heads of the same groups from each of them",
        lambda: hw.find_heads(shared_keys("Gemma 4")),
        prune(removed={0: [0, 1]}),
        prune(removed={0: [0, 1], 2: [0, 1]}),
    ),
    (
        "remove whole groups, or equally many heads of each group that stays",
        of("Llama"),
        prune(removed={0: [0]}),
        prune(removed={0: [0, 1], 1: [1, 2]}),
    ),
    (
        "would keep different heads; remove the same heads from both",
        shared,
        prune(removed=HALVES, inputs=(X,)),
        prune(removed=LAYERS, inputs=(X,)),
    ),
    (
        r"has LoRA adapters; merge them into the weight first \(merge_and_unload\), and find heads again\.$",
        adapted,
        prune(removed=HALVES),
        merge_lora(prune(removed=HALVES)),
    ),
    (
        r"has LoRA adapters; merge them into the weight first \(merge_and_unload\), and find heads again\.$",
        adapted,
        merge(batches=[tokens(0)]),
        merge_lora(merge(batches=[tokens(0)])),
    ),
    (
        "only a call shows whether the model works with fewer heads: pass inputs=",
        own,
        prune(removed=HALVES),
        prune(removed=HALVES, inputs=(X,)),
    ),
    (
        "was not reached by",
        lambda: hw.find_heads(Halves()),
        prune(removed=LAYERS, inputs=(X,)),
        prune(removed=LAYERS, inputs=(X, True)),
    ),
    (
        "reads num_key_value_heads from its configuration at each call.*; leave equally many heads in every layer",
        moonshine,
        lambda heads: hw.prune(heads, {heads.sites[0].name: [0, 1]}),
        lambda heads: hw.prune(heads, {site.name: [0, 1] for site in heads}),
    ),
    ("no attention would lose a head; expected a smaller share", of("Llama"), keep([1.0] * 4, 0.9), keep([1.0] * 4)),
    (
        "optimizer is an LBFGS.*; leave it out, and make a new one afterwards",
        find,
        train(partial(hw.prune, removed=HALVES), torch.optim.LBFGS),
        prune(removed=HALVES),
    ),
    (
        'so its query heads must stay where they are; use grouping="order"',
        of("T5"),
        on("T5"),
        on("T5", grouping="order"),
    ),
    (
        'may hold something of each query head, so that they must stay where they are; use grouping="order"',
        lambda: build_other("AFMoE"),
        merge(groups=1, batches=[INPUTS]),
        merge(groups=1, batches=[INPUTS], grouping="order"),
    ),
    (
        "are read by other attentions of the Gemma4ForCausalLM too.*; select the other attentions",
        lambda: hw.find_heads(shared_keys(UNSHARED)),
        lambda heads: hw.merge(heads.layers(0, 1, 2), 1, batches=[INPUTS]),
        lambda heads: hw.merge(heads.layer(0), 1, batches=[INPUTS]),
    ),
    ("no inputs are known for its class; pass batches=", of("ViT"), merge(groups=1), on("ViT")),
    (
        "leave its heads as they are, or load a model of transformers with attn_implementation='sdpa'",
        eager,
        on("BERT", 2),
        use_sdpa,
    ),
    (
        # told nothing that would not help: it runs sdpa already
        "its code counts on the heads it was built with. The model is as it was; leave its heads as they are.$",
        of("GPT-2"),
        on("GPT-2"),
        ablate("GPT-2"),
    ),
    (
        "its code takes no fewer; .*, or call hw.prune",
        of("torch.nn.Transformer"),
        on("torch.nn.Transformer"),
        lambda heads: hw.prune(heads, {site.name: [1] for site in heads}),
    ),
    (
        "computes NaN on the given inputs.*give inputs on which it is finite",
        own,
        prune(removed=HALVES, inputs=(X * float("nan"),)),
        prune(removed=HALVES, inputs=(X,)),
    ),
]


@pytest.mark.full
@cases(("message", "make", "refused", "works"), REMEDIES)
@pytest.mark.filterwarnings("ignore")
def test_what_a_refusal_says_to_do_works(message: str, make: Any, refused: Any, works: Any):
    made = make()
    with pytest.raises(HeadwiseError, match=message):
        refused(made)
    works(made)
