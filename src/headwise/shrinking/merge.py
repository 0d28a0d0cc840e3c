"""Key and value heads merged: multi-head attention becomes grouped or multi-query attention, with a smaller cache.

Refused are attentions whose key and value heads cannot become one. W_O may be refitted to the outputs of the attention
before its heads were merged, by least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import (
    HeadwiseError,
    LayoutError,
    SettingError,
    require_boolean,
    require_choice,
    require_integer,
    require_positive,
    require_shape,
)
from headwise.heads.experiments.replay import draw_noise
from headwise.heads.heads import LINES, PROJECTIONS, Heads, Site, align, require_heads
from headwise.heads.record import restored
from headwise.nn.hooks import without_wrappers
from headwise.shrinking.alignment import ALIGNMENTS, Alignment, Groups, group_in_order
from headwise.shrinking.cuts import (
    KEEPS_ALL,
    collect_cuts,
    count_left,
    cut_model,
    list_beside,
    list_guessed,
    list_lines,
    require_optimizer,
)
from headwise.shrinking.layerwise import OutOfStep, Passes, Resumable, Steps
from headwise.shrinking.merge_heads import (
    GROUPINGS,
    Batch,
    Freedom,
    Grouping,
    Way,
    assume_inputs,
    find_freedoms,
    join_output,
    keep_first,
    list_held,
    make_alike,
    measure_inputs,
    measure_outputs,
    remember,
    write_output,
)
from headwise.shrinking.proof import MERGED, Expected, expect, find_dummy, require_equal, run
from headwise.shrinking.prune import find_obstacle, find_table_owner
from headwise.shrinking.reload_stock import counts_groups

# What to do where nothing helps.
_LEAVE = "leave its heads as they are, and select the others (heads.where)"


def require_mergeable(heads: Heads, groups: int, *, moves: bool) -> None:
    """Raise unless the key/value heads of all sites can become `groups` ones.

    Args:
        heads: The sites.
        groups: Key/value heads of each afterwards.
        moves: Whether query heads may move to other places.

    Raises:
        SettingError: A site has no more key/value heads than that, or a number that does not divide into it.
        LayoutError: Its code takes no fewer, or something of it belongs to each key/value head.
    """
    require_integer("groups", groups, low=1)
    for site in heads:
        if groups >= site.key_value_heads:
            raise SettingError(
                f"groups is {groups}, and {site.label} has {site.key_value_heads} key/value heads; expected fewer."
            )
        reason = find_obstacle(heads, site, _LEAVE) or _find_form(site, moves=moves)
        if reason is not None:
            raise LayoutError(f"{site.label} ({type(site.module).__name__}) {reason}")
        owner = find_table_owner(heads, site) if moves else None
        if owner is not None:
            raise LayoutError(
                f"{site.label} has the position biases of {owner.label}, as have the other layers of {site.stack}, so "
                'its query heads must stay where they are; use grouping="order".'
            )
        group_in_order(site.key_value_heads, groups)
        _require_own(heads.model, site)


def require_unread(heads: Heads, batch: Batch) -> None:
    """Raise `LayoutError` if another attention reads the keys or values of the sites."""
    if not _are_read(heads.model, heads.sites, batch):
        return
    read = [site.label for site in heads if _are_read(heads.model, [site], batch)]
    others = "; select the other attentions (heads.where), or" if 0 < len(read) < len(heads) else ";"
    raise LayoutError(
        f"the keys and values of {', '.join(read[:6]) or 'these attentions'} are read by other attentions of the "
        f"{type(heads.model).__name__} too, whose queries would meet other heads{others} remove heads with hw.prune."
    )


@torch.no_grad()
def _are_read(model: nn.Module, sites: Sequence[Site], batch: Batch) -> bool:
    """Whether keys and values of sites change the outputs of a model while W_O of these sites is zero."""
    held = [part.parameter.data for site in sites for view in site.slices[1:] for part in view.parts]
    outputs = [site.output.parameter.data for site in sites if site.output is not None]
    with restored(outputs, 0.0):
        before = run(model, batch)
        with restored(held):
            for data in held:
                data.copy_(draw_noise(data) * data.std())
            after = run(model, batch)
    # the weights of attentions and cached keys are among what a model may return
    counts = {count for site in sites for count in (site.num_heads, site.key_value_heads)}
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0].dim() != 4 or pair[0].shape[1] not in counts]
    return not all(torch.equal(first, second) for first, second in pairs)


def _find_form(site: Site, *, moves: bool) -> str | None:
    """Return why the key/value heads of an attention cannot be merged, and what to do."""
    if site.borrows:
        return f"computes with the keys and values of another layer and holds none to merge; {_LEAVE}."
    if len(site.slices) != len(PROJECTIONS):
        return f"holds no values beside its keys, so that the two cannot be aligned apart; {_LEAVE}."
    if not (counts_groups(site) or type(site.module).__module__.startswith("transformers.")):
        return (
            "has a key/value head for each query head, and its code takes no fewer; merging is for attentions with "
            f"grouped queries, such as those of Llama, Mistral, Qwen and Gemma; {_LEAVE}, or call hw.prune."
        )
    if site.tiled:
        return (
            "gives query head h the keys and values of head h mod G, so that merged heads would be other heads'; "
            f"{_LEAVE}."
        )
    query, key, value = site.slices
    if query.head_size != key.head_size or any(part.module is None for part in site.parts):
        return f"makes queries and keys in several parts (latent attention), of which only some are heads; {_LEAVE}."
    if value.head_size != site.head_size:
        return f"has values of {value.head_size} features and gives W_O {site.head_size} of each head; {_LEAVE}."
    unknown = list_guessed(site) if moves else []
    if unknown:
        return (
            f"has {unknown[0][0]}, which may hold something of each query head, so that they must stay where they are; "
            'use grouping="order".'
        )
    own = next((name for name, _, _, units in list_beside(site, proved=True) if units == "key"), None)
    if own is None:
        return None
    return f"has {own} with a separate part for each key/value head, so the heads cannot be merged; {_LEAVE}."


def _require_own(model: nn.Module, site: Site) -> None:
    """Raise `LayoutError` if another part of the model, found or left out, has a weight that is written."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(_locate(parameter), []).append(name)
    own = [name for name, module in model.named_modules(remove_duplicate=False) if module is site.module]
    for name, parameter in _list_written(site):
        held = names.get(_locate(parameter), [])
        outside = [other for other in held if not any(other.startswith(f"{place}.".lstrip(".")) for place in own)]
        # W_O may be beside the attention
        if len(outside) > (len(own) if len(outside) == len(held) else 0):
            other = next((other for other in outside if other != name), outside[0])
            raise LayoutError(
                f"{name if name in held else held[0]} is {other} too, and what merges heads in one is not right in the "
                f"other; {_LEAVE}."
            )


