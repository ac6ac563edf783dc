"""MultiWorkerMirroredStrategy on real processes: rows 46 to 50 of the reference, and law 1."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from stratagem import errors

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "programs")]

import training
from jobs import Job, run_job

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=[1, 2], ids=["one device each", "two devices each"])
def results(request):
    return run_job("conformance", 2, request.param), request.param


def test_reduce_and_gather(results):
    (first, second), local = results
    for worker in (first["reduce"], second["reduce"]):
        assert worker["sum"] == 3  # row 46
        assert worker["mean"] == 1.5
        assert worker["sum_axis"] == 6
        assert worker["gather"] == [1] + [11] * (4 * local - 2)  # row 47
        assert worker["mean_axis"] == pytest.approx((1 + 11 * (4 * local - 2)) / (4 * local - 1))
        assert worker["even_sum"] == sum(range(2 * local + 1))
    assert first["reduce"]["even_parts"] + second["reduce"]["even_parts"] == [
        *range(1, 2 * local + 1)
    ]


def test_variables(results):
    workers, local = results
    replicas = range(2 * local)
    for worker in (w["variables"] for w in workers):
        assert worker["initial"] == 5  # row 48: the chief's
        assert worker["total"] == 10 + sum(replicas) + local  # worker 1's replicas bring 1 each
        assert worker["on_read"] == 2 * local + sum(r + 1 for r in replicas)
        assert worker["mean"] == pytest.approx(np.mean(replicas))
        assert worker["gathered"] == [0] * local + [1] * local
        assert worker["spread"] == [8 / (2 * local)] * local


def test_datasets(results):
    workers, local = results
    first, second = (worker["datasets"] for worker in workers)

    def rows(steps):
        return [[row for part in step for row in part] for step in steps]

    assert rows(first["even"])[0] + rows(second["even"])[0] == list(range(8))  # row 49
    assert rows(first["even"])[1] + rows(second["even"])[1] == list(range(8, 14))
    assert rows(first["uneven"])[1] + rows(second["uneven"])[1] == [8]
    assert rows(second["uneven"])[1] == []
    assert all(len(step) == local for step in first["even"])
    # Row 50: worker 0 has run out, and takes part with nothing.
    assert [sum(step, []) for step in second["from_function"]] == (
        [[0], [1, 2], [3]] if local == 1 else [[0, 1, 2], [3]]
    )
    assert [sum(step, []) for step in first["from_function"]] == (
        [[0, 1], [], []] if local == 1 else [[0, 1], []]
    )


def test_custom_loop_gives_the_result_of_one_device(results):
    workers, _ = results
    # Computed by hand with NumPy: SGD with momentum on the mean of the squares.
    x = np.random.default_rng(0).normal(size=(11, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    weights, velocity, losses = np.zeros((3, 1)), np.zeros((3, 1)), []
    for start in range(0, 11, 4):
        features, targets = x[start : start + 4], y[start : start + 4]
        error = features @ weights - targets
        losses.append(np.mean(error**2))
        velocity = 0.5 * velocity - 0.1 * 2 * features.T @ error / len(features)
        weights = weights + velocity
    for worker in workers:
        np.testing.assert_allclose(worker["loop"]["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(worker["loop"]["weights"], weights[:, 0], rtol=1e-4)


def test_fit_gives_the_result_of_one_device(tmp_path):
    workers = run_job("training", 2, 1, str(tmp_path))
    for kind in training.KINDS:
        _, expected = training.train(kind, synchronized=False)
        for worker in workers:
            for a, e in zip(jax.tree.leaves(worker[kind]), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-5)
    assert all(worker["saved"] for worker in workers)
    assert not (tmp_path / "not-there").exists()  # only the chief writes
    assert workers[0]["loaded"] == pytest.approx(workers[0][training.KINDS[-1]]["evaluate"])
    assert workers[0]["loaded"] == workers[1]["loaded"]
    assert workers[0]["retrained"] == workers[1]["retrained"]


def test_only_the_chief_shows_progress(tmp_path):
    with Job("quiet", 2) as job:
        ended = job.wait()
    assert [e.code for e in ended.values()] == [0, 0]
    assert "loss" in ended[0].output
    assert "loss" not in ended[1].output
    assert ended[0].result["log"] > 0
    assert [e.result["saved"] for e in ended.values()] == [True, False]
    assert "CSVLogger: left to the chief" in ended[1].output


def test_a_missing_worker_is_named():
    with Job("join", 3, arguments=["2"], absent=[1]) as job:
        ended = job.wait()
    for index, process in ended.items():
        assert process.code == 1
        assert "Expected 3 tasks to start within 2 s." in process.output
        assert f"Missing: worker 1 at {job.addresses[1]}" in process.output
        assert f"(this is worker {index} at {job.addresses[index]})" in process.output
        assert errors.PeerTimeoutError.__name__ in process.output
