"""Everything private that we need from JAX and XLA, each with what it is needed for."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

# Needed to give a program the same name in the persistent cache on all processes of a job, and to
# let a process that is not the first one write it there.
from jax._src import cache_key as _cache_key
from jax._src import compilation_cache as _compilation_cache
from jax._src import compiler as _compiler

# Needed to know whether a value is made at the top level of a step or inside a loop of it.
from jax._src import core as _core

# Needed to start JAX's devices anew: effects (`jax.debug.print`) of a program that never ends are
# not to be waited for.
from jax._src import dispatch as _dispatch

# Needed to join a job whose coordination service another process hosts: the fields that backends
# read when they start (client, process_id, num_processes).
from jax._src import distributed as _distributed

# Needed to know whether a backend has started without starting one: virtual devices and the size
# of XLA's thread pool can only be chosen before. Public functions that list backends start them.
# And to make the CPU backend with the Gloo of our choice.
from jax._src import xla_bridge as _xla_bridge

# The coordination service itself and its client; JAX hides both behind one call that starts them
# together in process 0.
from jaxlib import _jax as _jaxlib

# How XLA names the threads of the CPU client's pool (thread names end at 15 characters).
_POOL_THREAD_NAME = "tf_XLAEigen"

# We notice by other means that a process is lost: no native code shall end a process for it.
_NO_HEARTBEAT_SECONDS = 1_000_000

_SHUTDOWN_SECONDS = 10  # how long a process that ends waits for the others to end too


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


class JobStore:
    """The key-value store of the job's coordination service, as `cluster.channel.Store`."""

    def __init__(self, client: Any):
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        """Writes a key that does not exist yet."""
        self._client.key_value_set_bytes(key, value)

    def get(self, key: str, seconds: float) -> bytes | None:
        """Waits for a key to exist; None when it does not within the time."""
        try:
            return self._client.blocking_key_value_get_bytes(key, max(1, int(1000 * seconds)))
        except _jaxlib.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise

    def delete(self, key: str) -> None:
        """Removes a key, if it is there."""
        self._client.key_value_delete(key)


def host_service(bind: str, processes: int) -> Any:
    """Starts the coordination service of a job in this process; keep what it returns.

    Args:
        bind: "host:port" to listen at.
        processes: of the job.
    """
    return _jaxlib.get_distributed_runtime_service(
        bind,
        processes,
        heartbeat_timeout=_NO_HEARTBEAT_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        recoverable=True,
    )


def connect(address: str, process: int, seconds: float) -> Any:
    """Connects to a coordination service; waits for all processes of the job, any thread.

    As `jax.distributed.initialize`, which cannot leave the service to another process, and whose
    preemption service takes SIGTERM away from the program.

    Raises:
        RuntimeError: not all came in time, or the service is gone.
    """
    client = _jaxlib.get_distributed_runtime_client(
        address,
        process,
        init_timeout=max(1, round(seconds)),
        heartbeat_timeout=_NO_HEARTBEAT_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    return client


def use_client(client: Any, address: str, processes: int, process: int) -> JobStore:
    """Lets backends that start from now on be those of the job that a client is connected to."""
    state = _distributed.global_state
    state.client = client
    state.process_id = process
    state.num_processes = processes
    state.coordinator_address = address
    return JobStore(client)


def listen_at(host: str) -> None:
    """Lets Gloo of CPU backends that start from now on listen at a host of this machine.

    By itself it takes what the machine's name resolves to: 127.0.0.1 in many containers and on
    many machines, where no other machine finds it.

    Raises:
        RuntimeError: the CPU backend has started.
    """

    def make() -> Any:
        client = _distributed.global_state.client
        chosen = jax.config.jax_cpu_collectives_implementation  # type: ignore[attr-defined]
        if client is None or chosen != "gloo":
            return _xla_bridge.make_cpu_client()
        return _xla_bridge.make_cpu_client(
            _jaxlib.make_gloo_tcp_collectives(distributed_client=client, hostname=host)
        )

    _xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)


def leave_job() -> None:
    """Says goodbye to the coordination service, so that the end is no failure."""
    state = _distributed.global_state
    client, state.client = state.client, None
    if client is not None:
        client.shutdown()


def forget_backends() -> None:
    """Lets the devices start anew, in another job; what compiles is compiled again.

    Arrays of this process alone stay what they are: JAX copies them to the new devices where they
    are used (on CPU). Arrays over several processes can be read shard by shard, and no more.
    """
    _dispatch.runtime_tokens.clear()
    _xla_bridge._clear_backends()
    jax.clear_caches()


_hash_accelerators = _cache_key._hash_accelerator_config
_write_first = _compiler._cache_write


def share_compilations(writes: Callable[[], bool]) -> None:
    """Gives a program over CPU devices one name in the persistent cache on all processes of a job.

    JAX's name has the number of the process in it, so that a process finds what it compiled
    itself, and only process 0 writes any: the others never find a program. What is compiled is the
    same on all of them. Other machines than this one get other names.

    Args:
        writes: whether this process writes what it compiles.
    """

    def hash_devices(hashed: Any, devices: Any) -> None:
        if devices.flat[0].platform != "cpu":
            _hash_accelerators(hashed, devices)
            return
        hashed.update(_processor().encode())

    # `calls` are the program's calls into Python; from JAX 0.11 on it keeps such programs too.
    def write(key: str, seconds: float, name: str, backend: Any, program: Any, *calls: Any) -> None:
        if _distributed.global_state.process_id == 0:
            _write_first(key, seconds, name, backend, program, *calls)
        elif writes() and not any(calls):
            _compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))

    _cache_key._hash_accelerator_config = hash_devices  # type: ignore[assignment]
    _compiler._cache_write = write  # type: ignore[assignment]


def _processor() -> str:
    """What a program that is compiled for this machine's CPUs depends on."""
    try:
        lines = set(Path("/proc/cpuinfo").read_text().splitlines())
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name")
    return "\n".join(sorted(line for line in lines if line.startswith(names)))
