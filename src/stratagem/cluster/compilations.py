"""Compiled programs are kept on disk where processes may change: each change compiles anew."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import jax

from stratagem import config
from stratagem.cluster.keys import own_cache

_CHOSEN = "JAX_COMPILATION_CACHE_DIR"

_log = logging.getLogger("stratagem")
_threads: list[threading.Thread] = []


def keep() -> None:
    """Turns JAX's persistent cache on, for all programs, unless the user has decided about it.

    A process that comes to devices of a number that was there before finds its programs, and so
    does one that replaces another. Its folder is `stratagem/jax` in the user's cache folder.
    """
    env = config.environment()
    if _CHOSEN in env or getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    jax.config.update("jax_compilation_cache_dir", str(own_cache(env) / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def ahead(lower: Callable[[], jax.stages.Lowered], what: str) -> None:
    """Compiles a program in a thread, and leaves it in the persistent cache, where there is one.

    Args:
        lower: gives the program; called in the thread.
        what: it is, for the log.
    """
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        return

    def work() -> None:
        began = time.monotonic()
        try:
            lower().compile()
        except Exception as error:
            _log.info("Not compiled ahead: %s: %s: %s", what, type(error).__name__, error)
        else:
            _log.info("Compiled ahead, in %.1f s: %s.", time.monotonic() - began, what)

    thread = threading.Thread(target=work, name="stratagem-ahead", daemon=True)
    _threads.append(thread)
    thread.start()


def finish() -> None:
    """Waits for what is being compiled.

    Where Python ends, which it may not in the middle of it; and where processes are lost, who need
    just that: to begin again would take longer.
    """
    while _threads:
        _threads.pop().join()
