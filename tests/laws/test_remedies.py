"""What an error tells its reader to do is done here, and what was refused then works."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from heads.families import BY_NAME
from headwise.integrations.accelerate import attach
from headwise.testing import check_rule
from roles.tokenizers_for_tests import fast_tokenizer

pytestmark = pytest.mark.full

# A case yields what is refused; what follows is the remedy. It may yield again what is to work afterwards, where that
# is another call.
Case = Callable[[], Iterator[Callable[[], Any]]]
# by the message of the error that they begin with
REMEDIES: dict[str, Case] = {}
x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
ids = torch.arange(1, 11).view(2, 5)


def after(message: str) -> Callable[[Case], Case]:
    """Have a case run after an error whose message matches."""

    def keep(case: Case) -> Case:
        assert message not in REMEDIES
        REMEDIES[message] = case
        return case

    return keep


def encoder(layers: int = 2, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, dropout=0.0, **settings)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def bert(implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
    return BertModel._from_config(config, attn_implementation=implementation).eval()


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
    )
    return LlamaModel(config).eval()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    out = model(*(inputs or (x,)))
    (out if isinstance(out, torch.Tensor) else out[0]).square().mean().backward()
    optimizer.step()


def with_lora(model: nn.Module, targets: list[str], **settings: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, **settings))


class Untold(nn.Module):
    """Attention whose number of heads is a number in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(tokens).unflatten(-1, (8, 2)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Switched(SeparateAttention):
    """Attention that a switch turns into a sum over sigmoids."""

    def __init__(self) -> None:
        super().__init__(16)
        self.fused = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return super().forward(tokens)
        query, key, value = (self.split(part(tokens)) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.join((query @ key.mT).sigmoid() @ value))


def window_mask(heads: int = 4) -> hw.roles.HeadMask:
    return hw.roles.HeadMask(torch.ones(2, heads, 5, 5, dtype=torch.bool).tril(1).triu(-1))


# repulsion


@after("all 4 heads are equal, so their repulsion is zero and stays so. Separate them with hw.repulsion.jitter")
def equal_heads() -> Iterator[Callable[[], Any]]:
    model = encoder(1)
    heads = hw.find_heads(model)
    with torch.no_grad():
        for part in heads.slices():
            view = part.of(part.parameter)
            view.copy_(view[:1].expand_as(view).clone())
    yield lambda: hw.repel(heads, hw.SVGD(), sgd(model))
    hw.repulsion.jitter(heads, scale=1e-3)


@after("are repelled by this optimizer already; call .remove\\(\\) on the earlier handle")
def repelled_twice() -> Iterator[Callable[[], Any]]:
    model = encoder()
    optimizer = sgd(model)
    earlier = hw.repel(hw.find_heads(model), hw.SVGD(), optimizer)
    yield lambda: hw.repel(hw.find_heads(model), hw.SVGD(), optimizer)
    earlier.remove()


@after("is another tensor than when hw.repel was called.* Build the optimizer from the model as it is now")
def replaced_parameters() -> Iterator[Callable[[], Any]]:
    model = encoder()
    optimizer = sgd(model)
    hw.repel(hw.find_heads(model), hw.SVGD(), optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    yield lambda: step(model, optimizer)
    optimizer = sgd(model)
    hw.repel(hw.find_heads(model), hw.SVGD(), optimizer)
    yield lambda: step(model, optimizer)


@after("is no longer held by SGD: its param_groups changed.* Call .remove\\(\\)")
def changed_groups() -> Iterator[Callable[[], Any]]:
    model = encoder()
    optimizer = sgd(model)
    repulsion = hw.repel(hw.find_heads(model), hw.SVGD(), optimizer)
    optimizer.param_groups[0]["params"] = []
    yield lambda: step(model, optimizer)
    repulsion.remove()
    optimizer = sgd(model)
    hw.repel(hw.find_heads(model), hw.SVGD(), optimizer)
    yield lambda: step(model, optimizer)


@after("has a gradient from a forward pass that ran without the repulsion.* Call hw.repel before the forward pass")
def adapters_repelled_late() -> Iterator[Callable[[], Any]]:
    model = with_lora(llama(), ["q_proj"], init_lora_weights=False)
    optimizer = sgd(model)
    model(ids)[0].square().mean().backward()
    hw.repel(hw.find_heads(model).projection("query"), hw.SVGD(), optimizer)
    yield optimizer.step
    optimizer.zero_grad()
    yield lambda: step(model, optimizer, ids)


@after("is the base of a LoRA layer, and noise in it would be saved with no adapter; call hw.repulsion.jitter before")
def jitter_under_adapters() -> Iterator[Callable[[], Any]]:
    model = with_lora(llama(), ["q_proj"])
    yield lambda: hw.repulsion.jitter(hw.find_heads(model), 0.1)
    model = llama()
    yield lambda: (hw.repulsion.jitter(hw.find_heads(model), 0.1), with_lora(model, ["q_proj"]))


@after("particle groups has a gradient; call backward\\(\\) before the step")
def no_gradient() -> Iterator[Callable[[], Any]]:
    model = encoder()
    optimizer = sgd(model)
    hw.repel(hw.find_heads(model), hw.SVGD(), optimizer)
    yield optimizer.step
    yield lambda: step(model, optimizer)


@after("is not attached to its optimizer anymore; call hw.repel again")
def removed_repulsion() -> Iterator[Callable[[], Any]]:
    model = encoder()
    optimizer = sgd(model)
    repulsion = hw.repel(hw.find_heads(model), hw.SVGD(), optimizer, when="manual")
    repulsion.remove()
    yield repulsion.apply
    again = hw.repel(hw.find_heads(model), hw.SVGD(), optimizer, when="manual")
    model(x).mean().backward()
    yield again.apply


@after("compares what heads span or compute; expected a rule on particles such as hw.SVGD")
def spans_as_particles() -> Iterator[Callable[[], Any]]:
    particles = torch.randn(3, 4)
    yield lambda: check_rule(hw.repulsion.SpanSVGD())
    model = encoder()
    optimizer = sgd(model)
    hw.repel(hw.find_heads(model), hw.repulsion.SpanSVGD(), optimizer)
    assert particles.shape == (3, 4)
    yield lambda: (check_rule(hw.SVGD()), step(model, optimizer))


@after("has no strength without a model to measure; give alpha as hw.Relative")
def target_without_a_model() -> Iterator[Callable[[], Any]]:
    yield lambda: check_rule(hw.SVGD(alpha=hw.Target(3.0)))
    yield lambda: check_rule(hw.SVGD(alpha=hw.Relative(0.3)))


# penalties


@after("so that each spans all of them and no two differ; compare another projection, or outputs: hw.similarity.CKA")
def spans_of_everything() -> Iterator[Callable[[], Any]]:
    model = SeparateAttention(width=5, num_heads=3, key_value_heads=3, head_dim=6)
    heads = hw.find_heads(model)
    yield lambda: hw.Disagreement(heads, hw.similarity.SpanOverlap())
    penalty = hw.Disagreement(heads, hw.similarity.CKA())
    model(torch.randn(3, 6, 5))
    yield penalty
    yield penalty


@after("use a term on all heads, such as hw.similarity.Output")
def groups_of_one() -> Iterator[Callable[[], Any]]:
    yield lambda: hw.Disagreement(hw.find_heads(encoder()), hw.similarity.GroupedQueries(hw.similarity.CKA()))
    yield lambda: hw.Disagreement(hw.find_heads(encoder()), hw.similarity.Output())


@after("select sites with more heads")
def one_head() -> Iterator[Callable[[], Any]]:
    single = nn.TransformerEncoderLayer(16, 1, 24, batch_first=True)
    model = nn.ModuleList([single, encoder()])
    yield lambda: hw.Disagreement(hw.find_heads(model).where("0.*"), hw.similarity.CKA())
    yield lambda: hw.Disagreement(hw.find_heads(model).where("1.*"), hw.similarity.CKA())


@after("is trained, so the penalty would change nothing; unfreeze them .* or use a term on outputs, hw.similarity.CKA")
def frozen_parameters() -> Iterator[Callable[[], Any]]:
    model = with_lora(llama(), ["q_proj"], init_lora_weights=False).train()
    heads = hw.find_heads(model)
    yield hw.Disagreement(heads, hw.similarity.SpanOverlap())
    named = with_lora(llama(), ["q_proj", "v_proj"], init_lora_weights=False).train()
    on_spans = hw.Disagreement(hw.find_heads(named), hw.similarity.SpanOverlap())
    on_outputs = hw.Disagreement(heads, hw.similarity.CKA())
    model(ids)
    yield lambda: (on_spans(), on_outputs())


@after("were kept and never read; call the penalty \\(or read the taps\\) after each forward, or remove\\(\\) it")
def unread_taps() -> Iterator[Callable[[], Any]]:
    model = encoder(1)
    taps = hw.Taps(hw.find_heads(model), outputs=True)

    def call_often() -> None:
        for _ in range(70):
            model(x)

    yield call_often
    taps.remove()


@after("these taps are attached to no model.* Make new ones")
def removed_taps() -> Iterator[Callable[[], Any]]:
    model = encoder()
    taps = hw.Taps(hw.find_heads(model), outputs=True)
    taps.remove()
    yield taps.read
    again = hw.Taps(hw.find_heads(model), outputs=True)
    model(x)
    yield again.read


@after("Attach after aggregate\\(\\)")
def taps_before_routing() -> Iterator[Callable[[], Any]]:
    model = encoder()
    taps = hw.Taps(hw.find_heads(model), outputs=True)
    hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    model(x)
    yield taps.read
    taps.remove()
    again = hw.Taps(hw.find_heads(model), outputs=True)
    model(x)
    yield again.read


# gates and matrices


@after("already has head_gates; call remove\\(\\) on the handle of the first gate_heads")
def gated_twice() -> Iterator[Callable[[], Any]]:
    model = encoder()
    first = hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    yield lambda: hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    first.remove()


@after("which would not save gates with them; call hw.gate_heads on the base model, and then get_peft_model")
def gates_under_adapters() -> Iterator[Callable[[], Any]]:
    model = with_lora(llama(), ["q_proj"])
    yield lambda: hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    base = llama()
    hw.gate_heads(hw.find_heads(base), hw.gating.SigmoidGate())
    yield lambda: with_lora(base, ["q_proj"], modules_to_save=["head_gates"])(ids)


@after("which would not save the matrices with them; call hw.mix_heads on the base model, and then get_peft_model")
def matrices_under_adapters() -> Iterator[Callable[[], Any]]:
    model = with_lora(llama(), ["q_proj"])
    yield lambda: hw.mix_heads(hw.find_heads(model))
    base = llama()
    hw.mix_heads(hw.find_heads(base))
    yield lambda: with_lora(base, ["q_proj"], modules_to_save=["head_mixer"])(ids)


@after("set after hw.gate_heads, which would get the heads without their gates; call remove\\(\\) on the gates")
def gates_bypassed() -> Iterator[Callable[[], Any]]:
    model = encoder()
    gates = hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    yield lambda: model(x)
    gates.remove()
    hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())


@after("has talking heads already; call remove\\(\\) on the handle of the first mix_heads")
def mixed_twice() -> Iterator[Callable[[], Any]]:
    model = encoder()
    first = hw.mix_heads(hw.find_heads(model))
    yield lambda: hw.mix_heads(hw.find_heads(model))
    first.remove()


@after("holds the matrices of hw.mix_heads and does not attend with them.* Call hw.mix_heads")
def copied_matrices() -> Iterator[Callable[[], Any]]:
    model = llama()
    hw.mix_heads(hw.find_heads(model))
    copied = pickle.loads(pickle.dumps(model))
    yield lambda: copied(ids)
    hw.mix_heads(hw.find_heads(copied))


# edits


@after("set after hw.ablate, and would get all heads unchanged; call remove\\(\\), and hw.ablate again")
def ablated_too_early() -> Iterator[Callable[[], Any]]:
    model = encoder()
    ablation = hw.ablate(hw.find_heads(model), 1)
    hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    yield lambda: model(x)
    ablation.remove()
    hw.ablate(hw.find_heads(model), 1)


@after("the blocks are attached already; call remove\\(\\) before attaching another optimizer")
def blocks_attached_twice() -> Iterator[Callable[[], Any]]:
    model = encoder()
    blocks = hw.heads.head_blocks(hw.find_heads(model))
    blocks.attach(torch.optim.SGD(list(blocks), lr=0.1))
    yield lambda: blocks.attach(torch.optim.SGD(list(blocks), lr=0.1))
    blocks.remove()


@after("is in another place of memory than when .*head_blocks was called.*; call remove\\(\\), and .*head_blocks again")
def moved_blocks() -> Iterator[Callable[[], Any]]:
    model = encoder()
    blocks = hw.heads.head_blocks(hw.find_heads(model))
    optimizer = torch.optim.SGD(list(blocks), lr=0.1)
    blocks.attach(optimizer)
    model.double()
    yield lambda: step(model, optimizer, x.double())
    blocks.remove()
    blocks = hw.heads.head_blocks(hw.find_heads(model))
    moved = torch.optim.SGD(list(blocks), lr=0.1)
    blocks.attach(moved)
    yield lambda: step(model, moved, x.double())


@after("expected heads of a model: hw.find_heads\\(model\\)")
def model_for_heads() -> Iterator[Callable[[], Any]]:
    model: Any = encoder()
    yield lambda: hw.ablate(model, 0)
    yield lambda: hw.ablate(hw.find_heads(model), 0)


# implementations of attention


@after("runs the attention implementation 'flex_attention'.*call model.set_attn_implementation\\('sdpa'\\) first")
def flex_attention() -> Iterator[Callable[[], Any]]:
    model = bert("flex_attention")
    yield lambda: hw.Taps(hw.find_heads(model), weights=True)
    model.set_attn_implementation("sdpa")


@after("set after hw.bias_heads.*call model.set_attn_implementation\\('sdpa'\\), or remove\\(\\)")
def flex_attention_later() -> Iterator[Callable[[], Any]]:
    model = bert()
    hw.Taps(hw.find_heads(model), weights=True)
    model.set_attn_implementation("flex_attention")
    yield lambda: model(ids)
    model.set_attn_implementation("sdpa")


# roles


@after("this guidance is a copy or was unpickled, and guides no model; call hw.guide on the heads")
def copied_guidance() -> Iterator[Callable[[], Any]]:
    model = encoder()
    copied = copy.copy(hw.guide(hw.find_heads(model)))
    yield lambda: copied(window_mask())
    guidance = hw.guide(hw.find_heads(model))
    yield lambda: guidance(window_mask())


@after("this guidance was removed.*call the handle that guides now, or hw.guide again")
def removed_guidance() -> Iterator[Callable[[], Any]]:
    model = encoder()
    guidance = hw.guide(hw.find_heads(model))
    guidance.remove()
    yield lambda: guidance(window_mask())
    again = hw.guide(hw.find_heads(model))
    yield lambda: again(window_mask())


@after("is guided and this forward has no mask; give it one .* or call guidance.paused\\(\\) or remove\\(\\)")
def forward_without_a_mask() -> Iterator[Callable[[], Any]]:
    model = encoder()
    guidance = hw.guide(hw.find_heads(model))
    yield lambda: model(x)
    guidance(window_mask())
    model(x)
    with guidance.paused():
        model(x)
    guidance.remove()


@after("is guided already, together with attentions that are not in these heads; call remove\\(\\) on that handle")
def guided_in_part() -> Iterator[Callable[[], Any]]:
    model = encoder()
    guidance = hw.guide(hw.find_heads(model))
    yield lambda: hw.guide(hw.find_heads(model).layer(0))
    guidance.remove()


@after("the mask is for 3 heads and .* has 4; build it with num_heads=4")
def mask_for_fewer_heads() -> Iterator[Callable[[], Any]]:
    guidance = hw.guide(hw.find_heads(encoder()))
    yield lambda: guidance(window_mask(3))
    yield lambda: guidance(window_mask(4))


# routing


@after("already has .* as its output; call remove\\(\\) on the handle of the first aggregate\\(\\) before a second")
def routed_twice() -> Iterator[Callable[[], Any]]:
    model = encoder()
    first = hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    yield lambda: hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    first.remove()


@after("is not the model that peft returned.*find the heads in that: hw.find_heads\\(peft_model\\)")
def routing_inside_of_adapters() -> Iterator[Callable[[], Any]]:
    peft_model = with_lora(bert(), ["query"])
    yield lambda: hw.aggregate(hw.find_heads(peft_model.base_model.model.encoder), hw.routing.Trunk())
    yield lambda: hw.aggregate(hw.find_heads(peft_model), hw.routing.Trunk())


@after("aggregators have to be in the model before there is an optimizer: call hw.aggregate\\(heads, setting\\)")
def aggregators_in_a_loop() -> Iterator[Callable[[], Any]]:
    model, accelerator = encoder(), Accelerator(cpu=True)
    optimizer = sgd(model)
    yield lambda: attach(accelerator, model, optimizer, hw.Aggregate(hw.routing.Trunk()))
    hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    yield lambda: attach(accelerator, model, sgd(model), hw.Penalize(hw.similarity.Output()), hw.Repel(hw.SVGD()))


@after("is gated and computed no queries before its output projection was called.* gate the heads again")
def queries_replaced_under_gates() -> Iterator[Callable[[], Any]]:
    model = llama()
    gates = hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
    model.layers[0].self_attn.q_proj = nn.Linear(16, 16, bias=False)
    yield lambda: model(ids)
    gates.remove()
    hw.gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())


