"""TPUStrategy on a slice of two hosts, rehearsed, and the example for TPUs: real processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "study_tpu.py"
_CHOSEN_HERE = {"NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "STRATAGEM_REHEARSE"}
SECONDS = 90

TRAIN = """
import json, sys
import stratagem
resolver = stratagem.cluster_resolver.TPUClusterResolver(tpu=sys.argv[1])
stratagem.config.experimental_connect_to_cluster(resolver)
topology = stratagem.tpu.experimental.initialize_tpu_system(resolver)
strategy = stratagem.TPUStrategy(resolver)
import keras, numpy as np
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.arange(44, dtype="float32").reshape(11, 4) / 44
history = model.fit(x, x.sum(1), batch_size=5, epochs=2, verbose=0, shuffle=False)
print("RESULT", json.dumps({
    "loss": history.history["loss"],
    "kernel": model.get_weights()[0].ravel().tolist(),
    "shape": list(topology.device_coordinates.shape),
    "replicas": strategy.num_replicas_in_sync,
}))
"""


def _environment(**more: str) -> dict[str, str]:
    inherited = {name: text for name, text in os.environ.items() if name not in _CHOSEN_HERE}
    return inherited | {"JAX_PLATFORMS": "cpu"} | more


def _train(address: str, hosts: int, cores: int) -> list[dict]:
    """What each host of a slice printed."""
    with ExitStack() as stack:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", TRAIN, address],
                env=_environment(STRATAGEM_REHEARSE=f"tpu:{cores}", TPU_WORKER_ID=str(host)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in range(hosts)
        ]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * hosts, outputs
    return [json.loads(re.findall("^RESULT (.*)$", output, re.M)[0]) for output in outputs]


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_two_hosts_are_as_one():
    (one,) = _train("local", hosts=1, cores=4)
    first, second = _train(f"grpc://{_free_address()},{_free_address()}", hosts=2, cores=2)
    assert one["shape"] == [1, 4, 4]
    assert first == second
    assert first["shape"] == [2, 2, 4]
    assert one["replicas"] == first["replicas"] == 4
    for name in ("loss", "kernel"):
        assert first[name] == pytest.approx(one[name], rel=1e-5)


def _run_example(**more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env=_environment(**more),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_the_example_without_a_tpu_says_how_to_rehearse():
    done = _run_example()
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("RuntimeError: Expected TPUs in this process. Got CPU:0. Looked for ")
    (setting,) = re.findall(r"^# run with: (\S+)$", EXAMPLE.read_text(), re.M)
    assert f"start the program with {setting} in its environment" in error


def test_the_example_rehearsed():
    done = _run_example(STRATAGEM_REHEARSE="tpu:8")
    assert done.returncode == 0, done.stderr
    assert "Total params: 193" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("replicas: 8 on /device:TPU:0, ")
