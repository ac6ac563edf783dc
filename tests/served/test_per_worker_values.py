"""PerWorkerValues: each worker gets its own, of whatever structure; what cannot be is refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
    experimental_get_current_worker_index,
)


@pytest.fixture
def coordinator(served):
    return ClusterCoordinator(served(2, 1))


def both(coordinator, step, *args, **kwargs):
    """The results of a step, by worker."""
    found = {}
    for _ in range(100):
        values = [
            coordinator.schedule(
                lambda *a, **k: (step(*a, **k), experimental_get_current_worker_index()),
                args,
                kwargs,
            )
            for _ in range(4)
        ]
        for result, index in coordinator.fetch(values):
            assert found.setdefault(int(index), result) == result
        if len(found) == 2:
            return [found[0], found[1]]
    raise AssertionError(f"waited for both workers to run it, got {sorted(found)}")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([1.0, 2.0], np.float32), ([1, 2], np.int32), ([True, False], np.bool_)],
)
def test_numbers_are_arrays(coordinator, values, dtype):
    def step(x):
        assert (x.shape, x.dtype) == ((), dtype)
        return x

    assert both(coordinator, step, PerWorkerValues(values)) == values


def test_structures(coordinator):
    def step(x, *, y):
        assert (x["name"], x["none"]) == ("same", None)
        return x["a"][0] + x["b"] + y[1]

    values = [{"a": np.float32([i]), "b": 10.0 * i, "name": "same", "none": None} for i in range(2)]
    y = PerWorkerValues([(0, 100.0), (0, 200.0)])
    assert both(coordinator, step, PerWorkerValues(values), y=y) == [100, 211]


def test_calls_with_others_arguments_are_other_programs(coordinator):
    """A value of dicts and plain dicts have the same leaves."""
    step = lambda x: x["a"] + 1  # noqa: E731
    own = PerWorkerValues([{"a": np.float32(i)} for i in range(2)])
    assert both(coordinator, step, own) == [1, 2]
    assert float(coordinator.schedule(step, ({"a": np.float32(7)},)).fetch()) == 8
    assert both(coordinator, step, own) == [1, 2]


def test_values_are_those_of_when_they_were_given(coordinator):
    buffer = np.zeros(2, np.float32)
    value = PerWorkerValues([buffer, buffer])
    buffer[:] = 1
    assert both(coordinator, lambda x: x[0] + x[1], value) == [0, 0]
    assert value.values[0] is buffer


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ([], ValueError, "PerWorkerValues: expected a value for each worker. Got none"),
        (
            [1, 2.0], ValueError,
            r"same shape and dtype.*Got worker 0: int32\[\], worker 1: float32\[\] as value\. Make",
        ),
        (
            [{"x": np.ones(2)}, {"x": np.ones(2)}, {"x": np.ones(3)}], ValueError,
            r"same shape.*Got worker 0: float32\[2\], worker 2: float32\[3\] as value\['x'\]",
        ),
        ([{"x": 1}, {"y": 1}], ValueError, r"same structure.*worker 0: PyTreeDef\({'x'.*'y'"),
        (range(6), None, None),
        ([np.ones(i) for i in range(6)], ValueError, r"worker 3: float32\[3\] and 2 more"),
        (
            ["a", "b"], TypeError,
            r"expected numbers, booleans or arrays.*worker 0: 'a' \(str\), worker 1: 'b'",
        ),
        ([1, "b"], TypeError, r"PerWorkerValues.*worker 0: 1 \(int\), worker 1: 'b'"),
        ([PerWorkerValues([1])] * 2, TypeError, r"worker 0: PerWorkerValues\(\[1\]\)"),
        (
            [np.array(["a"])] * 2, TypeError,
            "PerWorkerValues, worker 0, value: expected numbers or booleans. Got an array of dtype "
            "<U1.*StringLookup",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(values, error, text):
    if error is None:
        assert len(PerWorkerValues(values).values) == 6
        return
    with pytest.raises(error, match=text):
        PerWorkerValues(values)


def test_what_schedule_looks_for_is_found_in_them(coordinator):
    value = RemoteValue()
    with pytest.raises(ValueError, match="Got a RemoteValue"):
        coordinator.schedule(lambda x: x, (PerWorkerValues([value, value]),))


def test_too_few(coordinator):
    with pytest.raises(ValueError, match=r"expected a value for each worker. Got 1, and worker 1"):
        both(coordinator, lambda x: x + jnp.ones(()), PerWorkerValues([1.0]))