@after("was replaced since hw.heads.head_blocks was called; call remove\\(\\), and hw.heads.head_blocks again")
def blocks_of_replaced_parameters() -> Iterator[Callable[[], Any]]:
    model = encoder()
    blocks = hw.heads.head_blocks(hw.find_heads(model))
    optimizer = torch.optim.SGD(list(blocks), lr=0.1)
    blocks.attach(optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    yield lambda: step(model, optimizer)
    blocks.remove()
    blocks = hw.heads.head_blocks(hw.find_heads(model))
    again = torch.optim.SGD(list(blocks), lr=0.1)
    blocks.attach(again)
    yield lambda: step(model, again)


@after("so none of their heads was dropped; call model.train\\(\\), and run a forward pass")
def dropping_in_evaluation() -> Iterator[Callable[[], Any]]:
    model = encoder().eval()
    dropping = hw.drop_heads(hw.find_heads(model), 0.5)
    model(x)
    yield dropping.check
    model.train()
    model(x)


@after("num_heads=8 fits no attention: the modules found say")
def heads_that_are_told() -> Iterator[Callable[[], Any]]:
    model = encoder()
    yield lambda: hw.find_heads(model, num_heads=8)
    yield lambda: hw.find_heads(model)


@after("give its number of heads, find_heads\\(model, num_heads=8\\)")
def heads_that_nothing_tells() -> Iterator[Callable[[], Any]]:
    model = Untold()
    yield lambda: hw.find_heads(model)
    yield lambda: hw.verify(hw.find_heads(model, num_heads=8), (x,))


@after("did not call the attention function that it looks up.*Call model.set_attn_implementation\\('sdpa'\\)")
def attention_that_takes_another_way() -> Iterator[Callable[[], Any]]:
    sizes = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    model = GPT2Model._from_config(GPT2Config(**sizes, reorder_and_upcast_attn=True), attn_implementation="eager")
    hw.Taps(hw.find_heads(model), weights=True)
    yield lambda: model(ids)
    model.set_attn_implementation("sdpa")


@after("it took another way .*Have it call that function, or remove\\(\\) what is attached")
def attention_without_a_softmax() -> Iterator[Callable[[], Any]]:
    model = Switched()
    taps = hw.Taps(hw.find_heads(model), weights=True)
    model.fused = False
    yield lambda: model(x)
    taps.remove()


@after("expected the same words at the same characters: call hw.roles.align with the tables given")
def other_words() -> Iterator[Callable[[], Any]]:
    encoding = fast_tokenizer("WordPiece")(["so it goes"])
    aligned = hw.roles.align([hw.roles.WordTable.split("so it goes")], encoding)
    other = [hw.roles.WordTable.split("so it went")]
    yield lambda: aligned.with_tables(other)
    yield lambda: hw.roles.align(other, fast_tokenizer("WordPiece")(["so it went"]))


@after(
    "which an aggregator in that place would leave as it is; use hw.routing.Residual\\(...\\) or hw.routing.Gate\\(\\)"
)
def norm_before_the_output() -> Iterator[Callable[[], Any]]:
    model = BY_NAME["BitNet"].build()
    yield lambda: hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    yield lambda: hw.aggregate(hw.find_heads(model), hw.routing.Residual(hw.routing.Trunk()))


@after("it was replaced since. Put the .* back, and call remove\\(\\) again")
def replaced_aggregator() -> Iterator[Callable[[], Any]]:
    model: Any = encoder(1)
    aggregation = hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    attention = model.layers[0].self_attn
    placed, attention.out_proj = attention.out_proj, nn.Linear(16, 16)
    yield aggregation.remove
    attention.out_proj = placed


@cases("message", REMEDIES)
@pytest.mark.filterwarnings("ignore")
def test_a_remedy_holds(message: str):
    case = REMEDIES[message]()
    refused = next(case)
    with pytest.raises(hw.errors.HeadwiseError, match=message):
        refused()
    works = next(case, refused)
    works()
