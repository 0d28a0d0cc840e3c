"""`verify` tells heads that attend, by weights over positions that sum to 1, from heads that are apart and do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from cases import cases, thin, tiers
from heads import attentions
from heads.attentions import GatedAttention, RotatedValuesAttention, SeparateAttention
from heads.calling import CallingAttention
from heads.own import LensAttention, ListAttention, ParameterAttention, ThreeLists

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(4))


def decay(scores: Tensor) -> Tensor:
    """Weights of a past that fades."""
    places = torch.arange(scores.shape[-1])
    return scores * 0.9 ** (places[:, None] - places).clamp_min(0)


# What becomes of q k^T: weights of at least 0 that sum to 1 ...
ATTENDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda q, k: (q @ k.mT).softmax(-1),
    "causal softmax": lambda q, k: (q @ k.mT - 9e9 * torch.ones(q.shape[-2], k.shape[-2]).triu(1)).softmax(-1),
    "in single precision": lambda q, k: (q @ k.mT).float().softmax(-1).to(q.dtype),
    "linear attention that is normalized": lambda q, k: F.normalize((F.elu(q) + 1) @ (F.elu(k) + 1).mT, p=1.0, dim=-1),
}
# ... or others.
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear attention": lambda q, k: (F.elu(q) + 1) @ (F.elu(k) + 1).mT,
    "mLSTM": lambda q, k: (q @ k.mT).tril() / (q @ k.mT).tril().sum(-1, keepdim=True).abs().clamp_min(1.0),
    "retention": lambda q, k: decay(q @ k.mT).tril(),
    "sums to 1 with signs": lambda q, k: 2.0 * (q @ k.mT).softmax(-1) - (-q @ k.mT).softmax(-1),
    "sigmoid": lambda q, k: (q @ k.mT).sigmoid(),
    "squared": lambda q, k: (q @ k.mT).relu().square(),
}


class Weighing(SeparateAttention):
    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.join(self.weigh(q, k) @ v))


class WeighingParameters(ParameterAttention):
    """Likewise, of weights that are parameters."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(width=12)
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bld,hed->bhle", x, self.weights()[kind]) for kind in ("query", "key", "value"))
        return self.proj((self.weigh(q, k) @ v).transpose(1, 2).flatten(2))


@tiers("kind", [Weighing], [WeighingParameters])
@cases("name", [*ATTENDING, *OTHERS])
def test_what_weighs_positions_by_a_mean_attends_and_nothing_else_does(name: str, kind: type):
    torch.manual_seed(0)
    model = nn.Sequential(kind((ATTENDING | OTHERS)[name]))
    result = hw.verify(hw.find_heads(model), (X,))
    assert result == hw.heads.Verification(("0",), unweighted=() if name in ATTENDING else ("0",))
    assert ("not seen to attend" in str(result)) is (name in OTHERS)


# What is no attention, or is refused, or takes something else than tokens.
ODD = ("Module", "StridedAttention", "ShuffledAttention", "SwappedAttention", "BlendedAttention", "LinearAttention")
ODD = (*ODD, "PointwiseGates", "MixedHeadsAttention", "KeyValueAttention")


BUILT = [
    *(
        kind
        for name, kind in vars(attentions).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and name not in ODD
    ),
    CallingAttention,
    ThreeLists,
    lambda: ListAttention(12),
    lambda: LensAttention(12),
    lambda: ParameterAttention(width=12, output_axes="h e d", causal=True),
    lambda: nn.MultiheadAttention(12, 4, batch_first=True),
]


@tiers("build", *thin(BUILT, 4))
def test_every_softmax_is_seen_to_attend_whatever_is_around_it(build):
    torch.manual_seed(0)
    model = build()
    inputs = (X, X, X) if isinstance(model, nn.MultiheadAttention) else (X,)
    assert hw.verify(hw.find_heads(model), inputs) == hw.heads.Verification(("",))


def test_gates_and_rotated_values_hide_nothing_of_heads_that_do_not_attend():
    class Gated(GatedAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, gate = self.q_proj(x).unflatten(-1, (self.num_heads, 2 * self.head_dim)).chunk(2, -1)
            k, v = self.split(self.k_proj(x)), self.split(self.v_proj(x))
            heads = (OTHERS["mLSTM"](q.transpose(1, 2), k) @ v).transpose(1, 2)
            return self.o_proj((heads * gate.sigmoid()).flatten(2))

    class Rotated(RotatedValuesAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.rotate(self.split(one(x))) for one in (self.q_proj, self.k_proj, self.v_proj))
            return self.o_proj(self.join(OTHERS["retention"](q, k) @ v))

    for kind in (Gated, Rotated):
        torch.manual_seed(0)
        assert hw.verify(hw.find_heads(kind()), (X,)).unweighted == ("",)
