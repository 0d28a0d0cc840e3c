"""DropHead: whole heads zeroed at random while training."""

import torch
from torch import Tensor, nn

from headwise.heads.heads import Heads


class DropHead:
    """Zero each head of each example with probability `rate` while training, and rescale the rest.

    O_h <- O_h * m_h * H / sum_h m_h with m_h ~ Bernoulli(1 - rate), drawn per example and attention (Zhou et al. 2020,
    section 3, Eq. 3). Where every head of an example would be dropped, all stay. The draws have their own generator, so
    that dropout and the order of the data are those of every other arm.
    """

    def __init__(self, heads: Heads, rate: float, *, seed: int) -> None:
        self.rate = rate
        self.generator = torch.Generator().manual_seed(seed)
        self._handles = [site.expose().module.register_forward_pre_hook(self._hook(site.num_heads)) for site in heads]

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, num_heads: int):
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not module.training:
                return None
            outputs, *rest = arguments
            kept = (torch.rand(outputs.shape[0], num_heads, generator=self.generator) >= self.rate).float()
            kept = torch.where(kept.sum(dim=-1, keepdim=True) > 0, kept, torch.ones_like(kept))
            scale = kept * (num_heads / kept.sum(dim=-1, keepdim=True))
            spread = scale.repeat_interleave(outputs.shape[-1] // num_heads, dim=-1)
            spread = spread.view(outputs.shape[0], *[1] * (outputs.dim() - 2), outputs.shape[-1])
            return (outputs * spread.to(outputs), *rest)

        return hook
