"""The only room that communicates between replicas: one file an algorithm, plus its costs.

Which one (`p` replicas, `n` bytes each, see `cost.py`):

| ops | rounds | bytes sent by the busiest replica |
|---|---|---|
| `NcclAllReduce` | the platform's choice | at least `2(p-1)/p * n` |
| `RingAllReduce` | `2(p-1)` | `2(p-1)/p * n` |
| `TreeAllReduce` | `2*ceil(log2 p)` | `ceil(log2 p) * n` |
| `DoublingAllReduce` | `log2 p` | `log2 p * n` |
| `HierarchicalCopyAllReduce` | about `4*(sqrt(p)-1)` | about `2*(sqrt(p)-1) * n` |
| `ReductionToOneDevice` | `2(p-1)` | `(p-1) * n` |
"""

from __future__ import annotations

from stratagem.collectives.abstract import CrossDeviceOps as CrossDeviceOps
from stratagem.collectives.auto import AutoAllReduce as AutoAllReduce
from stratagem.collectives.doubling import DoublingAllReduce as DoublingAllReduce
from stratagem.collectives.hierarchical import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from stratagem.collectives.nccl import NcclAllReduce as NcclAllReduce
from stratagem.collectives.one_device import ReductionToOneDevice as ReductionToOneDevice
from stratagem.collectives.options import CommunicationImplementation as CommunicationImplementation
from stratagem.collectives.options import CommunicationOptions as CommunicationOptions
from stratagem.collectives.ring import RingAllReduce as RingAllReduce
from stratagem.collectives.tree import TreeAllReduce as TreeAllReduce
