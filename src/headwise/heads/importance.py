"""How much each head matters: by removing it, or to first order by one backward pass for all heads."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, LayoutError, NotFired, SettingError, ShapeError, require_choice
from headwise.heads.ablation import ablate, ignore, require_unshared
from headwise.heads.capture import require_joined
from headwise.heads.heads import Heads, Site, require_heads
from headwise.heads.printed import LINES, shorten
from headwise.nn.compiled import uncompiled
from headwise.nn.hooks import Handle, read_first_argument, replace_first_argument
from headwise.nn.scores import Observer

METHODS = ("exact", "first_order")


@dataclass(frozen=True)
class Importance:
    """How much each head matters.

    Attributes:
        baseline: The score of the whole model; for "first_order" the mean loss of the items.
        drops: For each site [H]. For "exact", baseline minus the score without the head; negative where removal helps.
            For "first_order", E |dL/dxi_h|, never negative: how much the loss of an item would change, one way or the
            other, if it were linear in the head.
        method: "exact" or "first_order".
    """

    baseline: float
    drops: dict[str, Tensor]
    method: str = "exact"

    def __str__(self) -> str:
        exact = self.method == "exact"
        title = "score of the whole model {:.4g}; drop without each head:"
        title = title if exact else "mean loss of the whole model {:.4g}; E |dL/dxi| of each head:"
        width = max(len(name) for name in self.drops)
        rows = [
            f"{name.ljust(width)}  " + " ".join(f"{float(drop):{'+.4f' if exact else '.3g'}}" for drop in drops)
            for name, drops in self.drops.items()
        ]
        first, left_out, last = shorten(rows, LINES - 1)
        middle = [f"... {left_out} more sites ..."] if left_out else []
        return "\n".join([title.format(self.baseline), *first, *middle, *last])


def importance(
    heads: Heads,
    score: Callable[[], float | Tensor | Iterable[Tensor]],
    *,
    method: Literal["exact", "first_order"] = "exact",
) -> Importance:
    """Return how much each head matters, exactly or to first order.

    "exact": how much the score drops when the head is removed alone; one evaluation for each head.

    "first_order": I_h = E_x |dL(x)/dxi_h| at xi_h = 1, where W_O gets xi_h O_h in the place of O_h (Michel et al. 2019,
    section 4.1); one forward and one backward pass for all heads. The absolute value is taken for each item x, so that
    items cannot cancel. A head that is called several times for an item has one xi_h. The paper divides I_h by its l2
    norm over the heads of a layer before it compares layers; this is not done here. It is a linear estimate: what heads
    do together, or what saturates, it does not see. Compare it with the exact drops on a sample where ranks matter.

    For "first_order" the items of a batch are along the first axis of the losses and of what the attention computes.
    Padding counts nowhere that it does not count in the losses: average the loss of an item over its own tokens. Use
    the evaluation mode, and no layer that mixes items (batch normalization). Aggregated heads have their xi_h before
    the aggregator. Gradients of parameters are left as they were, and a compiled model runs uncompiled.

    Args:
        heads: The sites whose heads are judged.
        score: For "exact", runs the model on the user's data and returns its score, the larger the better; called once
            for the whole model and once per head, without gradients. For "first_order", runs it once and returns the
            losses of the items, [items], with their graph, or yields them batch by batch, so that only one graph is
            held. A loss that is a sum of a sequence's tokens, or any score, will do: the sign does not matter.
        method: "exact" or "first_order".

    Raises:
        NotFired: `score` did not run the model, or the losses do not depend on the heads of a site or have no graph.
        ShapeError: The losses are not one number for each item, or a site computed another number of items.
        HeadwiseError: A score, a loss or a gradient is not finite.
        LayoutError: The output projection of a site was not found, or another attention calls it too; or, for
            "first_order", tensor parallelism divides its heads.
        SettingError: `method` is another one, `score` is no function, or what it returns is no number, or for
            "first_order" no losses of items.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> x = torch.randn(3, 5, 8)
        >>> result = importance(hw.find_heads(model), lambda: float(model(x).std()))
        >>> result.drops["self_attn"].shape
        torch.Size([2])
        >>> fast = importance(hw.find_heads(model), lambda: model(x).std((1, 2)), method="first_order")
        >>> bool((fast.drops["self_attn"] > 0).all())
        True
    """
    require_heads(heads)
    require_choice("method", method, METHODS)
    if not callable(score):
        raise SettingError(
            f"score is a {type(score).__name__}; expected a function without arguments that runs the model on your "
            "data, such as lambda: accuracy(model)."
        )
    with uncompiled(), heads.exposed():
        return _remove_each(heads, score) if method == "exact" else _differentiate(heads, score)


@torch.no_grad()
def _remove_each(heads: Heads, score: Callable[[], Any]) -> Importance:
    baseline = _read_score(score())
    drops = {site.shown: baseline - _score_without_each(heads, site, score) for site in heads.sites}
    return Importance(baseline, drops)


def _read_score(given: Any) -> float:
    """Return a score as a number; raise unless it is one, and finite."""
    try:
        number = float(given)
    except (TypeError, ValueError, RuntimeError) as error:
        told = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise SettingError(
            f'score returned {told}; method="exact" expects one number, the larger the better, and '
            'method="first_order" the losses of the items.'
        ) from error
    if not math.isfinite(number):
        raise HeadwiseError(f"score returned {number}, by which no head can be judged; check the data for NaN.")
    return number


def _score_without_each(heads: Heads, site: Site, score: Callable[[], Any]) -> Tensor:
    """Return the score without each head of a site, [H]."""
    alone, scores = Heads(heads.model, (site,), heads.projections, heads.found), []
    for head in range(site.num_heads):
        with ablate(alone, head) as ablation:
            scores.append(_read_score(score()))
            ablation.verify()
    return torch.tensor(scores, dtype=torch.float64, device="cpu")


@torch.enable_grad()
def _differentiate(heads: Heads, score: Callable[[], Any]) -> Importance:
    with _Gates(heads) as gates:
        found = score()
        if not isinstance(found, Iterable):
            raise SettingError(
                f'score returned a {type(found).__name__}; method="first_order" expects the losses of the items, a '
                "tensor [items], or yields one such tensor for each batch."
            )
        total, items = 0.0, 0
        for losses in [found] if isinstance(found, Tensor) else found:
            _require_losses(losses)
            gates.differentiate(losses)
            total, items = total + float(losses.detach().double().sum()), items + len(losses)
    if not items:
        raise NotFired("score gave no item; expected the losses of at least one.")
    gates.require_reached()
    drops = {gate.site.shown: gate.total / items for gate in gates.sites}
    return Importance(total / items, drops, "first_order")


def _require_losses(losses: object) -> None:
    """Raise unless these are the finite losses of the items of a batch, with a graph."""
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.is_floating_point():
        given = f"a tensor of {losses.dtype}, {list(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise ShapeError(
            f"score gave {given} as losses; expected one number for each item of the batch, a floating-point tensor "
            '[items]: in torch reduction="none", and then the mean over the tokens of each item.'
        )
    if not losses.requires_grad:
        raise NotFired(
            "the losses carry no gradient of the heads: score ran the model under torch.no_grad() or "
            "torch.inference_mode(), detached what it computed, or did not run it."
        )
    if not bool(losses.isfinite().all()):
        raise HeadwiseError("a loss is not finite, so no head can be judged by it; leave that item out.")


@dataclass(eq=False)
class _GatedSite:
    """The gates of one site in the batch that is running, and the sum of |dL/dxi| over the items so far, [H]."""

    site: Site
    total: Tensor
    gates: list[Tensor]
    reached: bool = False

    def gate(self, outputs: Tensor) -> Tensor:
        """Return outputs of heads [rows, ..., H, e] times new gates [rows, H]."""
        if not torch.is_grad_enabled():
            raise NotFired(
                f"{self.site.label} ran without gradients: under torch.no_grad(), or in a reentrant activation "
                "checkpoint (use_reentrant=False is needed)."
            )
        rows, heads = (outputs.shape[0] if outputs.dim() > 2 else 1), outputs.shape[-2]
        gates = torch.ones(rows, heads, dtype=outputs.dtype, device=outputs.device, requires_grad=True)
        self.gates.append(gates)
        between = (1,) * max(outputs.dim() - 3, 0)
        return outputs * gates.view((rows, *between, heads, 1)[-outputs.dim() :])


class _Gates(Handle):
    """A gate of 1 on each head of each item, at the input of W_O."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        require_unshared(heads)
        within = [site.output_projection is None and site.gives("outputs") for site in heads.sites]
        projections = [
            None if own else site.expose(self._removers.append).module
            for site, own in zip(heads.sites, within, strict=True)
        ]
        divided = next((site.label for site in heads.sites if site.divided), None)
        if divided is not None:
            raise LayoutError(
                f'{divided}: under tensor parallelism no process computes the outputs of all heads; use method="exact".'
            )
        self.sites = [
            _GatedSite(site, torch.zeros(site.num_heads, dtype=torch.float64, device="cpu"), []) for site in heads.sites
        ]
        for gated, projection in zip(self.sites, projections, strict=True):
            if projection is None:
                listener = Observer(ignore, edit=gated.gate)
                self._removers.append(gated.site.reach_scores(self._removers.append).listen(listener))
            else:
                self._hook_before(projection, _make_gating(gated))

    def differentiate(self, losses: Tensor) -> None:
        """Add what the losses of a batch say of each head."""
        taken = [(gated, gate) for gated in self.sites for gate in gated.gates]
        if not taken:
            return
        gradients = torch.autograd.grad(losses.sum(), [gate for _, gate in taken], allow_unused=True)
        for gated in self.sites:
            # those of recomputed checkpoints too
            gated.gates = []
        sums: dict[_GatedSite, Tensor] = {}
        for (gated, gate), gradient in zip(taken, gradients, strict=True):
            if gradient is not None:
                sums[gated] = sums.get(gated, 0.0) + _group(gradient, gate, len(losses), gated.site)
        for gated, gradient in sums.items():
            if not bool(gradient.isfinite().all()):
                raise HeadwiseError(f"{gated.site.label}: the gradient of a head is not finite.")
            gated.total, gated.reached = gated.total + gradient.abs().sum(0), True

    def require_reached(self) -> None:
        """Raise `NotFired` unless the losses depend on the heads of every site."""
        silent = [gated.site.label for gated in self.sites if not gated.reached]
        if silent:
            raise NotFired(
                f"the losses depend on no head of {len(silent)} of {len(self.sites)} sites ({', '.join(silent[:6])}); "
                "no forward pass went through them, or what they computed was detached. Select other heads."
            )


def _make_gating(gated: _GatedSite) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict]]:
    site = gated.site

    def gate(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        joined = read_first_argument(module, args, kwargs)
        require_joined(joined, site)
        split = gated.gate(joined.unflatten(-1, (site.num_heads, site.head_size)))
        return replace_first_argument(args, kwargs, split.flatten(-2))

    return gate


def _group(gradient: Tensor, gate: Tensor, items: int, site: Site) -> Tensor:
    """Return the gradients of the gates of each item, [items, H], in double precision."""
    gradient = gradient.detach().double().cpu()
    if items == 1:
        # all rows are the one item's, for example the windows of an image
        return gradient.sum(0, keepdim=True)
    if len(gate) != items:
        raise ShapeError(
            f"{site.label} computed {len(gate)} rows in a call, and there are {items} losses; expected one row for "
            "each item. Give the losses of one item at a time."
        )
    return gradient
