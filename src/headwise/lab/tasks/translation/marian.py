"""Hugging Face's Marian with the sizes of a `Seq2Seq` and label smoothing, and the choice between the two models."""

import functools
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import MarianConfig, MarianMTModel
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from typing_extensions import override

from headwise.lab.data.subwords import END, PADDING, START
from headwise.lab.models.electra import draw_normal
from headwise.lab.tasks.translation.model import IGNORED, Seq2Seq, Seq2SeqConfig
from headwise.lab.tasks.translation.scales import TranslationScale

LONGEST = 512


class Marian(MarianMTModel):
    """`transformers.MarianMTModel`, post-norm, with tied embeddings and a smoothed loss.

    Example:
        >>> import torch
        >>> model = Marian(Seq2SeqConfig(vocab_size=9, label_smoothing=0.1)).eval()
        >>> model(input_ids=torch.tensor([[4, 2]]), labels=torch.tensor([[5, 2]])).logits.shape
        torch.Size([1, 2, 9])
    """

    def __init__(self, sizes: Seq2SeqConfig) -> None:
        config = MarianConfig(
            vocab_size=sizes.vocab_size,
            d_model=sizes.width,
            encoder_layers=sizes.encoder_layers,
            decoder_layers=sizes.decoder_layers,
            encoder_attention_heads=sizes.heads,
            decoder_attention_heads=sizes.heads,
            encoder_ffn_dim=sizes.hidden,
            decoder_ffn_dim=sizes.hidden,
            dropout=sizes.dropout,
            attention_dropout=sizes.dropout,
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=LONGEST,
            pad_token_id=PADDING,
            decoder_start_token_id=START,
            eos_token_id=END,
            forced_eos_token_id=None,
        )
        super().__init__(config)
        self.label_smoothing = sizes.label_smoothing
        for module in self.modules():
            # every arm's parameters are drawn module by module; torch's default for an embedding is 50 times as wide
            if isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters = functools.partial(_draw, module)

    @override
    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Seq2SeqLMOutput:
        """Return Marian's output with the loss of `Seq2Seq`."""
        if labels is not None and "decoder_input_ids" not in kwargs:
            kwargs["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(labels)
        output = super().forward(*args, **kwargs)
        if labels is not None and output.logits is not None:
            output.loss = F.cross_entropy(
                output.logits.flatten(0, 1),
                labels.flatten(),
                ignore_index=IGNORED,
                label_smoothing=self.label_smoothing,
            )
        return output


def _draw(module: nn.Linear | nn.Embedding) -> None:
    if isinstance(module, MarianSinusoidalPositionalEmbedding):
        module.weight.copy_(module.create_weight())
        return
    draw_normal(module)


def build_model(scale: TranslationScale, vocabulary_size: int) -> Seq2Seq | Marian:
    """Return a new model of a scale: our Transformer or Marian."""
    config = Seq2SeqConfig(
        vocab_size=vocabulary_size,
        width=scale.width,
        hidden=scale.hidden,
        encoder_layers=scale.encoder_layers,
        decoder_layers=scale.decoder_layers,
        heads=scale.heads,
        norm_first=scale.norm_first,
        dropout=scale.dropout,
        label_smoothing=scale.label_smoothing,
    )
    return Seq2Seq(config) if scale.model == "seq2seq" else Marian(config)
