"""The TPU compiler's word in a plan."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from stratagem.cli import plan_trace
from stratagem.planning import machines, predict, topology
from stratagem.strategies import PlannedStrategy

pytestmark = pytest.mark.libtpu


def test_memory_and_bytes_are_the_compilers():
    planned, asked = PlannedStrategy(4), []
    with planned.scope():
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(256)])
        model.compile("sgd", "mse")
    x, y = np.ones((66, 512)), np.ones((66, 256))
    with plan_trace.replaced(planned, asked), pytest.raises(plan_trace.Caught) as caught:
        model.fit(x, y, batch_size=66, verbose=0)
    wanted = plan_trace.Wanted(out="", replicas=4, compiler="v5e:2x2")
    counted = plan_trace.count(caught.value, planned, asked, wanted)
    program = plan_trace.asked_compiler(counted, caught.value, planned, wanted.compiler)
    compiled = program.compiled
    assert compiled.name == "libtpu, v5e:2x2"
    assert compiled.all_reduces == len(program.reduces) == 1
    # 17 rows a core, which TPUs keep in tiles of 8.
    least = 4 * (512 * 256 + 256 + 17 * (512 + 256))
    assert least <= compiled.arguments <= 1.2 * least
    assert program.memory == compiled.memory >= compiled.arguments
    assert compiled.operations == pytest.approx(program.total_operations, rel=0.1)


def test_a_step_that_does_not_fit_is_planned_by_estimate():
    planned, asked = PlannedStrategy(4), []
    with planned.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1 << 20)])
        model.compile("sgd", "mse")
    x, y = np.ones((64, 8)), np.ones((64, 1))
    with plan_trace.replaced(planned, asked, 8192), pytest.raises(plan_trace.Caught) as caught:
        model.fit(x, y, batch_size=64, verbose=0)
    wanted = plan_trace.Wanted(out="", replicas=4, rows=8192)
    counted = plan_trace.count(caught.value, planned, asked, wanted)
    program = plan_trace.asked_compiler(counted, caught.value, planned, "v5e:2x2")
    assert program.refused.startswith("RESOURCE_EXHAUSTED")
    made = predict.plan(program, topology.parse("v5e:2x2", machines.load()))
    assert not made.fits
    assert any("The compiler for these devices does not compile" in note for note in made.notes)
