"""A limit on attention scores: after each step of an optimizer, heads with larger ones have W_Q and W_K scaled.

QK-Clip of Kimi K2 (arXiv 2507.20534). The largest score of a head is read from the queries and keys of the forwards of
a step, just before they are compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.errors import LayoutError, NotFired, require_choice, require_positive
from headwise.heads.heads import Heads, Site, list_sharing, require_heads, require_proved
from headwise.heads.method import Method, Stage
from headwise.heads.scores.sdpa import list_methods
from headwise.heads.sharding import is_distributed
from headwise.heads.view import HeadView, is_sharded
from headwise.nn.difference import find_difference
from headwise.nn.hooks import Handle
from headwise.nn.multihead import VERY_NEGATIVE, walk_once
from headwise.nn.scores import Attended, Compared, Observer
from headwise.repulsion.optimizers import unwrap_optimizers
from headwise.settings import Positive

Measure = Literal["bound", "sample", "exact"]
# What a log calls the largest score, by how it was measured.
LOGGED: Mapping[str, str] = {"bound": "score_bound", "sample": "sampled_score", "exact": "largest_score"}
# Queries of each head and sequence in a sample, and numbers of the scores that are computed at a time.
SAMPLED, COMPUTED = 16, 2**22
# Names of queries and keys, and of the narrow states of latent attention, which are normalized before they are keys.
PROJECTED = {"q", "k", "qk", "query", "key", "queries", "keys"}
NARROW = {"a", "down", "lora", "latent", "compressed"}
NORMALIZES = {"normalize", "rms_norm"}


@dataclass(frozen=True)
class ClipScores(Method):
    """A limit on attention scores: `clip_scores`, as a value.

    Attributes:
        limit, measure: As for `clip_scores`.

    Example:
        >>> ClipScores(limit=50.0)
        ClipScores(layers=None, kinds=None, limit=50.0, measure='sample')
    """

    limit: Positive = 100.0
    measure: Measure = "sample"
    stage: ClassVar[Stage] = "step"

    def attach(self, heads: Heads, optimizers: Optimizer | Sequence[Optimizer] = (), _seed: int = 0) -> ScoreClipping:
        """Clip the scores of the selected heads after steps of these optimizers; errors as of `clip_scores`."""
        return ScoreClipping(self.select(heads), self.limit, self.measure, unwrap_optimizers(optimizers))


def clip_scores(
    heads: Heads,
    *,
    limit: float = 100.0,
    measure: Measure = "sample",
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> ScoreClipping:
    """Keep the attention scores of each head at most at a limit, by scaling W_Q and W_K after each step.

    S_h = max over queries i and keys j of scale q_hi . k_hj, the largest score before the softmax in the forwards since
    the last step (all micro-batches). With gamma_h = min(1, limit / S_h), after the step (QK-Clip, arXiv 2507.20534):

    * each head has a key head of its own: the rows of W_Q,h and W_K,h times sqrt(gamma_h);
    * grouped queries, and keys that other heads, attentions or the values use too: the rows of W_Q,h times gamma_h, as
      another head must not change;
    * latent attention: the parts without positions times sqrt(gamma_h), the queries with positions times gamma_h, and
      the keys with positions, which all heads share, stay.

    Biases of the maps are scaled with them. Biases on scores, position biases and a cap on scores are not in S_h. The
    state of the optimizer, such as its momentum, stays as it is. Forwards in evaluation mode or without gradients do
    not count. A head whose largest score is not finite is left alone. Where processes train together, S_h is the
    largest of all of them.

    Args:
        heads: The sites.
        limit: The largest score allowed, above 0.
        measure: How S_h is found, where a fused kernel hides the scores. "sample": from the scores of the 16 longest
            queries of each sequence, at most S_h, so that a head may end somewhat above the limit until the next step.
            "bound": max_i |q_hi| max_j |k_hj| scale of each sequence, with padding and masked pairs, at least S_h, and
            often several times as much: no score of these batches stays above the limit, and heads are scaled long
            before they reach it. "exact": all scores, a second product of queries and keys.
        optimizer: The optimizer of the heads, or several; a head is scaled after the last one, in this order, that
            holds its weights. Those of `head_blocks` count. None: call `apply()` after each step.

    Raises:
        SettingError: A setting is out of range.
        LayoutError: No optimizer holds a weight; a weight is frozen, sharded, quantized, under LoRA or shared by sites;
            queries or keys are normalized after their projection, so that scaling does nothing; or queries and keys are
            not reached, as where a softmax is written out. Nothing is attached then.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> clip = clip_scores(hw.find_heads(model), limit=0.5, measure="exact", optimizer=optimizer)
        >>> model(torch.randn(3, 5, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(clip.stats()), clip.largest["self_attn"].shape
        (['clipped_heads', 'largest_score'], torch.Size([2]))
    """
    return ScoreClipping(heads, limit, measure, None if optimizer is None else unwrap_optimizers(optimizer))


class _Largest:
    """The largest scores [H] of a site since the last step, -inf where there were none, and what they scale.

    Its own object, so that layers that torch.compile compiles one by one share a graph.
    """

    def __init__(self, site: Site, model: nn.Module, measure: Measure, scaled: list[tuple[HeadView, Tensor]]) -> None:
        self.site, self.model, self.measure, self.scaled = site, model, measure, scaled
        weight = site.slices[0].parts[0].parameter
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.scores = torch.full((site.num_heads,), -math.inf, dtype=dtype, device=weight.device)
        self.last = self.scores.clone()

    def trains(self) -> bool:
        """Whether a forward belongs to a step."""
        return self.model.training and torch.is_grad_enabled()

    @torch.no_grad()
    def take(self, compared: Compared) -> None:
        """Take the queries and keys of a call."""
        query, key = compared.query.detach(), compared.key.detach()
        if not query.numel() or not key.numel():
            return
        if self.scores.device != query.device:
            self.scores, self.last = self.scores.to(query.device), self.last.to(query.device)
        scale = query.shape[-1] ** -0.5 if compared.scale is None else compared.scale
        if self.measure == "bound":
            found = _bound(query, key, self.scores.dtype) * abs(scale)
        else:
            found = _compute_largest(self.site, compared, query * scale, key, self.measure == "sample")
        # the same memory, so that a captured graph writes there
        self.scores.copy_(torch.maximum(self.scores, found))

    def scale(self, factors: Tensor) -> None:
        """Multiply the rows of each head by its factor [H] to the power that each feature has."""
        for view, powers in self.scaled:
            first = 0
            for part in view.parts:
                weight = part.parameter
                own = factors[first : first + part.heads, None] ** powers.to(factors)
                own, first = own.to(weight.device), first + part.heads
                part.turn(part.of(weight.detach())).mul_(own.unsqueeze(1))
                bias = part.bias_parameter
                if bias is not None:
                    part.bias_view(bias.detach()).mul_(own)


class ScoreClipping(Handle):
    """The handle of `clip_scores`: what it keeps below which limit, and the largest scores of the last step.

    It has no state of its own: a run that resumes with the weights goes on alike.

    Attributes:
        heads: The sites.
        limit, measure: As for `clip_scores`.
        steps: How many steps it has acted on.
    """

    def __init__(
        self, heads: Heads, limit: float, measure: Measure, optimizers: Sequence[Optimizer] | None = None
    ) -> None:
        require_heads(heads)
        require_positive("limit", limit)
        require_choice("measure", measure, tuple(LOGGED))
        super().__init__()
        self.heads, self.limit, self.measure, self.steps = heads, float(limit), measure, 0
        require_proved(heads)
        taken: dict[tuple[int, int], str] = {}
        self._records = [_Largest(site, heads.model, measure, _list_scaled(site, heads, taken)) for site in heads]
        turns: dict[Optimizer, list[_Largest]] = {}
        for record in self._records if optimizers is not None else ():
            turns.setdefault(_find_last(optimizers or (), record), []).append(record)
        with self._attaching(), walk_once(heads.model):
            for record in self._records:
                scores = record.site.reach_scores(self._removers.append)
                if scores.written:
                    raise LayoutError(
                        f"{record.site.label} ({type(record.site.module).__name__}) writes its softmax out, where its "
                        "queries and keys are not seen; scores are clipped where a module calls torch's "
                        "scaled_dot_product_attention or the attention interface of transformers. Select other heads."
                    )
                observer = Observer(_see_nothing, active=record.trains, compare=record.take)
                self._removers.append(scores.listen(observer))
            for optimizer, own in turns.items():

                def act(_optimizer: Optimizer, _args: Any, _kwargs: Any, own: list[_Largest] = own) -> None:
                    self._act(own)

                self._removers.append(optimizer.register_step_post_hook(act).remove)

    @property
    def largest(self) -> dict[str, Tensor]:
        """The largest score of each head [H] in the last step, by the name of its site; -inf before the first."""
        return {record.site.name: record.last for record in self._records}

    def apply(self) -> None:
        """Scale the heads now, by the scores since the last step: after `optimizer.step()`, without an optimizer.

        Raises:
            NotFired: The handle was removed.
        """
        if not self.attached:
            raise NotFired("the clip of scores was removed; call hw.clip_scores again.")
        self._act(self._records)

    def stats(self) -> dict[str, Tensor]:
        """Return, of the last step, the largest score and how many heads were scaled.

        The name of the first tells how it was measured: "score_bound", "sampled_score" or "largest_score".
        """
        if self.steps == 0:
            return {}
        every = torch.cat([record.last.to(self._records[0].last) for record in self._records])
        return {LOGGED[self.measure]: every.max(), "clipped_heads": self._find_clipped(every).sum()}

    def check(self) -> None:
        """Raise `NotFired` unless it acted on a step, and scores of each site were seen."""
        if self.steps == 0:
            raise NotFired(
                "no step was seen since hw.clip_scores; step the optimizer that it was given, or call apply() after "
                "each step."
            )
        silent = [record.site.label for record in self._records if bool((record.last == -math.inf).all())]
        if silent:
            raise NotFired(
                f"no scores of {', '.join(silent[:6])} were seen in {self.steps} steps: the model must be called in "
                "training mode, with gradients, before each step; or these attentions took another way (a kernel of "
                "their own)."
            )

    def _describe(self) -> str:
        return f"{self.measure} of {len(self.heads)} sites at most {self.limit:g}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_records": []}

    def _find_clipped(self, largest: Tensor) -> Tensor:
        return largest.isfinite() & (largest > self.limit)

    @torch.no_grad()
    def _act(self, records: Sequence[_Largest]) -> None:
        found = torch.cat([record.scores.to(records[0].scores) for record in records])
        if is_distributed():
            # all processes scale alike, also one whose batch did not reach an attention
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        clipped = self._find_clipped(found)
        # on an accelerator asking would wait for it
        idle = found.device.type == "cpu" and not bool(clipped.any())
        factors = torch.where(clipped, self.limit / found, 1.0)
        sizes = [record.site.num_heads for record in records]
        for record, own, factor in zip(records, found.split(sizes), factors.split(sizes), strict=True):
            # a step() that calls its parent's comes here twice, the second time without scores
            record.last.copy_(torch.where(own == -math.inf, record.last, own))
            record.scores.fill_(-math.inf)
            if not idle:
                record.scale(factor)
        self.steps += records[0] is self._records[0]


def _see_nothing(_attended: Attended) -> None:
    """Observe nothing but queries and keys."""


def _bound(query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest |q| |k| of each head [H] over sequences of queries [B, H, Q, e] and keys [B, G, K, e]."""
    longest = [torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype).amax(-1) for tensor in (query, key)]
    groups = longest[1].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return (longest[0] * groups).amax(0)


def _compute_largest(site: Site, compared: Compared, query: Tensor, key: Tensor, sample: bool) -> Tensor:
    """Return the largest score of each head [H] of scaled queries where they may attend: of all, or of the longest."""
    mask = compared.mask
    if not isinstance(mask, Tensor | None):
        raise LayoutError(
            f"{site.label} ({type(site.module).__name__}) was given a mask of {type(mask).__name__}, which does not "
            'tell where single queries attend; use measure="bound".'
        )
    if mask is not None:
        mask = (mask if mask.dtype == torch.bool else mask > VERY_NEGATIVE).expand(
            max(len(query), len(key)), query.shape[1], query.shape[2], key.shape[2]
        )
    positions = torch.arange(query.shape[2], device=query.device)
    if sample:
        count = min(SAMPLED, query.shape[2])
        rows = torch.linalg.vector_norm(query, dim=-1).topk(count, sorted=False).indices
        allowed = None if mask is None else mask.take_along_dim(rows.unsqueeze(-1), 2)
        allowed = rows.unsqueeze(-1) >= positions[: key.shape[2]] if compared.causal else allowed
        return _largest_of(query.take_along_dim(rows.unsqueeze(-1), 2), key, allowed)
    size = max(1, COMPUTED // (len(query) * query.shape[1] * key.shape[2]))
    keys, found = torch.arange(key.shape[2], device=key.device), []
    for first in range(0, query.shape[2], size):
        rows = slice(first, first + size)
        allowed = None if mask is None else mask[:, :, rows]
        allowed = positions[rows, None] >= keys if compared.causal else allowed
        found.append(_largest_of(query[:, :, rows], key, allowed))
    return torch.stack(found).amax(0)


def _largest_of(query: Tensor, key: Tensor, allowed: Tensor | None) -> Tensor:
    # the query heads of a key head follow one another: one product for all of them
    products = query.reshape(len(query), key.shape[1], -1, query.shape[-1]) @ key.mT
    scores = products.reshape(*query.shape[:3], key.shape[2])
    scores = scores if allowed is None else scores.masked_fill(~allowed, -math.inf)
    return scores.amax((0, 2, 3))


def _list_scaled(site: Site, heads: Heads, taken: dict[tuple[int, int], str]) -> list[tuple[HeadView, Tensor]]:
    """Return the views of a site that are scaled, with the power of gamma of each feature; raise where they cannot."""
    _require_scaling(site)
    parts = {part.projection: part for part in site.slices}
    query, key = parts["query"], parts.get("key")
    alone = site.num_heads == site.key_value_heads and len(list_sharing(heads.found, site)) == 1
    # a learned key of torch's attention is no row of W_K
    alone = alone and "value" in parts and getattr(site.module, "bias_k", None) is None
    powers, scaled = torch.ones(query.head_size, dtype=torch.float64), []
    if key is not None and alone:
        # the features of a latent query that follow those of its key have positions, and one key for all heads
        powers[: key.head_size] = 0.5
        scaled = [(key, torch.full((key.head_size,), 0.5, dtype=torch.float64))]
    scaled = [(query, powers), *scaled]
    for part in (part for view, _ in scaled for part in view.parts):
        place = (id(part.parameter), part.start)
        reason = None
        if is_sharded(part.parameter):
            reason = "is sharded over processes, which have no whole head; clip scores under DistributedDataParallel"
        elif part.lora is not None:
            reason = "is the base of a LoRA layer and stays frozen; merge the adapter, or train the weight itself"
        elif place in taken:
            reason = f"has the same heads as {taken[place]}, which has other scores; select one of them"
        if reason is not None:
            raise LayoutError(f"{part.name} {reason}.")
        part.require_trainable()
        taken[place] = site.label
    return scaled


def _require_scaling(site: Site) -> None:
    """Raise `LayoutError` unless the scores of a site are products that change with W_Q and W_K."""
    label = f"{site.label} ({type(site.module).__name__})"
    if site.slices[0].projection != "query" or site.kind == "pooling":
        raise LayoutError(f"{label}: its scores are no products of queries and keys; select other heads.")
    if site.divided:
        raise LayoutError(f"{label}: under tensor parallel no process holds all heads; clip scores without it.")
    if find_difference(site.module) is not None:
        raise LayoutError(f"{label}: a head of differential attention has two maps of scores; select other heads.")
    norm = _find_norm(site.module)
    if norm is not None:
        raise LayoutError(
            f"{label} normalizes its queries or keys after their projection ({norm}), which undoes any scaling of W_Q "
            "and W_K and bounds the scores by itself: there is nothing to clip. Leave out hw.clip_scores; where the "
            "norm has a weight, that sets the size of its scores."
        )


def _find_norm(module: nn.Module) -> str | None:
    """Return the name of what normalizes queries or keys after their projection, None where nothing does.

    >>> attention = nn.Module()
    >>> attention.q_a_layernorm, attention.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)
    >>> _find_norm(attention)
    'k_norm'
    """
    for name, child in module.named_children():
        words = {*re.split(r"_|(?<=[a-z])(?=[A-Z])", name.lower())}
        normalizes = any("norm" in type(part).__name__.lower() for part in child.modules())
        if normalizes and words & PROJECTED and not words & NARROW:
            return name
    called = {name for method in list_methods(type(module)) for name in method.__code__.co_names}
    return next(iter(sorted(called & NORMALIZES - {*module._modules})), None)


def _find_last(optimizers: Sequence[Optimizer], record: _Largest) -> Optimizer:
    """Return the last optimizer that holds a weight which is scaled, or its memory, as those of `head_blocks` do."""
    wanted = {part.parameter.untyped_storage().data_ptr() for view, _ in record.scaled for part in view.parts}
    for optimizer in reversed(optimizers):
        held = (parameter for options in optimizer.param_groups for parameter in options["params"])
        if not wanted.isdisjoint(own.untyped_storage().data_ptr() for own in held if not is_sharded(own)):
            return optimizer
    raise LayoutError(
        f"{record.scaled[0][0].name} is not held by "
        f"{'the optimizer' if len(optimizers) == 1 else f'any of the {len(optimizers)} optimizers'}; pass the one that "
        "updates these heads, or select other heads."
    )
