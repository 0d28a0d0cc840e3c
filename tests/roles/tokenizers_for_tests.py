"""Tiny tokenizers of every kind Hugging Face has, trained on a few lines."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "The plot is thin, but I don't mind: it's well-acted!",
    "naïve café — übermäßig; 数据 по-русски 👩‍👩‍👧 ...",
    "I can't stop watching the United States of cinema?",
    "Rare words, like sesquipedalian, are cut into pieces.",
] * 3
SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
KINDS = ["byte-level BPE", "WordPiece", "Unigram", "BPE across words"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """A trained tokenizer with [CLS] before and [SEP] after each text."""
    sizes = {"vocab_size": 420, "special_tokens": SPECIAL, "show_progress": False}
    if kind == "byte-level BPE":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **sizes)
    elif kind == "WordPiece":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(**sizes)
    elif kind == "Unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="[UNK]", **sizes)
    else:
        made = Tokenizer(models.BPE(unk_token="[UNK]"))
        trainer = trainers.BpeTrainer(**sizes)
    made.train_from_iterator(LINES, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", made.token_to_id("[CLS]")), ("[SEP]", made.token_to_id("[SEP]"))],
    )
    return made


def fast_tokenizer(kind: str, **settings: object) -> PreTrainedTokenizerFast:
    """The same as people meet it in transformers."""
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    made = Tokenizer.from_str(tokenizer_of(kind).to_str())
    return PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", **names, **settings)
