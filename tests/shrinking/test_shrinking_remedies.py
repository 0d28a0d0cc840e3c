"""What an error of pruning or merging tells its reader to do is done here, and what was refused then works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import headwise as hw
from heads.attentions import SeparateAttention
from heads.families import BY_NAME
from heads.own import ListAttention
from heads.shared import build
from headwise.gating import SigmoidGate
from headwise.heads.heads import Heads
from laws.remedies import Remedies
from shrinking.cutting import evenly
from shrinking.test_compared import INPUTS, Gated, build_other
from shrinking.test_prune import Tied

REMEDIES = Remedies()
after = REMEDIES.after
x = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0))
wide = torch.randn(2, 6, 20, generator=torch.Generator().manual_seed(0))


def find(name: str) -> Heads:
    return hw.find_heads(BY_NAME[name].build())


def ablates(name: str) -> Callable[[], Any]:
    def ablate() -> None:
        with hw.ablate(find(name), 1) as ablation:
            ablation.heads.model(**BY_NAME[name].inputs())

    return ablate


for label, reason in {
    "WavLM": "hands its weights to torch's function",
    "BitNet": "through a BitNetRMSNorm before W_O",
    "Bloom": "is given ALiBi slopes",
}.items():

    @after(f"{reason}.*; use hw\\.ablate")
    def ablation(label: str = label) -> Iterator[Callable[[], Any]]:
        yield lambda: hw.prune(find(label), evenly(find(label)))
        yield ablates(label)

    @after(f"{reason}.*; leave its heads as they are, and select the others")
    def none_merged(label: str = label) -> Iterator[Callable[[], Any]]:
        yield lambda: hw.merge(find(label), 1, batches=[BY_NAME[label].inputs()])
        yield ablates(label)


@after(r"has head_gates, made for all heads; remove them \(remove\(\) of their handle\) first, and attach new ones")
def gates() -> Iterator[Callable[[], Any]]:
    model = BY_NAME["BERT"].build()
    handle = hw.gate_heads(hw.find_heads(model), SigmoidGate())
    yield lambda: hw.prune(hw.find_heads(model), {0: [1]})
    handle.remove()
    yield lambda: (hw.prune(hw.find_heads(model), {0: [1]}), hw.gate_heads(hw.find_heads(model), SigmoidGate()))


@after(
    r"SimpleAggregator as its output.*; remove it \(remove\(\) of its handle\) first, and call hw.aggregate afterwar"
)
def aggregated() -> Iterator[Callable[[], Any]]:
    model = BY_NAME["BERT"].build()
    handle = hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting())
    yield lambda: hw.prune(hw.find_heads(model), {0: [1]})
    handle.remove()
    yield lambda: (
        hw.prune(hw.find_heads(model), {0: [1]}),
        hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting()),
    )


@after("keeps its heads in a list of modules; delete them there, and their columns of the output projection, and find")
def listed() -> Iterator[Callable[[], Any]]:
    model: Any = ListAttention()
    given, size = torch.randn(2, 5, 10), model.proj.in_features // len(model.heads)
    yield lambda: hw.prune(hw.find_heads(model), {0: [0]}, inputs=(given,))
    del model.heads[0]
    smaller = nn.Linear(model.proj.in_features - size, model.proj.out_features)
    smaller.weight.data.copy_(model.proj.weight[:, size:])
    model.proj = smaller
    yield lambda: hw.verify(hw.find_heads(model), (given,))


@after(r"has no output projection that was found; name it in a layout row of your own \(output=...\)")
def unnamed() -> Iterator[Callable[[], Any]]:
    class Mixing(SeparateAttention):
        """Its W_O has a name that no row knows."""

        def __init__(self) -> None:
            super().__init__()
            self.mingle = self.o_proj
            del self.o_proj
            # no module, and so no layer that a row could name
            self.__dict__["o_proj"] = self.mingle.__call__

    model = Mixing()
    yield lambda: hw.prune(hw.find_heads(model), {0: [1]}, inputs=(x,))
    row = hw.layouts.SeparateLinears(output=("mingle",))
    yield lambda: hw.prune(hw.find_heads(model, (row, *hw.layouts.LAYOUTS)), {0: [1]}, inputs=(x,))


@after("would leave 0, 2, 2, 2 in them; remove equally many of each")
def parts() -> Iterator[Callable[[], Any]]:
    heads = find("CodeGen")
    yield lambda: hw.prune(heads, {0: [0, 1]})
    yield lambda: hw.prune(heads, {0: [0, 2, 4, 6]})


@after("so all of them must lose the same heads")
def tables() -> Iterator[Callable[[], Any]]:
    heads = find("T5")
    first, second = (site.name for site in heads.where("encoder.*"))
    yield lambda: hw.prune(heads, {first: [0]})
    yield lambda: hw.prune(heads, {first: [0], second: [0]})


@after("remove all query heads of the same groups from each of them")
def groups_of_layers() -> Iterator[Callable[[], Any]]:
    heads = hw.find_heads(build("Gemma 4"))
    yield lambda: hw.prune(heads, {0: [0, 1]})
    yield lambda: hw.prune(heads, {0: [0, 1], 2: [0, 1]})


@after("remove whole groups, or equally many heads of each group that stays")
def whole_groups() -> Iterator[Callable[[], Any]]:
    heads = find("Llama")
    yield lambda: hw.prune(heads, {0: [0]})
    yield lambda: hw.prune(heads, {0: [0, 1], 1: [1, 2]})


@after("would keep different heads; remove the same heads from both")
def tied() -> Iterator[Callable[[], Any]]:
    heads = hw.find_heads(Tied())
    yield lambda: hw.prune(heads, {0: [1]}, inputs=(x,))
    yield lambda: hw.prune(heads, {0: [1], 1: [1]}, inputs=(x,))


@after(r"has LoRA adapters; merge them into the weight first \(merge_and_unload\), and find heads again\.$")
def adapted() -> Iterator[Callable[[], Any]]:
    model = peft.get_peft_model(BY_NAME["BERT"].build(), peft.LoraConfig(target_modules=["query", "value"], r=2))
    yield lambda: hw.prune(hw.find_heads(model), {0: [1]})
    yield lambda: hw.prune(hw.find_heads(model.merge_and_unload()), {0: [1]})


@after(r"has LoRA adapters; merge them into the weight first \(merge_and_unload\), and find heads again\.")
def adapted_and_merged() -> Iterator[Callable[[], Any]]:
    model = peft.get_peft_model(BY_NAME["Llama"].build(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    batches = [BY_NAME["Llama"].inputs()]
    yield lambda: hw.merge(hw.find_heads(model), 1, batches=batches)
    yield lambda: hw.merge(hw.find_heads(model.merge_and_unload()), 1, batches=batches)


@after("only a call shows whether the model works with fewer heads: pass inputs=")
def unknown() -> Iterator[Callable[[], Any]]:
    heads = hw.find_heads(SeparateAttention())
    yield lambda: hw.prune(heads, {0: [1]})
    yield lambda: hw.prune(heads, {0: [1]}, inputs=(x,))


@after("was not reached by|no forward pass went through the ablated heads")
def unreached() -> Iterator[Callable[[], Any]]:
    class Halves(nn.Module):
        """Calls its second attention when it is told to."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([SeparateAttention(), SeparateAttention()])

        def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
            for layer in self.layers if both else self.layers[:1]:
                x = layer(x)
            return x

    heads = hw.find_heads(Halves())
    yield lambda: hw.prune(heads, {0: [1], 1: [1]}, inputs=(x,))
    yield lambda: hw.prune(heads, {0: [1], 1: [1]}, inputs=(x, True))


