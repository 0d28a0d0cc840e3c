"""Proof that a layout reads a model's heads rightly, by experiments on a copy.

Identities that hold for any set of rows prove nothing; these hold for true heads only. Each experiment redraws the
projections of one site in a float64 copy, changes them in a way that a true head cannot or must notice, and compares
what the output projection returns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headwise.checks import LayoutError, NotFired
from headwise.heads import Heads, Site, Slab

__all__ = ["Verification", "verify"]

# In float64 an identity holds to rounding through one attention; a difference of the kind sought is far above it.
UNCHANGED = 1e-9
CHANGED = 1e-6


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

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
    """Prove that the rows read as heads are the model's heads; raise where they are not.

    On a float64 copy in evaluation mode, for each site: (1) a random rotation of the value rows of one head, undone
    in W_O, changes nothing, and a rotation across two heads, undone likewise, does; (2) with all values zero but head
    h's, changing the query or key rows of the other heads changes nothing, and changing head h's does; (3) adding a
    constant to every key of a head changes nothing, adding one to every query does. Strided rows, half or twice the
    heads, random partitions and swapped queries and keys each fail one of them.

    Args:
        heads: What `find_heads` returned, for a model whose positions do not enter the scores of its heads in another
            way than through the inputs (rotary positions are not proved by (3)).
        inputs: Positional (a sequence) or keyword (a mapping) inputs of the model: at least one sequence of three or
            more different tokens.

    Returns:
        The names of the sites proved.

    Raises:
        LayoutError: A site is misread; the message names the site and the experiment.
        NotFired: A site was not reached by a forward pass on these inputs.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> print(verify(hw.find_heads(model), (torch.randn(2, 5, 8),)))
        1 sites verified: self_attn
    """
    originals = tuple(heads.sites)
    twin, sites = _copied(heads.model, originals)
    twin.double().eval()
    given = {name: _double(value) for name, value in inputs.items()} if isinstance(inputs, Mapping) else {}
    positional = () if isinstance(inputs, Mapping) else tuple(_double(value) for value in inputs)

    proved, skipped = [], []
    with torch.no_grad():
        for site in sites:
            if site.output is None:
                skipped.append(site.name or "(model)")
                continue
            site.expose()
            _Experiment(site, lambda: twin(*positional, **given)).run()
            proved.append(site.name)
    if not proved:
        raise LayoutError(
            f"no site could be verified: the output projection of {', '.join(skipped)} was not found; "
            "name it in the layout row (output=...)."
        )
    return Verification(tuple(proved), tuple(skipped))


class _Experiment:
    """The experiments on one site of the copy."""

    def __init__(self, site: Site, forward: Callable[[], object]) -> None:
        assert site.output is not None
        assert site.seam is not None
        self.site, self.forward = site, forward
        self.slabs = {slab.projection: slab for slab in site.slabs}
        self.output = site.output
        self.generator = torch.Generator().manual_seed(0)
        self.group = site.num_heads // site.key_value_heads

    def run(self) -> None:
        """Run all experiments; the parameters touched are restored."""
        owners = {id(s.owner): s.owner for s in (*self.site.slabs, self.output)}.values()
        saved = [{k: p if p is None else p.detach().clone() for k, p in o._parameters.items()} for o in owners]
        try:
            self._redraw()
            self._values_belong_to_outputs()
            for projection in ("query", "key"):
                self._scores_belong_to_values(projection)
            self._keys_are_keys()
        finally:
            for owner, parameters in zip(owners, saved, strict=True):
                for key, value in parameters.items():
                    owner._parameters[key] = None if value is None else nn.Parameter(value)

    def _values_belong_to_outputs(self) -> None:
        value, heads = self.slabs["value"], self.slabs["value"].heads
        before = self._observe()
        for head in range(heads):
            with _Restored(value, self.output):
                self._rotate([head])
                self._unchanged(before, self._observe(), f"rotating the values of head {head} and undoing it in W_O")
        for head in range(heads - 1):
            with _Restored(value, self.output):
                self._rotate([head, head + 1])
                after = self._observe()
                self._changed(before, after, f"rotating across the values of heads {head} and {head + 1}")

    def _scores_belong_to_values(self, projection: str) -> None:
        slab, value = self.slabs[projection], self.slabs["value"]
        members = self.group if projection == "query" else 1
        for head in range(value.heads):
            own = range(head * members, (head + 1) * members)
            with _Restored(value):
                self._keep_only(value, head)
                before = self._observe()
                with _Restored(slab):
                    self._disturb(slab, [i for i in range(slab.heads) if i not in own])
                    what = f"changing the {projection} rows of every head but those of values {head}"
                    self._unchanged(before, self._observe(), what)
                with _Restored(slab):
                    self._disturb(slab, list(own))
                    self._changed(before, self._observe(), f"changing the {projection} rows of values {head}")

    def _keys_are_keys(self) -> None:
        before = self._observe()
        for projection, check in (("key", self._unchanged), ("query", self._changed)):
            slab = self.slabs[projection]
            with _Restored(slab):
                bias = slab.owner._parameters[slab.bias or ""]
                assert bias is not None  # _redraw gave every projection a bias
                view = slab.bias_view(bias)
                view.add_(self._draw(view.shape, view))
                check(before, self._observe(), f"adding a constant to every {projection}")

    def _redraw(self) -> None:
        if isinstance(self.site.module, nn.MultiheadAttention):
            # a constant added to every key leaves out the keys appended after the projection
            self.site.module.add_zero_attn = False
            self.site.module.bias_k = self.site.module.bias_v = None
        for slab in self.site.slabs:
            if slab.bias is None:
                name, rows = "bias", slab.parameter.shape[0]
                if isinstance(slab.owner, nn.MultiheadAttention):
                    name, rows = "in_proj_bias", 3 * slab.owner.embed_dim
                if slab.owner._parameters.get(name) is None:
                    slab.owner._parameters[name] = nn.Parameter(slab.parameter.new_zeros(rows))
                self.slabs[slab.projection] = replace(slab, bias=name)
            view = slab.view(slab.parameter)
            # weights of trained or freshly initialised models may be zero, equal or tiny: these are none of that
            view.copy_(self._draw(view.shape, view) * 2 / view.shape[-1] ** 0.5)
        view = self.output.view(self.output.parameter)
        view.copy_(self._draw(view.shape, view))

    def _rotate(self, heads: list[int]) -> None:
        value, size = self.slabs["value"], self.site.head_size
        square = (len(heads) * size, len(heads) * size)
        rotation = torch.linalg.qr(self._draw(square, value.parameter))[0]
        weight, bias = value.view(value.parameter), value.owner._parameters[value.bias or ""]
        weight[heads] = (rotation @ weight[heads].flatten(0, 1)).unflatten(0, (len(heads), size))
        if bias is not None:
            rows = value.bias_view(bias)
            rows[heads] = (rotation @ rows[heads].flatten()).unflatten(0, (len(heads), size))
        columns = self.output.view(self.output.parameter)
        for member in range(self.group):
            queries = [head * self.group + member for head in heads]
            joined = columns[queries].transpose(0, 1).flatten(1)
            columns[queries] = (joined @ rotation.T).unflatten(1, (len(heads), size)).transpose(0, 1)

    def _keep_only(self, slab: Slab, head: int) -> None:
        others = [i for i in range(slab.heads) if i != head]
        slab.view(slab.parameter)[others] = 0.0
        bias = slab.owner._parameters[slab.bias or ""]
        if bias is not None:
            slab.bias_view(bias)[others] = 0.0

    def _disturb(self, slab: Slab, heads: list[int]) -> None:
        view = slab.view(slab.parameter)
        view[heads] = self._draw(view[heads].shape, view)

    def _draw(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator, dtype=like.dtype).to(like.device)

    def _observe(self) -> Tensor:
        seen: list[Tensor] = []
        seam = self.site.seam
        assert seam is not None
        handle = seam.module.register_forward_hook(lambda _m, _i, output: seen.append(output.detach().clone()))
        try:
            self.forward()
        finally:
            handle.remove()
        if not seen:
            raise NotFired(f"{self.site.name or 'the model'} was not reached by a forward pass on the given inputs.")
        return torch.cat([tensor.flatten() for tensor in seen])

    def _unchanged(self, before: Tensor, after: Tensor, what: str) -> None:
        difference = _relative(before, after)
        if difference > UNCHANGED:
            raise LayoutError(self._verdict(f"{what} changed its output by {difference:.1e}; true heads would not"))

    def _changed(self, before: Tensor, after: Tensor, what: str) -> None:
        difference = _relative(before, after)
        if difference < CHANGED:
            raise LayoutError(self._verdict(f"{what} changed nothing ({difference:.1e}); true heads would change it"))

    def _verdict(self, finding: str) -> str:
        return (
            f"{self.site.name or 'the model'}: layout {self.site.layout!r} with {self.site.num_heads} heads of "
            f"{self.site.head_size} misreads {type(self.site.module).__name__}: {finding}. "
            "Pass a layout row that describes it to find_heads."
        )


class _Restored:
    """Puts the parameters of some slabs, and their biases, back after a block."""

    def __init__(self, *slabs: Slab) -> None:
        self.owners = {id(slab.owner): slab.owner for slab in slabs}.values()

    def __enter__(self) -> None:
        self.saved = [[(p, p.detach().clone()) for p in o._parameters.values() if p is not None] for o in self.owners]

    def __exit__(self, *_: object) -> None:
        for parameters in self.saved:
            for parameter, value in parameters:
                parameter.copy_(value)


def _relative(before: Tensor, after: Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max().clamp_min(1e-12))


def _double(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _copied(model: nn.Module, sites: Sequence[Site]) -> tuple[nn.Module, list[Site]]:
    """Return a copy of the model and the same sites read in the copy."""
    memo: dict[int, object] = {}
    twin = copy.deepcopy(model, memo)

    def again(module: nn.Module | None) -> nn.Module | None:
        found = None if module is None else memo.get(id(module))
        return found if isinstance(found, nn.Module) else None

    def slab_again(slab: Slab) -> Slab:
        owner = again(slab.owner)
        assert owner is not None
        return replace(slab, owner=owner)

    copies = []
    for site in sites:
        module = again(site.module)
        assert module is not None
        seam = site.seam
        seam_owner = None if seam is None else again(seam.owner)
        copies.append(
            replace(
                site,
                model=twin,
                module=module,
                slabs=tuple(slab_again(slab) for slab in site.slabs),
                output=None if site.output is None else slab_again(site.output),
                seam=None if seam is None or seam_owner is None else replace(seam, owner=seam_owner),
                value_module=again(site.value_module),
            )
        )
    return twin, copies
