# %% [markdown]
# # Add a method
#
# A penalty is a frozen dataclass that says what it reads of each head, and returns a sum over tokens with their
# number. A rule of repulsion is one that turns the geometry of heads into coefficients. Both then work on every model
# and in every loop, with relative strengths and targets. Whatever else is done to heads is a `hw.Method`.

# %%
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.kernels import Geometry
from headwise.repulsion import Mixing
from headwise.repulsion.rules import RepulsiveRule
from headwise.similarity.terms import Arithmetic


@dataclass(frozen=True)
class SameNorm(Arithmetic):
    """How equal the sizes of heads are: mean over pairs of |O_i| |O_j| / (|O_i|^2 + |O_j|^2), at most 1/2."""

    reads = "outputs"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum over valid queries [B, Q] and their number; `tensor` is [B, Q, H, e]."""
        norms = tensor.norm(dim=-1)
        one, other = norms.unsqueeze(-1), norms.unsqueeze(-2)
        pairs = one * other / (one.square() + other.square()).clamp_min(1e-12)
        heads = norms.shape[-1]
        values = pairs.triu(1).sum((-2, -1)) / (heads * (heads - 1) / 2)
        kept = torch.ones_like(values) if keep is None else keep.to(values.dtype)
        return (values * kept).sum(), kept.sum()


torch.manual_seed(0)
model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
heads = hw.find_heads(model)
penalty = hw.Disagreement(heads, SameNorm() + 0.5 * hw.similarity.CKA(), strength=hw.Relative(0.2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# %% [markdown]
# A rule: every head is pushed straight away from the mean of all heads. `geometry` has the squared distances of the
# heads of each group; `Mixing` says how gradients and parameters are combined.

# %%


@dataclass(frozen=True)
class AwayFromTheMean(RepulsiveRule):
    """g'_i = eps (g_i - alpha (theta_i - mean_j theta_j))."""

    needs_inner = False

    def mixing(self, geometry: Geometry) -> Mixing:
        """Return the coefficients [*, M, M] of gradients and parameters."""
        distances = geometry.squared_distances
        eye = torch.eye(distances.shape[-1], dtype=distances.dtype).expand_as(distances)
        from_mean = eye - 1 / distances.shape[-1]
        return Mixing(self.step_size * eye, None, self.step_size * self._weight * from_mean, self._ratio)


repulsion = hw.repel(heads, AwayFromTheMean(alpha=hw.Relative(0.3)), optimizer)
for _ in range(3):
    tokens = torch.randn(8, 6, 16)
    loss = (model(tokens) - tokens.flip(1)).square().mean()
    optimizer.zero_grad()
    penalty.loss(loss).backward()
    optimizer.step()
print(repulsion.last)
print("similarity", float(penalty.last))
assert torch.allclose(repulsion.last.force_ratio, torch.tensor(0.3))

# %% [markdown]
# Anything else is a `hw.Method`: its settings, and `attach`, which returns a handle. Layers, kinds of attention,
# removal, the end of a `with` block, trainers and the laboratory's arms are there already. This one scales what heads
# put out:

# %%


@dataclass(frozen=True)
class Damp(hw.Method):
    """O_h <- factor O_h."""

    factor: float = 0.5

    def attach(self, heads: hw.Heads) -> hw.nn.Handle:
        """Scale the selected heads before W_O."""
        handle = hw.nn.Handle()
        for site in self.select(heads):
            handle.hook_before(site.expose().module, lambda _, args, kwargs: ((args[0] * self.factor,), kwargs))
        return handle


model.eval()
with torch.no_grad(), hw.attach(heads, Damp(), hw.Tap(outputs=True)):
    print("damped", model(tokens).std())
