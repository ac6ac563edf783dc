"""Holds `stratagem plan` against what was measured: on this machine, and by others.

    python benchmarks/plan_validation.py            both parts
    python benchmarks/plan_validation.py published  what others have published; takes no time
    python benchmarks/plan_validation.py ps         parameter servers, with 1 and 2 workers

The first part needs a calibrated machine (`stratagem plan --calibrate`) and a quiet one. It
predicts and measures the training steps of an MLP and of a small CNN on 1, 2, 4 and 8 virtual
devices, and in 1 to 4 processes; all of them share this machine's cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import stratagem  # before Keras

# isort: split
import keras
import numpy as np
from keras import layers

from stratagem.cli import plan, plan_servers
from stratagem.planning import allreduce, machines, predict, served_plan, topology
from stratagem.planning.machines import Link, Machine

ROWS = 64  # on each device
STEPS = 30
MODELS = ("mlp", "cnn")
DEVICES = (1, 2, 4, 8)
PROCESSES = (1, 2, 3, 4)
_MARK = "measured: "


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["step"]:
        return train(arguments[1], *map(int, arguments[2:]))
    if arguments[:1] == ["serve"]:
        return train_served(arguments[1])
    if arguments in ([], ["ps"]):
        served()
    if arguments in ([], ["here"]):
        here()
    if arguments in ([], ["published"]):
        published()
    return 0


# On this machine.


class Clock(keras.callbacks.Callback):
    """Seconds of each step of `fit`, the first ones not counted."""

    def __init__(self):
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter())


def train(model_name: str, devices: int, processes: int) -> int:
    """What is measured and planned: `fit`, as a user writes it. Prints the median of its steps."""
    if processes > 1:
        strategy = stratagem.MultiWorkerMirroredStrategy()
    else:
        stratagem.config.set_virtual_devices(devices)
        strategy = stratagem.MirroredStrategy()
    rows = ROWS * strategy.num_replicas_in_sync
    with strategy.scope():
        if model_name == "mlp":
            inner = [layers.Dense(1024, activation="relu") for _ in range(3)]
            shape: tuple[int, ...] = (512,)
        else:
            inner = [layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(3)]
            inner.append(layers.Flatten())
            shape = (16, 16, 3)
        model = keras.Sequential([keras.Input(shape), *inner, layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones((rows, *shape), "float32"), np.zeros(rows, "int32")
    data = [(x, y)] * STEPS
    clock = Clock()
    model.fit(strategy.experimental_distribute_dataset(data), verbose=0, callbacks=[clock])
    steps = np.diff(clock.times)[3:]
    print(_MARK + json.dumps(float(np.median(steps))), flush=True)
    return 0


def here() -> None:
    machine = machines.load(plan.user_file())["cpu"]
    print(f"{machine.title}. {machine.source}\n")
    print("| model | devices | processes | predicted | measured | predicted / measured |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for model in MODELS:
        for devices, processes in [*((d, 1) for d in DEVICES), *((1, p) for p in PROCESSES[1:])]:
            expected = predicted(machine, model, devices, processes)
            seen = measured(model, devices, processes)
            ratios.append(expected / seen)
            times = f"{1e3 * expected:.2f} ms | {1e3 * seen:.2f} ms | {ratios[-1]:.2f}"
            print(f"| {model} | {devices} | {processes} | {times} |", flush=True)
    error = np.median(np.abs(np.log2(ratios)))
    print(f"\nmedian factor between predicted and measured: {2**error:.2f}")


def predicted(machine: Machine, model: str, devices: int, processes: int) -> float:
    """Seconds of a step. Processes share the cores, as devices do, and meet by AutoAllReduce."""
    replicas = devices * processes
    where = topology.parse(f"cpu:{devices}x{processes}", {"cpu": machine})
    wanted = plan.Config(
        script=__file__,
        module=False,
        arguments=("step", model, str(devices), str(processes)),
        strategy="mwms",
        topology=str(where),
        per_device_batch=None,
        json=False,
        plot=None,
    )
    program = plan.trace(wanted, where)
    if processes == 1:
        return predict.step(program, where, replicas, "NcclAllReduce").seconds
    ops = ("DoublingAllReduce", "NcclAllReduce")  # of which it takes the faster one
    reduce = min(predict.step(program, where, replicas, op).reduce for op in ops)
    return predict.compute(program, machine, inside=replicas) + reduce


def measured(model: str, devices: int, processes: int) -> float:
    """Seconds of a step, by a process of its own, or several."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "stratagem.cli", "run", "--workers", str(processes)]
    return _run([*command, __file__, "step", model, str(devices), str(processes)])


