"""Proof, by experiments on a float64 copy, that a layout reads a model's heads correctly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, LayoutError, SettingError
from headwise.heads.experiments.replay import Replay, Uncalled, draw_noise
from headwise.heads.experiments.separation import check_heads, check_learned_queries
from headwise.heads.experiments.weights import WeightReplay, check_weights, weighs_positions
from headwise.heads.heads import Heads, Site, note_proved, require_heads
from headwise.heads.layouts.functional import is_handing
from headwise.heads.record import Call, copy_deeply, copy_site, record_sites
from headwise.heads.view import check_head_views
from headwise.nn.hooks import without_wrappers


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        sites: Names of the sites proved.
        skipped: Names of sites whose output projection is unknown, so that nothing could be proved.
        unweighted: Names of the sites proved whose heads were not seen to attend: to weigh positions by numbers of at
            least 0 that sum to 1. Their heads are apart, and that is all; they may be linear attention, retention or a
            recurrent state.
    """

    sites: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    unweighted: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} sites verified: {', '.join(name or '(model)' for name in self.sites)}"]
        if self.skipped:
            lines.append(f"not verifiable without an output projection: {', '.join(self.skipped)}")
        if self.unweighted:
            lines.append(
                "not seen to attend, by weights of at least 0 that sum to 1 over positions: "
                f"{', '.join(name or '(model)' for name in self.unweighted)}; proved there is that the output of each "
                "head depends on its own query, key and value alone"
            )
        return "\n".join(lines)


def verify(heads: Heads, inputs: Sequence[Any] | Mapping[str, object]) -> Verification:
    """Prove that the heads found are the model's heads; raise if they are not.

    Each attention of a copy in evaluation mode is called again in float64 (float32 where its code says so) with random
    queries, keys and values, and: (1) changing the weight rows of a head changes its features and no others; (2)
    changing the query, key or value of a head changes its output and no others; (3) changing the query of one token
    changes the output at that position only, and changing its key the output at several; (4) changing one feature of a
    query or key changes the weights of all features of the head's output. All four hold for every softmax attention,
    whatever positions, norms, biases or gates it has, and where positions rotate its values. Strided rows, half or
    twice the heads, random partitions, rows shifted by a few, swapped queries and keys, and a fused weight read in
    another order each fail one of them.

    Where a module uses its weights as parameters, nothing can be put in the place of queries, keys and values. There
    (1) changing the weights of a head changes its output and no others, and (2) one input of one token is given to one
    feature of every query, key or value alone: of a query it changes the output at that position only, of a key at
    several, both in all features of the head, and of a value in that feature.

    Where values are the keys, or both are another layer's, values cannot be drawn apart: there (4) changing one feature
    of a query or key changes all features of the head's output and of no other. Values that are keys are the same for
    all tokens when keys are; and the keys and values of each group, among what the attention is called with, reach the
    heads of this group and no others.

    Where heads are learned queries and share keys and values, changing the weight rows of a head changes its output and
    no other.

    Args:
        heads: What `find_heads` returned.
        inputs: Positional (a sequence) or keyword (a mapping) inputs of the model: at least one sequence of three or
            more different tokens.

    Returns:
        The names of the sites proved, and which of them were not seen to attend. The experiments hold for heads of
        linear attention and of recurrent states too. Whether positions are weighed, by numbers of at least 0 that sum
        to 1, is seen from values of 1 at all tokens and at some of them, or from the weights where they are reached.

    Raises:
        LayoutError: A site is misread, and the message names the site and the experiment; or it is on the meta device,
            or the model was changed since its heads were found.
        SettingError: `heads` or `inputs` is something else.
        NotFired: A site was not reached by a forward pass on these inputs.
        HeadwiseError: The model could not be run on these inputs, or one of its attentions in float64 or float32.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> print(verify(hw.find_heads(model), (torch.randn(2, 5, 8),)))
        1 sites verified: self_attn
    """
    require_heads(heads)
    if not isinstance(inputs, Sequence | Mapping) or isinstance(inputs, str):
        raise SettingError(
            f"inputs is a {type(inputs).__name__}; expected what the model is called with: a sequence of positional "
            "arguments, (x,), or a mapping of names."
        )
    twin, copies = _copy_heads(heads)
    given = dict(inputs) if isinstance(inputs, Mapping) else {}
    positional = () if isinstance(inputs, Mapping) else tuple(inputs)

    def is_provable(site: Site) -> bool:
        lists = any(head_slice.stacked for head_slice in site.slices)
        return site.output_projection is not None or site.output is not None or lists

    sites = [site for site in copies if is_provable(site)]
    skipped = tuple(site.shown for site in copies if not is_provable(site))
    if not sites:
        raise LayoutError(
            f"no site could be verified: the output projection of {', '.join(skipped)} was not found; "
            "name it in the layout row (output=...)."
        )
    for site in sites:
        if site.output_projection is not None:
            site.expose()
    with torch.no_grad():
        calls = record_sites(twin, sites, lambda: twin(*positional, **given))
        attending = [verify_site(site, call) for site, call in zip(sites, calls, strict=True)]
    for site in heads.sites:
        if site.shown not in skipped:
            note_proved(site)
    unweighted = tuple(site.name for site, attends in zip(sites, attending, strict=True) if not attends)
    return Verification(tuple(site.name for site in sites), skipped, unweighted)


