"""The examples themselves are run by .ci/run; here, what they promise at their edges."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(example: str, **environment: str) -> subprocess.CompletedProcess[str]:
    chosen_here = {"NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "STRATAGEM_REHEARSE"}
    inherited = {name: text for name, text in os.environ.items() if name not in chosen_here}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / example)],
        env=inherited | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_a_script_for_gpus_says_how_to_rehearse_it():
    done = _run("study_keras.py")
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("ValueError: no such devices: ['/gpu:0', '/gpu:1']. This process has: ")
    (setting,) = re.findall(r"^# run with: (\S+)$", (EXAMPLES / "study_keras.py").read_text(), re.M)
    assert f"start the program with {setting} in its environment" in error


def test_the_script_runs_when_it_is_rehearsed():
    done = _run("study_keras.py", STRATAGEM_REHEARSE="gpu:2")
    assert done.returncode == 0, done.stderr
    assert "Total params: 193" in done.stdout
    assert done.stdout.endswith("devices: /device:GPU:0, /device:GPU:1\n")
