"""Everything private that we need from JAX and XLA, each with what it is needed for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Needed to know whether a value is made at the top level of a step or inside a loop of it.
from jax._src import core as _core

# Needed to know whether a backend has started without starting one: virtual devices and the size
# of XLA's thread pool can only be chosen before. Public functions that list backends start them.
from jax._src import xla_bridge as _xla_bridge

# How XLA names the threads of the CPU client's pool (thread names end at 15 characters).
_POOL_THREAD_NAME = "tf_XLAEigen"


def started_backends() -> tuple[str, ...]:
    """Names of the backends that have started, such as `("cpu",)`; starts none."""
    if not _xla_bridge.backends_are_initialized():
        return ()
    return tuple(_xla_bridge.backends())


def cpu_pool_threads() -> int | None:
    """Threads in the pool of the CPU client that runs, or None where that cannot be seen.

    The size is fixed when the client starts and JAX does not report it; the kernel's thread list
    does. What the environment says now may have been written after the client started.
    """
    count = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        try:
            count += path.read_text().strip() == _POOL_THREAD_NAME
        except OSError:  # That thread has just ended.
            continue
    return count or None


def current_trace() -> Any:
    """The trace that JAX records into now: another object inside a loop, a branch or jax.grad."""
    return _core.trace_ctx.trace


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.12: the structure of the inputs
    return len(consts), len(carry)
