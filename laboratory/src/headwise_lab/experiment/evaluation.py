"""The scores of a trained model per bin, and how similar its heads are.

The metrics of tasks: how per-item statistics become a score whose mean over test items it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from headwise import metrics
from headwise.errors import ShapeError, require_choice, require_integer
from headwise.heads.capture import Capture
from headwise.heads.heads import Heads, Site
from headwise.heads.taps import Taps
from headwise.report.measure import group_readable
from headwise.texts.batching import batch_by_length

ORDERS = 4
# What a set of GLUE is scored by.
ACCURACY, MATTHEWS, SPEARMAN = range(3)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Metric(ABC):
    """A metric of at most 1, shown times 100.

    Attributes:
        name: Its name, as in "accuracy".
        unit: The unit, "%" or "".
        least: The lowest possible value: 0, or -1 for a correlation.
        own_test: Whether each model is tested on items that it generated, so that models cannot be compared.
        columns: Shape of the statistics of one item.
        expected: Their meaning, in messages.
    """

    name: str = ""
    unit: str = ""
    least: float = 0.0
    own_test: bool = False
    columns: ClassVar[tuple[int, ...]] = (2,)
    expected: ClassVar[str]

    def values(self, statistics: NDArray) -> Array:
        """Return one number per test item, [N], whose mean is the metric, from statistics [N] or [N, K]."""
        if not statistics.ndim or statistics.shape[1:] != self.columns:
            raise ShapeError(f"statistics have shape {statistics.shape}; expected {self.expected}.")
        return self.share(statistics.astype(np.float64))

    @abstractmethod
    def share(self, statistics: Array) -> Array:
        """Return the values, from statistics of the right shape."""


@dataclass(frozen=True)
class Measure:
    """A number about a run's answers that is shown in addition to the metric.

    Attributes:
        key: Its key in `task.Answers.measures`.
        name: Its name in a table.
        unit: Its unit, or "".
        better: Whether "higher" or "lower" is better.
        digits: Number of decimals.

    Example:
        >>> Measure("decoding_seconds", "decoding", "s", better="lower").title
        'decoding, s ↓'
    """

    key: str
    name: str
    unit: str = ""
    better: Literal["higher", "lower"] = "higher"
    digits: int = 1

    def __post_init__(self) -> None:
        require_choice("better", self.better, ("higher", "lower"))
        require_integer("digits", self.digits)

    @property
    def title(self) -> str:
        """The header of its column: name, unit, and an arrow to the better side."""
        name = f"{self.name}, {self.unit}".removesuffix(", ")
        return f"{name} {'↑' if self.better == 'higher' else '↓'}"


@dataclass(frozen=True)
class Accuracy(Metric):
    """The share of items answered correctly; the statistic of an item is whether it was.

    >>> Accuracy().values(np.array([True, False])).tolist()
    [1.0, 0.0]
    """

    name: str = "accuracy"
    unit: str = "%"
    columns, expected = (), "one answer per item, (N,)"

    @override
    def share(self, statistics: Array) -> Array:
        return statistics


@dataclass(frozen=True)
class Bleu(Metric):
    """Corpus BLEU (Papineni et al. 2002) as a mean over sentences.

    The statistics of a sentence are its matched and its possible n-grams of orders 1 to 4, its length and that of its
    reference: [c_1..c_4, t_1..t_4, h, r], as counted by sacreBLEU. With S their sums over N sentences,
    BLEU(S) = min(1, e^(1 - r/h)) (prod_n c_n / t_n)^(1/4), and the value of a sentence is BLEU(S) + N grad BLEU(S) . s.
    BLEU does not depend on the scale of S, so the mean of the values is BLEU; their spread is that of BLEU under
    resampling of sentences, to first order (the infinitesimal jackknife). Without a match of some order all are 0.

    >>> perfect = np.array([[4, 3, 2, 1, 4, 3, 2, 1, 4, 4], [6, 5, 4, 3, 6, 5, 4, 3, 6, 6]])
    >>> Bleu().values(perfect).tolist()
    [1.0, 1.0]
    """

    name: str = "BLEU"
    columns, expected = (2 * ORDERS + 2,), f"(N, {2 * ORDERS + 2})"

    @override
    def share(self, statistics: Array) -> Array:
        total = statistics.sum(axis=0)
        matched, possible, length, reference = total[:ORDERS], total[ORDERS:-2], total[-2], total[-1]
        if not matched.all():
            return np.zeros(len(statistics))
        penalty = min(0.0, 1.0 - reference / length)
        score = float(np.exp(penalty + np.log(matched / possible).mean()))
        logarithm = (statistics[:, :ORDERS] / matched - statistics[:, ORDERS:-2] / possible).mean(axis=1)
        if penalty < 0.0:
            logarithm += (reference * statistics[:, -2] / length - statistics[:, -1]) / length
        return score * (1.0 + len(statistics) * logarithm)


@dataclass(frozen=True)
class Loss(Metric):
    """The mean loss of a prediction; the statistics of an item are the sum of its losses and their number.

    With t_i the sums and n_i the counts over N items, the mean is m = sum t / sum n, and the value of an item is
    m + N (t_i - m n_i) / sum n: the mean of the values is m, their spread that of m under resampling, to first order.

    >>> Loss().values(np.array([[6.0, 2], [2.0, 2]])).tolist()
    [3.0, 1.0]
    """

    name: str = "loss"
    unit: str = "nats"
    expected = "a sum and a count per item, (N, 2)"

    @override
    def share(self, statistics: Array) -> Array:
        sums, counts = statistics.T
        mean = sums.sum() / counts.sum()
        return mean + len(sums) * (sums - mean * counts) / counts.sum()


@dataclass(frozen=True)
class Likelihood(Loss):
    """The geometric mean of the probability of a prediction: e^-m, with m the mean of `Loss`, one over the perplexity.

    With the statistics of `Loss`, the value of an item is e^-m (1 - N (t_i - m n_i) / sum n).

    >>> Likelihood().values(np.log(2.0) * np.array([[1.0, 1 / np.log(2.0)]])).tolist()
    [0.5]
    """

    name: str = "likelihood"
    unit: str = "%"

    @override
    def share(self, statistics: Array) -> Array:
        losses = Loss.share(self, statistics)
        mean = losses.mean()
        return np.exp(-mean) * (1.0 - (losses - mean))


@dataclass(frozen=True)
class Auc(Metric):
    """Area under the ROC curve of replaced tokens: the probability that one scores above one that was not replaced.

    Tokens are replaced by the model's generator, so each model has a different test.

    The placement of a position is the share of positions of the other kind that it is on the right side of, counting
    ties half. The statistics of an item are [placements of the first kind, number of these positions, placements of the
    second, number]. With S their sums over N items, S_1 / S_2 = S_3 / S_4 is the area A, and an item with s has
    A + N ((s_1 - A s_2) / S_2 + (s_3 - A s_4) / S_4): the mean of the values is A, their spread that of A under
    resampling of items, to first order (DeLong et al. 1988; for clusters, Obuchowski 1997).

    >>> Auc().values(np.array([[0.5, 1, 1.5, 2], [0.5, 1, 0.5, 2]])).tolist()
    [0.75, 0.25]
    """

    name: str = "AUC-ROC, own test"
    unit: str = "%"
    own_test: bool = True
    columns, expected = (4,), "two pairs of sums per item, (N, 4)"

    @override
    def share(self, statistics: Array) -> Array:
        total = statistics.sum(axis=0)
        # one kind may be absent
        first, second = np.maximum(total[[1, 3]], 1.0)
        one, other = total[0] / first, total[2] / second
        spread = (statistics[:, 0] - one * statistics[:, 1]) / first
        spread = spread + (statistics[:, 2] - other * statistics[:, 3]) / second
        return (one + other) / 2 + len(statistics) * spread


@dataclass(frozen=True)
class GlueScore(Metric):
    """The score of a GLUE set as a mean over items; the statistics of an item are [kind of score, answer, truth].

    Matthews correlation is a function f of the four counts S that does not depend on their scale, and an item with
    counts s has f + N grad f . s. Spearman correlation has the influence function

        IF(x, y) = -3 rho - 9 + 12 (F(x) G(y) + E[F(X) 1{Y >= y}] + E[G(Y) 1{X >= x}])

    (Croux and Dehon 2010), F and G the mid-ranks over N, and an item has rho + IF minus the mean of IF. The mean of the
    values is the score; their spread is that of the score under resampling of items, to first order.

    >>> GlueScore().values(np.array([[0, 1, 1], [0, 1, 0]])).tolist()
    [1.0, 0.0]
    """

    name: str = "GLUE score"
    least: float = -1.0
    columns, expected = (3,), "kind, answer and truth, (N, 3)"

    @override
    def share(self, statistics: Array) -> Array:
        kind, (answers, truth) = int(statistics[0, 0]), statistics[:, 1:].T
        if kind == ACCURACY:
            return (answers == truth).astype(np.float64)
        return _share_matthews(answers, truth) if kind == MATTHEWS else _share_spearman(answers, truth)


METRICS: Mapping[str, Metric] = {
    metric.name: metric for metric in (Accuracy(), Bleu(), Auc(), GlueScore(), Likelihood())
}


def count_ngrams(hypotheses: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """Return the statistics of `Bleu` for each text, [N, 10], as sacreBLEU counts it.

    >>> count_ngrams(["a b"], ["a c"]).tolist()
    [[1.0, 0.0, 0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 2.0, 2.0]]
    """
    # slow to import
    import sacrebleu

    bleu = sacrebleu.BLEU()
    scores = [bleu.corpus_score([one], [[other]]) for one, other in zip(hypotheses, references, strict=True)]
    rows = [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]
    return np.array(rows, dtype=np.float64)


def score_answers(kind: int, answers: NDArray, truth: NDArray) -> float:
    """Return a score of answers; 0 for a correlation of constant answers.

    >>> score_answers(MATTHEWS, np.array([1, 0, 1]), np.array([1, 0, 1]))
    1.0
    """
    # both take seconds to import
    if kind == ACCURACY:
        from sklearn.metrics import accuracy_score

        return float(accuracy_score(truth, answers))
    if kind == MATTHEWS:
        from sklearn.metrics import matthews_corrcoef

        return float(matthews_corrcoef(truth, answers))
    from scipy.stats import spearmanr

    if np.ptp(answers) == 0.0 or np.ptp(truth) == 0.0:
        return 0.0
    found: Any = spearmanr(answers, truth)
    return float(found.statistic)


def _share_matthews(answers: Array, truth: Array) -> Array:
    called, right = answers > 0.5, truth > 0.5
    cells = np.stack([called & right, ~called & ~right, called & ~right, ~called & right]).astype(np.float64)
    tp, tn, fp, fn = cells.sum(axis=1)
    sums = np.array([tp + fp, tp + fn, tn + fp, tn + fn])
    if not sums.all():
        return np.zeros(len(answers))
    root = float(np.sqrt(sums.prod()))
    score = (tp * tn - fp * fn) / root
    products = np.array([tn, tp, -fn, -fp]) / root
    # each count is in two of the four sums
    inside = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1]]) / sums
    gradient = products - 0.5 * score * inside.sum(axis=1)
    return score + len(answers) * (gradient @ cells)


def _share_spearman(answers: Array, truth: Array) -> Array:
    from scipy.stats import rankdata

    count, score = len(answers), score_answers(SPEARMAN, answers, truth)
    if np.ptp(answers) == 0.0 or np.ptp(truth) == 0.0:
        return np.zeros(count)
    first, second = ((rankdata(values) - 0.5) / count for values in (answers, truth))
    influence = first * second + _average_above(first, second) + _average_above(second, first)
    return score + 12 * (influence - influence.mean())


def _average_above(values: Array, ranks: Array) -> Array:
    """Return E[values 1{ranks >= r}] for each r of ranks."""
    order = np.argsort(ranks, kind="stable")
    sums = np.append(np.cumsum(values[order][::-1])[::-1], 0.0)
    return sums[np.searchsorted(ranks[order], ranks, side="left")] / len(ranks)


PAIRWISE = (
    "effective_heads",
    "effective_heads_weighted",
    "debiased_cka",
    "distance",
    "output_cosine",
    "output_cka",
    "position_js",
)


def scores_by_bin(metric: Metric, statistics: NDArray, bins: NDArray[np.integer]) -> dict[str, Any]:
    """Return {"pooled": score, "bins": {bin: score}} of items with statistics [N] or [N, K] in bins [N].

    >>> from headwise_lab.experiment.evaluation import Accuracy
    >>> scores_by_bin(Accuracy(), np.array([True, False, True]), np.array([1, 1, 2]))
    {'pooled': 0.6666666666666666, 'bins': {'1': 0.5, '2': 1.0}}
    """
    per_bin = {str(b): float(metric.values(statistics[bins == b]).mean()) for b in np.unique(bins).tolist()}
    return {"pooled": float(metric.values(statistics).mean()), "bins": per_bin}


def spread_evenly(items: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` places spread evenly over `items`.

    >>> spread_evenly(9, 3).tolist()
    [0, 4, 8]
    """
    return np.unique(np.linspace(0, items - 1, min(most, items)).astype(np.int64))


