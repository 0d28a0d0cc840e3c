"""Heads removed from the weights of a model, which is then smaller and faster.

Refused are attentions in which removing heads would not be ablating them. Where a share of the heads stays, the same
number is removed from every attention, the least important first.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, LayoutError, SettingError, ShapeError, require_integer, require_range
from headwise.heads.ablation import Importance
from headwise.heads.heads import LINES, Heads, Site, list_sharing, require_heads
from headwise.nn.hooks import without_wrappers
from headwise.nn.multihead import MultiheadAttention
from headwise.routing.modules import Aggregator
from headwise.shrinking.cuts import (
    collect_cuts,
    count_left,
    cut_model,
    cut_neurons,
    list_gone,
    list_guessed,
    list_lines,
    require_optimizer,
)
from headwise.shrinking.neurons import Mlp, zeroed
from headwise.shrinking.proof import PRUNED, SHRUNK, expect_ablated, require_equal
from headwise.shrinking.reload_stock import mentions

# A bias for each distance and head, which the layers of a stack may share.
_TABLE = re.compile(r"(?:^|\.)(?:relative_attention_bias|rel_attn_embed)\.weight$")
# What tells such a layer whether it holds the table.
_HELD = "has_relative_attention_bias"
# A value of each head that comes from outside of the attention.
_GIVEN = {"alibi": "ALiBi slopes", "value_embeds": "value embeddings"}

RemovedHeads = Mapping[Site, Sequence[int]]


def _require_prunable(heads: Heads, site: Site, removed: RemovedHeads) -> None:
    gone = removed[site]
    if len(gone) == site.num_heads:
        raise SettingError(f"{site.label} would lose all its {site.num_heads} heads; expected at least one that stays.")
    reason = (
        find_obstacle(heads, site, "use hw.ablate")
        or _find_parts(site, gone)
        or _find_shared_table(heads, site, removed)
        or _find_shared_keys(heads, site, removed)
    )
    if reason is not None:
        raise LayoutError(f"{site.label} ({type(site.module).__name__}) {reason}")


def find_obstacle(heads: Heads, site: Site, otherwise: str) -> str | None:
    """Return why the heads of a site cannot be taken apart, and what to do: `otherwise` where nothing helps."""
    obstacles = chain(_list_wrappings(heads, site), _list_forms(heads, site))
    reason, remedy = next(obstacles, (None, None))
    return None if reason is None else f"{reason}; {remedy or otherwise}."


# What is in the way, and the remedy; None where nothing helps.
Obstacle = tuple[str, str | None]


def _list_wrappings(heads: Heads, site: Site) -> Iterator[Obstacle]:
    if heads.replicated:
        yield (
            "is wrapped by DistributedDataParallel, which holds the parameters as they were",
            "take the model out of it (.module), find heads there, and wrap it again afterwards",
        )
    if site.divided:
        yield "is divided by tensor parallelism", "do it before the model is divided"
    for part in (*site.parts, site.output):
        if part is not None and part.lora is not None:
            yield "has LoRA adapters", "merge them into the weight first (merge_and_unload), and find heads again"
        # a DTensor
        if part is not None and part.obstacle is None and hasattr(part.parameter, "device_mesh"):
            yield "is sharded over processes", "do it before the model is sharded"


def _list_forms(heads: Heads, site: Site) -> Iterator[Obstacle]:
    module, children = site.module, site.module._modules
    if mentions(module, "multi_head_attention_forward") and not isinstance(module, nn.MultiheadAttention):
        yield "hands its weights to torch's function, which takes as many heads as its width holds", None
    for added in ("head_gates", "head_mixer"):
        if added in children:
            remedy = "remove them (remove() of their handle) first, and attach new ones afterwards"
            yield f"has {added}, made for all heads", remedy
    if "head_difference" in children and not isinstance(module, MultiheadAttention):
        yield "has head_difference, which no folder that transformers or hw.load reads can hold", None
    if any(view.stacked for view in site.slices):
        yield (
            "keeps its heads in a list of modules",
            "delete them there, and their columns of the output projection, and find heads again",
        )
    if site.output is None:
        yield _explain_output(None if site.output_projection is None else site.output_projection.module)
    for given in _list_given(heads, site):
        yield f"is given {given} of each head that are computed elsewhere, for all of them", None


def _explain_output(output: nn.Module | None) -> Obstacle:
    """Return why the columns of an output projection cannot be removed, and the remedy."""
    if output is None:
        return "has no output projection that was found", "name it in a layout row of your own (output=...)"
    name = type(output).__name__
    if any(isinstance(part, Aggregator) for part in output.modules()):
        return (
            f"has {name} as its output, built for all heads",
            "remove it (remove() of its handle) first, and call hw.aggregate afterwards",
        )
    if not list(output.children()):
        alone = "which takes all of them together, so the others change when one is removed"
        return f"passes its heads through a {name} before W_O, {alone}", None
    return "has no linear output projection that was found, so its columns cannot be removed", None


def _list_given(heads: Heads, site: Site) -> Iterator[str]:
    """Yield the numbers of each head that are computed outside of the attentions and given to this one."""
    arguments = inspect.signature(type(site.module).forward).parameters
    config = getattr(site.module, "config", None)
    for name, given in _GIVEN.items():
        if name in arguments and getattr(config, name, True) is not False:
            yield given
    # T5 holds tables itself, and its cross-attention needs no table
    if "position_bias" in arguments and not hasattr(site.module, _HELD) and not _list_tables(_list_alike(heads, site)):
        yield "position biases"
    read = {id(parameter) for other in heads.found for parameter in other.module.parameters()}
    for name, table in heads.model.named_parameters():
        if _TABLE.search(name) and id(table) not in read:
            yield f"the position biases {name}"


def _find_parts(site: Site, gone: Sequence[int]) -> str | None:
    """Return why other numbers of heads must go: they lie in runs, of which some would keep more than others."""
    if not all(view.pieces for view in site.slices):
        return None
    run = site.slices[0].parts[0].heads
    left = [run - sum(head // run == part for head in gone) for part in range(site.num_heads // run)]
    if len({*left}) == 1:
        return None
    return (
        f"holds its heads in {len(left)} parts of {run}, and removing heads {', '.join(map(str, gone))} would leave "
        f"{', '.join(map(str, left))} in them; remove equally many of each."
    )


def _find_shared_table(heads: Heads, site: Site, removed: RemovedHeads) -> str | None:
    """Return why the other layers of a stack must lose the same heads: they get their position biases of one table."""
    owner, alike = find_table_owner(heads, site), _list_alike(heads, site)
    if owner is None or len({tuple(removed.get(other, ())) for other in alike}) == 1:
        return None
    return (
        f"has the position biases of {owner.label}, as have the other layers of {site.stack}, so all of "
        f"them must lose the same heads: {{{', '.join(f'{other.name!r}: [...]' for other in alike[:2])}, ...}}."
    )


def _find_shared_keys(heads: Heads, site: Site, removed: RemovedHeads) -> str | None:
    """Return why other layers must lose the same groups: they compute with the same keys and values."""
    alike = list_sharing(heads.found, site)
    gone = {other: list_gone(other, removed.get(other, ()))["key"] for other in alike}
    if len({*gone.values()}) == 1:
        return None
    shown = "; ".join(f"{other.label} group {', '.join(map(str, groups)) or 'none'}" for other, groups in gone.items())
    return (
        f"computes with the same keys and values as {', '.join(other.label for other in alike if other is not site)}, "
        f"and the key/value heads that would go are not the same ({shown}); remove all query heads of the same groups "
        f"from each of them (group g has heads g * {site.num_heads // site.key_value_heads} and on)."
    )


def find_table_owner(heads: Heads, site: Site) -> Site | None:
    """Return the site that holds the position biases of this one and other layers; None if they are not shared."""
    alike = _list_alike(heads, site)
    owners = _list_tables(alike)
    return (owners or alike)[0] if hasattr(site.module, _HELD) and len(owners) < len(alike) else None


def _list_alike(heads: Heads, site: Site) -> list[Site]:
    return [other for other in heads.found if (other.stack, other.kind) == (site.stack, site.kind)]


def _list_tables(sites: Sequence[Site]) -> list[Site]:
    """Return the sites that hold a table of position biases."""
    return [site for site in sites if any(_TABLE.search(name) for name, _ in site.module.named_parameters())]


def choose_heads(heads: Heads, keep: float, importance: Importance | Mapping[str, Any] | None) -> dict[str, list[int]]:
    """Return the query heads that each attention loses when a share of its heads stays.

    Attentions of one size keep equally many heads, round(keep H) and at least one, so that a configuration can say it.
    Where queries are grouped whole groups go, by the sum of their importances, and round(keep G) stay; of multi-query
    attention single query heads go. Layers that share a table of position biases lose the same heads, and those that
    compute with the same keys and values the same groups.

    Args:
        heads: The sites.
        keep: The share that stays, above 0.
        importance: What `hw.importance` returned, or a number for each head, by the name of the attention; the larger,
            the longer it stays.

    Raises:
        SettingError: `keep` is no such share, or no importance was given for an attention.
        ShapeError: There is not one number for each head.
        HeadwiseError: A number is not finite.
    """
    require_range("keep", keep, low=0.0, high=1.0, low_open=True)
    if importance is None:
        raise SettingError(
            "keep needs importance=..., what each head is worth: hw.importance(heads, score), or {name: numbers}."
        )
    # of each head, or of each group where there are several
    grouped = {site: 1 < site.key_value_heads < site.num_heads for site in heads}
    worth = {site: _read(site, importance) for site in heads}
    worth = {site: site.group_queries(one).sum(1) if grouped[site] else one for site, one in worth.items()}
    chosen = {}
    for site in heads:
        owner = find_table_owner(heads, site)
        alike = [other for other in heads if owner is not None and find_table_owner(heads, other) is owner]
        if site.key_value_heads > 1:
            alike += [other for other in list_sharing(heads.sites, site) if other not in alike]
        total = torch.cat([worth[other][None] for other in alike or [site]]).sum(0)
        # of equal ones the first stays
        gone = total.argsort(descending=True, stable=True)[max(1, round(keep * len(total))) :].tolist()
        members = (site.list_members(one) if grouped[site] else (one,) for one in gone)
        chosen[site.name] = sorted(head for unit in members for head in unit)
    return {name: gone for name, gone in chosen.items() if gone}


def _read(site: Site, importance: Importance | Mapping[str, Any]) -> Tensor:
    """Return the importance of each head of a site, checked."""
    held: Any = importance.drops if isinstance(importance, Importance) else importance
    name = site.shown
    if not isinstance(held, Mapping) or not {site, site.name, name} & {*held}:
        raise SettingError(f"importance has no entry {name!r}; expected one number for each head of each attention.")
    given = next(held[key] for key in (site, site.name, name) if key in held)
    if isinstance(given, list | tuple):
        # the drops of a report have intervals
        given = [getattr(one, "value", one) for one in given]
    try:
        numbers = torch.as_tensor(given, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise SettingError(
            f"importance of {name} is {given!r:.80}; expected {site.num_heads} numbers, one for each head."
        ) from None
    if numbers.shape != (site.num_heads,):
        raise ShapeError(f"importance of {name} has shape {tuple(numbers.shape)}; expected ({site.num_heads},).")
    if not bool(numbers.isfinite().all()):
        raise HeadwiseError(f"importance of {name} holds NaN or infinity; expected finite numbers.")
    return numbers


Removed = (
    Mapping[int, Iterable[int]]
    | Mapping[str, Iterable[int]]
    | Mapping[Site, Iterable[int]]
    | Mapping[int | str | Site, Iterable[int]]
)


@dataclass(frozen=True)
class Pruning:
    """What `prune` did.

    Attributes:
        removed: The query heads that each attention lost, by its name; numbers from before.
        heads: Query heads that each of these attentions has now.
        parameters: The number of parameters of the model before and after.
        stock: Why transformers alone cannot load the model, so that it is saved for `hw.load`; None where it can, and
            for a model that is not of transformers.
        loading: The code that loads the model from the folder that its `save_pretrained` wrote; None for a model that
            is not of transformers.
        model: The model.
        neurons: Hidden neurons that each MLP has now, where `hw.shrink` removed some.
    """

    removed: dict[str, tuple[int, ...]]
    heads: dict[str, int]
    parameters: tuple[int, int]
    stock: str | None
    loading: str | None
    model: nn.Module = field(repr=False)
    neurons: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [
            f"  {name or '(model)'}: heads {', '.join(map(str, gone))} removed, {self.heads[name]} left"
            for name, gone in self.removed.items()
        ]
        rows += [f"  {name or '(model)'}: {left} neurons left" for name, left in self.neurons.items()]
        before, after = self.parameters
        total = sum(map(len, self.removed.values()))
        title = f"{total} heads removed from {len(self.removed)} attentions; {after:,} of {before:,} parameters left"
        return "\n".join(list_lines(title, rows, LINES - 2, self.stock, self.loading))


def prune(
    heads: Heads,
    removed: Removed | None = None,
    *,
    keep: float | None = None,
    importance: Importance | Mapping[str, Any] | None = None,
    inputs: Sequence[Any] | Mapping[str, object] | None = None,
    optimizer: Any = None,
) -> Pruning:
    """Remove heads from the weights of a model, in place.

    The model then computes what it computes with these heads ablated (`hw.ablate`), up to rounding: the rows of their
    queries, keys and values, the columns of W_O, and what else is theirs (biases, norms, position tables, sinks) are
    gone. The bias of W_O stays. With grouped queries a key/value head goes with the last of its query heads; groups
    that stay must stay equally large. A tied, shared or fused parameter is cut once. Parameters stay the same objects.

    Where the configuration of a transformers model can say it, it does: `save_pretrained` and `from_pretrained` work
    without headwise. That is so for Llama, Mistral, Qwen, Gemma and T5, where all layers keep equally many heads.
    Otherwise `save_pretrained` writes a folder for `hw.load`, which transformers refuses.

    Find heads again afterwards: sites and handles from before are of the model as it was. Refused, as removing is not
    ablating there: norms over all heads together (Olmo 2), positions that depend on the number of a head (ALiBi), heads
    that share a position table with layers that keep others (T5), groups whose keys and values other layers read that
    keep them (Gemma 4), and layers with adapters, aggregators or shards.

    Args:
        heads: The sites, from `find_heads`.
        removed: The heads to remove, counted from 0, by the layer (an integer), the name of the attention (which
            `hw.importance` and a report have too) or its site.
        keep: Instead of `removed`: the share of heads that each attention keeps, above 0 and below 1; round(keep H), at
            least one, and whole groups where queries are grouped. Those that matter least go.
        importance: With `keep`, what `hw.importance` returned, or one number for each head by the name of the
            attention; the larger, the longer it stays.
        inputs: Inputs of the model, as in `hw.verify`. The result is compared with ablation on them, and the model is
            put back where they differ. A comparison is needed where only a call shows whether removing is ablating:
            attentions that are the user's own or of a family that is not tested, models of which attentions were left
            out, and layers that share weights. None takes the inputs that a class of transformers gives, where they do.
        optimizer: The optimizer that trains the model, whose state is cut too, so that training goes on.

    Returns:
        What was removed.

    Raises:
        SettingError: A layer or head does not exist, an attention would lose all its heads, neither or both of
            `removed` and `keep` were given, `inputs` are needed, or the optimizer trains something else or keeps a
            state that cannot be cut.
        HeadwiseError: The model cannot be run on the inputs, or computes NaN.
        NotFired: A call did not reach a site.
        LayoutError: Heads cannot be removed there. The model is then as it was.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 16, batch_first=True), 2).eval()
        >>> print(hw.prune(hw.find_heads(model), {0: [1, 2]}))
        2 heads removed from 1 attentions; 1,060 of 1,200 parameters left
          layers.0.self_attn: heads 1, 2 removed, 2 left
        >>> [site.num_heads for site in hw.find_heads(model)]
        [2, 4]
        >>> import torch
        >>> x = torch.randn(3, 5, 8)
        >>> worth = hw.importance(hw.find_heads(model), lambda: model(x).std((1, 2)), method="first_order")
        >>> list(hw.prune(hw.find_heads(model), keep=0.5, importance=worth).heads.values())
        [1, 2]
    """
    require_heads(heads)
    require_optimizer(optimizer, heads.model)
    if inputs is not None and (not isinstance(inputs, Sequence | Mapping) or isinstance(inputs, str)):
        raise SettingError(
            f"inputs is a {type(inputs).__name__}; expected what the model is called with: a sequence of positional "
            "arguments, (x,), or a mapping of names."
        )
    if (removed is None) is (keep is None) or (keep is None and importance is not None):
        raise SettingError("expected either the heads to remove, or keep=... with importance=...")
    if keep is not None:
        removed = {**choose_heads(heads, keep, importance)}
        if not removed:
            raise SettingError(f"keep is {keep:g}, and no attention would lose a head; expected a smaller share.")
    with without_wrappers(heads.model), ExitStack() as exposed:
        return remove(heads, _read_removed(heads, removed), inputs, optimizer, exposed)


def remove(
    heads: Heads,
    removed: Mapping[Site, tuple[int, ...]],
    inputs: Any,
    optimizer: Any,
    exposed: ExitStack,
    *,
    neurons: Mapping[Mlp, Sequence[int]] | None = None,
    undone_by: ExitStack | None = None,
) -> Pruning:
    """Remove heads, and hidden neurons of MLPs, from a model, for good or until `undone_by` is closed.

    Errors as of `prune`; `neurons` need `inputs`, on which the result is compared.
    """
    for site in removed:
        _require_prunable(heads, site, removed)
    for site in removed:
        if site.output_projection is not None:
            # a stock attention of torch is swapped for ours, which takes fewer heads than its width holds; it stays so
            site.make_visible(exposed.callback)
    lost = {site: list_gone(site, gone) for site, gone in removed.items()}
    neurons = neurons or {}
    if undone_by is not None:
        # of a model that is put back, another call has the proof
        expected = None
    elif neurons:
        with zeroed({}, neurons):
            expected = expect_ablated(heads, removed, inputs)
    else:
        expected = expect_ablated(heads, removed, inputs)
    kind = SHRUNK if neurons else PRUNED
    prove = (lambda: None) if expected is None else partial(require_equal, heads.model, expected, kind)
    proved = expected is not None or undone_by is not None

    def cut(*, guess: bool) -> tuple[tuple[int, int], str | None, str | None]:
        cuts = collect_cuts(heads, lost, proved=proved, guess=guess) + cut_neurons(neurons)
        return cut_model(heads, cuts, lost, optimizer, prove, neurons=neurons, undone_by=undone_by)

    if not proved or not any(list_guessed(site) for site in removed):
        changed = cut(guess=False)
    else:
        try:
            changed = cut(guess=True)
        except LayoutError as error:
            try:
                # what has the sizes of heads need not be theirs
                changed = cut(guess=False)
            except LayoutError:
                raise error from None
    names = {site.name: gone for site, gone in removed.items()}
    left = {site.name: count_left(site, lost[site])[0] for site in removed}
    hidden = {mlp.name: mlp.neurons - len(gone) for mlp, gone in neurons.items()}
    return Pruning(names, left, *changed, heads.model, hidden)


def _read_removed(heads: Heads, removed: Any) -> dict[Site, tuple[int, ...]]:
    """Return the heads that each site loses, sorted, without sites that lose none.

    Raises:
        SettingError: It is no mapping, or a layer or a head does not exist.
        LayoutError: No attention has that name, or a layer has several.
    """
    if not isinstance(removed, Mapping):
        raise SettingError(
            f"removed is {removed!r}; expected the heads to remove by layer or name, {{0: [1, 3], 2: [0]}}."
        )
    found: dict[Site, tuple[int, ...]] = {}
    for key, given in removed.items():
        # a site, or what a report names it by
        name = getattr(key, "name", key)
        sites = heads.layer(key).sites if isinstance(key, int) else [s for s in heads if name in (s.name, s.shown)]
        if len(sites) != 1:
            names = ", ".join(repr(site.name) for site in heads.sites[:6])
            raise SettingError(f"removed names {key!r}; expected a layer, or one of {len(heads)} names: {names}.")
        (site,) = sites
        if site in found:
            raise SettingError(f"removed names {site.label} twice; expected its heads in one list.")
        listed = given.tolist() if hasattr(given, "tolist") else given
        if not isinstance(listed, Iterable) or isinstance(listed, str):
            raise SettingError(f"heads of {site.label} are {given!r}; expected a list of integers.")
        listed = list(listed)
        for head in listed:
            require_integer(f"head of {site.label}", head, high=site.num_heads - 1)
        found[site] = tuple(sorted({*listed}))
    found = {site: gone for site, gone in found.items() if gone}
    if not found:
        raise SettingError("removed names no head; expected at least one, counted from 0.")
    return found
