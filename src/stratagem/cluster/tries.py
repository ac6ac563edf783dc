"""How long a try to reach a task takes."""

from __future__ import annotations

import time

LEAST_SECONDS = 1.0


def fair(deadline: float) -> float:
    """Seconds for a try: what is left, and a second at least.

    The last one would tell of no more than a time-out otherwise, in the place of what others found.

    Args:
        deadline: when trying ends, as `time.monotonic` tells it.
    """
    return max(LEAST_SECONDS, deadline - time.monotonic())
