"""Attention modules whose scores and output projection can be seen."""

from headwise.nn.additive import AdditiveAttention
from headwise.nn.average_weights import mean_of, mean_weights
from headwise.nn.difference import HeadDifference, pair_heads
from headwise.nn.hooks import Handle
from headwise.nn.mixing import HeadMixer
from headwise.nn.multihead import DifferentialAttention, MultiheadAttention, adopt, valid_keys
from headwise.nn.scores import ScoreCall

__all__ = [
    "AdditiveAttention",
    "DifferentialAttention",
    "Handle",
    "HeadDifference",
    "HeadMixer",
    "MultiheadAttention",
    "ScoreCall",
    "adopt",
    "mean_of",
    "mean_weights",
    "pair_heads",
    "valid_keys",
]
