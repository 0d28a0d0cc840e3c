"""What each head of a causal model does, as loops from the definitions."""

from __future__ import annotations

import torch
from torch import Tensor


def repeat_scores(weights: Tensor, period: int, start: int) -> dict[str, list[float]]:
    """Scores of each head on [start] r_1 .. r_P r_1 .. r_P, from weights [B, H, T, T]."""
    found: dict[str, list[float]] = {"induction": [], "previous": [], "duplicate": []}
    size = start + 2 * period
    for head in range(weights.shape[1]):
        induction, duplicate, previous = [], [], []
        for row in weights[:, head]:
            for j in range(period):
                second = start + period + j
                duplicate.append(row[second, start + j].item())
                if j < period - 1:
                    induction.append(row[second, start + j + 1].item())
            previous += [row[query, query - 1].item() for query in range(2, size)]
        found["induction"].append(sum(induction) / len(induction))
        found["duplicate"].append(sum(duplicate) / len(duplicate))
        found["previous"].append(sum(previous) / len(previous))
    return found


def text_scores(weights: Tensor, keep: Tensor, window: int) -> dict[str, list[float]]:
    """Scores of each head on texts with real tokens `keep` [B, T], from weights [B, H, T, T]."""
    found: dict[str, list[float]] = {"first": [], "learned_sink": [], "distance": [], "local": []}
    for head in range(weights.shape[1]):
        first, sink, far, mass, near = [], [], 0.0, 0.0, []
        for text, real in enumerate(keep.tolist()):
            places = [place for place, one in enumerate(real) if one]
            for query in places[window:]:
                row = weights[text, head, query].tolist()
                if any(weights[text, other, query, places[0]] for other in range(weights.shape[1])):
                    first.append(row[places[0]])
                sink.append(1 - sum(row))
                mass += sum(row)
                far += sum(row[key] * (query - key) for key in range(query + 1))
                near.append(sum(row[key] for key in range(query - window + 1, query + 1)))
        found["first"].append(sum(first) / max(len(first), 1))
        found["learned_sink"].append(sum(sink) / len(sink))
        found["distance"].append(far / mass)
        found["local"].append(sum(near) / len(near))
    return found


def relative_norms(contributions: Tensor, keep: Tensor, window: int) -> list[float]:
    """Mean norm of what each head adds, contributions [B, T, H, d], over the mean of the heads."""
    counted = [(text, place) for text, real in enumerate(keep.tolist()) for place in _real(real)[window:]]
    heads = range(contributions.shape[2])
    norms = [
        sum(contributions[text, place, h].square().sum().sqrt().item() for text, place in counted) / len(counted)
        for h in heads
    ]
    return [norm / (sum(norms) / len(norms)) for norm in norms]


def direct_effects(
    contributions: Tensor,
    residual: Tensor,
    gain: Tensor,
    epsilon: float,
    unembedding: Tensor,
    ids: Tensor,
    keep: Tensor,
    queries: range,
    *,
    centered: bool,
) -> list[float]:
    """What each head adds to the logit of the right next token, less the mean logit, with the final norm frozen."""
    found = []
    for head in range(contributions.shape[2]):
        effects = []
        for text in range(len(ids)):
            for query in queries:
                if query + 1 >= ids.shape[1] or not keep[text, query] or not keep[text, query + 1]:
                    continue
                x, added = residual[text, query], contributions[text, query, head]
                if centered:
                    x, added = x - x.mean(), added - added.mean()
                scaled = gain * added / torch.sqrt(x.square().mean() + epsilon)
                logits = unembedding @ scaled
                effects.append((logits[ids[text, query + 1]] - logits.mean()).item())
        found.append(sum(effects) / len(effects))
    return found


def _real(real: list[bool]) -> list[int]:
    return [place for place, one in enumerate(real) if one]
