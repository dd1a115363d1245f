"""Series of step times with noise."""

from __future__ import annotations

import random
from collections.abc import Sequence


def noisy(levels: Sequence[float], seed: int, noise: float = 0.02) -> list[float]:
    chance = random.Random(seed)
    return [level * (1 + chance.gauss(0, noise)) for level in levels]
