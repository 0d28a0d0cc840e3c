"""The Transformer of the translation task, pre- or post-norm, with tied embeddings.

`Seq2Seq` is a Hugging Face model, so `generate()` decodes it: greedy, sampling or beam search with a cache.

Hugging Face's Marian with the sizes of a `Seq2Seq` and label smoothing, and the choice between the two models.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, MarianConfig, MarianMTModel, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from typing_extensions import override

from headwise.errors import SettingError, require_integer, require_range
from headwise.gating.attach import tell_queries
from headwise.nn.multihead import MultiheadAttention
from headwise_lab.data.subwords import END, PADDING, START
from headwise_lab.models.electra import draw_normal
from headwise_lab.models.encoder import ScaledEmbedding, sinusoids
from headwise_lab.tasks.translation.scales import TranslationScale

IGNORED = -100
# its name since transformers 5.24, and before
CACHE = "cache" if "cache" in {field.name for field in fields(Seq2SeqLMOutput)} else "past_key_values"


class Seq2SeqConfig(PreTrainedConfig):
    """Sizes of a `Seq2Seq`.

    Args:
        vocab_size: Number of token ids; 0 is padding, 1 starts a target, 2 ends a sequence.
        width: Model width d, even.
        hidden: Hidden units of the feed-forward layers.
        encoder_layers: Layers of the encoder.
        decoder_layers: Layers of the decoder.
        heads: Attention heads H of each layer; must divide `width`.
        norm_first: Whether layers are pre-norm; else post-norm, as in Vaswani et al. 2017.
        dropout: Dropout of embeddings and of each sublayer's output, in [0, 1).
        label_smoothing: Share of the target's probability spread over the vocabulary, in [0, 1).
    """

    model_type = "headwise-seq2seq"

    def __init__(
        self,
        vocab_size: int = 8,
        width: int = 8,
        hidden: int = 16,
        encoder_layers: int = 1,
        decoder_layers: int = 1,
        heads: int = 2,
        norm_first: bool = True,
        dropout: float = 0.0,
        label_smoothing: float = 0.0,
        **kwargs: Any,
    ) -> None:
        sizes = {"vocab_size": vocab_size, "width": width, "hidden": hidden, "heads": heads}
        sizes |= {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
        for name, size in sizes.items():
            require_integer(name, size, low=1)
        require_range("dropout", dropout, low=0.0, high=0.999)
        require_range("label_smoothing", label_smoothing, low=0.0, high=0.999)
        if width % 2 or width % heads:
            raise SettingError(
                f"width is {width} with {heads} heads; expected an even multiple of the number of heads."
            )
        self.vocab_size, self.width, self.hidden, self.heads = vocab_size, width, hidden, heads
        self.encoder_layers, self.decoder_layers = encoder_layers, decoder_layers
        # generate() makes one entry of the cache for each of these
        self.num_hidden_layers = decoder_layers
        self.norm_first, self.dropout, self.label_smoothing = norm_first, dropout, label_smoothing
        ids = {"pad_token_id": PADDING, "decoder_start_token_id": START, "eos_token_id": END}
        super().__init__(**{"is_encoder_decoder": True, **ids, **kwargs})


class Seq2Seq(PreTrainedModel, GenerationMixin):
    """Encoder-decoder Transformer (Vaswani et al. 2017) with one embedding for source, target and output.

    Embeddings are drawn from N(0, 1/d) and multiplied by sqrt(d); sinusoidal positions. Pre-norm stacks end in a layer
    normalization. `model.encoder.layers.*.attention`, `model.decoder.layers.*.attention` and
    `model.decoder.layers.*.cross_attention` are the sites `find_heads` finds, of kinds self, decoder and cross.

    Example:
        >>> model = Seq2Seq(Seq2SeqConfig(vocab_size=9)).eval()
        >>> source = torch.tensor([[4, 5, 2], [6, 2, 0]])
        >>> model(source, labels=torch.tensor([[5, 2], [7, 2]])).logits.shape
        torch.Size([2, 2, 9])
        >>> model.generate(source, num_beams=3, max_new_tokens=4).shape[0]
        2
    """

    config_class = Seq2SeqConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _tied_weights_keys = {  # noqa: RUF012  transformers reads it from the class
        "encoder.embedding.weight": "embedding.weight",
        "decoder.embedding.weight": "embedding.weight",
    }

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.embedding = ScaledEmbedding(config.vocab_size, config.width)
        self.encoder = Encoder(config, self.embedding)
        self.decoder = Decoder(config, self.embedding)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the one embedding."""
        return self.embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        cache: EncoderDecoderCache | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        **_unused: Any,
    ) -> Seq2SeqLMOutput:
        """Return the logits [B, T, V], and the loss where labels are given.

        loss = mean over target tokens of (1 - s) (-log p(y)) + s mean_v (-log p(v)), with s the label smoothing.

        Args:
            input_ids: Source ids, int64 [B, S], padded with 0 on the right.
            attention_mask: 1 where a source id is real, [B, S]; read from the ids when None.
            decoder_input_ids: Target ids, int64 [B, T]; the labels shifted right when None.
            labels: Ids to predict, int64 [B, T]; -100 where there is none.
            encoder_outputs: States of the encoder, to run it once for many steps.
            cache: Projected keys and values of earlier steps.
            past_key_values: The same, under its name before transformers 5.24.
            use_cache: Whether to use the cache, and return it for the next step.
            **_unused: What generate() hands to every model and this one has no use for.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise SettingError("Seq2Seq was given neither labels nor decoder_input_ids; expected one of them.")
            decoder_input_ids = shift_right(labels)
        if encoder_outputs is None and input_ids is None:
            raise SettingError("Seq2Seq was given neither input_ids nor encoder_outputs; expected one of them.")
        cache = (past_key_values if cache is None else cache) if use_cache else None
        encoded: Any = self.encoder(input_ids, attention_mask) if encoder_outputs is None else encoder_outputs
        memory: Tensor = encoded[0]
        if attention_mask is None:
            attention_mask = torch.ones(memory.shape[:2], device=memory.device) if input_ids is None else input_ids != 0
        padding = _mask_padding(attention_mask)
        states = self.decoder(decoder_input_ids, memory, padding, cache)
        logits = F.linear(states, self.embedding.weight)
        loss = None
        if labels is not None:
            smoothing = self.config.label_smoothing
            loss = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
            )
        kept: dict[str, Any] = {CACHE: cache}
        return Seq2SeqLMOutput(loss=loss, logits=logits, encoder_last_hidden_state=memory, **kept)

    def _init_weights(self, module: nn.Module) -> None:
        """Leave every module as it drew itself."""


class Encoder(nn.Module):
    """Returns the states of the source."""

    # generate() asks the encoder what it is called with
    main_input_name = "input_ids"

    def __init__(self, config: Seq2SeqConfig, embedding: ScaledEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.norm = nn.LayerNorm(config.width) if config.norm_first else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_unused: Any) -> BaseModelOutput:
        """Return the states [B, S, d] of source ids [B, S]."""
        padding = _mask_padding(input_ids != PADDING if attention_mask is None else attention_mask)
        states = self.dropout(_add_positions(self.embedding(input_ids), 0))
        for layer in self.layers:
            states = layer(states, padding)
        return BaseModelOutput(last_hidden_state=self.norm(states))


class Decoder(nn.Module):
    """Returns the states of the target."""

    def __init__(self, config: Seq2SeqConfig, embedding: ScaledEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.width) if config.norm_first else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, memory: Tensor, padding: Tensor, cache: EncoderDecoderCache | None) -> Tensor:
        """Return the states [B, T, d] of target ids [B, T], given the source's states and padding."""
        past = 0 if cache is None else int(cache.get_seq_length())
        states = self.dropout(_add_positions(self.embedding(ids), past))
        target_padding = _mask_padding(ids != PADDING)
        for index, layer in enumerate(self.layers):
            states = layer(states, target_padding, memory, padding, None if cache is None else (cache, index))
        return self.norm(states)


