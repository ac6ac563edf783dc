"""The private names of Orbax that Stratagem uses, and what it needs of each.

A test (tests/devices/test_private_names.py) fails when a new version of Orbax moves or changes
one of them.
"""

from __future__ import annotations

# Orbax keeps its client of the job's coordination service for the life of the process; in a job
# whose processes have changed that service is another one. Needed: `cache_clear()`.
from orbax.checkpoint._src.futures.signaling_client import get_signaling_client


def forget_coordination_service() -> None:
    """Lets the next save look up the coordination service of the processes that are there now."""
    get_signaling_client.cache_clear()
