"""The all-reduce of several processes on CPUs, chosen by its cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from stratagem.collectives.abstract import CrossDeviceOps
from stratagem.collectives.cost import Cost
from stratagem.collectives.doubling import DoublingAllReduce
from stratagem.collectives.nccl import NcclAllReduce
from stratagem.collectives.packs import nbytes_of

# Bytes in a round of messages up to which they are about as fast as XLA's own, or faster: of one
# value, and of all together. From `stratagem run --workers 2 benchmarks/crossover.py`, on two cores
# that were busy with other things too: doubling's time as a multiple of XLA's, medians of three
# runs. One value, 2 processes: 1 MB 0.9, 3 MB 1.2, 8 MB 1.2, 16 MB 3.2, 32 MB 1.8; 4 processes
# (one run): 0.6, 1.0, 1.7, 2.8 (16 MB). 8 values, 2 processes (one run): 1 MB 0.6,
# 3 MB 0.7, 8 MB 0.6, 16 MB 0.7, 32 MB 2.8. The jump to 3 is one of memory: buffers of some 30 MB
# and more are new pages in every step. The ring is not chosen: where it is faster than XLA's own,
# doubling is so too (figures at `RingAllReduce`).
_LARGEST = 4 << 20
_MOST = 16 << 20


class AutoAllReduce(CrossDeviceOps):
    """Leaves the all-reduce to XLA, except where messages are faster: between processes on CPUs.

    There XLA's all-reduce (Gloo's) takes many messages for every value. Recursive doubling takes
    the fewest there can be, each of all bytes: this chooses it where latency counts, so up to a
    size, which is the smaller the more rounds there are.
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
        sizes = [nbytes_of(value) for value in values]
        rounds = max(1, (axis_size - 1).bit_length())
        few = max(sizes, default=0) * rounds <= _LARGEST and sum(sizes) * rounds <= _MOST
        return DoublingAllReduce() if few else NcclAllReduce()
