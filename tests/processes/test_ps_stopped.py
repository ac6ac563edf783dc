"""A worker that stands still: others do its work, each closure counts once, and it may go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest

import stratagem
from stratagem.cluster_resolver import ClusterSpec, SimpleClusterResolver
from stratagem.launcher.abstract import Task, tf_config

sys.path.insert(0, str(Path(__file__).parent))

from jobs import free_ports
from ps_jobs import environment

pytestmark = pytest.mark.processes
KEY = "a key that only this test knows"


def test_a_stopped_worker_is_done_without(monkeypatch, caplog):
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", KEY)
    worker, other, ps, chief = (f"127.0.0.1:{port}" for port in free_ports(4))
    cluster = {"chief": [chief], "worker": [worker, other], "ps": [ps]}
    with contextlib.ExitStack() as stack:

        def serve(task: Task) -> subprocess.Popen[bytes]:
            env = environment() | {
                "STRATAGEM_CLUSTER_KEY": KEY, "TF_CONFIG": tf_config(cluster, task)
            }  # fmt: skip
            process = subprocess.Popen([sys.executable, "-m", "stratagem.cli", "serve"], env=env)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        tasks = [serve(Task(job, i)) for job, i in (("ps", 0), ("worker", 0), ("worker", 1))]
        strategy = stratagem.ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(cluster)))
        stack.callback(strategy.close)
        coordinator = stratagem.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            total = keras.Variable(0.0)

        def schedule(count: int) -> int:
            for _ in range(count):
                coordinator.schedule(lambda: total.assign_add(1.0))
            return count

        scheduled = schedule(20)
        coordinator.join()
        os.kill(tasks[2].pid, signal.SIGSTOP)
        end = time.monotonic() + 30
        while "has not been heard for" not in caplog.text and time.monotonic() < end:
            scheduled += schedule(5)
            time.sleep(0.1)
        assert f"worker 1 at {other} is lost: it has not been heard for" in caplog.text
        coordinator.join()
        assert float(total.numpy()) == scheduled
        os.kill(tasks[2].pid, signal.SIGCONT)
        scheduled += schedule(20)
        coordinator.join()
        assert float(total.numpy()) == scheduled  # what it had in hand was not added again
