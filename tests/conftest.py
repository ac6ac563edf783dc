"""Eight virtual CPU devices for every test, and fixtures that fail a test which leaves a mess."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

# Keras picks its backend at import, and JAX its device count when a backend starts: both come
# before any test module is imported.
os.environ["KERAS_BACKEND"] = "jax"

from stratagem import config, context

config.set_virtual_devices(8)

import hypothesis
import psutil
import pytest
import zmq.utils.garbage

# How long an example takes says something of this machine; and the first one of a test may compile.
hypothesis.settings.register_profile("stratagem", deadline=None)
hypothesis.settings.load_profile("stratagem")

# How long a thread or process may take to end after the test that started it has returned.
GRACE_SECONDS = 2.0

# Written by the tools that run the test, not by the test.
_TOOL_VARIABLES = frozenset({"PYTEST_CURRENT_TEST", "PYTEST_VERSION"})

# Written once by a library at its first use, and meant to stay for the life of the process.
_LIBRARY_VARIABLES = frozenset(
    {
        "NPROC",
        "KERAS_BACKEND",
        "TF_CPP_MIN_LOG_LEVEL",
        # TensorFlow, at its import:
        "ENABLE_RUNTIME_UPTIME_TELEMETRY",
        "HDF5_PLUGIN_PATH",
        "TF2_BEHAVIOR",
        "TPU_ML_PLATFORM",
        "TPU_ML_PLATFORM_VERSION",
    }
)

# Started once by a library at its first use: frees what ZeroMQ has sent without a copy.
_LASTING_THREADS = (zmq.utils.garbage.GarbageCollectorThread,)


def _settles(is_clean, seconds: float = GRACE_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not is_clean():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fails a test that leaves a Python thread running."""
    before = set(threading.enumerate())
    yield

    def leaked() -> list[threading.Thread]:
        return [
            t
            for t in threading.enumerate()
            if t not in before and t.is_alive() and not isinstance(t, _LASTING_THREADS)
        ]

    if not _settles(lambda: not leaked()):
        pytest.fail(f"the test left threads running: {sorted(t.name for t in leaked())}")


@pytest.fixture(autouse=True)
def no_leaked_processes() -> Iterator[None]:
    """Fails a test that leaves a child process, and ends that process."""
    this = psutil.Process()
    before = set(this.children(recursive=True))
    yield

    def leaked() -> list[psutil.Process]:
        return [p for p in this.children(recursive=True) if p not in before]

    if not _settles(lambda: not leaked()):
        left = leaked()
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=GRACE_SECONDS)
        pytest.fail(f"the test left child processes running: {[p.pid for p in left]}")


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    """Fails a test that leaves an environment variable changed, and puts it back."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and name not in _TOOL_VARIABLES | _LIBRARY_VARIABLES
    }
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if changed:
        pytest.fail(f"the test left environment variables changed: {sorted(changed)}")


@pytest.fixture(autouse=True)
def no_open_scope() -> Iterator[None]:
    """Fails a test that leaves a strategy scope open."""
    before = context.depth()
    yield
    if (left := context.depth()) > before:
        pytest.fail(f"the test left strategy scopes open: {left - before}")
