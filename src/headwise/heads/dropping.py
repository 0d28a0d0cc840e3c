"""DropHead: whole heads zeroed at random while a model trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, NotFired, require_integer, require_range
from headwise.heads.ablation import make_check, require_unshared
from headwise.heads.capture import require_joined
from headwise.heads.heads import Heads, Site, require_heads
from headwise.nn.checkpointing import is_in_checkpoint, is_recomputing
from headwise.nn.hooks import Handle, read_first_argument, replace_first_argument


@dataclass(eq=False)
class _Dropped:
    """An attention, and whether heads of it could be dropped; its own object, as in `ablate`."""

    site: Site
    acted: bool = False


class HeadDropping(Handle):
    """Heads dropped at random in training mode until `remove()` or the end of a `with` block; see `drop_heads`.

    What was attached before (taps, penalties, measures) reads heads as they were computed. A copy of the model drops
    none.

    Attributes:
        heads: The attentions.
        generator: What is drawn from; None for torch's generator of the device.
    """

    def __init__(self, heads: Heads, rate: float, *, seed: int | None = None) -> None:
        super().__init__()
        require_heads(heads)
        self.rate = rate
        if seed is not None:
            require_integer("seed", seed)
        self.heads, self.generator = heads, None if seed is None else torch.Generator().manual_seed(seed)
        require_unshared(heads)
        for site in heads:
            if site.divided:
                raise LayoutError(f"{site.label}: its heads are divided over processes, which would drop others each.")
        self._dropped = [_Dropped(site) for site in heads]
        with self._attaching():
            for dropped in self._dropped:
                site = dropped.site
                projection = site.expose(self._removers.append)
                self._hook_before(projection.module, self._make_hook(dropped))
                self._hook_before(site.module, make_check(site, projection, "hw.drop_heads", training_only=True))

    def verify(self) -> None:
        """Raise `NotFired` unless heads of every attention could be dropped in some call in training mode."""
        silent = [dropped.site.label for dropped in self._dropped if not dropped.acted]
        if silent:
            raise NotFired(
                f"no call in training mode went through {len(silent)} of {len(self.heads)} attentions "
                f"({', '.join(silent[:6])}), so none of their heads was dropped; call model.train(), and run a forward "
                "pass."
            )

    @property
    def rate(self) -> float:
        """Probability of dropping a head, in [0, 0.99]; set it between steps for a schedule."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        require_range("rate", rate, low=0.0, high=0.99)
        self._rate = rate

    def _make_hook(self, dropped: _Dropped) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict] | None]:
        site = dropped.site

        def drop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
            if not module.training:
                return None
            dropped.acted = True
            joined = read_first_argument(module, args, kwargs)
            require_joined(joined, site)
            factors = self._draw(site, joined).repeat_interleave(site.head_size, dim=-1).to(joined)
            factors = factors.view(joined.shape[0], *[1] * (joined.dim() - 2), joined.shape[-1])
            return replace_first_argument(args, kwargs, joined * factors)

        return drop

    def _draw(self, site: Site, joined: Tensor) -> Tensor:
        """Return m_h H / sum_h m_h of each row, [B, H]."""
        shape = (joined.shape[0], site.num_heads)
        if self.generator is None:
            drawn = torch.rand(shape, device=joined.device)
        elif is_in_checkpoint() or is_recomputing():
            raise NotFired(
                f"{site.label}: an activation checkpoint is computed again in the backward pass, where a generator of "
                "its own would drop other heads; leave seed out, since checkpoints restore torch's generator."
            )
        else:
            drawn = torch.rand(shape, generator=self.generator, device="cpu")
        kept = (drawn >= self.rate).float()
        kept = torch.where(kept.sum(dim=-1, keepdim=True) > 0, kept, torch.ones_like(kept))
        return kept * (site.num_heads / kept.sum(dim=-1, keepdim=True))

    def _describe(self) -> str:
        return f"{self.rate:g} of the heads of {len(self.heads)} attentions"


def drop_heads(heads: Heads, rate: float, *, seed: int | None = None) -> HeadDropping:
    """Zero each head of each example with probability `rate` while training, and scale the others up: DropHead.

    O_h <- O_h m_h H / sum_h m_h before W_O, with m_h ~ Bernoulli(1 - rate) drawn for each example and attention (Zhou
    et al. 2020, section 3, Eq. 3). An example is a row of what W_O gets: where windows of an image are folded into the
    batch (Swin), each window draws its own. Where every head of an example would be dropped, all stay. In evaluation
    mode nothing is dropped. For scheduled DropHead, set `rate` of the handle between steps.

    Args:
        heads: The attentions.
        rate: Probability of dropping a head, in [0, 0.99].
        seed: Seed of a generator of its own, so that dropout and the order of the data are those of a run without;
            None draws from torch's generator of the device, as dropout does.

    Raises:
        SettingError: `heads` is something else, or `rate` or `seed` is out of range.
        LayoutError: An attention has no output projection that is a module, or one that another attention calls too, or
            is divided over processes.
        NotFired: In a call, an activation checkpoint is computed under a seed, or the output projection is another
            module than when this was attached.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> dropping = drop_heads(hw.find_heads(model), 0.2)
        >>> dropping.rate = 0.1
        >>> dropping
        HeadDropping(0.1 of the heads of 1 attentions)
    """
    return HeadDropping(heads, rate, seed=seed)
