"""`measure` on models of every make: what it says is what separate ablations and slow loops say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import headwise as hw
from cases import cases
from headwise_lab.models.text_classifiers import SentenceTransformer, WordVectors
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.sentence.model import SelfAttentive
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from headwise_lab.tasks.translation.model import Seq2Seq, Seq2SeqConfig

TOKENS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 3, 0, 0], [2, 0, 0, 0, 0]])
SECOND = torch.tensor([[7, 5], [4, 0], [3, 9]])
SENTENCE = replace(SENTENCE_SCALES["demo"], width=6, units=4, attention=5, heads=3, hidden=7)
WORDS = replace(CLASSIFICATION_SCALES["demo"], width=8, heads=4, head_size=2, hidden=8)


class Case(NamedTuple):
    model: nn.Module
    batches: list[Any]
    score: Callable[[Any, Any], Tensor]
    forward: Callable[[Any, Any], Any] | None = None


def words(width: int) -> WordVectors:
    return WordVectors(10, width, dropout=0.2)


def first_class(output: dict[str, Tensor], _batch: object) -> Tensor:
    return output["logits"].softmax(-1)[:, 0]


def first_number(output: Any, _batch: object) -> Tensor:
    return (output if isinstance(output, Tensor) else output["logits"])[:, 0, :3].sum(-1)


def padded(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0], src_key_padding_mask=batch[1])


def encoder(**settings: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 3, **settings)


def case(name: str) -> Case:
    torch.manual_seed(5)
    texts = [{"tokens": TOKENS}, {"tokens": TOKENS[:2, :4]}]
    inputs, padding = torch.randn(3, 5, 8), TOKENS == 0
    ids = TOKENS.clamp(min=4)
    if name == "self-attentive":
        return Case(SelfAttentive(words(6), 3, SENTENCE), texts, first_class)
    if name == "self-attentive pairs":
        return Case(SelfAttentive(words(6), 3, SENTENCE, texts=2), [{"tokens": TOKENS, "second": SECOND}], first_class)
    if name == "classification":
        return Case(SentenceTransformer(words(8), 3, WORDS), texts, first_class)
    if name == "torch encoder":
        return Case(encoder(), [(inputs, padding)], first_number, padded)
    if name == "torch encoder, no mask":
        return Case(encoder(enable_nested_tensor=False), [inputs], first_number)
    if name == "torch transformer":
        model = nn.Transformer(8, 2, 2, 2, 12, batch_first=True)
        return Case(model, [(inputs, inputs[:, :3])], first_number, lambda model, batch: model(*batch))
    if name == "t5":
        sizes = {"vocab_size": 10, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
        return Case(model, [{"input_ids": ids, "labels": ids[:, :3].contiguous()}], first_number)
    sizes = {"width": 8, "heads": 2, "hidden": 8}
    batch = {"input_ids": ids, "attention_mask": ~padding, "labels": ids}
    return Case(Seq2Seq(Seq2SeqConfig(vocab_size=10, **sizes)), [batch], first_number)


CASES = (
    "self-attentive",
    "self-attentive pairs",
    "classification",
    "torch encoder",
    "torch encoder, no mask",
    "torch transformer",
    "t5",
    "seq2seq",
)


@cases("name", CASES)
def test_what_each_head_is_worth_is_what_separate_ablations_say(name):
    model, batches, score, forward = case(name)
    heads = hw.find_heads(model)
    report = hw.measure(heads, batches, score=score, forward=forward)
    assert report.replayed
    run = forward or (lambda model, batch: model(batch) if isinstance(batch, Tensor) else model(**batch))
    model.eval()
    found = hw.importance(
        heads, lambda: float(torch.cat([score(run(model, batch), batch).double() for batch in batches]).mean())
    )
    assert report.whole is not None
    assert report.whole.value == pytest.approx(found.baseline)
    for layer in report.layers:
        assert [drop.value for drop in layer.drops] == pytest.approx(found.drops[layer.site].tolist(), abs=1e-7)
    assert any(abs(drop.value) > 1e-4 for layer in report.layers for drop in layer.drops)


@cases("name", ["torch encoder", "classification", "self-attentive"])
def test_what_heads_do_is_that_of_each_text_alone(name):
    model, batches, _, forward = case(name)
    heads = hw.find_heads(model)
    together = hw.measure(heads, batches[:1], forward=forward)
    model.eval()
    cosines = {site.name: [] for site in heads}
    entropies = {site.name: [] for site in heads}
    with torch.no_grad(), hw.Taps(heads, outputs=True, weights=True) as taps:
        for row, count in enumerate((TOKENS != 0).sum(1).tolist()):
            if forward is None:
                model(TOKENS[row : row + 1, :count])
            else:
                model(batches[0][0][row : row + 1, :count])
            for capture in taps.read():
                assert capture.outputs is not None
                assert capture.weights is not None
                for outputs in capture.outputs[0].double():
                    units = nn.functional.normalize(outputs, dim=-1)
                    cosines[capture.site.name].append(units @ units.T)
                for weights in capture.weights[0].double().unbind(1):
                    entropies[capture.site.name].append(-torch.special.xlogy(weights, weights).sum(-1))
    for layer in together.layers:
        expected = torch.stack(cosines[layer.site]).mean(0)
        torch.testing.assert_close(torch.tensor(layer.pairs["output_cosine"]).double(), expected, atol=1e-5, rtol=1e-4)
        expected = torch.stack(entropies[layer.site]).mean(0)
        assert layer.entropy == pytest.approx(expected.tolist(), abs=1e-5)
    queries = 3 if name == "self-attentive" else int((TOKENS != 0).sum())
    assert together.tokens == queries
    said = "in 1 attention module, 3 queries." if name == "self-attentive" else f"{queries} tokens."
    assert together.summary.endswith(said)
