"""Programs that travel: serialised StableHLO that a process without the user's code runs.

See "Exporting and serializing staged-out computations" in JAX's documentation (`jax.export`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export


def ship(function: Callable[..., Any], inputs: Sequence[Any]) -> bytes:
    """A function as bytes, for CPU and for the kind of device that this process uses.

    Args:
        function: of arrays, to arrays; traced here.
        inputs: shapes and dtypes; dimensions may be symbolic.

    Raises:
        ValueError: it calls back into Python (`jax.debug.print`, `io_callback`).
    """
    platforms = list(dict.fromkeys(["cpu", jax.default_backend()]))
    platforms = ["cuda" if p == "gpu" else p for p in platforms]
    try:
        return bytes(export.export(jax.jit(function), platforms=platforms)(*inputs).serialize())
    except NotImplementedError as error:
        raise ValueError(
            "Expected a step that other processes can run without this program's code. Got one "
            f"that cannot be sent: {error}. Take calls back into Python out of it "
            "(jax.debug.print, jax.debug.callback, io_callback, pure_callback), and print what "
            "the step returns."
        ) from error


def unship(program: bytes) -> Any:
    """The compiled function of bytes; compiles once for each new shape of its inputs."""
    return jax.jit(export.deserialize(bytearray(program)).call)


def spec_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The input that a value of a program is."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def symbols(count: int) -> list[Any]:
    """So many symbolic dimensions, of one scope."""
    return list(export.symbolic_shape(",".join(f"u{i}" for i in range(count)))) if count else []
