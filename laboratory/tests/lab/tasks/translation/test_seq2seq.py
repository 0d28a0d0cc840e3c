from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import headwise as hw
from cases import cases
from headwise.errors import SettingError
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.seeding import initialize_parameters
from headwise_lab.tasks.translation.model import END, START, Seq2Seq, Seq2SeqConfig
from headwise_lab.training.attach import Methods

SIZES = {"vocab_size": 11, "width": 16, "hidden": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 2}
SOURCE = torch.tensor([[4, 5, 6, 7, 2], [8, 2, 0, 0, 0]])
TARGET = torch.tensor([[5, 9, 6, 2], [7, 2, -100, -100]])


def built(seed: int = 3, **changes) -> Seq2Seq:
    model = Seq2Seq(Seq2SeqConfig(**{**SIZES, **changes}))
    initialize_parameters(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # sharper than a fresh model, so that no two continuations are nearly as likely
            parameter.mul_(2.0)
    return model.double().eval()


@cases("arm", ["plain", "differential", "gated-elements+talking", "mixture", "pruned"])
@cases("norm_first", [False, True])
def test_decoding_with_a_cache_equals_decoding_without(norm_first, arm):
    model = built(norm_first=norm_first)
    if arm == "pruned":
        hw.prune(hw.find_heads(model), {site.name: [1] for site in hw.find_heads(model)})
    else:
        Methods(parse_arm(arm), model, model, seed=3)
    model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "head_" in name:
                # gates and matrices that are not what they start as
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
    ids = torch.tensor([[START, 5, 9, 6, 8], [START, 7, 4, 4, 3]])
    whole = model(SOURCE, decoder_input_ids=ids).logits
    states = model.encoder(SOURCE)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    parts = []
    for start, end in ((0, 1), (1, 3), (3, 5)):
        mask = (SOURCE != 0).long()
        step = model(
            attention_mask=mask,
            encoder_outputs=states,
            decoder_input_ids=ids[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        parts.append(step.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-10)


@cases("beams", [1, 4])
def test_generate_gives_the_same_tokens_with_and_without_a_cache(beams):
    model = built()
    hw.aggregate(hw.find_heads(model).kind("decoder").layer(1), hw.routing.EMRouting(capsules=4, iterations=2))
    model.double()
    settings = {"num_beams": beams, "max_new_tokens": 9, "length_penalty": 0.6}
    with_cache = model.generate(SOURCE, use_cache=True, **settings)
    assert torch.equal(with_cache, model.generate(SOURCE, use_cache=False, **settings))
    assert len(torch.unique(with_cache)) > 2


@cases("length_penalty", [0.0, 0.7, 1.0])
def test_beam_search_with_room_for_everything_finds_the_best_of_all_translations(length_penalty):
    model = built(vocab_size=5, seed=8)
    source = torch.tensor([[4, 3, 3, 2]])
    longest = 3
    scored = {}
    for length in range(1, longest + 1):
        for words in itertools.product([3, 4], repeat=length - 1):
            scored[(*words, END)] = None
    for words in itertools.product([3, 4], repeat=longest):
        scored[words] = None
    for words in scored:
        labels = torch.tensor([words])
        with torch.no_grad():
            logits = model(source, labels=labels).logits
        # padding and the start are never generated, so the others share what is left
        logits[..., [0, START]] = -torch.inf
        total = logits.log_softmax(-1)[0, range(len(words)), list(words)].sum()
        scored[words] = float(total) / len(words) ** length_penalty
    best = max(scored, key=lambda words: scored[words])
    found = model.generate(
        source,
        num_beams=12,
        max_new_tokens=longest,
        length_penalty=length_penalty,
        early_stopping="never",
        suppress_tokens=[0, START],
        renormalize_logits=True,
    )
    assert tuple(found[0, 1:].tolist()) == best


def test_padding_of_source_and_target_changes_nothing():
    model = built()
    alone = model(SOURCE[1:, :2], labels=TARGET[1:, :2])
    together = model(SOURCE, labels=TARGET)
    torch.testing.assert_close(together.logits[1:, :2], alone.logits, rtol=1e-10, atol=1e-10)


def test_a_target_token_sees_no_later_one():
    model = built()
    ids = torch.tensor([[START, 5, 9, 6]])
    changed = torch.tensor([[START, 5, 9, 8]])
    one, other = (model(SOURCE[:1], decoder_input_ids=given).logits for given in (ids, changed))
    assert torch.equal(one[:, :3], other[:, :3])
    assert not torch.allclose(one[:, 3], other[:, 3])


def test_the_loss_is_the_smoothed_cross_entropy_over_target_tokens():
    model = built(label_smoothing=0.3)
    output = model(SOURCE, labels=TARGET)
    logarithm = output.logits.log_softmax(-1)
    terms = [
        0.7 * -logarithm[b, t, TARGET[b, t]] + 0.3 * -logarithm[b, t].mean()
        for b, t in (TARGET != -100).nonzero().tolist()
    ]
    torch.testing.assert_close(output.loss, torch.stack(terms).mean())


def test_one_embedding_serves_source_target_and_output():
    model = built()
    shared = [name for name, parameter in model.named_parameters() if parameter.shape == (11, 16)]
    assert shared == ["embedding.weight"]


def test_its_heads_are_found_by_kind_and_verified():
    model = built()
    heads = hw.find_heads(model)
    assert [len(heads.kind(kind)) for kind in ("self", "decoder", "cross")] == [2, 2, 2]
    given = {"input_ids": SOURCE[:1], "decoder_input_ids": torch.tensor([[START, 5, 9]])}
    assert len(hw.verify(heads, given).sites) == 6


def test_taps_know_the_padding_of_both_sides():
    model = built().train()
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    model(SOURCE, labels=TARGET)
    pooled = penalty()
    model(SOURCE[:1], labels=TARGET[:1])
    model(SOURCE[1:, :2], labels=TARGET[1:, :3])
    torch.testing.assert_close(penalty(), pooled)


def test_a_saved_model_comes_back(tmp_path):
    model = built(dropout=0.2, label_smoothing=0.1, norm_first=False)
    model.save_pretrained(tmp_path)
    again = Seq2Seq.from_pretrained(tmp_path).eval()
    assert again.config.norm_first is False
    assert torch.equal(again.double()(SOURCE, labels=TARGET).logits, model(SOURCE, labels=TARGET).logits)


def test_wrong_sizes_and_missing_inputs_are_refused():
    with pytest.raises(SettingError, match="width is 15 with 4 heads"):
        Seq2SeqConfig(width=15, heads=4)
    with pytest.raises(SettingError, match="neither labels nor"):
        built()(SOURCE)
    with pytest.raises(SettingError, match="neither input_ids nor"):
        built()(labels=TARGET)
    assert isinstance(built(norm_first=False).encoder.norm, nn.Identity)
