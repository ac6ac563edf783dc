"""The fixtures of conftest.py fail a test that leaves a mess, and let a clean one pass."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_CONFTEST = Path(__file__).parents[1] / "conftest.py"

_LEAKS = """
import os, subprocess, sys, threading, time
from stratagem import context

def test_clean(): pass
def test_thread(): threading.Thread(target=time.sleep, args=(60,), daemon=True, name="idle").start()
def test_process(): subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def test_variable(): os.environ["LEFT_BEHIND"] = "1"
def test_variable_is_gone(): assert "LEFT_BEHIND" not in os.environ
def test_scope(): context._frames.set((context.Frame(strategy=None),))
"""


@pytest.mark.processes
def test_a_test_that_leaves_a_mess_fails(tmp_path):
    shutil.copy(_CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_leaks.py").write_text(_LEAKS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "6 passed, 4 errors" in done.stdout, done.stdout + done.stderr
    for test, reason in {
        "test_thread": "left threads running: ['idle']",
        "test_process": "left child processes running: [",
        "test_variable": "left environment variables changed: ['LEFT_BEHIND']",
        "test_scope": "left strategy scopes open: 1",
    }.items():
        assert f"ERROR at teardown of {test} " in done.stdout, done.stdout
        assert f"Failed: the test {reason}" in done.stdout, done.stdout
