"""A model's step for one process less is compiled before a process is lost.

The first process of each machine does it, in a thread, once for each set of processes, and leaves
the program in the persistent cache. After a loss all find it there (`cluster/compilations.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stratagem.cluster import compilations
from stratagem.data import RebatchRule, split_rows
from stratagem.keras_bridge.distributed_input import GlobalBatch

_CALM_STEPS = 2  # on these processes: the first one may compile


class Ahead:
    """Counts the steps of a model, and has the smaller one compiled.

    Args:
        strategy: the model's.
        step: makes the model's step for another strategy.
    """

    def __init__(self, strategy: Any, step: Callable[[Any], Any]):
        self._strategy = strategy
        self._step = step
        self._mesh: Any = None
        self._steps = 0

    def stepped(self, batch: Any) -> None:
        """A step of this batch has finished."""
        if self._mesh is not self._strategy.mesh:
            self._mesh, self._steps = self._strategy.mesh, 0
        self._steps += 1
        if self._steps == _CALM_STEPS and self._strategy.job.is_first_here:
            self._start(batch)

    def _start(self, batch: Any) -> None:
        smaller = self._strategy.smaller()
        if smaller is None:
            return
        replicas = smaller.num_replicas_in_sync
        shares = jax.tree.map(lambda leaf: share(leaf, replicas), batch)
        if any(leaf is None for leaf in jax.tree.leaves(shares, is_leaf=lambda x: x is None)):
            return
        step = self._step(smaller)
        compilations.ahead(lambda: step.lower(shares), f"{step.doing} on {replicas} replicas")


def share(leaf: Any, replicas: int) -> GlobalBatch | None:
    """What a tensor of a batch is on another number of replicas: zeros, for their shapes.

    None where that is not known: each worker has data of its own.
    """
    if isinstance(leaf, GlobalBatch):
        if leaf.dealt is None:
            return None
        counts = leaf.dealt.counts(replicas)
    elif np.ndim(leaf):
        counts = split_rows(np.shape(leaf)[0], replicas, RebatchRule.CEIL)
    else:
        return None
    zero = np.zeros((), jax.dtypes.canonicalize_dtype(leaf.dtype))
    return GlobalBatch([np.broadcast_to(zero, (n, *leaf.shape[1:])) for n in counts])
