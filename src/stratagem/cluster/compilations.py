"""Compiled programs are kept on disk where processes may change: each change compiles anew."""

from __future__ import annotations

from pathlib import Path

import jax

from stratagem import config

_CHOSEN = "JAX_COMPILATION_CACHE_DIR"
_CACHES = "XDG_CACHE_HOME"


def keep() -> None:
    """Turns JAX's persistent cache on, for all programs, unless the user has decided about it.

    A process that comes to devices of a number that was there before finds its programs, and so
    does one that replaces another. Its folder is `stratagem/jax` in the user's cache folder.
    """
    env = config.environment()
    if _CHOSEN in env or getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    home = Path(env[_CACHES]) if env.get(_CACHES) else Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(home / "stratagem" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
