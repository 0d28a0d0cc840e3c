"""Where to write a name beside a dot, so that no name covers another name or a dot.

Pure geometry on boxes in one unit, such as points; must not know what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Box = tuple[float, float, float, float]

# How far from its dot a label is tried, in points.
DISTANCES = (8.0, 14.0, 22.0, 32.0, 46.0)


def place_labels(
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    obstacles: Sequence[Box],
    frame: Box,
) -> list[Box]:
    """Return a box for each label, near its anchor, inside the frame, clear of the others where that is possible.

    Labels are placed one after the other, those with the most crowded anchors first, each at the nearest place that
    costs least; covering another label costs most, then an obstacle, then distance.

    Args:
        anchors: The dots, x and y.
        sizes: Width and height of each label.
        obstacles: Boxes (left, bottom, right, top) that should stay visible.
        frame: The box that labels must stay in.

    >>> place_labels([(50, 50)], [(20, 10)], [], (0, 0, 100, 100))
    [(58.0, 45.0, 78.0, 55.0)]
    """
    crowding = [sum(math.dist(here, there) < 60 for there in anchors) for here in anchors]
    placed: dict[int, Box] = {}
    for index in sorted(range(len(anchors)), key=lambda index: (-crowding[index], index)):
        candidates = [
            (distance, box) for distance in DISTANCES for box in _around(anchors[index], sizes[index], distance)
        ]
        _, placed[index] = min(
            ((_cost(box, distance, placed.values(), obstacles, frame), box) for distance, box in candidates),
            key=lambda found: found[0],
        )
    return [placed[index] for index in range(len(anchors))]


def overlap(one: Box, other: Box) -> float:
    """Return the area that two boxes share.

    >>> overlap((0, 0, 4, 4), (2, 3, 9, 9))
    2
    """
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0


def _around(anchor: tuple[float, float], size: tuple[float, float], distance: float) -> list[Box]:
    """Return boxes whose nearest point lies at the distance: beside, above, below and at the corners."""
    (x, y), (width, height), slant = anchor, size, distance / math.sqrt(2)
    corners = [(x + distance, y - height / 2)]
    corners += [(x - share * width, y + distance) for share in (0.5, 0.2, 0.8)]
    corners += [(x - share * width, y - distance - height) for share in (0.5, 0.2, 0.8)]
    corners += [(x - distance - width, y - height / 2)]
    corners += [(left, bottom) for left in (x + slant, x - slant - width) for bottom in (y + slant, y - slant - height)]
    return [(left, bottom, left + width, bottom + height) for left, bottom in corners]


def _cost(box: Box, distance: float, placed: Iterable[Box], obstacles: Iterable[Box], frame: Box) -> float:
    outside = (box[2] - box[0]) * (box[3] - box[1]) - overlap(box, frame)
    covered = sum(overlap(box, other) for other in placed)
    return distance + 100 * outside + 10 * covered + sum(overlap(box, other) for other in obstacles)