def _run(command: list[str]) -> float:
    """The largest figure that a job prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    done = subprocess.run(
        command,
        env={**environment, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if _MARK in line]
    return max(float(line.partition(_MARK)[2]) for line in lines)


# With parameter servers on this machine.

SERVED = ("lookup", "dense")
SERVED_STEPS = 100
WORKERS = (1, 2)


def train_served(model_name: str) -> int:
    """What is measured and planned: `fit` with parameter servers. Prints seconds a step."""
    strategy = stratagem.ParameterServerStrategy()
    with strategy.scope():
        if model_name == "lookup":
            x = keras.Input((26,), dtype="int32")
            rows = layers.Embedding(200_000, 64, name="table")(x)
            y = layers.Dense(1)(layers.GlobalAveragePooling1D()(rows))
        else:
            x = keras.Input((512,))
            y = layers.Dense(1)(layers.Dense(512, activation="relu")(x))
        model = keras.Model(x, y)
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
    rng = np.random.default_rng(0)
    count = 256 * SERVED_STEPS
    data = (
        rng.integers(0, 200_000, (count, 26)).astype("int32")
        if model_name == "lookup"
        else rng.normal(size=(count, 512)).astype("float32")
    )
    times = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: times.append(-time.perf_counter()),
        on_epoch_end=lambda epoch, logs: times.append(time.perf_counter()),
    )
    targets = np.ones((count, 1), "float32")
    model.fit(data, targets, batch_size=256, epochs=4, verbose=0, callbacks=[clock])
    epochs = [begin + end for begin, end in zip(times[::2], times[1::2], strict=True)]
    print(_MARK + json.dumps(float(np.median(epochs[1:])) / SERVED_STEPS), flush=True)
    return 0


def served() -> None:
    machine = machines.load(plan.user_file())["cpu"]
    print(f"{machine.title}. {machine.source}\n")
    print("| model | workers | ps | predicted | measured | predicted / measured |")
    print("|---|---|---|---|---|---|")
    for model in SERVED:
        for workers in WORKERS:
            expected = predicted_served(machine, model, workers)
            seen = measured_served(model, workers)
            rates = f"{expected:.1f} steps/s | {seen:.1f} steps/s | {expected / seen:.2f}"
            print(f"| {model} | {workers} | 1 | {rates} |", flush=True)
    print()


def predicted_served(machine: Machine, model: str, workers: int) -> float:
    """Steps a second: simulated, and no more than the cores that all tasks share can do."""
    wanted = plan_servers.Config(__file__, False, ("serve", model), workers, 1, machine.name)
    step, rule = plan_servers.trace(wanted)
    made = served_plan.plan(step, machine, workers, rule)
    costs = made.costs
    work = sum(e.pull + e.push for e in costs.exchanges) + costs.dispatch
    work += costs.compute * max(1, machine.shared) + costs.requests * costs.serving.message
    return min(made.simulated.rate, max(1, machine.shared) / work)


def measured_served(model: str, workers: int) -> float:
    """Steps a second, by processes of their own."""
    command = [sys.executable, "-m", "stratagem.cli", "run", "--workers", str(workers), "--ps", "1"]
    return 1 / _run([*command, __file__, "serve", model])


# By others.


@dataclass(frozen=True)
class Published:
    """A published scaling result, and what the formulas need to know of it.

    Args:
        what: model, devices, network.
        weights: values in trainable variables, which travel as float32.
        rows: on each device.
        speed: rows a second of one device.
        local: devices of a machine.
        hosts: machines.
        link: bytes a second out of a machine.
        efficiency: as published.
        source: of the efficiency, and of the speed.
    """

    what: str
    weights: float
    rows: int
    speed: float
    local: int
    hosts: int
    link: float
    efficiency: float
    source: str


_HOROVOD = (
    "A. Sergeev, M. Del Balso, arXiv:1802.05799, and README of Horovod: 128 servers with 4 Pascal "
    "GPUs, RoCE of 25 Gbit/s. "
)
_SPEED = "Speed: tensorflow.org/performance/benchmarks (2017), one P100, synthetic data, batch 64"
RESULTS = (
    Published(
        "Inception V3, 512 GPUs", 23.8e6, 64, 142.0, 4, 128, 25e9 / 8, 0.90,
        f"{_HOROVOD}{_SPEED}.",
    ),
    Published(
        "ResNet-101, 512 GPUs", 44.7e6, 64, 129.0, 4, 128, 25e9 / 8, 0.90,
        f"{_HOROVOD}{_SPEED}; between ResNet-50 (219) and ResNet-152 (91.8) by their operations.",
    ),
    Published(
        "VGG-16, 512 GPUs", 138.4e6, 64, 154.0, 4, 128, 25e9 / 8, 0.68,
        f"{_HOROVOD}{_SPEED}.",
    ),
    Published(
        "ResNet-50, 256 GPUs", 25.6e6, 32, 138.0, 8, 32, 50e9 / 8, 0.90,
        "P. Goyal et al., arXiv:1706.02677: 32 servers with 8 P100, Ethernet of 50 Gbit/s. Speed: "
        "29 hours for 90 epochs of 1.28 million images on 8 P100 (as H. Mikami et al., "
        "arXiv:1811.05233, quote it).",
    ),
)  # fmt: skip
_BACKWARD = 2 / 3  # of the time of a step: two of three products are its


def published() -> None:
    print("| result | published | plan: not hidden | error, points | fully hidden | between |")
    print("|---|---|---|---|---|---|")
    for result in RESULTS:
        after, hidden = bounds(result)
        inside = "yes" if after <= result.efficiency <= hidden else "no"
        error = 100 * (after - result.efficiency)
        cells = f"{result.efficiency:.0%} | {after:.0%} | {error:+.0f} | {hidden:.0%} | {inside}"
        print(f"| {result.what} | {cells} |")
    print()
    for result in RESULTS:
        print(f"- {result.what}: {result.source}")


def bounds(result: Published) -> tuple[float, float]:
    """Predicted efficiency, the all-reduce after computing, and hidden behind the backward pass.

    These systems send gradients while others are still computed, so the truth lies between. Inside
    a machine 10 GB/s, and the latencies, are assumed; they hardly matter.
    """
    base = machines.load()["v100"]
    inner = Link("PCIe or NVLink", 10e-6, bandwidth=10e9)
    outer = Link("network", 30e-6, group_bandwidth=result.link)
    where = topology.Topology(replace(base, links=(inner, outer)), (result.local, result.hosts))
    compute = result.rows / result.speed
    reduce = allreduce.platform(where.levels(where.devices), 4 * result.weights)
    return compute / (compute + reduce), compute / (
        compute + max(0.0, reduce - _BACKWARD * compute)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
