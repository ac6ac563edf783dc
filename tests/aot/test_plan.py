"""The TPU compiler's word in a plan."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from stratagem.cli import plan_trace
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
    program = plan_trace.count(caught.value, planned, asked, wanted)
    compiled = program.compiled
    assert compiled.name == "libtpu, v5e:2x2"
    assert compiled.all_reduces == len(program.reduces) == 1
    # 17 rows a core, which TPUs keep in tiles of 8.
    least = 4 * (512 * 256 + 256 + 17 * (512 + 256))
    assert least <= compiled.arguments <= 1.2 * least
    assert program.memory == compiled.memory >= compiled.arguments
    assert compiled.operations == pytest.approx(program.total_operations, rel=0.1)
