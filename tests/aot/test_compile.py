"""Training steps under TPUStrategy, taken as `fit` takes them, by the real compiler for TPUs."""

from __future__ import annotations

import re
import time
from typing import Any

import jax
import numpy as np
import pytest

import stratagem
from aot.models import MODELS, ROWS, zeros
from stratagem.experimental import DescribedTPUStrategy

pytestmark = [pytest.mark.libtpu, pytest.mark.timeout(1800)]

# Bytes of high-bandwidth memory of a chip, as Google states them at cloud.google.com/tpu/docs/ in
# v5e, v5p and v6e. (One device is one chip on all of them.)
HBM = {"v5e": 16e9, "v5p": 95e9, "v6e": 32e9}
CORES = {"v5e:2x2": 4, "v5e:4x4": 16, "v5p:2x2x2": 8, "v6e:2x4": 8}
# Gradients, metrics and statistics are one. Synchronized batch normalisation, which the demo has,
# needs its statistics inside the pass: once forward, once backward.
ALL_REDUCES = {"demo": 3, "cnn": 1, "transformer": 1, "embedding": 1}

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def collectives(text: str) -> list[str]:
    """The collectives of the compiled program, each once (start and done are one)."""
    return re.findall(rf" = .*? ({KINDS})(?:-start)?\(", text)


def replicas(text: str) -> set[int]:
    """How many replicas each all-reduce is over."""
    groups = re.findall(r" all-reduce(?:-start)?\(.*?replica_groups=\{?\{?([^}]*)\}", text)
    iota = re.findall(r" all-reduce(?:-start)?\(.*?replica_groups=\[1,(\d+)\]", text)
    return {int(n) for n in iota} | {len(g.split(",")) for g in groups if "[" not in g}


def used(compiled: jax.stages.Compiled) -> int:
    """Bytes of one chip's memory that the step needs, its program included."""
    memory = compiled.memory_analysis()
    values = memory.argument_size_in_bytes + memory.output_size_in_bytes
    values -= memory.alias_size_in_bytes  # outputs that take the place of donated inputs
    return values + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


@pytest.mark.parametrize("topology", CORES)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step(topology, name, record_property, capsys):
    strategy = DescribedTPUStrategy(topology)
    assert strategy.num_replicas_in_sync == CORES[topology]
    with strategy.scope():
        model, (x, y) = MODELS[name](ROWS * CORES[topology])
    lowered = strategy.lower(model.train_step, ((x, y, None),))
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    assert collectives(text) == ["all-reduce"] * ALL_REDUCES[name]
    assert replicas(text) == {CORES[topology]}
    capacity = HBM[topology.partition(":")[0]]
    assert 0 < used(compiled) < capacity
    state = 4 * sum(int(np.prod(v.shape)) for v in model.variables + model.optimizer.variables)
    assert used(compiled) > state  # it counts the variables at least
    row = (
        f"{topology:10} {name:12} {seconds:5.1f} s  {ALL_REDUCES[name]} all-reduce  "
        f"{used(compiled) / 2**20:8.1f} MiB = {used(compiled) / capacity:.2%} of a chip"
    )
    record_property("compiled", row)
    with capsys.disabled():
        print(f"\n{row}", end="")


def test_a_custom_loop_and_an_uneven_batch():
    """`run` and parts of different sizes lower for described devices as well."""
    strategy = DescribedTPUStrategy("v5e:2x2")
    rows = stratagem.PerReplica([zeros((n, 3), "float32") for n in (2, 2, 2, 1)])

    def step(x: Any) -> Any:
        return stratagem.get_replica_context().all_reduce("SUM", jax.numpy.sum(x))

    text = strategy.lower(step, (rows,)).compile().as_text()
    assert collectives(text) == ["all-reduce"]


def test_what_does_not_fit_is_refused():
    """The compiler knows the memory of the chip: 40 GB of results do not fit into 16 GB."""
    strategy = DescribedTPUStrategy("v5e:2x2")
    x = stratagem.PerReplica([zeros((100_000,), "float32")] * 4)
    lowered = strategy.lower(lambda x: x[:, None] * x, (x,))
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED|memory"):
        lowered.compile()


def test_it_only_describes():
    strategy = DescribedTPUStrategy("v5e:2x2")
    with strategy.scope():
        model, (x, y) = MODELS["embedding"](8)
    told = r"fit: expected a strategy whose devices are here. Got <DescribedTPUStrategy of v5e:2x2"
    with pytest.raises(RuntimeError, match=told):
        model.fit(x, y)
    calls = {
        "run": lambda: strategy.run(lambda: 1),
        "stratagem.function": lambda: stratagem.function(lambda: 1, strategy=strategy)(),
        "experimental_distribute_dataset": lambda: strategy.experimental_distribute_dataset([]),
        "distribute_datasets_from_function": lambda: strategy.distribute_datasets_from_function(
            lambda _: []
        ),
    }
    for what, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{what}: expected a strategy whose devices are"):
            call()
    assert strategy.worker_devices[0] == "/device:TPU:0"
    assert all(v.value.devices() == {jax.devices("cpu")[0]} for v in model.variables)


def test_an_unknown_slice():
    with pytest.raises(ValueError, match="topology: expected a slice that libtpu knows.*'v5e:3x"):
        DescribedTPUStrategy("v5e:3x999")