@after("reads num_key_value_heads from its configuration at each call.*; leave equally many heads in every layer")
def configured() -> Iterator[Callable[[], Any]]:
    counts: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    sizes = {f"{stack}_{name}": count for stack in ("encoder", "decoder") for name, count in counts.items()}
    few: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    config = transformers.MoonshineConfig(**few, **sizes, pad_token_id=0, decoder_start_token_id=1)
    heads = hw.find_heads(transformers.MoonshineForConditionalGeneration(config).eval())
    yield lambda: hw.prune(heads, {heads.sites[0].name: [0, 1]})
    yield lambda: hw.prune(heads, {site.name: [0, 1] for site in heads})


@after("no attention would lose a head; expected a smaller share")
def share() -> Iterator[Callable[[], Any]]:
    heads = find("Llama")
    worth = {site.name: torch.rand(4) for site in heads}
    yield lambda: hw.prune(heads, keep=0.9, importance=worth)
    yield lambda: hw.prune(heads, keep=0.5, importance=worth)


@after("optimizer is an LBFGS.*; leave it out, and make a new one afterwards")
def optimizer() -> Iterator[Callable[[], Any]]:
    heads = find("BERT")
    given = torch.optim.LBFGS(heads.model.parameters())
    yield lambda: hw.prune(heads, {0: [1]}, optimizer=given)
    yield lambda: (hw.prune(heads, {0: [1]}), torch.optim.LBFGS(heads.model.parameters()))


