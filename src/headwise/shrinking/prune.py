"""Heads removed from the weights of a model, which is then smaller and faster."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from headwise.errors import LayoutError, SettingError, require_integer
from headwise.heads.heads import Heads, Site, require_heads
from headwise.heads.importance import Importance
from headwise.heads.printed import LINES, shorten
from headwise.nn.compiled import without_wrappers
from headwise.shrinking.cut_model import count_parameters, cut_model, describe_loading
from headwise.shrinking.prune_beside import list_guessed
from headwise.shrinking.prune_choice import choose_heads
from headwise.shrinking.prune_cuts import collect_cuts, list_gone
from headwise.shrinking.prune_optimizer import require_optimizer
from headwise.shrinking.prune_proof import PRUNED, expect_ablated, require_equal
from headwise.shrinking.prune_refusals import require_prunable
from headwise.shrinking.reload_stock import ConfigChange, Counts

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
    """

    removed: dict[str, tuple[int, ...]]
    heads: dict[str, int]
    parameters: tuple[int, int]
    stock: str | None
    loading: str | None
    model: nn.Module = field(repr=False)

    def __str__(self) -> str:
        rows = [
            f"  {name or '(model)'}: heads {', '.join(map(str, gone))} removed, {self.heads[name]} left"
            for name, gone in self.removed.items()
        ]
        first, left_out, last = shorten(rows, LINES - 2)
        middle = [f"  ... {left_out} more attentions ..."] if left_out else []
        before, after = self.parameters
        total = sum(map(len, self.removed.values()))
        title = f"{total} heads removed from {len(self.removed)} attentions; {after:,} of {before:,} parameters left"
        loading = [] if self.stock is None else [f"saved for hw.load, as transformers cannot load it: {self.stock}"]
        if self.stock is None and self.loading is not None and "=" in self.loading:
            loading = [f"loaded by {self.loading}"]
        return "\n".join([title, *first, *middle, *last, *loading])


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
        return _prune(heads, _read_removed(heads, removed), inputs, optimizer, exposed)


def _prune(
    heads: Heads, removed: dict[Site, tuple[int, ...]], inputs: Any, optimizer: Any, exposed: ExitStack
) -> Pruning:
    for site in removed:
        require_prunable(heads, site, removed)
    before = count_parameters(heads.model)
    counts = {site: _count(site, removed.get(site, ())) for site in heads.found}
    # a stock attention of torch is swapped for ours, which takes fewer heads than its width holds; it stays so when cut
    for site in removed:
        if site.output_projection is not None:
            site.expose(exposed.callback)
    lost = {site: list_gone(site, gone) for site, gone in removed.items()}
    expected = expect_ablated(heads, removed, inputs)

    def prove() -> None:
        if expected is not None:
            require_equal(heads.model, expected, PRUNED)

    def cut(*, guess: bool) -> list[ConfigChange]:
        cuts = collect_cuts(heads, lost, proved=expected is not None, guess=guess)
        return cut_model(heads.model, cuts, counts, list(removed), optimizer, prove)

    if expected is None or not any(list_guessed(site) for site in removed):
        plans = cut(guess=False)
    else:
        try:
            plans = cut(guess=True)
        except LayoutError as error:
            try:
                # what has the sizes of heads need not be theirs
                plans = cut(guess=False)
            except LayoutError:
                raise error from None
    return Pruning(
        {site.name: gone for site, gone in removed.items()},
        {site.name: counts[site][0] for site in removed},
        (before, count_parameters(heads.model)),
        *describe_loading(heads.model, plans),
        heads.model,
    )


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


def _count(site: Site, gone: Sequence[int]) -> Counts:
    """Return how many query and key/value heads a site has without some, and their size."""
    groups = len(list_gone(site, gone)["key"]) if gone else 0
    return site.num_heads - len(gone), site.key_value_heads - groups, site.slices[0].head_size
