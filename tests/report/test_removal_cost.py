"""What a head costs is to the bit that of whole forwards, however much of a forward is not computed again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel, GPT2Config, GPT2Model

import headwise as hw
from cases import cases, tiers
from headwise.report.removal_cost import estimate_removal, measure_removal, record_forward
from headwise.texts.batching import Encoded
from headwise.texts.frozen import Fidelity
from report.stack import SMALL, Stack, ids, spread, tensors


class Remembering(nn.Module):
    """A layer that tells the model something beside what it returns."""

    def __init__(self, model: list[Tensor]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        self.model.append(x.mean() + 1)
        return x + self.attention(x, x, x)[0]


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[Tensor] = []
        self.layers = nn.ModuleList(Remembering(self.told) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.told.clear()
        for layer in self.layers:
            x = layer(x)
        return x * sum(self.told, torch.tensor(1.0))


class Sharing(nn.TransformerEncoderLayer):
    """A layer that keeps what it returns, or adds what another one kept."""

    def __init__(self, kept: dict[str, Tensor], place: int) -> None:
        super().__init__(12, 3, 16, batch_first=True)
        self.kept, self.place = kept, place

    def forward(self, src: Tensor, *args, **kwargs) -> Tensor:
        output = super().forward(src, *args, **kwargs)
        if self.place == 0:
            self.kept["first"] = output
        return output + self.kept["first"] if self.place == 2 else output


class Keeping(nn.Module):
    """Layers of which the first keeps what it returned for the last, and what the model does before them."""

    def __init__(self, before: str) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.before = before
        self.layers = nn.ModuleList(Sharing(self.kept, place) for place in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.before == "forget":
            self.kept.clear()
        if self.before == "noise":
            x = x + 0.1 * torch.randn_like(x)
        for layer in self.layers:
            x = layer(x)
        return x


def run(model: nn.Module, batch) -> object:
    return model(batch) if isinstance(batch, Tensor) else model(**batch)


MODELS = {
    "torch": (lambda: Stack("plain"), tensors),
    "a skip around every layer": (lambda: Stack("skip"), tensors),
    "changed in place": (lambda: Stack("in place"), tensors),
    "BERT": (lambda: BertModel(BertConfig(num_hidden_layers=3, **SMALL)), ids),
    "ALBERT, one layer for all": (
        lambda: AlbertModel(AlbertConfig(num_hidden_layers=3, embedding_size=8, **SMALL)),
        ids,
    ),
    "GPT-2": (lambda: GPT2Model(GPT2Config(n_layer=3, n_embd=16, n_head=4, vocab_size=30, n_positions=16)), ids),
    "a layer that tells": (Told, tensors),
}


@tiers("name", [*MODELS][:4] + [*MODELS][6:], [*MODELS][4:6])
def test_what_a_head_costs_is_to_the_bit_that_of_whole_forwards(name: str):
    torch.manual_seed(0)
    make, batches = MODELS[name]
    model = make().eval()
    heads = hw.find_heads(model)
    found = measure_removal(heads, batches(), run, spread)
    by_importance = torch.stack(
        [torch.cat([spread(run(model, batch), batch).double().detach() for batch in batches()])]
    )
    assert torch.equal(found.whole, by_importance[0])
    for site in heads:
        for head in range(site.num_heads):
            with hw.ablate(hw.find_heads(model).where(site.name), head):
                without = torch.cat([spread(run(model, batch), batch).double().detach() for batch in batches()])
            assert torch.equal(found.drops[site.name][head], found.whole - without)
            assert found.drops[site.name][head].abs().max() > 0


def test_it_is_said_whether_forwards_were_whole_and_why():
    torch.manual_seed(0)
    batches = tensors()
    model = Stack("plain").eval()
    assert measure_removal(hw.find_heads(model), batches, run, spread).replayed
    told = Told().eval()
    found = measure_removal(hw.find_heads(told), batches, run, spread)
    assert not found.replayed
    assert "returned other numbers" in found.reason
    report = hw.measure(hw.find_heads(told), batches, score=spread)
    assert any("every forward pass without a head was computed in full" in note for note in report.notes)
    one = Stack("plain", layers=1).eval()
    assert measure_removal(hw.find_heads(one), batches, run, spread).reason == "no layer ends before another begins"


def test_what_ran_before_a_head_does_not_run_again():
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=3, **SMALL)).eval()
    heads, (batch, _) = hw.find_heads(model), ids()
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(("query", "intermediate.dense")):
            module.forward = counting(module.forward, calls, name)
    with torch.no_grad(), record_forward(heads) as recording:
        model(**batch)
    calls.clear()
    with torch.no_grad(), recording.before(heads.sites[1]) as spared:
        model(**batch)
    assert spared == 3  # the embeddings, the layer before, and what the heads attend with
    assert calls == [
        f"encoder.layer.{part}" for part in ("1.intermediate.dense", "2.attention.self.query", "2.intermediate.dense")
    ]
    calls.clear()
    model(**batch)
    assert len(calls) == 6


def counting(forward, calls: list[str], name: str):
    def counted(*args, **kwargs):
        calls.append(name)
        return forward(*args, **kwargs)

    return counted


def test_an_output_that_was_changed_in_place_is_never_given_back():
    torch.manual_seed(0)
    model = Stack("in place").eval()
    with torch.no_grad(), record_forward(hw.find_heads(model)) as recording:
        model(tensors()[0])
    assert {call.module for call in recording.calls if call.output.stale} == {*model.layers}
    # what was not changed is given back still
    assert measure_removal(hw.find_heads(model), tensors(), run, spread).replayed


@cases("before", ["", "forget"])
def test_what_a_layer_keeps_for_a_later_one_is_seen_and_every_forward_computed_whole(before: str):
    torch.manual_seed(0)
    model = Keeping(before).eval()
    heads, told = hw.find_heads(model), []
    fast = measure_removal(heads, tensors(), run, spread, advance=told.append)
    slow = measure_removal(heads, tensors(), run, spread, replay=False)
    assert not fast.replayed
    assert ("KeyError" if before else "other numbers") in fast.reason
    assert all(torch.equal(fast.drops[name], slow.drops[name]) for name in slow.drops)
    # a forward a head and batch, and the whole one
    assert sum(told) == 2 * (9 + 1)


def test_a_model_that_draws_is_computed_whole():
    model = Keeping("noise").eval()
    assert not measure_removal(hw.find_heads(model), tensors(), run, spread).replayed


def test_the_estimate_of_a_cost_is_the_exact_cost_of_a_head_that_adds_little():
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=2, **SMALL)).eval().double()
    heads = hw.find_heads(model)
    batches = []
    for number in range(10):
        keep = torch.ones(40, 6, dtype=torch.bool)
        keep[:20, 4:] = False
        inputs = {"input_ids": torch.randint(1, 30, keep.shape), "attention_mask": keep}
        batches.append(Encoded(number, tuple(range(40)), inputs, keep, ()))

    def run(batch: Encoded) -> Tensor:
        return model(**batch.inputs).last_hidden_state

    estimated = estimate_removal(heads, batches, run, lambda: None)
    exact = measure_removal(heads, batches, lambda _model, batch: run(batch), Fidelity())
    for name, drops in exact.drops.items():
        assert estimated.drops[name].shape == drops.shape
        # the mean of the squares of 400 draws is within 4 standard deviations of 7 %
        torch.testing.assert_close(estimated.drops[name].mean(1), drops.mean(1), rtol=0.3, atol=0)

    # an output that only grows along itself keeps its direction
    way = torch.randn(6, 12, dtype=torch.float64)
    along = estimate_removal(
        heads, batches, lambda batch: run(batch).exp().sum((1, 2))[:, None, None] * way, lambda: None
    )
    assert max(float(drops.max()) for drops in along.drops.values()) < 1e-20
