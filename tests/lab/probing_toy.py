"""Probing files made for the tests: sentences whose label shows in one word."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

FILLERS = ("the", "a", "film", "plot", "of", "it", "here", "once", "near", "town", "rain", "stone")
VERBS = {"PAST": ("walked", "saw", "went"), "PRES": ("walks", "sees", "goes")}


def write_probing(path: Path, counts: Mapping[str, int], *, seed: int = 3) -> Path:
    """Write so many lines of each partition, with a field that is none of ours between label and sentence."""
    draw = random.Random(seed)
    lines = []
    for partition, count in counts.items():
        for _ in range(count):
            label = draw.choice(sorted(VERBS))
            words = draw.choices(FILLERS, k=draw.randint(4, 9))
            words.insert(draw.randrange(len(words) + 1), draw.choice(VERBS[label]))
            lines.append(f"{partition}\t{label}\tignored\t{' '.join(words)} .\n")
    path.write_text("".join(lines))
    return path
