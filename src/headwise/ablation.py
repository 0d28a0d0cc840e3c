"""Removing heads from a model, and how much each one matters.

A head is removed by zeroing its slice of the output projection's input, in any model whose W_O was found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.checks import NotFired, SettingError, require_integer
from headwise.given_heads import require_heads
from headwise.heads import Heads, Site
from headwise.hooks import Hook
from headwise.recomputation import in_checkpoint

__all__ = ["Ablation", "Importance", "ablate", "importance"]


class Ablation:
    """Heads taken out of a model until `remove()` or the end of a `with` block; made by `ablate`."""

    def __init__(self, heads: Heads, indices: tuple[int, ...]) -> None:
        self.heads, self.indices = heads, indices
        self._reached: set[str] = set()
        self._handles: list[RemovableHandle] = []
        # every site is reached before the first is changed: a refusal leaves the model as it was
        for site, seam in [(site, site.expose()) for site in heads.sites]:
            module = seam.module
            self._handles.append(module.register_forward_pre_hook(Hook(module, self._zeroing(site))))

    @property
    def called(self) -> bool:
        """Whether a forward pass went through every ablated site."""
        return all(site.name in self._reached for site in self.heads.sites)

    def verify(self) -> None:
        """Raise `NotFired` unless a forward pass went through every ablated site."""
        silent = [site.name or "(model)" for site in self.heads.sites if site.name not in self._reached]
        if silent:
            raise NotFired(
                f"no forward pass went through the ablated heads of {len(silent)} of {len(self.heads)} sites "
                f"({', '.join(silent[:6])}); the score cannot show their removal."
            )

    def remove(self) -> None:
        """Put the heads back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
        if kind is None:
            self.verify()

    def _zeroing(self, site: Site) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def zeroed(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if in_checkpoint():
                raise NotFired(
                    f"{site.name or 'the model'}: heads are removed for evaluation; a backward pass after the block "
                    "would compute this activation checkpoint again with the heads in place. Turn checkpointing off, "
                    "or gradients."
                )
            self._reached.add(site.name)
            keep = torch.ones(site.num_heads, 1, dtype=args[0].dtype, device=args[0].device)
            keep[list(self.indices)] = 0.0
            outputs = args[0].unflatten(-1, (site.num_heads, site.head_size))
            return ((outputs * keep).flatten(-2), *args[1:])

        return zeroed


@dataclass(frozen=True)
class Importance:
    """What removing each head costs.

    Attributes:
        baseline: The score of the whole model.
        drops: Baseline minus the score without the head, for each site [H]; negative where removal helps.
    """

    baseline: float
    drops: dict[str, Tensor]

    def __str__(self) -> str:
        lines = [f"score of the whole model {self.baseline:.4g}; drop without each head:"]
        width = max(len(name) for name in self.drops)
        for name, drops in self.drops.items():
            lines.append(f"{name.ljust(width)}  " + " ".join(f"{float(drop):+.4f}" for drop in drops))
        return "\n".join(lines)


def ablate(heads: Heads, *indices: int) -> Ablation:
    """Remove heads, by index, from every site of `heads`; returns a handle that puts them back.

    O_h = 0 for each h in `indices` before W_O (Michel et al. 2019 call it masking a head).

    Args:
        heads: The sites; select one with `.where(...)` or `.layer(...)`.
        indices: Heads to remove, from 0.

    Raises:
        SettingError: No index was given, or a site does not have that many heads.
        LayoutError: The output projection of a site was not found.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with ablate(hw.find_heads(model), 1) as ablation:
        ...     _ = model(torch.randn(3, 5, 8))
        >>> ablation.called
        True
    """
    require_heads(heads)
    if not indices:
        raise SettingError("ablate was given no head; expected at least one index, counted from 0.")
    for site in heads.sites:
        for index in indices:
            require_integer(f"head of {site.name or 'the model'}", index, high=site.num_heads - 1)
    return Ablation(heads, indices)


def importance(heads: Heads, score: Callable[[], float]) -> Importance:
    """Return how much the score drops when each head is removed alone.

    Args:
        heads: The sites whose heads are removed, one at a time.
        score: Runs the model on the user's data and returns its score; called once whole and once a head, without
            gradients.

    Raises:
        NotFired: `score` did not run the model.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> x = torch.randn(3, 5, 8)
        >>> result = importance(hw.find_heads(model), lambda: float(model(x).std()))
        >>> result.drops["self_attn"].shape
        torch.Size([2])
    """
    require_heads(heads)
    with torch.no_grad():
        return _importance(heads, score)


def _importance(heads: Heads, score: Callable[[], float]) -> Importance:
    baseline = float(score())
    drops: dict[str, Tensor] = {}
    for site in heads.sites:
        one = Heads(heads.model, (site,), heads.projections, heads.found)
        scores = []
        for head in range(site.num_heads):
            with ablate(one, head) as ablation:
                scores.append(float(score()))
                ablation.verify()
        drops[site.name or "(model)"] = baseline - torch.tensor(scores, dtype=torch.float64)
    return Importance(baseline, drops)
