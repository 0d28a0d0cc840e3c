"""Which heads are put together: equal groups of heads that are alike."""

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, SettingError, require_integer, require_shape

# Of the largest similarity: an exchange that gains less is none.
NO_GAIN = 1e-12

Groups = tuple[tuple[int, ...], ...]


def group_in_order(heads: int, groups: int) -> Groups:
    """Return equal groups of neighbors.

    Raises:
        SettingError: `groups` does not divide the number of heads.

    Example:
        >>> group_in_order(6, 3)
        ((0, 1), (2, 3), (4, 5))
    """
    require_integer("groups", groups, low=1, high=heads)
    if heads % groups:
        divisors = [number for number in range(1, heads) if heads % number == 0]
        raise SettingError(
            f"groups is {groups}, and {heads} heads do not make that many equal groups; expected one of "
            f"{', '.join(map(str, divisors))}."
        )
    size = heads // groups
    return tuple(tuple(range(start, start + size)) for start in range(0, heads, size))


def group_by_similarity(similarity: Tensor, groups: int) -> Groups:
    """Return equal groups of heads with a large sum of similarities inside groups.

    From groups of neighbors on, the two heads are exchanged that raise the sum most, as long as there are such. This is
    not always the best of all groupings; its sum is never below that of neighbors.

    Args:
        similarity: Of each pair of heads, [G, G]; the mean of both orders counts, and the diagonal is not read.
        groups: Their number, a divisor of G.

    Raises:
        SettingError: `groups` does not divide the number of heads.
        ShapeError: `similarity` is not square.
        HeadwiseError: `similarity` is not finite.

    Example:
        >>> alike = torch.tensor([[0.0, 0.1, 0.9, 0.2], [0.1, 0.0, 0.3, 0.8], [0.9, 0.3, 0.0, 0.1], [0.2, 0.8, 0.1, 0]])
        >>> group_by_similarity(alike, 2)
        ((0, 2), (1, 3))
    """
    require_shape("similarity", similarity, (None, len(similarity)))
    alike = similarity.double().cpu()
    alike = ((alike + alike.T) / 2).fill_diagonal_(0)
    if not alike.isfinite().all():
        raise HeadwiseError("similarity holds NaN or infinity; expected finite numbers.")
    return tuple(sorted(_exchange(alike, group_in_order(len(alike), groups))))


def _exchange(alike: Tensor, groups: Groups) -> Groups:
    """Return groups in which no exchange of two heads raises the sum."""
    member = torch.zeros(len(alike), len(groups), dtype=alike.dtype)
    for number, group in enumerate(groups):
        member[list(group), number] = 1
    while True:
        inside = alike @ member
        own = (inside * member).sum(1)
        to_other = inside @ member.T  # [i, j]: of i with the group that j is in
        gain = to_other + to_other.T - own[:, None] - own - 2 * alike
        gain[(member @ member.T) > 0] = 0
        place = int(gain.argmax())
        first, second = divmod(place, len(alike))
        if float(gain[first, second]) <= NO_GAIN * float(alike.abs().max()):
            return tuple(tuple(column.nonzero().flatten().tolist()) for column in member.T)
        member[[first, second]] = member[[second, first]]
