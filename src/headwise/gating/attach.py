"""`gate_heads`: put gates on the heads of a model, with a handle that takes them off again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, NotFired, SettingError, ShapeError
from headwise.gating.gates import Gates, GateSetting, MixtureOfHeads, balance, build_gates, require_gate
from headwise.heads.adapters import has_peft
from headwise.heads.capture import ForwardScope, Padding, find_askers, list_parameters, note_padding
from headwise.heads.heads import Heads, Site, Undo, require_heads
from headwise.heads.layouts.functional import hands_output, is_handing
from headwise.heads.method import Method, Stage
from headwise.heads.scores.mixing import RequireTrained, match_placement, require_unwrapped
from headwise.heads.view import OutputProjection, is_sharded
from headwise.nn.checkpointing import is_recomputing
from headwise.nn.hooks import (
    Handle,
    PerThread,
    guard_hooks,
    read_first_argument,
    replace_first_argument,
    require_original,
    run_uncompiled,
    unwrap_compiled,
)
from headwise.nn.scores import always

# The attribute of an attention that holds its gates.
NAME = "head_gates"
# A loop that trains for this many calls without reading their balance holds every graph it has built.
UNREAD_CALLS = 64


class Call:
    """The running call of an attention: the input and the padding of its queries, and the balances of calls so far."""

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.padding = Padding()
        self.balances: list[Tensor] = []


class Link:
    """The hooks of one gated attention: they take x before the queries, and gate the input of W_O.

    Unlike hooks that observe, these are part of what the model computes: a deep copy of the model has its own, and a
    pickled model keeps them. A copy counts no balance. The gates are looked up in `attention` at each call, so that a
    wrapper around them is called too; `queries` is the name of its first argument.
    """

    def __init__(self, site: Site, output_projection: OutputProjection, source: nn.Module, balanced: bool) -> None:
        self.attention, self.source, self.balanced = site.module, source, balanced
        self.owner, self.attribute = output_projection.owner, output_projection.attribute
        self.projection = output_projection.module
        self.label, self.num_heads, self.head_size = site.label, site.num_heads, site.head_size
        self.queries = next(iter(list_parameters(site.module)), "")
        self.here, self.acted = PerThread(Call), False

    def attach(self, gates: nn.Module) -> list[Callable[[], object]]:
        """Put the gates and the hooks in place, and return what removes them."""
        self.attention.add_module(NAME, gates)
        handles = [self.attention.register_forward_pre_hook(self.begin, with_kwargs=True)]
        if self.source is not self.attention:
            handles.append(self.source.register_forward_pre_hook(self.take_input, with_kwargs=True))
        # before what reads outputs, however early that was attached: it sees what W_O gets
        handles.append(self.projection.register_forward_pre_hook(self.gate, prepend=True, with_kwargs=True))
        return [*(handle.remove for handle in handles), lambda: self.attention._modules.pop(NAME, None)]

    def note_padding(self, padding: Padding) -> None:
        """Note the padding of the queries of the running call."""
        self.here.own.padding = padding

    def take_balances(self) -> list[Tensor]:
        """Return the balance of each call since the last time, and forget them."""
        taken, self.here.own.balances = self.here.own.balances, []
        return taken

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin a call of the attention; the hook before it. Where no module makes its queries, x is its argument."""
        require_original(module)
        held = self.owner._modules.get(self.attribute)
        if held is not self.projection and (held is None or unwrap_compiled(held) is not self.projection):
            raise NotFired(
                f"{self.label}: its output projection is now a {type(held).__name__}, set after hw.gate_heads, which "
                "would get the heads without their gates; call remove() on the gates, and gate the heads again."
            )
        self.here.own.x = None
        if module is self.source:
            # queries come first in a signature, and anywhere in a call by name
            given = kwargs[self.queries] if self.queries in kwargs else args[0] if args else None
            x = read_first_argument(module, (given,), {})
            if isinstance(module, nn.MultiheadAttention):
                x = x.unsqueeze(0) if x.dim() == 2 else x if module.batch_first else x.transpose(0, 1)
            self.here.own.x = x

    def take_input(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep x, [..., d], until the heads of the call arrive; the hook before the queries."""
        require_original(module)
        # DeBERTa-v3 projects positions with the same module, after its tokens
        if self.here.own.x is None:
            self.here.own.x = read_first_argument(module, args, kwargs)

    def gate(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of W_O with gated heads, [..., H * e]; the hook before it."""
        x, self.here.own.x = self.here.own.x, None
        if x is None:
            raise NotFired(
                f"{self.label} is gated and computed no queries before its output projection was called: the call "
                "bypassed them, or their projection was replaced. Call remove() on the gates, and gate the heads again."
            )
        joined = read_first_argument(module, args, kwargs)
        if joined.shape[-1:] != (self.num_heads * self.head_size,):
            raise ShapeError(
                f"{self.label} gave its output projection a tensor of shape {tuple(joined.shape)}; expected "
                f"{self.num_heads} heads of {self.head_size} numbers on the last axis. If heads were pruned since "
                "hw.gate_heads, remove the gates, and gate the heads again."
            )
        if x.shape[:-1] != joined.shape[:-1]:
            raise ShapeError(
                f"{self.label}: its queries are made from a tensor of shape {tuple(x.shape)} and its output projection "
                f"gets {tuple(joined.shape)}; gates need the same tokens in both."
            )
        self.acted = True
        gates: Any = getattr(self.attention, NAME)
        found: Gates = gates(x)
        counted = self.balanced and self.attention.training and torch.is_grad_enabled()
        if counted and found.shares is not None and found.chosen is not None:
            self._count(found.shares, found.chosen)
        weights = found.weights.to(joined.dtype)
        if weights.shape[-1] == joined.shape[-1]:
            return replace_first_argument(args, kwargs, joined * weights)
        gated = joined.unflatten(-1, (self.num_heads, self.head_size)) * weights[..., None]
        return replace_first_argument(args, kwargs, gated.flatten(-2))

    def _count(self, shares: Tensor, chosen: Tensor) -> None:
        keep = self.here.own.padding.select_queries(shares.shape[1]) if shares.dim() == 3 else None
        if keep is not None:
            keep = keep.expand(shares.shape[:2])
        # a checkpoint that is computed again must save the same tensors
        term = balance(shares, chosen, keep)
        if is_recomputing():
            return
        self.here.own.balances.append(term)
        unread = len(self.here.own.balances)
        if unread > UNREAD_CALLS:
            raise NotFired(
                f"{unread} calls of {self.label} were counted and their balance was never read; call "
                "gating.loss(loss) after each forward, or set balance=0 in MixtureOfHeads."
            )

    def __getstate__(self) -> dict[str, Any]:
        # for copy and pickle: no count that nobody would read
        return {**vars(self), "balanced": False, "acted": False}


def tell_queries(attention: nn.Module, x: Tensor) -> None:
    """Tell gates the input x of the queries, [B, Q, d], where the parts of an attention are called instead of it."""
    for hook in attention._forward_pre_hooks.values():
        link = getattr(hook, "__self__", None)
        if isinstance(link, Link) and link.source is link.attention:
            link.here.own.x = x


# A compiled module calls its own hooks outside its graph; see `headwise.nn.hooks`.
run_uncompiled(Link.begin)
run_uncompiled(Link.take_input)
run_uncompiled(Link.gate)


class Gating(Handle):
    """Gates on the heads of a model until `remove()` or the end of a `with` block; returned by `gate_heads`.

    Attributes:
        heads: The attentions.
        setting: What the gates were built from.
    """

    def __init__(self, heads: Heads, setting: GateSetting) -> None:
        super().__init__()
        self.heads, self.setting = heads, setting
        balanced = isinstance(setting, MixtureOfHeads) and setting.balance > 0.0
        with self._attaching():
            # all are found and built before the first is attached
            keep = self._removers.append
            self._links = [_build_link(heads, site, setting, balanced, keep) for site in heads.sites]
            for link, gates in self._links:
                self._removers += link.attach(gates)
            if balanced:
                self._removers.append(ForwardScope(heads.model, always, self._end_forward).remove)
                self._watch_padding()

    @property
    def added(self) -> tuple[nn.Module, ...]:
        """The gates of each attention."""
        return tuple(gates for _, gates in self._links)

    def check(self) -> None:
        """Raise `NotFired` unless the heads of every attention were gated in some call."""
        silent = [link.label for link, _ in self._links if not link.acted]
        if silent:
            raise NotFired(
                f"no call of {len(silent)} of {len(self.heads)} attentions was gated: {', '.join(silent[:6])}. Run a "
                "forward pass of the model that gates were put on; under DataParallel, peft or a copy, of that one."
            )

    def balance(self) -> Tensor:
        """Return the balance term of a mixture of heads since the last call, and forget it.

        The mean over attentions and their calls in training mode with gradients; see `MixtureOfHeads`. Padding that the
        attentions received is left out, as in `Disagreement`.

        Raises:
            SettingError: The gates are no mixture, or its balance is 0.
            NotFired: No call was counted, or the handle is attached to no model.
        """
        if not isinstance(self.setting, MixtureOfHeads) or self.setting.balance == 0.0:
            raise SettingError(
                f"{self.setting} has no balance term; expected a MixtureOfHeads whose balance is above 0."
            )
        terms = [term for link, _ in self._links for term in link.take_balances()]
        if not terms:
            raise NotFired(
                "no gated attention ran in training mode with gradients since the last balance(). Run a forward pass "
                "first; under activation checkpointing use use_reentrant=False. A copy of the model is not counted."
            )
        return torch.stack([term.to(terms[0].device) for term in terms]).mean()

    def compute_term(self, loss: Tensor, share: float) -> Tensor | None:
        """Return the weight of a mixture times `balance()`; nothing without one, or in evaluation."""
        weight = getattr(self.setting, "balance", 0.0)
        if weight == 0.0 or not (self.heads.model.training and torch.is_grad_enabled()):
            return None
        return (share * weight * self.balance()).to(loss)

    def _describe(self) -> str:
        count = sum(parameter.numel() for _, gates in self._links for parameter in gates.parameters())
        return f"{self.setting} on {len(self.heads)} attentions, {count:,} parameters"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_links": []}

    def _end_forward(self, failed: bool) -> None:
        if failed:
            # what it counted must not enter the next loss
            for link, _ in self._links:
                link.take_balances()

    def _watch_padding(self) -> None:
        """Pass each link its query padding; cross-attention uses the padding of the decoder's self-attention."""
        links = {site: link for site, (link, _) in zip(self.heads.sites, self._links, strict=True)}
        own = [(site, site) for site in links if site.kind != "cross"]
        for site, asked in (*own, *find_askers(self.heads)):
            self.hook_before(asked.module, note_padding(asked.module, links[site].note_padding), prepend=True)


@dataclass(frozen=True)
class GateHeads(Method):
    """Gates on heads, before W_O: `gate_heads`, as a value.

    Attributes:
        gate: What the gates are.

    Raises:
        SettingError: `gate` is something else; or as of `Method`.

    Example:
        >>> import headwise as hw
        >>> hw.attach(hw.find_heads(nn.TransformerEncoderLayer(8, 2, 16)), GateHeads(hw.gating.SigmoidGate()))
        Attached(Gating(SigmoidGate(per='head', token=True, scale=2.0) on 1 attentions, 18 parameters))
    """

    gate: GateSetting
    stage: ClassVar[Stage] = "build"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_gate(self.gate)

    def attach(self, heads: Heads) -> Gating:
        """Put the gates on heads; errors as of `gate_heads`."""
        return gate_heads(self.select(heads), self.gate)


def gate_heads(heads: Heads, setting: GateSetting) -> Gating:
    """Put gates that depend on the token on the heads of a model, before W_O; returns a handle that takes them off.

    Y_h = O_h * g_h(x), where x is what the queries are made from: the equations of g are those of the setting. Each
    attention gets its own gates as the submodule `head_gates`, on the device and in the dtype of its output
    projection; they are part of the model's parameters and state dict, and of its copies. Build the optimizer
    afterwards, and wrap the model (DistributedDataParallel, `fully_shard`, peft) afterwards: under peft, train and save
    them with `LoraConfig(modules_to_save=["head_gates"])`.

    To load a gated model, put the same gates on a new one and load the state dict. `headwise.save` and
    `from_pretrained` of transformers do not make gates: of a folder that `save_pretrained` wrote, load the tensors
    after `gate_heads`. With aggregators or fewer heads too, change a new model in the same order, `aggregate` or
    `prune` and then `gate_heads`, and call `headwise.load(folder, model)`.

    Args:
        heads: The attentions, from `find_heads`.
        setting: `SigmoidGate` or `MixtureOfHeads`.

    Returns:
        The handle, also a context manager. A mixture of heads has a balance term: `loss = gating.loss(loss)`.

    Raises:
        SettingError: `heads` or `setting` is something else, or an attention has fewer heads than a mixture uses.
        LayoutError: There is no attention; one has gates already, pools with a learned query, pools its queries or
            computes them of other tokens than W_O gets (Hiera, ProphetNet's decoder, local attention of CANINE), or has
            no output projection that is a module; two share one; heads or weights are divided over processes; or the
            model is wrapped already. Nothing is attached then.
        ShapeError: In a call, what the queries are made from has other tokens than what W_O gets.
        NotFired: In a call, the output projection is another module than when the gates were put before it.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
        >>> x = torch.randn(3, 5, 8)
        >>> before = model(x)
        >>> gate_heads(hw.find_heads(model), hw.gating.SigmoidGate())
        Gating(SigmoidGate(per='head', token=True, scale=2.0) on 2 attentions, 36 parameters)
        >>> torch.equal(model(x), before)  # until the gates are trained
        True
    """
    require_heads(heads)
    require_gate(setting)
    if not heads.sites:
        raise LayoutError("gate_heads was given no attention; expected at least one from find_heads.")
    if has_peft(heads.model):
        raise LayoutError(
            f"{type(heads.model).__name__} holds adapters of peft, which would not save gates with them; call "
            f"hw.gate_heads on the base model, and then get_peft_model with LoraConfig(modules_to_save=[{NAME!r}])."
        )
    guard_hooks()
    return Gating(heads, setting)


def _build_link(heads: Heads, site: Site, setting: GateSetting, balanced: bool, undo: Undo) -> tuple[Link, nn.Module]:
    """Return the link of an attention and its gates; refuse an attention that cannot have them."""
    if hasattr(site.module, NAME):
        raise LayoutError(
            f"{site.label} already has {NAME}; call remove() on the handle of the first gate_heads() before a second. "
            "A copy keeps the gates of its model: remove() them before it is copied."
        )
    if site.kind == "pooling":
        raise LayoutError(
            f"{site.label} pools a sequence with one learned query for each head, so that its gates would depend on no "
            "token; leave it out (heads.kind('self'))."
        )
    if hands_output(site):
        raise LayoutError(
            f"{site.label} ({type(site.module).__name__}) hands the weight of its output projection to a "
            "function instead of calling it, and so would a copy of the model, without its gates; leave it out."
        )
    different = _find_other_tokens(site)
    if different is not None:
        raise LayoutError(
            f"{site.label} ({type(site.module).__name__}) {different}, so that its output projection gets other tokens "
            "than its queries are made from, and gates need the same; leave it out (heads.where(...), heads.kind(...))."
        )
    output_projection = site.expose(undo)
    projection = output_projection.module
    require_unwrapped(heads, site, projection, "gates", "hw.gate_heads")
    if site.divided or any(is_sharded(parameter) for parameter in projection.parameters()):
        raise LayoutError(
            f"{site.label}: its heads or its output projection are divided over processes, and gates are not; call "
            "hw.gate_heads first, or leave this attention out of the plan of parallelize_module."
        )
    others = [other.output_projection for other in heads.found if other is not site]
    if any(other is not None and other.module is projection for other in others):
        raise LayoutError(
            f"{site.label} calls the same output projection as another attention, whose heads its gates would reach "
            "too; select attentions with projections of their own."
        )
    width = site.slices[0].across
    if width == 0:
        raise LayoutError(
            f"{site.label}: the width of what its queries are made from is not known, as {site.slices[0].name} is no "
            "matrix; use the full-precision weights."
        )
    gates = build_gates(setting, site.num_heads, site.head_size, width)
    gates = match_placement(gates, projection).train(site.module.training)
    path = f"{site.name}.{NAME}" if site.name else NAME
    RequireTrained(path, "gate").watch(gates)
    # the query projection where it is called as a module
    queries = site.slices[0].parts[0].module
    source = site.module if queries is None or is_handing(site) else queries
    return Link(site, output_projection, source, balanced), gates


def _find_other_tokens(site: Site) -> str | None:
    """Return the reason why W_O gets other tokens than the queries, as far as attributes tell."""
    module: Any = site.module
    for name in ("query_stride", "q_stride", "stride_q"):
        stride = getattr(module, name, None)
        steps = stride if isinstance(stride, tuple | list) else (stride,)
        if any(isinstance(step, int) and step > 1 for step in steps):
            return f"pools its queries ({name}={stride})"
    if isinstance(getattr(module, "ngram", None), int):
        return f"attends in several streams of tokens (ngram={module.ngram})"
    around: Any = site.model.get_submodule(site.name.rpartition(".")[0])
    if getattr(around, "local", False) is True and hasattr(around, "attend_from_chunk_width"):
        return "is called for one chunk of a text after another (local=True)"
    return None
