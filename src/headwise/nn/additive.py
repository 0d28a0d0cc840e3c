"""Additive attention whose heads are learned queries, as in self-attentive sentence embeddings."""

import torch
from torch import Tensor, nn

from headwise.errors import ShapeError, require_integer
from headwise.nn.average_weights import mean_of
from headwise.nn.checkpointing import resolve_request
from headwise.nn.scores import Bias, Observer, ScoreCall, normalize_scores, sum_masks


class _GlorotLinear(nn.Linear):
    """Linear with the draw of Lin et al.'s code (Glorot and Bengio 2010); torch's own starts attention out flat."""

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.xavier_uniform_(self.weight)


class AdditiveAttention(nn.Module):
    """Multi-head additive attention over a sequence, with one learned query per head.

    A = softmax(W_2 tanh(W_1 H^T)), M = A H (Lin et al. 2017, Eq. 6 and 7), with H [L, d] the states of a sequence, W_1
    [a, d] shared by all heads, and row h of W_2 [r, a] the query of head h: its particle under `repel`. Keys and values
    are shared, so there is nothing else of a head to act on. Neither matrix has a bias: the paper's have none. Both are
    initialized as in Glorot and Bengio 2010.

    The concatenated heads pass through the identity module `output`, where taps read them and `ablate` removes them.
    Observers and biases work as in `headwise.nn.MultiheadAttention`.

    Args:
        embed_dim: Width d of the states, and of each head's output.
        hidden_dim: Width a of the hidden layer.
        num_heads: Number of heads r.

    Raises:
        SettingError: A size is below 1.

    Example:
        >>> attention = AdditiveAttention(6, 4, 3)
        >>> padding = torch.tensor([[False, False, False], [False, False, True]])
        >>> embedding, weights = attention(torch.randn(2, 3, 6), padding)
        >>> embedding.shape, weights.shape, float(weights[1, :, 2].sum().detach())
        (torch.Size([2, 18]), torch.Size([2, 3, 3]), 0.0)
    """

    observers: tuple[Observer, ...] = ()
    biases: tuple[Bias, ...] = ()

    def __init__(self, embed_dim: int, hidden_dim: int, num_heads: int) -> None:
        super().__init__()
        for name, size in (("embed_dim", embed_dim), ("hidden_dim", hidden_dim), ("num_heads", num_heads)):
            require_integer(name, size, low=1)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.hidden = _GlorotLinear(embed_dim, hidden_dim, bias=False)
        self.score = _GlorotLinear(hidden_dim, num_heads, bias=False)
        self.output = nn.Identity()

    def forward(self, states: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the concatenated outputs of all heads, [B, r * d], and the attention weights, [B, r, L].

        Args:
            states: H, [B, L, d].
            key_padding_mask: True where a state is padding, [B, L]; it gets no attention, and what it holds has no
                influence unless it is not finite. A sequence of nothing but padding has outputs and weights 0.

        Raises:
            ShapeError: The shapes do not fit, or the mask is not bool.
        """
        if states.dim() != 3 or states.shape[-1] != self.embed_dim:
            raise ShapeError(f"states has shape {tuple(states.shape)}; expected (B, L, {self.embed_dim}).")
        keep = None
        if key_padding_mask is not None:
            if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != states.shape[:2]:
                raise ShapeError(
                    f"key_padding_mask is {key_padding_mask.dtype} of shape {tuple(key_padding_mask.shape)}; expected "
                    f"torch.bool of shape {tuple(states.shape[:2])}."
                )
            keep = ~key_padding_mask
        scores = self.score(torch.tanh(self.hidden(states))).transpose(1, 2).unsqueeze(2)
        batch, _, _, keys = scores.shape
        call = ScoreCall(batch, self.num_heads, 1, keys, dtype=scores.dtype, device=scores.device)
        extra = resolve_request(self, self.observers, self.biases, call)
        allowed = None if keep is None else keep[:, None, None, :]
        if extra.biases or allowed is not None:
            biases = extra.biases or (scores.new_zeros(()),)
            scores = scores + sum_masks(allowed, False, biases, 1, keys, scores.dtype)
        weights = normalize_scores(scores)
        for observer in self.observers:
            observer.notify(None, weights, keep, mean_of(weights) if observer.mean_weights else None)
        heads = weights.squeeze(2) @ states
        return self.output(heads.flatten(1).unsqueeze(1)).squeeze(1), weights.squeeze(2)

    def __getstate__(self) -> dict:
        # copies and pickles have no listeners
        return {name: value for name, value in self.__dict__.items() if name not in ("observers", "biases")}
