"""ELECTRA (Clark et al. 2020) on Hugging Face's modules: a generator fills gaps, a discriminator finds them."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining
from typing_extensions import override

from headwise.errors import SettingError, require_integer, require_positive, require_range
from headwise_lab.models.encoder import sinusoids

# BERT's standard deviation of initial weights, and the default of most of transformers.
DEVIATION = 0.02
# Fine-tuning takes texts longer than those of pre-training.
LONGEST = 512


@dataclass(frozen=True)
class ElectraSizes:
    """Sizes of an ELECTRA; the defaults are ELECTRA-small's.

    Attributes:
        vocabulary: Number of token ids.
        width: Width of the discriminator.
        hidden: Hidden units of its feed-forward layers.
        layers: Layers of each network.
        heads: Attention heads of a layer of the discriminator.
        embedding: Width of the embeddings that both share.
        generator: Share of the discriminator's width, hidden units and heads that the generator has, in (0, 1].
        dropout: Dropout, of attention weights too, in [0, 1).
        generator_weight: Weight of the generator's loss.
        discriminator_weight: Weight of the discriminator's loss.
        deviation: Standard deviation that weights are drawn with. BERT's suits its width; in a narrow model attention
            then adds next to nothing to a state, and learns nothing for thousands of steps.
        sinusoids: Whether position vectors are initialized as sinusoids of that deviation, so that what
            is learned of one distance holds at all positions. They are trained in either case.
    """

    vocabulary: int = 30_522
    width: int = 256
    hidden: int = 1_024
    layers: int = 12
    heads: int = 4
    embedding: int = 128
    generator: float = 0.25
    dropout: float = 0.1
    generator_weight: float = 1.0
    discriminator_weight: float = 50.0
    deviation: float = DEVIATION
    sinusoids: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "hidden", "layers", "heads", "embedding"):
            require_integer(name, getattr(self, name), low=1)
        require_range("dropout", self.dropout, low=0.0, high=0.999)
        require_range("generator_weight", self.generator_weight, low=0.0)
        require_range("discriminator_weight", self.discriminator_weight, low=0.0)
        require_positive("deviation", self.deviation)
        if self.sinusoids and self.embedding % 2:
            raise SettingError(f"embedding is {self.embedding}; sinusoids for positions need an even width.")
        if not 0.0 < self.generator <= 1.0:
            raise SettingError(f"generator is {self.generator}; expected a share of the discriminator, in (0, 1].")
        for share, named in ((1.0, "discriminator"), (self.generator, "generator")):
            width, heads = self._width(share), self._heads(share)
            if width % heads:
                raise SettingError(f"the {named}'s width {width} cannot be divided among {heads} heads; change one.")

    def config(self, share: float, padding: int) -> ElectraConfig:
        """Return Hugging Face's configuration of a network of `share` times the discriminator's size."""
        return ElectraConfig(
            vocab_size=self.vocabulary,
            embedding_size=self.embedding,
            hidden_size=self._width(share),
            num_hidden_layers=self.layers,
            num_attention_heads=self._heads(share),
            intermediate_size=max(1, int(share * self.hidden)),
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            max_position_embeddings=LONGEST,
            initializer_range=self.deviation,
            pad_token_id=padding,
        )

    def _width(self, share: float) -> int:
        return max(1, int(share * self.width))

    def _heads(self, share: float) -> int:
        return max(1, int(share * self.heads))


class ElectraPretraining(nn.Module):
    """Generator and discriminator with one embedding, and the loss of replaced token detection.

    With x a text, m its masked positions, x^masked the text with [MASK] there, and p_G the generator,

        xhat_t ~ p_G(x_t | x^masked) for t in m,   x^corrupt = x with xhat at m,
        L = w_G mean_{t in m} -log p_G(x_t | x^masked) + w_D mean_t BCE(D(x^corrupt, t), [x^corrupt_t != x_t])

    (Clark et al. 2020, section 2): a position where the sample is the right token counts as original, every position
    of the text is judged, and no gradient passes through the samples. Word, position and segment embeddings and their
    norm are one module in both networks, and the generator's output matrix is the word embedding.

    Attributes:
        generator: `transformers.ElectraForMaskedLM`.
        discriminator: `transformers.ElectraForPreTraining`, what is kept after training.

    Example:
        >>> model = ElectraPretraining(ElectraSizes(9, width=8, hidden=8, layers=1, heads=2, embedding=4)).eval()
        >>> ids = torch.tensor([[2, 4, 5, 3]])
        >>> out = model(input_ids=ids, positions=torch.tensor([[1]]), labels=torch.tensor([[6]]), sampling_seed=0)
        >>> out["logits"].shape, bool(out["loss"] > 0)
        (torch.Size([1, 4]), True)
    """

    def __init__(self, sizes: ElectraSizes, *, padding: int = 0) -> None:
        super().__init__()
        self.sizes = sizes
        self.discriminator = ElectraForPreTraining(sizes.config(1.0, padding))
        self.generator = ElectraForMaskedLM(sizes.config(sizes.generator, padding))
        shared = self.discriminator.electra.embeddings
        self.generator.electra.embeddings = shared
        self.generator.generator_lm_head.weight = shared.word_embeddings.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # each arm draws its parameters module by module; torch's default for an embedding is 50 times as wide
                module.reset_parameters = functools.partial(draw_normal, module, sizes.deviation)
        if sizes.sinusoids:
            positions = shared.position_embeddings
            positions.reset_parameters = functools.partial(_begin_with_sinusoids, positions, sizes.deviation)
        head = self.generator.generator_lm_head
        head.reset_parameters = functools.partial(clear_bias, head)

    @override
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        labels: Tensor,
        token_type_ids: Tensor | None = None,
        sampling_seed: int | None = None,
    ) -> dict[str, Tensor]:
        """Return both losses, their weighted sum, and what the discriminator judged.

        Args:
            input_ids: Texts with [MASK] at the masked positions, int64 [B, T], without padding.
            positions: The masked positions, int64 [B, K].
            labels: The token that each of them hid, int64 [B, K].
            token_type_ids: Segment of each token, int64 [B, T]; None for one segment.
            sampling_seed: Seed of the replacements; None draws them from torch's own generator.

        Returns:
            "loss", "generator_loss" and "discriminator_loss" (scalars), "generator_losses" [B, K] and "losses" [B, T]
            (one a prediction), "logits" [B, T] (above 0: replaced), "replaced" (whether it was, bool [B, T]) and
            "filled" (whether the generator's likeliest token is the right one, bool [B, K]).
        """
        generated = self._generate_logits(input_ids, positions, token_type_ids)
        generator_losses = F.cross_entropy(generated.flatten(0, 1), labels.flatten(), reduction="none")
        sampled = _sample(generated.detach(), sampling_seed)
        original = input_ids.scatter(1, positions, labels)
        corrupted = input_ids.scatter(1, positions, sampled)
        replaced = corrupted != original
        states = self.discriminator.electra(corrupted, token_type_ids=token_type_ids)[0]
        logits = _to_float(self.discriminator.discriminator_predictions(states))
        losses = F.binary_cross_entropy_with_logits(logits, replaced.to(logits.dtype), reduction="none")
        generator_loss, discriminator_loss = generator_losses.mean(), losses.mean()
        sizes = self.sizes
        return {
            "loss": sizes.generator_weight * generator_loss + sizes.discriminator_weight * discriminator_loss,
            "generator_loss": generator_loss,
            "discriminator_loss": discriminator_loss,
            "generator_losses": generator_losses.view_as(labels),
            "losses": losses,
            "logits": logits,
            "replaced": replaced,
            "filled": generated.argmax(dim=-1) == labels,
        }

    def parameter_groups(self, rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the optimizer's groups: biases and norms are not decayed (Clark et al. 2020, released code)."""
        return [{**group, "lr": rate} for group in decayed_apart(self.named_parameters(), weight_decay)]

    def _generate_logits(self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Return the generator's logits at the masked positions, [B, K, V]: no other position needs them."""
        states = self.generator.electra(input_ids, token_type_ids=token_type_ids)[0]
        chosen = states.gather(1, positions[:, :, None].expand(-1, -1, states.shape[-1]))
        return _to_float(self.generator.generator_lm_head(self.generator.generator_predictions(chosen)))


def decayed_apart(parameters: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Return named parameters as two groups: matrices with decay, biases and the gains of norms without.

    >>> groups = decayed_apart(nn.Linear(2, 3).named_parameters(), 0.1)
    >>> [(group["weight_decay"], len(group["params"])) for group in groups]
    [(0.1, 1), (0.0, 1)]
    """
    kept: tuple[list[Tensor], list[Tensor]] = [], []
    for _, parameter in parameters:
        kept[parameter.dim() < 2].append(parameter)
    decays: Sequence[float] = (weight_decay, 0.0)
    return [{"params": params, "weight_decay": decay} for params, decay in zip(kept, decays, strict=True) if params]


@torch.no_grad()
def draw_normal(module: nn.Linear | nn.Embedding, deviation: float = DEVIATION) -> None:
    """Draw a module's weights from a normal distribution of that standard deviation; clear its bias or padding.

    >>> table = nn.Embedding(3, 4, padding_idx=0)
    >>> draw_normal(table, 0.5)
    >>> bool(table.weight[0].any()), bool(table.weight[1].any())
    (False, True)
    """
    nn.init.normal_(module.weight, std=deviation)
    if isinstance(module, nn.Linear):
        clear_bias(module)
    elif module.padding_idx is not None:
        module.weight[module.padding_idx] = 0.0


@torch.no_grad()
def clear_bias(module: nn.Linear) -> None:
    """Set a module's bias to zero, where it has one."""
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def _to_float(logits: Tensor) -> Tensor:
    """Return logits in single precision at least: losses and draws are not made in half."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _sample(logits: Tensor, seed: int | None) -> Tensor:
    """Return one token for each row of logits, drawn from its softmax: where one uniform number falls in its sums.

    One number a row is drawn, where a number a token would take longer than the rest of a small step. With a seed it
    is drawn where every machine draws the same.
    """
    sums = logits.softmax(dim=-1).cumsum(dim=-1)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    place = logits.device if seed is None else "cpu"
    uniform = torch.rand(*logits.shape[:-1], 1, generator=generator, device=place).to(logits.device)
    total = sums[..., -1:].contiguous()
    # from the right, so that no token of probability 0 is drawn; rounding may lift the product to the total
    drawn = torch.searchsorted(sums, uniform * total, right=True)
    drawn = torch.minimum(drawn, torch.searchsorted(sums, total)).squeeze(-1)
    # a diverged model is left to the loss
    return drawn.clamp(max=logits.shape[-1] - 1)


@torch.no_grad()
def _begin_with_sinusoids(positions: nn.Embedding, deviation: float) -> None:
    # the mean square of a sinusoid is a half
    positions.weight.copy_(sinusoids(*positions.weight.shape, like=positions.weight) * deviation * math.sqrt(2.0))