def spread_batches(lengths: NDArray[np.int64], most: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Yield at most `most` places spread evenly over items of these lengths, in batches of similar length.

    >>> [batch.tolist() for batch in spread_batches(np.array([5, 9, 4, 2, 3]), 3, 2)]
    [[4, 2], [0]]
    """
    chosen = spread_evenly(len(lengths), most)
    for batch in batch_by_length(lengths[chosen], size):
        yield chosen[batch]


def round_to_bins(values: ArrayLike, ends: Sequence[int]) -> NDArray[np.int64]:
    """Return each value rounded up to the end of its bin; the last bin has all larger values.

    >>> round_to_bins([3, 5, 6, 99], (5, 10)).tolist()
    [5, 5, 10, 10]
    """
    return np.array(ends)[np.minimum(np.searchsorted(ends, values), len(ends) - 1)]


def select_with_weights(heads: Heads, forward: Callable[[], object]) -> Heads:
    """Return the attentions whose weights a forward pass shows, perhaps none."""
    groups = group_readable(heads, forward)[0]
    found = [site.name for read, sites in groups.items() if "weights" in read for site in sites]
    return replace(heads, sites=tuple(site for site in heads if site.name in found))


@dataclass(frozen=True)
class Diversity:
    """How alike heads are.

    Attributes:
        means: Means over sites, by measure.
        sites: The measures of each site, by name.
    """

    means: dict[str, float | None]
    sites: dict[str, dict[str, float]]


def diversity(heads: Heads | None, probe: Callable[[], Iterable[None]]) -> Diversity:
    """Return how alike the heads are, at each site and on average.

    Returns:
        "effective_heads", "effective_heads_weighted" (by variance) and "debiased_cka" of the contributions of heads,
        or of their outputs where no linear output projection follows; "distance" (Dist of An et al. 2020, per token),
        "output_cosine", "output_cka", "position_js" (Jensen-Shannon of attention rows), "parameter_cosine" (mean
        absolute), "particle_norm"; None for all but the last if sites have one head, and for all without heads. Where
        weights cannot be read, a site has no "position_js"; the mean is over the others, and None if there are none.
    """
    pairwise = (*PAIRWISE, "parameter_cosine")
    if heads is None:
        return Diversity(dict.fromkeys((*pairwise, "particle_norm")), {})
    parameters = [head_slice.read().flatten(1) for head_slice in heads.slices()]
    norms = torch.cat([metrics.particle_norms(particles) for particles in parameters])
    measured: dict[str, float | None] = {"particle_norm": float(norms.mean())}
    if min(site.num_heads for site in heads) < 2:
        return Diversity(dict.fromkeys(pairwise) | measured, {})
    measured["parameter_cosine"] = _mean(
        # a key/value head that all query heads share has nothing to be compared with
        [float(metrics.parameter_cosine(particles).mean_absolute) for particles in parameters if len(particles) > 1]
    )
    sites: dict[str, _Site] = {site.name: _Site(site) for site in heads}
    with ExitStack() as attached:
        taps = [
            attached.enter_context(Taps(group, outputs=True, weights="weights" in read))
            for read, group in group_readable(heads, lambda: next(iter(probe()), None))[0].items()
        ]
        for _ in probe():
            for capture in (capture for tap in taps for capture in tap.read()):
                sites[capture.site.name].add(capture)
    found = {name: site.means() for name, site in sites.items()}
    for measure in PAIRWISE:
        known = [site[measure] for site in found.values() if measure in site]
        measured[measure] = _mean(known) if known else None
    return Diversity(measured, found)


class _Site:
    """Sums over batches of the measures of one site."""

    def __init__(self, site: Site) -> None:
        self.tokens, self.sums = 0, defaultdict[str, float](float)
        self.output_weights = site.find_output_weights()
        # of outputs, and of contributions where a linear output projection follows
        self.moments: list[metrics.OutputMoments] = []

    def add(self, capture: Capture) -> None:
        outputs, weights, keep = capture.outputs, capture.weights, capture.query_keep
        assert outputs is not None
        self.tokens += capture.queries
        means = {
            "distance": metrics.head_distance(outputs, keep),
            "output_cosine": metrics.output_cosine(outputs, keep),
        }
        if weights is not None:
            means["position_js"] = metrics.attention_jensen_shannon(weights, keep)
        for name, mean in means.items():
            self.sums[name] += capture.queries * float(mean)
        found = [metrics.output_moments(outputs, keep)]
        if self.output_weights is not None:
            found.append(metrics.output_moments(outputs, keep, output_weights=self.output_weights))
        self.moments = [one + other for one, other in zip(self.moments, found, strict=True)] if self.moments else found

    def means(self) -> dict[str, float]:
        """Return each of `PAIRWISE` that was read."""
        number, weighted, _ = self.moments[-1].effective_heads()
        return {
            "effective_heads": number,
            "effective_heads_weighted": weighted,
            "debiased_cka": float(self.moments[-1].debiased_cka()),
            "output_cka": float(self.moments[0].linear_cka()),
            **{name: total / self.tokens for name, total in self.sums.items()},
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
