"""What `stratagem plan --calibrate` runs in processes of its own: one measurement each.

    python -m stratagem.cli.calibrate_measure device | devices | processes

Prints one line of JSON. Each time is the least of several: what disturbs only adds to it.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import config
from stratagem.context import get_replica_context
from stratagem.strategies import MirroredStrategy, MultiWorkerMirroredStrategy, Strategy
from stratagem.values import ReduceOp

MARK = "calibrated: "
_REPEATS = 20
_SIDE = 1024  # of the matrices
_LARGE = 1 << 24  # float32 values of arrays that are larger than caches
_SENT = 1 << 22  # float32 values of the larger all-reduce
_CHAIN = 64  # operations, or kernels, one after the other


def main(arguments: Sequence[str]) -> int:
    """Measures what the argument names; returns the exit code."""
    measured = {"device": device, "devices": devices, "processes": processes}[arguments[0]]()
    if measured:
        print(MARK + json.dumps(measured), flush=True)
    return 0


def device() -> dict[str, float]:
    """One device: operations a second, memory, kernels, input."""
    config.set_virtual_devices(1)
    a = jnp.ones((_SIDE, _SIDE), jnp.float32)
    image, kernel = jnp.ones((32, 32, 32, 32)), jnp.ones((3, 3, 32, 64))
    large, small = jnp.ones(_LARGE), jnp.ones(1 << 14)
    convolution = 2 * 32 * 32**2 * 9 * 32 * 64
    tiny, host = jnp.eye(16), np.ones(_LARGE, np.float32)

    def convolve(x: Any, k: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=layout)

    def train(x: Any, k: Any) -> Any:  # gradients are most of a step, and slower
        return jax.grad(lambda x, k: jnp.sum(convolve(x, k) ** 2), (0, 1))(x, k)

    def chain(x: Any) -> Any:
        return functools.reduce(lambda y, _: y * 0.999 + 0.001, range(_CHAIN), x)

    def kernels(x: Any) -> Any:
        return functools.reduce(lambda y, _: y @ tiny, range(_CHAIN), x)

    empty = _least(jax.jit(lambda x: x + 1), tiny)
    return {
        "product": 2 * _SIDE**3 / _least(jax.jit(jnp.matmul), a, a),
        "convolution": 3 * convolution / _least(jax.jit(train), image, kernel),
        "other": 2 * _CHAIN * small.size / _least(jax.jit(chain), small),
        "memory_bandwidth": 2 * large.nbytes / _least(jax.jit(lambda x: x + 1), large),
        "host_bandwidth": host.nbytes / _least(lambda x: jax.device_put(x.copy()), host),
        "kernel_seconds": max(_least(jax.jit(kernels), tiny) - empty, 1e-9) / _CHAIN,
    }


def devices() -> dict[str, float]:
    """Two devices of this process, by the platform's all-reduce: `2*alpha + n/B`."""
    config.set_virtual_devices(2)
    small, large = _all_reduces(MirroredStrategy(["CPU:0", "CPU:1"]))
    return {"device_alpha": small / 2, "device_bandwidth": 4 * _SENT / (large - small)}


def processes() -> dict[str, float] | None:
    """Two processes, by one exchange of recursive doubling: `alpha + n/B`. Both call it."""
    strategy = MultiWorkerMirroredStrategy()
    small, large = _all_reduces(strategy)
    if strategy.local_replicas.start:
        return None
    return {"process_alpha": small, "process_bandwidth": 4 * _SENT / (large - small)}


def _all_reduces(strategy: Strategy) -> tuple[float, float]:
    """Seconds of an all-reduce of one value, and of many; the way into a step is taken off.

    Raises:
        RuntimeError: the larger one is not slower.
    """

    def reduce(x: Any) -> Any:
        return get_replica_context().all_reduce(ReduceOp.SUM, x)[:1]

    def nothing(x: Any) -> Any:
        return x[:1] + 1

    def difference(count: int) -> float:
        x = strategy.run(lambda: jnp.ones(count))
        calls = [functools.partial(_run, strategy, fn, x) for fn in (reduce, nothing)]
        # In turns, so that both see the same of what else this machine does.
        turns = [tuple(map(_timed, calls)) for _ in range(_REPEATS)]
        both, alone = map(min, zip(*turns, strict=True))
        return both - alone

    small, large = difference(1), difference(_SENT)
    if not 0 < small < large:
        raise RuntimeError(
            f"Expected an all-reduce of {4 * _SENT} bytes to take longer than one of 4, and that "
            f"to take some time. Got {large:.3g} and {small:.3g} seconds. Calibrate again when the "
            "machine is quiet."
        )
    return small, large


def _run(strategy: Strategy, fn: Any, x: Any) -> Any:
    result = strategy.run(fn, (x,))
    stacked = getattr(result, "stacked", None)
    return jax.block_until_ready(result if stacked is None else stacked)


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _least(function: Callable[..., Any], *arguments: Any) -> float:
    """The shortest of several calls, in seconds; the first one, which compiles, not counted."""
    jax.block_until_ready(function(*arguments))
    return min(_timed(lambda: jax.block_until_ready(function(*arguments))) for _ in range(_REPEATS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
