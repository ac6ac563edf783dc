"""Where compiled programs are kept, unless the user has decided."""

from __future__ import annotations

import jax
import pytest

from stratagem.cluster import compilations

OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def options(monkeypatch, tmp_path):
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def test_they_are_kept_in_the_users_cache_folder(options):
    compilations.keep()
    assert jax.config.jax_compilation_cache_dir == str(options / "stratagem" / "jax")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0


def test_without_such_a_folder_in_that_of_the_home(options, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(options))
    compilations.keep()
    assert jax.config.jax_compilation_cache_dir == str(options / ".cache" / "stratagem" / "jax")


def test_what_the_user_has_chosen_stays(options, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")  # none
    compilations.keep()
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_compilation_cache_dir", "/chosen")
    compilations.keep()
    assert jax.config.jax_compilation_cache_dir == "/chosen"
