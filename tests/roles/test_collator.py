"""Batches bring their masks through Hugging Face's Trainer, whatever it does to them on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from cases import cases
from headwise.errors import DataError
from headwise.roles.guide import find_max_length
from roles.tokenizers_for_tests import fast_tokenizer

TEXTS = ["The plot is thin, but well acted!", "No.", "I can't stop watching.", "naïve; rare words ...", "why not?"]
EXAMPLES = [{"text": text, "label": index % 2} for index, text in enumerate(TEXTS)]
ROLES = hw.roles.Roles(hw.roles.Separator(), hw.roles.Window(3))


def classifier() -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=500, **sizes))


def test_the_mask_is_that_of_the_encoded_texts_and_their_padding():
    tokenizer = fast_tokenizer("WordPiece")
    batch = hw.roles.RoleCollator(ROLES, tokenizer, 3)(EXAMPLES)
    encoding = tokenizer(TEXTS, padding=True)
    tables = [hw.roles.WordTable.split(text) for text in TEXTS]
    expected = ROLES(tables, 3, encoding=encoding)
    assert torch.equal(batch["role_mask"].allowed(), expected.allowed())
    assert batch["input_ids"].tolist() == encoding["input_ids"]
    assert batch["labels"].tolist() == [0, 1, 0, 1, 0]
    assert "text" not in batch


def test_a_collator_of_your_own_pads_as_it_likes_and_sees_the_other_columns():
    from transformers import DataCollatorWithPadding

    tokenizer = fast_tokenizer("byte-level BPE", padding_side="left", model_max_length=64)
    inner = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    seen: list[set[str]] = []

    def collate(features: list[dict]) -> dict:
        seen.append(set(features[0]))
        return inner(features)

    batch = hw.roles.RoleCollator(ROLES, tokenizer, 4, collator=collate, max_length=12, heads=(3, 1), empty="self")(
        EXAMPLES
    )
    assert {"input_ids", "attention_mask", "label"} <= seen[0]
    mask = batch["role_mask"]
    assert mask.tokens == batch["input_ids"].shape[1] == 16
    assert torch.equal(mask.keep, batch["attention_mask"].bool())
    assert (mask.heads, mask.empty) == ((3, 1), "self")


def test_pairs_of_texts_and_a_parser_of_your_own():
    calls: list[list[str]] = []

    def parse(texts: list[str]) -> list[hw.roles.WordTable]:
        calls.append(texts)
        return [hw.roles.WordTable(text.split(), text=text) for text in texts]

    tokenizer = fast_tokenizer("WordPiece")
    collator = hw.roles.RoleCollator(
        hw.roles.Roles(hw.roles.Window(1)), tokenizer, 1, parse=parse, text=("premise", "hypothesis")
    )
    batch = collator([{"premise": "so it goes", "hypothesis": "it stops."}, {"premise": "a", "hypothesis": "b c"}])
    assert calls == [["so it goes", "it stops.", "a", "b c"]]
    places = tokenizer(["so it goes"], ["it stops."]).encodings[0].word_ids
    first = batch["role_mask"].roles[0, 0]
    # pieces of one word see one another and nothing else: "stops." is one word of this parser, and two of the tokenizer
    last = [place for place, word in enumerate(places) if word is not None][-1]
    assert bool(first[last, last - 1])
    assert not first[1, 0]


@cases("workers", [0, 1])
def test_a_trainer_gets_masks_by_one_line(tmp_path: Path, workers: int):
    from transformers import Trainer, TrainingArguments

    model, tokenizer = classifier(), fast_tokenizer("WordPiece")
    heads = hw.find_heads(model)
    guidance = hw.guide(heads)
    arguments = TrainingArguments(
        tmp_path,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        remove_unused_columns=False,
        dataloader_num_workers=workers,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=guidance.collator(ROLES, tokenizer),
        train_dataset=EXAMPLES,
        eval_dataset=EXAMPLES,
    )
    trainer.train()
    # three batches an epoch, two epochs
    assert set(guidance.calls.values()) == {6}
    metrics = trainer.evaluate()
    assert set(guidance.calls.values()) == {8}
    assert metrics["eval_loss"] > 0
    seen: list[Tensor] = []
    with hw.Taps(heads.layer(0), weights=True) as taps:
        for examples in (EXAMPLES[:2], EXAMPLES[2:]):
            batch = guidance.collator(ROLES, tokenizer)(examples)
            model(**batch)
            seen.append(taps.read()[0].weights[~batch["role_mask"].allowed()])
    assert all(len(forbidden) and not forbidden.any() for forbidden in seen)
    guidance.remove()


def test_a_trainer_that_generates_hands_the_mask_to_generate(tmp_path: Path):
    from transformers import (
        DataCollatorForSeq2Seq,
        MarianConfig,
        MarianMTModel,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    tokenizer = fast_tokenizer("WordPiece")
    sizes = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_layers": 2, "decoder_layers": 1}
    tokens = {"pad_token_id": 3, "decoder_start_token_id": 3, "eos_token_id": 2, "forced_eos_token_id": 2}
    model = MarianMTModel(
        MarianConfig(vocab_size=420, d_model=24, encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes, **tokens)
    )
    guidance = hw.guide(hw.find_heads(model).kind("self"))
    arguments = Seq2SeqTrainingArguments(
        tmp_path,
        remove_unused_columns=False,
        predict_with_generate=True,
        generation_num_beams=2,
        generation_max_length=5,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    pairs = [{"text": text, "labels": [5, 6, 2]} for text in TEXTS[:3]]
    trainer = Seq2SeqTrainer(
        model,
        arguments,
        data_collator=guidance.collator(ROLES, tokenizer, collator=DataCollatorForSeq2Seq(tokenizer, model=model)),
        eval_dataset=pairs,
        compute_metrics=lambda found: {"rows": len(found.predictions)},
    )
    assert trainer.evaluate()["eval_rows"] == 3
    # once for the beams, once for the loss
    assert set(guidance.calls.values()) == {2}
    guidance.remove()


def test_a_text_longer_than_the_models_positions_is_refused_before_the_model_sees_it():
    model, tokenizer = classifier(), fast_tokenizer("WordPiece")
    model.bert.embeddings.position_embeddings = torch.nn.Embedding(20, 24)
    guidance = hw.guide(hw.find_heads(model))
    long = [{"text": "one", "label": 0}, {"text": "word " * 30, "label": 1}]
    with pytest.raises(DataError, match=r"example 1 has \d+ tokens and the model takes 20; truncate texts"):
        guidance.collator(ROLES, tokenizer)(long)
    batch = guidance.collator(ROLES, tokenizer, max_length=20, heads=(2, 0), empty="self")(long)
    assert batch["input_ids"].shape[1] == 20
    assert (batch["role_mask"].heads, batch["role_mask"].empty) == ((2, 0), "self")
    guidance.remove()


BART = {"attention_heads": 2, "ffn_dim": 8, "layers": 1}


@cases(("name", "room"), [("BERT", 64), ("RoBERTa", 62), ("BART", 64), ("GPT-2", 64), ("Llama", None), ("T5", None)])
def test_models_take_as_many_tokens_as_their_tables_of_positions_have_rows(name: str, room: int | None):
    import transformers

    class_ = {"BERT": "Bert", "RoBERTa": "Roberta", "BART": "Bart", "GPT-2": "GPT2", "Llama": "Llama", "T5": "T5"}[name]
    config = getattr(transformers, f"{class_}Config")(
        vocab_size=60, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, pad_token_id=1
    )
    bart = {f"{side}_{size}": value for side in ("encoder", "decoder") for size, value in BART.items()}
    for key, value in {"max_position_embeddings": 64, "n_positions": 64, "num_layers": 1, "d_ff": 8, **bart}.items():
        setattr(config, key, value)
    model = getattr(transformers, f"{class_}Model")(config).eval()
    assert find_max_length(model) == room
    if room is not None:
        named = {"decoder_input_ids": torch.full((1, 2), 5)} if name == "BART" else {}
        model(input_ids=torch.full((1, room), 5), **named)
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, room + 1), 5), **named)