@after('so its query heads must stay where they are; use grouping="order"')
def in_order() -> Iterator[Callable[[], Any]]:
    heads, batches = find("T5"), [BY_NAME["T5"].inputs()]
    yield lambda: hw.merge(heads, 1, batches=batches)
    yield lambda: hw.merge(heads, 1, batches=batches, grouping="order")


@after('may hold something of each query head, so that they must stay where they are; use grouping="order"')
def gated_in_order() -> Iterator[Callable[[], Any]]:
    heads = build_other("AFMoE")
    yield lambda: hw.merge(heads, 1, batches=[INPUTS])
    yield lambda: hw.merge(heads, 1, batches=[INPUTS], grouping="order")


@after("are read by other attentions of the Gemma4ForCausalLM too.*; select the other attentions")
def read_elsewhere() -> Iterator[Callable[[], Any]]:
    heads = hw.find_heads(build("Gemma 4 with one that lends nothing"))
    lending = heads.layers(0, 1, 2)
    yield lambda: hw.merge(lending, 1, batches=[INPUTS])
    yield lambda: hw.merge(heads.layer(0), 1, batches=[INPUTS])


@after("is found out by calling it; pass batches=")
def uncalled() -> Iterator[Callable[[], Any]]:
    heads = find("ViT")
    yield lambda: hw.merge(heads, 1)
    yield lambda: hw.merge(heads, 1, batches=[BY_NAME["ViT"].inputs()])


@after("leave its heads as they are, or load a model of transformers with attn_implementation='sdpa'")
def eager() -> Iterator[Callable[[], Any]]:
    model: Any = BY_NAME["BERT"].build()
    model.set_attn_implementation("eager")
    yield lambda: hw.merge(hw.find_heads(model), 2, batches=[BY_NAME["BERT"].inputs()])
    model.set_attn_implementation("sdpa")
    yield lambda: hw.merge(hw.find_heads(model), 2, batches=[BY_NAME["BERT"].inputs()])


@after("its code counts on the heads it was built with. The model is as it was; leave its heads as they are.$")
def counting() -> Iterator[Callable[[], Any]]:
    # told nothing that would not help: it runs sdpa already
    yield lambda: hw.merge(find("GPT-2"), 1, batches=[BY_NAME["GPT-2"].inputs()])
    yield ablates("GPT-2")


@after("its code takes no fewer; .*, or call hw.prune")
def ungrouped() -> Iterator[Callable[[], Any]]:
    heads = find("torch.nn.Transformer")
    yield lambda: hw.merge(heads, 1, batches=[BY_NAME["torch.nn.Transformer"].inputs()])
    yield lambda: hw.prune(heads, {site.name: [1] for site in heads})


@after("computes NaN on the given inputs.*give inputs on which it is finite")
def not_finite() -> Iterator[Callable[[], Any]]:
    model = Gated("gate", 4)
    yield lambda: hw.prune(hw.find_heads(model), {0: [1]}, inputs=(wide * float("nan"),))
    yield lambda: hw.prune(hw.find_heads(model), {0: [1]}, inputs=(wide,))


@pytest.mark.parametrize("message", REMEDIES.cases)
@pytest.mark.filterwarnings("ignore")
def test_a_remedy_holds(message: str):
    REMEDIES.check(message)
