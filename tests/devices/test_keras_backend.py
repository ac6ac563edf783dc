"""Which backend Keras gets, each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

_SAYS = "import stratagem, keras; print(keras.config.backend())"


def _python(program: str, home: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: text for name, text in os.environ.items() if name != "KERAS_BACKEND"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | {"KERAS_HOME": home} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _fails(program: str, home: str, **environment: str) -> str:
    done = _python(program, home, **environment)
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_jax_is_chosen_when_nothing_was_said(tmp_path):
    done = _python(_SAYS, str(tmp_path))
    assert done.stdout.strip() == "jax", done.stderr


def test_keras_may_be_imported_first_on_jax(tmp_path):
    done = _python("import keras\n" + _SAYS, str(tmp_path), KERAS_BACKEND="jax")
    assert done.stdout.strip() == "jax", done.stderr


def test_another_backend_in_the_environment(tmp_path):
    error = _fails(_SAYS, str(tmp_path), KERAS_BACKEND="tensorflow")
    assert error.startswith("ImportError: Expected Keras on its JAX backend. Got backend")
    assert "'tensorflow' (KERAS_BACKEND=tensorflow)" in error
    assert "Set KERAS_BACKEND=jax" in error


def test_keras_imported_first_on_another_backend(tmp_path):
    # NumPy's is the one other backend that needs nothing installed.
    error = _fails("import keras\n" + _SAYS, str(tmp_path), KERAS_BACKEND="numpy")
    assert "Got backend 'numpy' (keras was imported first)" in error
    assert "import stratagem before keras" in error


@pytest.mark.parametrize(("before", "after"), [("", "True"), ("gc.disable()", "False")])
def test_importing_leaves_garbage_collection_as_it_was_and_orbax_and_numba_for_those_who_need_them(
    tmp_path, before, after
):
    program = f"import gc, sys\n{before}\nimport stratagem\n"
    program += "print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
    program += "print({'orbax', 'numba'} & {*sys.modules})"
    done = _python(program, str(tmp_path))
    assert done.stdout.split() == [after, "True", "set()"], done.stderr
