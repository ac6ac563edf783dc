"""Workers that are lost, and replaced, under `stratagem run`; training goes on from memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "programs")]

import rejoin
import rejoin_loop
from jobs import PROGRAMS

pytestmark = pytest.mark.processes
SECONDS = 240
MIN_WORKERS = ["--workers", "3", "--min-workers", "2"]
REPLACED = [*MIN_WORKERS, "--max-restarts", "1", "--wait-for-replacement", "120"]


def run(folder: Path, options: list[str], program: str, *arguments: Any) -> tuple[list[Any], str]:
    """What the workers that came to the end have found, by rank, and all that was printed."""
    command = [
        sys.executable,
        "-m",
        "stratagem.cli",
        "run",
        *options,
        str(PROGRAMS / f"{program}.py"),
    ]
    done = subprocess.run(
        [*command, str(folder), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "caches")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return found, done.stdout


def check_fit(found: list[Any]) -> None:
    """All have the same bits, each row of each epoch was counted once, nothing else was lost."""
    assert len({result["digest"] for result in found}) == 1
    undisturbed = rejoin.undisturbed()
    for result in found:
        rows, epochs = result["history"]["rows"], len(result["history"]["rows"])
        assert rows == [rejoin.ROWS] * epochs
        assert result["iterations"] == undisturbed["iterations"]
        for name in ("loss", "val_loss", "mae"):
            expected = undisturbed["history"][name][-epochs:]
            np.testing.assert_allclose(result["history"][name], expected, rtol=1e-4)
        for mine, expected in zip(result["weights"], undisturbed["weights"], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def test_fit_goes_on_without_the_chief_and_its_replacement_takes_its_share(tmp_path):
    found, output = run(tmp_path, REPLACED, "rejoin", 0, 3, 10, -1)
    assert [result["joined"] for result in found] == [True, False, False]
    steps = rejoin.EPOCHS * -(-rejoin.ROWS // rejoin.BATCH)
    assert [result["shares"] for result in found] == [
        [3] * (steps - 10),
        *([[3] * 3 + [2] * 7 + [3] * (steps - 10)] * 2),
    ]
    check_fit(found)
    assert [result["found"] for result in found] == [[], [True], [True]]  # compiled ahead
    for who in ("worker 1", "worker 2"):
        assert f"[{who}] worker 0 is lost: its connection closed." in output
        assert f"[{who}] worker 0 joins. Going on with worker 0, w" in output


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_lost_at_whatever_step(tmp_path, seed):
    rng = np.random.default_rng(seed)
    steps = rejoin.EPOCHS * -(-rejoin.ROWS // rejoin.BATCH)
    rank, step = int(rng.integers(3)), int(rng.integers(1, steps - 4))
    found, _ = run(tmp_path, REPLACED, "rejoin", rank, step, step + 2, -1)
    assert [result["joined"] for result in found] == [i == rank for i in range(3)]
    assert all(result["shares"][-1] == 3 for result in found)
    check_fit(found)


def test_who_is_a_step_ahead_takes_it_back(tmp_path):
    found, _ = run(tmp_path, MIN_WORKERS, "rejoin", 1, 4, -1, 3)
    assert [result["taken back"] for result in found] == [1, 0]
    check_fit(found)


def test_a_loop_of_ones_own_gets_its_worker_back_at_a_backup(tmp_path):
    found, output = run(tmp_path, REPLACED, "rejoin_loop", 1, 4, 8)
    assert [result["joined"] for result in found] == [False, True, False]
    assert len({result["digest"] for result in found}) == 1
    first, joined, _ = found
    assert first["history"]["rows"] == [rejoin_loop.ROWS] * rejoin_loop.EPOCHS
    assert joined["history"]["rows"] == first["history"]["rows"][-len(joined["history"]["rows"]) :]
    assert first["shares"] == [3] * 4 + [2] * 5 + [3] * 9
    assert joined["shares"] == [3] * 9
    losses, weights = rejoin_loop.undisturbed()
    np.testing.assert_allclose(first["history"]["loss"], losses, rtol=1e-4)
    np.testing.assert_allclose(first["weights"][0], weights, rtol=1e-4, atol=1e-5)
    # Components of the lost worker are lost: one replica's part of four steps, and it is said.
    assert output.count("keeps a component on each replica until it is read: those of the") == 2
