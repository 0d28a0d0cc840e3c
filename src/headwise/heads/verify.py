"""Proof, by experiments on a float64 copy, that a layout reads a model's heads correctly."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from headwise.errors import HeadwiseError, LayoutError, NotFired, SettingError
from headwise.heads.head_slice import HeadSlice, check_head_slice
from headwise.heads.heads import Heads, Site, require_heads
from headwise.heads.replay import RecordedCall, Replay
from headwise.heads.verify_experiments import Experiments, check_learned_queries


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        sites: Names of the sites proved.
        skipped: Names of sites whose output projection is unknown, so that nothing could be proved.
    """

    sites: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} sites verified: {', '.join(name or '(model)' for name in self.sites)}"]
        if self.skipped:
            lines.append(f"not verifiable without an output projection: {', '.join(self.skipped)}")
        return "\n".join(lines)


def verify(heads: Heads, inputs: Sequence | Mapping[str, object]) -> Verification:
    """Prove that the heads found are the model's heads; raise if they are not.

    Each attention of a copy in evaluation mode is called again in float64 with random queries, keys and values, and:
    (1) changing the weight rows of a head changes its features and no others; (2) where all features of a head have
    the same values, so do all features of its output; (3) changing the query, key or value of a head changes its
    output and no others; (4) changing the query of one token changes the output at that position only, and changing
    its key the output at several. All four hold for every softmax attention, whatever positions, norms, biases or
    gates it has. Strided rows, half or twice the heads, random partitions, swapped queries and keys, and a fused weight
    read in another order each fail one of them.

    Where heads are learned queries and share keys and values, changing the weight rows of a head changes its output and
    no other.

    Args:
        heads: What `find_heads` returned.
        inputs: Positional (a sequence) or keyword (a mapping) inputs of the model: at least one sequence of three or
            more different tokens.

    Returns:
        The names of the sites proved.

    Raises:
        LayoutError: A site is misread, and the message names the site and the experiment; or the model was changed
            since its heads were found.
        SettingError: `heads` or `inputs` is something else.
        NotFired: A site was not reached by a forward pass on these inputs.
        HeadwiseError: The model could not be run on these inputs, or one of its attentions in float64.

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
    twin, copies = _copy_model(heads.model, tuple(heads.sites))
    _disable_flash(twin.eval())
    given = dict(inputs) if isinstance(inputs, Mapping) else {}
    positional = () if isinstance(inputs, Mapping) else tuple(inputs)

    for site in heads.sites:
        for head_slice in site.slices:
            check_head_slice(head_slice)
    sites = [site for site in copies if site.output_projection is not None]
    skipped = tuple(site.name or "(model)" for site in copies if site.output_projection is None)
    if not sites:
        raise LayoutError(
            f"no site could be verified: the output projection of {', '.join(skipped)} was not found; "
            "name it in the layout row (output=...)."
        )
    for site in sites:
        site.expose()
    with torch.no_grad():
        calls = _record_calls(twin, sites, lambda: twin(*positional, **given))
        twin.double()
        for site, call in zip(sites, calls, strict=True):
            _verify_site(site, call)
    return Verification(tuple(site.name for site in sites), skipped)


def _verify_site(site: Site, call: RecordedCall) -> None:
    try:
        if [head_slice.projection for head_slice in site.slices] == ["query"]:
            check_learned_queries(Replay(site, call))
        else:
            Experiments(Replay(site, call)).run()
    except HeadwiseError:
        raise
    except Exception as error:
        raise HeadwiseError(
            f"{site.label} ({type(site.module).__name__}) could not be called again in float64 "
            f"({type(error).__name__}: {error}); a quantized model cannot be proved, its full-precision original can, "
            "and has the same layout."
        ) from error


def _disable_flash(twin: nn.Module) -> None:
    for module in twin.modules():
        config: Any = getattr(module, "config", None)
        if "flash" in str(getattr(config, "_attn_implementation", "")):
            # flash kernels do not take float64
            config._attn_implementation = "sdpa"


def _record_calls(twin: nn.Module, sites: Sequence[Site], forward: Callable[[], object]) -> list[RecordedCall]:
    """Run the model once and return, for each site, the smallest call that runs it and its output projection."""
    names = {id(module): name for name, module in twin.named_modules()}
    seen: dict[str, RecordedCall] = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in seen:
                seen[name] = RecordedCall(module, args, kwargs)

        return called

    wanted: dict[str, list[str]] = {}
    for site in sites:
        assert site.output_projection is not None
        wanted[site.name] = _list_common_parents(site.name, names[id(site.output_projection.owner)])
    around = {*(place for places in wanted.values() for place in places), *wanted}
    handles = [twin.get_submodule(name).register_forward_pre_hook(remember(name), with_kwargs=True) for name in around]
    try:
        forward()
    except HeadwiseError:
        raise
    except Exception as error:
        raise HeadwiseError(
            f"{type(twin).__name__} could not be run on the given inputs ({type(error).__name__}: {error}); "
            "give what the model itself takes: a mapping of names, or a sequence of positional arguments."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    silent = [site.label for site in sites if site.name not in seen]
    if silent:
        raise NotFired(f"{', '.join(silent[:6])} was not reached by a forward pass on the given inputs.")
    return [next(seen[place] for place in wanted[site.name] if place in seen) for site in sites]


def _list_common_parents(first: str, second: str) -> list[str]:
    """Return the names of the modules that hold both modules, innermost first; the model, "", is last."""
    both = []
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        both.append(a)
    return [".".join(both[:depth]) for depth in range(len(both), -1, -1)]


def _copy_model(model: nn.Module, sites: Sequence[Site]) -> tuple[nn.Module, list[Site]]:
    """Return a copy of the model and the same sites read in the copy."""
    memo: dict[int, object] = {}
    twin = copy.deepcopy(model, memo)

    def find_copy(module: nn.Module | None) -> nn.Module | None:
        found = None if module is None else memo.get(id(module))
        return found if isinstance(found, nn.Module) else None

    def copy_slice(head_slice: HeadSlice) -> HeadSlice:
        owner = find_copy(head_slice.owner)
        assert owner is not None  # the heads are those of the model as it is
        return replace(head_slice, owner=owner, module=find_copy(head_slice.module))

    copies = []
    for site in sites:
        module = find_copy(site.module)
        assert module is not None
        output_projection = site.output_projection
        output_owner = None if output_projection is None else find_copy(output_projection.owner)
        copies.append(
            replace(
                site,
                model=twin,
                module=module,
                slices=tuple(copy_slice(head_slice) for head_slice in site.slices),
                # an aggregator may have replaced W_O since the heads were found
                output=None if site.output is None or find_copy(site.output.owner) is None else copy_slice(site.output),
                output_projection=None
                if output_projection is None or output_owner is None
                else replace(output_projection, owner=output_owner),
                value_module=find_copy(site.value_module),
            )
        )
    return twin, copies
