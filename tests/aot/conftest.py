"""Installs libtpu, the compiler for TPUs, where it is missing. No TPU is needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from stratagem.strategies import libtpu_stacks

ROOT = Path(__file__).parents[2]
_TESTS = str(ROOT / "tests")
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

# Kept between runs, and out of the environment: with libtpu installed, every start of JAX would
# look for a TPU.
TARGET = ROOT / ".libtpu"


@pytest.fixture(scope="session", autouse=True)
def libtpu() -> Iterator[None]:
    """Makes libtpu importable, and keeps it from asking the network what machine this is."""
    if importlib.util.find_spec("libtpu") is None:
        if not (TARGET / "libtpu").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", str(TARGET), _wanted()], check=True)
        sys.path.insert(0, str(TARGET))
    before = dict(os.environ)
    # One process that only compiles; libtpu would ask Google's metadata server for these, and
    # let no other process compile meanwhile.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # Before JAX starts, which would look for a TPU; see libtpu_stacks.
    jax.config.update("jax_platforms", "cpu")
    libtpu_stacks.fit()
    importlib.import_module("libtpu")  # which puts TPU_LIBRARY_PATH into the environment
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _wanted() -> str:
    """The version that this JAX asks for in its extra `tpu`."""
    (pinned,) = (
        re.split(r"\s*;", line)[0]
        for line in importlib.metadata.requires("jax") or ()
        if line.startswith("libtpu") and re.search(r"""extra == ["']tpu["']""", line)
    )
    return pinned