def _copy_heads(heads: Heads) -> tuple[nn.Module, list[Site]]:
    """Return a copy of the model in evaluation mode, and its sites; raise where there are no values."""
    for site in heads.sites:
        meta = next((name for name, parameter in site.module.named_parameters() if parameter.is_meta), None)
        if meta is not None:
            raise LayoutError(
                f"{site.label}: its {meta} is on the meta device and has no values, so nothing can be proved; load "
                "the weights first."
            )
        check_head_views(site.slices)
    with without_wrappers(heads.model):
        memo: dict[int, Any] = {}
        twin = copy_deeply(heads.model, memo)
        copies = [copy_site(site, twin, memo) for site in heads.sites]
    for module in twin.eval().modules():
        config: Any = getattr(module, "config", None)
        if "flash" in str(getattr(config, "_attn_implementation", "")):
            # flash kernels do not take float64
            config._attn_implementation = "sdpa"
    return twin, [site for site in copies if site is not None]


def verify_site(site: Site, call: Call) -> bool:
    """Return whether heads that were proved to be apart were seen to attend; raise where they are not apart."""
    if all(part.called for part in site.parts):
        try:
            return _run_experiments(site, call, by_weights=False)
        except Uncalled:
            if not is_handing(site):
                raise
    return _run_experiments(site, call, by_weights=True)


def _run_experiments(site: Site, call: Call, *, by_weights: bool) -> bool:
    learned = site.kind == "pooling" and len(site.slices) == 1
    # what is drawn depends on the precision
    first, replay, weights = Replay(site, call), Replay(site, call), WeightReplay(site, call)
    read = weights.read if by_weights else first.outputs if learned else partial(first.heads, {})
    try:
        if not _call_in(torch.float64, call, read) and not _call_in(torch.float32, call, read):
            raise LayoutError(
                f"{site.label}: called again with the same inputs its heads are not finite, so nothing can be proved; "
                "pass inputs without rows that are padding throughout."
            )
        draw_zeros(site.module)
        if by_weights:
            check_weights(weights)
        elif learned:
            check_learned_queries(replay)
            return True
        else:
            check_heads(replay)
        return weighs_positions(site, call, by_weights=by_weights)
    except HeadwiseError:
        raise
    except Exception as error:
        raise HeadwiseError(
            f"{site.label} ({type(site.module).__name__}) could be called again neither in float64 nor in float32 "
            f"({type(error).__name__}: {error}); a quantized model cannot be proved, its full-precision original can, "
            "and has the same layout."
        ) from error


def draw_zeros(module: nn.Module) -> None:
    """Draw the parameters that are zero: a gate that starts at zero hides what passes through it."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not parameter.any():
            parameter.copy_(draw_noise(parameter))


def _call_in(dtype: torch.dtype, call: Call, read: Callable[[], Tensor]) -> bool:
    """Convert a call to a precision, and return whether it can be made: some code has float32 written into it."""
    call.module.to(dtype)
    try:
        return bool(read().isfinite().all())
    except HeadwiseError:
        raise
    except Exception:
        if dtype == torch.float64:
            return False
        raise
