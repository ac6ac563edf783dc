"""Losses, growth, preemption and restarts, one after the other in one job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "programs")]

import paths
from rejoin import ROWS
from test_rejoin import run

pytestmark = pytest.mark.processes
STEPS = -(-paths.ROWS // paths.BATCH)  # of an epoch


def check(found: list[Any]) -> None:
    """All have the same bits, and each row of each epoch they were there for counted once."""
    assert len({result["digest"] for result in found}) == 1
    losses = paths.undisturbed()
    for result in found:
        rows = result["history"]["rows"]
        assert rows == [ROWS] * len(rows)
        np.testing.assert_allclose(result["history"]["loss"], losses[-len(rows) :], rtol=1e-4)


def how(events: list[Any], data: str = "arrays", steps: int = 1, backup: int = 0) -> str:
    return json.dumps(
        {"events": events, "data": data, "steps_per_execution": steps, "backup": backup}
    )


def test_a_job_shrinks_to_one_worker_and_grows_in_the_middle_of_an_execution(tmp_path):
    options = ["--workers", "2", "--min-workers", "1", "--max-restarts", "1"]
    events = [[1, STEPS + 1, "kill"], [0, 2 * STEPS + 1, "wait"]]
    found, _ = run(
        tmp_path,
        [*options, "--wait-for-replacement", "120"],
        "paths",
        how(events, "distributed", steps=3),
    )
    assert [result["again"] for result in found] == [False, True]
    assert found[0]["shares"] == [2, 2, 1, 1, 2, 2, 2, 2]
    check(found)


def test_a_preempted_job_saves_with_whom_is_left_and_starts_again_with_all(tmp_path):
    options = ["--workers", "3", "--min-workers", "2", "--max-restarts", "1"]
    events = [[0, 3, "kill"], [2, STEPS + 2, "terminate"]]
    found, output = run(tmp_path, options, "paths", how(events, backup=100))
    assert "restart the group: preempted after saving" in output
    assert [result["again"] for result in found] == [True] * 3
    assert all(set(result["shares"]) == {3} for result in found)
    # From the backup, not from the start.
    assert 0 < len(found[0]["shares"]) < paths.EPOCHS * STEPS - 3
    check(found)
