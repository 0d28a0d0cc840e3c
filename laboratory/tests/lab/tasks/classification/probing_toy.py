"""Probing files made for the tests, sentences whose label shows in one word; and drawn models that read their words."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, PreTrainedTokenizerFast

FILLERS = ("the", "a", "film", "plot", "of", "it", "here", "once", "near", "town", "rain", "stone")
VERBS = {"PAST": ("walked", "saw", "went"), "PRES": ("walks", "sees", "goes")}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", *FILLERS, *VERBS["PAST"], *VERBS["PRES"]]


def write_probing(path: Path, counts: Mapping[str, int], *, seed: int = 3) -> Path:
    """Write so many lines of each partition, with a field that is none of ours between label and sentence."""
    draw = random.Random(seed)
    lines = []
    for partition, count in counts.items():
        for _ in range(count):
            label = draw.choice(sorted(VERBS))
            words = draw.choices(FILLERS, k=draw.randint(4, 9))
            words.insert(draw.randrange(len(words) + 1), draw.choice(VERBS[label]))
            lines.append(f"{partition}\t{label}\tignored\t{' '.join(words)} .\n")
    path.write_text("".join(lines))
    return path


def write_bert(folder: Path) -> Path:
    """Save a drawn BERT of two layers with three heads, and its tokenizer."""
    torch.manual_seed(4)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 16, "vocab_size": len(WORDS)}
    BertModel(BertConfig(num_hidden_layers=2, initializer_range=0.4, **sizes)).save_pretrained(folder)
    make_tokenizer(WORDS).save_pretrained(folder)
    return folder


def write_gpt2(folder: Path) -> Path:
    """Save a drawn GPT-2 of two layers, whose tokenizer pads on the left."""
    torch.manual_seed(5)
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 40, "vocab_size": len(WORDS)}
    GPT2Model(GPT2Config(initializer_range=0.4, **sizes)).save_pretrained(folder)
    tokenizer = make_tokenizer(WORDS, marked=False)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(words: Sequence[str], longest: int = 32, *, marked: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, which puts [CLS] and [SEP], the third and the fourth, around a text."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if marked:
        special = [("[CLS]", 2), ("[SEP]", 3)]
        made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=longest, model_input_names=names
    )
