"""Jobs that engines place: a stand-in for Slurm's `srun`, and a local Ray cluster."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from stratagem.launcher.abstract import Job, Task
from stratagem.launcher.output import Output, renderer
from stratagem.launcher.slurm import SlurmLauncher
from stratagem.recovery.policy import Limits

pytestmark = pytest.mark.processes

# As much of srun as is used: starts the command once for each task of one node, puts the rank in
# front of its lines, passes SIGTERM on, and ends with the highest exit code.
SRUN = """
import os, signal, subprocess, sys, threading
arguments = sys.argv[1:]
command = arguments[next(i for i, a in enumerate(arguments) if not a.startswith("-")):]
(count,) = [int(a.removeprefix("--ntasks=")) for a in arguments if a.startswith("--ntasks=")]
step = {
    "SLURM_STEP_NUM_TASKS": str(count),
    "SLURM_STEP_NODELIST": "node7",
    "SLURM_STEP_TASKS_PER_NODE": str(count),
}
tasks = [
    subprocess.Popen(
        command, env={**os.environ, **step, "SLURM_PROCID": str(r)}, stdout=subprocess.PIPE
    )
    for r in range(count)
]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
for rank, task in enumerate(tasks):
    for line in task.stdout:
        print(f"{rank}: {line.decode()}", end="", flush=True)
sys.exit(max(task.wait() for task in tasks))
"""
# Writes down how it was called.
SCONTROL = """
import sys
with open(__file__ + ".called", "w") as file:
    file.write(" ".join(sys.argv[1:]))
"""
SERVICE = "import time; time.sleep(1000)"


def _service(address: str, tasks: int) -> list[str]:
    return [sys.executable, "-S", "-c", SERVICE]


def _write(path: Path, body: str) -> str:
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment as in an allocation."""
    _write(tmp_path / "srun", SRUN)
    _write(tmp_path / "scontrol", SCONTROL)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return {**os.environ, "SLURM_JOB_ID": "17", "CUDA_VISIBLE_DEVICES": ""}


def _run(environment: dict[str, str], job: Job) -> tuple[int, list[str], list[str]]:
    out, err = io.BytesIO(), io.BytesIO()
    plain = renderer(io.StringIO())
    output = Output([Task("srun", 0)], out, err, (plain, plain))
    code = SlurmLauncher(environment, output=output, service=_service).launch(job)
    return code, sorted(out.getvalue().decode().splitlines()), err.getvalue().decode().splitlines()


def test_a_slurm_step_has_the_tasks_of_the_job(slurm, tmp_path):
    script = _write(
        tmp_path / "task.py",
        """
        import json, os, sys
        config = json.loads(os.environ["TF_CONFIG"])
        print(config["task"]["type"], config["task"]["index"], *config["cluster"]["worker"])
        told = "STRATAGEM_COORDINATION" in os.environ
        print(os.environ["STRATAGEM_ATTEMPT"], told, *sys.argv[1:])
        """,
    )
    code, lines, _ = _run({**slurm, "SLURM_RESTART_COUNT": "2"}, Job((script, "a"), workers=2))
    assert code == 0
    assert lines == [
        "[srun 0] 0: 2 True a",
        "[srun 0] 0: worker 0 node7:8888 node7:8889",
        "[srun 0] 1: 2 True a",
        "[srun 0] 1: worker 1 node7:8888 node7:8889",
    ]


@pytest.mark.parametrize(
    ("code", "restarts", "comes_back"),
    [(42, "5", True), (3, "0", True), (3, "1", False), (0, "0", False)],
)
def test_what_slurm_starts_again(slurm, tmp_path, code, restarts, comes_back):
    _write(tmp_path / "srun", f"import sys; sys.exit({code})")
    environment = {**slurm, "SLURM_RESTART_COUNT": restarts}
    job = Job(("task.py",), limits=Limits(max_restarts=1))
    found, _, said = _run(environment, job)
    assert found == code
    called = tmp_path / "scontrol.called"
    assert called.exists() == comes_back
    if comes_back:
        assert called.read_text() == "requeue 17"
        assert "[stratagem] back into Slurm's queue: scontrol requeue 17" in said


def test_slurm_refuses_to_start_it_again(slurm, tmp_path):
    _write(tmp_path / "srun", "import sys; sys.exit(3)")
    _write(tmp_path / "scontrol", "import sys; sys.exit('Job is not requeueable')")
    code, _, said = _run(slurm, Job(("task.py",), limits=Limits(max_restarts=1)))
    assert code == 3
    assert "[stratagem] scontrol refused: Job is not requeueable" in said


# In a process of its own, which takes Ray's processes with it.
RAY = """
import os, sys, time
import ray
from stratagem.launcher.abstract import Job
from stratagem.launcher.ray import RayLauncher
from stratagem.recovery.policy import Limits
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
service = lambda address, tasks: [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
job = Job((sys.argv[1],), workers=2, limits=Limits(max_restarts=1))
code = RayLauncher(os.environ, service=service).launch(job)
while ray.available_resources().get("CPU") != 2:  # Freed soon, or the test runs out of time.
    time.sleep(0.1)
ray.shutdown()
sys.exit(code)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray"
)
def test_actors_of_ray_run_the_tasks(tmp_path):
    script = _write(
        tmp_path / "task.py",
        """
        import json, os, sys, time
        config = json.loads(os.environ["TF_CONFIG"])
        index, attempt = config["task"]["index"], os.environ["STRATAGEM_ATTEMPT"]
        here = os.path.dirname(__file__)
        open(os.path.join(here, f"{attempt}-{index}"), "w").close()
        while not os.path.exists(os.path.join(here, f"{attempt}-{1 - index}")):
            time.sleep(0.01)
        print("worker", index, "of", len(config["cluster"]["worker"]), "attempt", attempt)
        if attempt == "0":
            if index == 1:
                raise ValueError("boom")
            time.sleep(1000)
        sys.exit(3 if index == 0 else 0)
        """,
    )
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # Paths of sockets must be.
        done = subprocess.run(
            [sys.executable, "-c", RAY, script],
            env={**os.environ, "HOME": short, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=110,
        )
    assert done.returncode == 3, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for line in ("[worker 0] worker 0 of 2 attempt 1", "[worker 1] worker 1 of 2 attempt 0"):
        assert line in lines
    assert "[worker 1] ValueError: boom" in done.stderr.splitlines()
    assert "first failure: worker 0, exit code 3, " in done.stderr