class CachedAttention(MultiheadAttention):
    """`headwise.nn.MultiheadAttention`, batch first, with keys and values that can be projected once for many calls.

    `attend(query, *project(states))` equals `forward(query, states, states)` in evaluation: the output projection is
    called as a module in both, so aggregators, gates and ablations act in both.

    Example:
        >>> attention = CachedAttention(8, 2).eval()
        >>> states = torch.randn(3, 5, 8)
        >>> whole = attention(states, states, states, need_weights=False)[0]
        >>> torch.allclose(attention.attend(states[:, 1:2], *attention.project(states)), whole[:, 1:2], atol=1e-6)
        True
    """

    def __init__(self, width: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(width, num_heads, dropout=dropout, batch_first=True)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [B, H, K, e], of states [B, K, d]."""
        width = self._joined
        keys, values = F.linear(states, self.in_proj_weight[width:], self.in_proj_bias[width:]).chunk(2, dim=-1)
        return self._by_head(keys), self._by_head(values)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, may_attend: Tensor | None = None) -> Tensor:
        """Return the output [B, Q, d] of queries [B, Q, d] on projected keys and values [B, H, K, e].

        Args:
            query: The states.
            keys: From `project`.
            values: From `project`.
            may_attend: True where a query may attend a key, bool, broadcastable to [B, H, Q, K]; None allows all.
        """
        width = self._joined
        queries = self._by_head(F.linear(query, self.in_proj_weight[:width], self.in_proj_bias[:width]))
        tell_queries(self, query)
        heads = self.attend_heads(queries, keys, values, may_attend)
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    @property
    def _joined(self) -> int:
        """The width of all heads together: less than the model's once heads are removed."""
        return self.num_heads * self.head_dim

    def _by_head(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


class Sublayers(nn.Module):
    """The parts a layer of encoder and decoder share: norm, residual and feed-forward."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = CachedAttention(config.width, config.heads, dropout=config.dropout)
        self.attention_norm = nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.width)
        )
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)


class EncoderLayer(Sublayers):
    """Self-attention and feed-forward; post-norm LN(x + f(x)) or pre-norm x + f(LN(x))."""

    def forward(self, states: Tensor, padding: Tensor) -> Tensor:
        """Return the new states [B, S, d]; `padding` is True at pads, bool [B, S]."""

        def attend(x: Tensor) -> Tensor:
            return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]

        states = _apply_sublayer(self, self.attention_norm, states, attend)
        return _apply_sublayer(self, self.feed_forward_norm, states, self.feed_forward)


class DecoderLayer(Sublayers):
    """Causal self-attention, attention to the source, feed-forward."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.cross_attention = CachedAttention(config.width, config.heads, dropout=config.dropout)
        self.cross_attention_norm = nn.LayerNorm(config.width)

    def forward(
        self,
        states: Tensor,
        target_padding: Tensor,
        memory: Tensor,
        padding: Tensor,
        cached: tuple[EncoderDecoderCache, int] | None = None,
    ) -> Tensor:
        """Return the new states [B, T, d].

        Args:
            states: [B, T, d]; with a cache only those of the tokens after the ones it holds.
            target_padding: True at pads of the target, bool [B, T]; with a cache there are none.
            memory: States of the source, [B, S, d].
            padding: True at pads of the source, bool [B, S].
            cached: The cache of projected keys and values, and this layer's place in it.
        """

        def attend(x: Tensor) -> Tensor:
            if cached is not None:
                return _attend_next(self.attention, x, *cached)
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            return self.attention(x, x, x, key_padding_mask=target_padding, attn_mask=future, need_weights=False)[0]

        def attend_source(x: Tensor) -> Tensor:
            if cached is not None:
                keys, values = _project_memory(self.cross_attention, memory, *cached)
                return self.cross_attention.attend(x, keys, values, ~padding[:, None, None])
            return self.cross_attention(x, memory, memory, key_padding_mask=padding, need_weights=False)[0]

        states = _apply_sublayer(self, self.attention_norm, states, attend)
        states = _apply_sublayer(self, self.cross_attention_norm, states, attend_source)
        return _apply_sublayer(self, self.feed_forward_norm, states, self.feed_forward)


def shift_right(labels: Tensor) -> Tensor:
    """Return the target that is read while `labels` [B, T] are predicted: the start, then all but the last.

    >>> shift_right(torch.tensor([[5, 2, -100]])).tolist()
    [[1, 5, 2]]
    """
    shifted = F.pad(labels[:, :-1], (1, 0), value=START)
    return shifted.masked_fill(shifted == IGNORED, PADDING)


def _apply_sublayer(layer: Sublayers, norm: nn.Module, states: Tensor, function: Any) -> Tensor:
    if layer.norm_first:
        return states + layer.dropout(function(norm(states)))
    return norm(states + layer.dropout(function(states)))


def _attend_next(attention: CachedAttention, states: Tensor, cache: EncoderDecoderCache, index: int) -> Tensor:
    """Return the causal self-attention of the next tokens, whose keys and values join the cache."""
    past = int(cache.self_attention_cache.get_seq_length(index))
    keys, values = cache.self_attention_cache.update(*attention.project(states), index)
    positions = torch.arange(keys.shape[2], device=states.device)
    return attention.attend(states, keys, values, positions <= past + positions[: states.shape[1], None])


def _project_memory(
    attention: CachedAttention, memory: Tensor, cache: EncoderDecoderCache, index: int
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the source, projected at the first step and kept for the others."""
    if cache.is_updated.get(index):
        layer: Any = cache.cross_attention_cache.layers[index]
        return layer.keys, layer.values
    keys, values = cache.cross_attention_cache.update(*attention.project(memory), index)
    cache.is_updated[index] = True
    return keys, values


def _add_positions(embedded: Tensor, past: int) -> Tensor:
    length = past + embedded.shape[1]
    return embedded + sinusoids(length, embedded.shape[2], like=embedded, longest=10_000.0)[past:]


def _mask_padding(attention_mask: Tensor) -> Tensor:
    padding = ~attention_mask.bool()
    # a row of pads alone keeps its first position: a softmax over nothing is NaN
    return torch.cat([torch.zeros_like(padding[:, :1]), padding[:, 1:]], dim=1)


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
