"""Measures of the diversity of heads and of the calibration of classifiers."""

from headwise.metrics.calibration import BINS, Reliability, predictive_entropy, reliability, reliability_of
from headwise.metrics.heads import (
    ParameterCosine,
    attention_entropy,
    attention_jensen_shannon,
    generalized_jensen_shannon,
    head_distance,
    output_cosine,
    parameter_cosine,
    particle_norms,
    prediction_disagreement,
    rbf_hsic,
)
from headwise.metrics.intervals import Interval, mean_interval, student_quantile
from headwise.metrics.moments import (
    EffectiveHeads,
    OutputMoments,
    debiased_cka,
    effective_heads,
    linear_cka,
    output_moments,
)
from headwise.metrics.pairs import (
    PairSums,
    attention_pairs,
    cosine_pairs,
    distance_pairs,
    mean_over_others,
    mean_over_pairs,
    parameter_pairs,
)
from headwise.metrics.patterns import induction_weights, sum_first_weights, weights_back
from headwise.metrics.roles import RoleShares, role_shares

__all__ = [
    "BINS",
    "EffectiveHeads",
    "Interval",
    "OutputMoments",
    "PairSums",
    "ParameterCosine",
    "Reliability",
    "RoleShares",
    "attention_entropy",
    "attention_jensen_shannon",
    "attention_pairs",
    "cosine_pairs",
    "debiased_cka",
    "distance_pairs",
    "effective_heads",
    "generalized_jensen_shannon",
    "head_distance",
    "induction_weights",
    "linear_cka",
    "mean_interval",
    "mean_over_others",
    "mean_over_pairs",
    "output_cosine",
    "output_moments",
    "parameter_cosine",
    "parameter_pairs",
    "particle_norms",
    "prediction_disagreement",
    "predictive_entropy",
    "rbf_hsic",
    "reliability",
    "reliability_of",
    "role_shares",
    "student_quantile",
    "sum_first_weights",
    "weights_back",
]
