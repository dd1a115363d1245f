"""How a series of ours is found in an expression of Prometheus."""

from __future__ import annotations

import re

SERIES = re.compile(r"slurm_watchdog_(\w+)(?:\{([^}]*)\})?")
"""Its name, and the labels that are asked for."""
PUT_ON_BY_PROMETHEUS = {"instance", "job"}
"""Labels that every series gets when it is read."""