def _locate(parameter: Tensor) -> int:
    # two parameters may have the same numbers
    return id(parameter) if parameter.is_meta or not parameter.numel() else parameter.data_ptr()


def _list_written(site: Site) -> list[tuple[str, Tensor]]:
    """Return the parameters of a site that merging writes, by name."""
    parts = [part for part in (*site.parts, site.output) if part is not None and part.obstacle is None]
    written = [(part.name, one) for part in parts for one in list_held(part)]
    return written + [(f"{site.label}.{name}", one) for name, one, _, _ in list_beside(site, proved=True)]


# Of the mean square of the features: what they hardly determine stays as it was.
RIDGE = 1e-4


def refit_output(moments: Tensor, products: Tensor, weight: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return W that gives the wanted outputs y from new features x: sum |x W^T - y|^2 + lambda |W - W_0|_F^2 is least.

    W = W_0 + (y^T x - W_0 x^T x) (x^T x + lambda 1)^-1, with lambda = ridge tr(x^T x) / F. Ridge regression (Hoerl and
    Kennard 1970) toward the given weight and not toward 0: where few tokens say nothing, W stays as it was.

    Args:
        moments: x^T x, summed over tokens, [F, F].
        products: x^T y, [F, d]; y without the bias of W_O.
        weight: W_0, [d, F].
        ridge: At least 0, exclusive.

    Returns:
        W, [d, F], in the precision of `moments`.

    Raises:
        HeadwiseError: The features are 0 or not finite.

    Example:
        >>> x, wanted = torch.randn(50, 3).double(), torch.randn(2, 3).double()
        >>> found = refit_output(x.T @ x, x.T @ x @ wanted.T, torch.zeros(2, 3), 1e-12)
        >>> bool((found - wanted).abs().max() < 1e-8)
        True
    """
    require_positive("ridge", ridge)
    features = weight.shape[-1]
    require_shape("moments", moments, (features, features))
    require_shape("products", products, (features, weight.shape[0]))
    size = float(moments.diagonal().mean())
    if not 0 < size < float("inf"):
        raise HeadwiseError(
            f"W_O cannot be refitted: the mean square of its inputs is {size:g}; expected finite features that are not "
            "all 0. Look at what the calibration runs the model on."
        )
    start = weight.to(moments)
    wanted = products - moments @ start.mT
    damped = moments + ridge * size * torch.eye(features, dtype=moments.dtype, device=moments.device)
    return start + torch.cholesky_solve(wanted, torch.linalg.cholesky(damped)).mT


@dataclass(frozen=True)
class MergeStep:
    """One way of merging that was tried.

    Attributes:
        way: The way, in words.
        score: The result of `score`; None without one.
        error: Mean over attentions of |y - y0|^2 / |y0|^2 on the calibration batches, for outputs of W_O with the heads
            merged and before; None without batches.
    """

    way: str
    score: float | None
    error: float | None


@dataclass(frozen=True)
class Merging:
    """What `merge` did.

    Attributes:
        groups: For each attention, by its name, the key/value heads that became one; numbers from before.
        heads: Query heads and key/value heads that each of these attentions has now.
        free: What was found to be free in the keys and values of each, and was used to align them.
        steps: The ways that were tried, from averaging as it is to what was done; the whole model first.
        parameters: The number of parameters of the model before and after.
        cache: Bytes that the keys and values of one token take in the model's cache, before and after; of all
            attentions, and where each keeps all tokens.
        stock: Why transformers alone cannot load the model, so that it is saved for `hw.load`; None where it can.
        loading: The code that loads the model from the folder that its `save_pretrained` wrote; None for a model that
            is not of transformers.
        model: The model.
    """

    groups: dict[str, Groups]
    heads: dict[str, tuple[int, int]]
    free: dict[str, str]
    steps: tuple[MergeStep, ...]
    parameters: tuple[int, int]
    cache: tuple[int, int]
    stock: str | None
    loading: str | None
    model: nn.Module = field(repr=False)

    def __str__(self) -> str:
        rows = [
            f"  {name}: {' + '.join('(' + ', '.join(map(str, group)) + ')' for group in groups)}; {self.free[name]}"
            for name, groups in self.groups.items()
        ]
        before, after = self.parameters
        title = (
            f"key/value heads of {len(self.groups)} attentions merged; {after:,} of {before:,} parameters left, "
            f"{self.cache[1]:,} of {self.cache[0]:,} bytes of cache per token"
        )
        # the way to load it comes after the steps
        lines = list_lines(title, rows, LINES - 4 - len(self.steps), None, None)
        return "\n".join([*lines, *self._list_steps(), *list_lines("", [], 1, self.stock, self.loading)[1:]])

    def _list_steps(self) -> list[str]:
        scored = any(step.score is not None for step in self.steps)
        if not scored and not any(step.error is not None for step in self.steps):
            return []
        whole = self.steps[0].score
        table = [("way", *(("score", "lost") if scored else ()), "error of outputs")]
        for step in self.steps:
            lost = "" if whole is None or step.score is None else f"{whole - step.score:+.4f}"
            score = (f"{step.score:.4f}", lost) if step.score is not None else ()
            table.append((step.way, *score, "" if step.error is None else f"{step.error:.4f}"))
        return align(table)


def merge(
    heads: Heads,
    groups: int,
    *,
    batches: Iterable[Batch] | None = None,
    alignment: Alignment = "low_rank",
    grouping: Grouping = "similarity",
    refit: bool = True,
    score: Callable[[], float | Tensor] | None = None,
    optimizer: Any = None,
) -> Merging:
    """Merge the key/value heads of attentions into fewer ones, in place, so that several query heads share one.

    Multi-head attention becomes grouped-query attention (Ainslie et al. 2023), or multi-query attention with one group;
    grouped queries become fewer groups. The cache of keys and values then takes g / G of its bytes. Ainslie et al.
    average heads as they are. Here they are aligned first, by what leaves the model as it is:

    - values v -> v A with W_O -> W_O A^-T, for any invertible A;
    - keys k -> k B with queries q -> q B^-T. Without positions in the keys B is any invertible matrix; with rotary
      ones, one complex number for each pair of features; with a norm of queries and keys, one sign or angle a pair.

    Experiments on one call find how much is free in each attention, as in `hw.verify`; the result says it. One head
    u = sum_i y_i F_i then takes the place of the heads y_i of a group, and what read y_i reads u G_i^T. With
    alignment "low_rank" F and G are those of least squared error over all choices (for keys within what is free: one
    complex number per pair), weighted by what reads each head; "orthogonal" averages heads after rotations (generalized
    Procrustes analysis); "none" averages as they are. Where the model hands the cosines and sines of its positions to
    each layer (Llama and its kin), "low_rank" goes on from there: keys and queries are fitted by turns to the scores at
    the distances in the first batch, at which slow pairs hardly turn and may be mixed. Then W_O is fitted to what the
    attention gave before, by ridge regression toward the given W_O, layer by layer, each with the layers below it
    merged. That takes as many forward passes in a deep model as in a shallow one: each layer goes on from where those
    below it ended. Where a pass calls an attention several times, or cannot be gone on with, the whole model runs twice
    for each attention.

    Where the configuration of a transformers model can say it (Llama, Mistral, Qwen, Gemma, Phi-3 and others, all
    layers merged), `save_pretrained` and `from_pretrained` work without headwise; otherwise the folder is for
    `hw.load`. BERT and its kin run merged under attn_implementation="sdpa", and raise under "eager".

    Query heads move where groups are not of neighbors. Find heads again afterwards. Refused are attentions whose code
    takes no fewer key/value heads than query heads, latent attention, norms over all heads or of each one, positions
    that depend on the number of a head, tied weights, keys and values that other layers read, and layers with adapters,
    aggregators or shards.

    Args:
        heads: The sites, from `find_heads`.
        groups: Key/value heads g of each attention afterwards; a divisor of what each has now.
        batches: Calibration inputs of the model, each a tensor, a tuple of positional arguments or a mapping of names:
            some thousand tokens, text of the kind the model is used on. None takes inputs for white noise and fits no
            W_O; it is for models of transformers, as others need a call for the experiments.
        alignment: "low_rank", "orthogonal" or "none".
        grouping: "similarity" puts heads together that one head can replace best; "order" puts neighbors together.
        refit: Whether W_O is fitted anew; needs `batches`.
        score: Runs the model on the user's data and returns its score, the larger the better; called for the whole
            model and for each way of merging that leads to the one wanted: averaging as it is, with and without a
            refit, aligning, grouping. None tries no other way.
        optimizer: The optimizer that trains the model. The state of parameters that are rewritten begins anew.

    Returns:
        What was merged, with the cost of each step.

    Raises:
        SettingError: `groups` is no smaller divisor, a setting is unknown, batches are needed and there are none, or
            the optimizer trains something else or keeps one state for all parameters.
        LayoutError: Heads cannot be merged there. The model is then as it was.

    Example:
        >>> import headwise as hw
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=4, **sizes)).eval()
        >>> merging = hw.merge(hw.find_heads(model), 2, batches=[torch.randint(61, (4, 16)) for _ in range(3)])
        >>> merging.cache, merging.heads["model.layers.0.self_attn"], model.config.num_key_value_heads
        ((512, 256), (4, 2), 2)
    """
    require_heads(heads)
    require_optimizer(optimizer, heads.model)
    require_choice("alignment", alignment, ALIGNMENTS)
    require_choice("grouping", grouping, GROUPINGS)
    require_boolean("refit", refit)
    require_mergeable(heads, groups, moves=grouping != "order")
    calibration = None if batches is None else [_settle(batch) for batch in batches]
    if calibration == []:
        raise SettingError("batches is empty; expected calibration inputs of the model, or None.")
    way = Way(alignment, grouping, refit and calibration is not None)
    rewritten = [one for site in heads for _, one in _list_written(site)]
    with without_wrappers(heads.model), torch.no_grad(), heads.exposed(), ExitStack() as undo:
        merging = _merge(heads, groups, way, calibration, score, undo)
        undo.pop_all()
    for parameter in rewritten:
        # gradients and states are of the heads before
        parameter.grad = None
        if optimizer is not None:
            optimizer.state.pop(parameter, None)
    return merging


def _merge(
    heads: Heads,
    groups: int,
    way: Way,
    batches: list[Batch] | None,
    score: Callable[[], float | Tensor] | None,
    undo: ExitStack,
) -> Merging:
    sites = list(heads)
    dummy = find_dummy(heads.model)
    shown = dummy if batches is None else batches[0]
    if shown is None:
        raise SettingError(
            f"merging calls a {type(heads.model).__name__} to find how its heads may be turned, and no inputs are "
            "known for its class; pass batches=[...], inputs of the model."
        )
    freedoms = _find_freedoms(sites, dummy, shown)
    require_unread(heads, shown)
    lost = {site: keep_first(site, groups) for site in sites}
    cuts = collect_cuts(heads, lost, proved=True)
    restore = remember(sites)
    undo.callback(restore)
    steps = [MergeStep("whole model", None if score is None else float(score()), None if batches is None else 0.0)]
    chosen: dict[Site, Groups] = {}
    for one in ([] if score is None else _list_ways(way)) + [way]:
        restore()
        chosen, error = _write(heads, groups, one, freedoms, batches, restore)
        steps.append(MergeStep(str(one), None if score is None else float(score()), error))
    expected = expect(heads.model, shown)
    counts = {site: count_left(site, lost.get(site, KEEPS_ALL))[:2] for site in heads.found}
    sizes = {site: _count_bytes(site) for site in heads.found}
    before = sum(size * site.key_value_heads for site, size in sizes.items())
    after = sum(size * counts[site][1] for site, size in sizes.items())
    parameters, stock, loading = cut_model(heads, cuts, lost, None, lambda: _require_merged(heads.model, expected))
    return Merging(
        {site.name: found for site, found in chosen.items()},
        {site.name: counts[site] for site in sites},
        {site.name: str(freedoms[site]) for site in sites},
        tuple(steps),
        parameters,
        (before, after),
        stock,
        loading,
        heads.model,
    )


def _find_freedoms(sites: Sequence[Site], dummy: Batch | None, shown: Batch) -> dict[Site, Freedom]:
    """Return the freedom of each site, from a few tokens where these reach all sites."""
    if dummy is not None:
        try:
            return find_freedoms(sites, dummy)
        except HeadwiseError:
            # what is wrong with the model is told of the given batch
            pass
    return find_freedoms(sites, shown)


def _write(
    heads: Heads,
    groups: int,
    way: Way,
    freedoms: Mapping[Site, Freedom],
    batches: list[Batch] | None,
    restore: Callable[[], None],
) -> tuple[dict[Site, Groups], float | None]:
    """Make the heads of each group alike, site by site, and return the groups and the mean error of outputs."""
    if batches is None:
        return {site: make_alike(site, groups, way, freedoms[site], assume_inputs(site)) for site in heads}, None
    try:
        with Resumable(heads.model) as forwards:
            return _calibrate(Steps(heads, batches, forwards), groups, way, freedoms)
    except (OutOfStep, HeadwiseError):
        # what is wrong with the model or the batches themselves is raised here
        restore()
        return _calibrate(Passes(heads, batches), groups, way, freedoms)


def _calibrate(
    course: Steps | Passes, groups: int, way: Way, freedoms: Mapping[Site, Freedom]
) -> tuple[dict[Site, Groups], float]:
    chosen: dict[Site, Groups] = {}
    errors = []
    for site, wanted in course:
        chosen[site] = make_alike(site, groups, way, freedoms[site], measure_inputs(site, course.walk))
        fit = measure_outputs(replace(course.heads, sites=(site,)), wanted, course.walk)
        weight = join_output(site)
        if way.refit:
            weight = refit_output(fit.moments, fit.products, weight)
            write_output(site, weight.unflatten(1, (site.num_heads, -1)).movedim(0, 1))
        errors.append(fit.measure_error(weight))
    return {site: chosen[site] for site in course.heads}, sum(errors) / len(errors)


def _list_ways(way: Way) -> list[Way]:
    """Return the ways that lead to one: each step by itself, and the refit after plain averaging."""
    ways = [Way("none", "order", False)]
    if way.refit:
        ways.append(Way("none", "order", True))
    ways += [Way(one, "order", False) for one in ALIGNMENTS[1 : ALIGNMENTS.index(way.alignment) + 1]]
    if way.grouping == "similarity":
        ways.append(Way(way.alignment, "similarity", False))
    return [one for one in dict.fromkeys(ways) if one != way]


def _settle(batch: Batch) -> Batch:
    """Return a batch as positional or named arguments."""
    if isinstance(batch, Tensor):
        return (batch,)
    if isinstance(batch, Mapping | Sequence) and not isinstance(batch, str):
        return batch
    raise SettingError(
        f"a batch is a {type(batch).__name__}; expected a tensor, a tuple of positional arguments, or a mapping of "
        "arguments by name."
    )


def _require_merged(model: nn.Module, expected: Expected) -> None:
    """Raise `LayoutError` unless a model computes with merged heads what it should; name what helps, where it does."""
    try:
        require_equal(model, expected, MERGED)
    except LayoutError:
        if not _works_under_sdpa(model, expected):
            raise
        helps = f"{MERGED.remedy}, or load a model of transformers with attn_implementation='sdpa'"
        require_equal(model, expected, replace(MERGED, remedy=helps))


def _works_under_sdpa(model: Any, expected: Expected) -> bool:
    named = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if named == "sdpa" or not hasattr(model, "set_attn_implementation"):
        return False
    try:
        model.set_attn_implementation("sdpa")
        require_equal(model, expected, MERGED)
    except Exception:
        # a class that has no such implementation may raise anything
        return False
    finally:
        model.set_attn_implementation(named)
    return True


def _count_bytes(site: Site) -> int:
    """Return the bytes of one key and value."""
    sizes = sum(head_slice.head_size for head_slice in site.slices if head_slice.projection in ("key", "value"))
    return sizes * site.slices[-1].parts[0].parameter.element_size()
