"""Where compiled programs are kept, unless the user has decided."""

from __future__ import annotations

import hashlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem import _jax
from stratagem.cluster import compilations
from stratagem.data.anew import Dealt
from stratagem.data.split import RebatchRule
from stratagem.keras_bridge.ahead import share
from stratagem.keras_bridge.distributed_input import GlobalBatch

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


@pytest.fixture
def shared(options):
    """The persistent cache, as a job has it whose processes may change."""
    _jax._compilation_cache.reset_cache()
    compilations.keep()
    yield options / "stratagem" / "jax"
    _jax._cache_key._hash_accelerator_config = _jax._hash_accelerators
    _jax._compiler._cache_write = _jax._write_first
    _jax._compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("process", "writes", "found"), [(0, False, 1), (1, True, 1), (1, False, 0)]
)
def test_the_first_process_of_a_machine_writes_programs(
    shared, monkeypatch, process, writes, found
):
    _jax.share_compilations(lambda: writes)
    monkeypatch.setattr(_jax._distributed.global_state, "process_id", process)

    def unlike_others(x):
        return x * (2 + process) + writes

    jax.jit(unlike_others).lower(jnp.ones(3)).compile()
    assert len(list(shared.glob("jit_unlike_others-*-cache"))) == found


def test_programs_of_cpus_are_named_after_the_processor_and_those_of_others_as_by_jax(monkeypatch):
    def name(devices):
        hashed = hashlib.sha256()
        _jax._cache_key._hash_accelerator_config(hashed, np.array(devices))
        return hashed.hexdigest()

    class Chip:
        platform = "tpu"

    monkeypatch.setattr(_jax, "_hash_accelerators", lambda hashed, _: hashed.update(b"chips"))
    monkeypatch.setattr(_jax._cache_key, "_hash_accelerator_config", None)
    monkeypatch.setattr(_jax._compiler, "_cache_write", None)
    _jax.share_compilations(lambda: True)
    first, second = jax.devices()[:2]
    assert name([first]) == name([second]) == hashlib.sha256(_jax._processor().encode()).hexdigest()
    assert name([Chip()]) == hashlib.sha256(b"chips").hexdigest()
    assert _jax._processor()


def test_what_is_compiled_ahead_is_found(shared, caplog):
    _jax.share_compilations(lambda: True)

    def step(x):
        return jnp.sin(x) + 41

    with caplog.at_level(logging.INFO, "stratagem"):
        compilations.ahead(lambda: jax.jit(step).lower(jnp.ones(3)), "a step")
        compilations.finish()
    assert "Compiled ahead, in " in caplog.text
    assert ": a step." in caplog.text
    assert len(list(shared.glob("jit_step-*-cache"))) == 1


def test_what_cannot_be_compiled_ahead_is_said(shared, caplog):
    with caplog.at_level(logging.INFO, "stratagem"):
        compilations.ahead(lambda: 1 / 0, "a step")
        compilations.finish()
    assert "Not compiled ahead: a step: ZeroDivisionError: division by zero" in caplog.text


def test_without_a_cache_nothing_is_compiled_ahead(options):
    compilations.ahead(lambda: 1 / 0, "a step")
    assert not compilations._threads


def test_what_a_batch_is_on_other_replicas():
    rows = np.zeros((7, 2))
    assert share(rows, 3).shapes == ((3, 2), (3, 2), (1, 2))
    assert share(rows, 3).dtype == np.float32
    dealt = GlobalBatch([rows[:4], rows[4:]])
    assert share(dealt, 3) is None  # each worker has its own
    dealt.dealt = Dealt(None, 7, lambda _: None, 0, RebatchRule.EVEN)
    assert share(dealt, 3).shapes == ((3, 2), (2, 2), (2, 2))
    assert share(np.float32(1), 3) is None
