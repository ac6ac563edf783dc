"""The all-reduce of several processes on CPUs, chosen by its cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from stratagem.collectives.abstract import CrossDeviceOps
from stratagem.collectives.cost import Cost
from stratagem.collectives.doubling import DoublingAllReduce
from stratagem.collectives.nccl import NcclAllReduce
from stratagem.collectives.ring import RingAllReduce

# Between two processes over loopback, from benchmarks/run.py's machine (benchmarks/cases
# /workers_by_hand.py with a psum, and with messages): a message of no bytes takes about 150 us,
# 3.25 MB take 1.9 ms. The choice depends on their ratio alone.
_ALPHA = 150e-6  # seconds
_BETA = 1.9e-3 / 3.25e6  # seconds a byte


class AutoAllReduce(CrossDeviceOps):
    """Leaves the all-reduce to XLA, except where messages are faster: between processes on CPUs.

    There XLA's all-reduce (Gloo's) sends every value by itself, around a ring. Instead this takes
    recursive doubling or one ring for all values, whichever costs less for the number of replicas
    and of bytes.
    """

    def placed_on(self, devices: Sequence[jax.Device]) -> CrossDeviceOps:
        several = len({d.process_index for d in devices}) > 1
        return self if several and devices[0].platform == "cpu" else NcclAllReduce()

    def all_reduce(
        self, values: Sequence[jax.Array], axis_name: str, axis_size: int
    ) -> list[jax.Array]:
        return self.chosen(values, axis_size).all_reduce(values, axis_name, axis_size)

    def cost(self, values: Sequence[Any], axis_size: int) -> Cost:
        return self.chosen(values, axis_size).cost(values, axis_size)

    def chosen(self, values: Sequence[Any], axis_size: int) -> CrossDeviceOps:
        """What reduces these values."""
        ways = (DoublingAllReduce(), RingAllReduce())
        return min(ways, key=lambda ops: ops.cost(values, axis_size).seconds(_ALPHA, _BETA))
