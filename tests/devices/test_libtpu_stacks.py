"""What libtpu needs of its process: stacks of one size, and to be alone."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from stratagem.strategies import described, libtpu_stacks

# In a process of its own: the size is that of all threads to come.
PROGRAM = """
import ctypes
from stratagem.strategies import libtpu_stacks
libtpu_stacks.fit()
attributes, size = ctypes.create_string_buffer(128), ctypes.c_size_t()
libc = ctypes.CDLL(None)
assert libc.pthread_getattr_default_np(attributes) == 0
assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
print(size.value)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "pthread_setattr_default_np"), reason="not the GNU C library"
)
def test_threads_to_come_get_two_mebibytes():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == 2 << 20


def test_a_c_library_that_refuses(monkeypatch):
    libc = SimpleNamespace(
        pthread_getattr_default_np=lambda attributes: 0,
        pthread_attr_setstacksize=lambda attributes, size: 0,
        pthread_setattr_default_np=lambda attributes: 22,
    )
    monkeypatch.setattr(libtpu_stacks.ctypes, "CDLL", lambda name: libc)
    with pytest.raises(OSError, match="Expected stacks of 2097152 .* Got error 22 .* Run `ul"):
        libtpu_stacks.fit()


def test_libtpu_that_another_process_has(monkeypatch):
    def held(**_):
        raise RuntimeError('ABORTED: libtpu lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".')

    monkeypatch.setattr(libtpu_stacks, "fit", lambda: None)
    monkeypatch.setattr(described.topologies, "get_topology_desc", held)
    told = "expected libtpu for this process alone. Got a lock .* set ALLOW_MULTIPLE_LIBTPU_LOAD=1"
    with pytest.raises(RuntimeError, match=told):
        described.describe_slice("v5e:2x2")


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(libtpu_stacks.ctypes, "CDLL", lambda name: SimpleNamespace())
    libtpu_stacks.fit()
