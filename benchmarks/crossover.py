"""All-reduces between processes on CPUs, in turns: messages against XLA's own, by size.

    stratagem run --workers 2 benchmarks/crossover.py [--turns 15] [--mb 1 3 8 16 32]

Every turn runs each way once at each size, in the same processes, so that what else the machine
does meets all of them. A ratio is taken within a turn; medians and quartiles are printed. From it
`AutoAllReduce` has its constants (`src/stratagem/collectives/auto.py`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import stratagem
from stratagem.collectives import CrossDeviceOps, DoublingAllReduce, NcclAllReduce, RingAllReduce

MB = 1 << 20
THEIRS = "XLA (Gloo)"
WAYS: dict[str, CrossDeviceOps] = {
    THEIRS: NcclAllReduce(),
    "doubling": DoublingAllReduce(),
    "ring": RingAllReduce(),
}


def program(
    ops: CrossDeviceOps, mesh: jax.sharding.Mesh
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """All-reduces of values `[replicas, ...]`."""

    def step(stacked: list[jax.Array]) -> list[jax.Array]:
        values = [value[0] for value in stacked]
        return [v[None] for v in ops.all_reduce(values, "replica", mesh.size)]

    spec = P("replica")
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 3, 8, 16, 32])
    parser.add_argument("--values", type=int, default=1, help="how many values make up the size")
    parser.add_argument("--small", type=int, default=0, help="values of 4 KB besides")
    options = parser.parse_args()
    strategy = stratagem.MultiWorkerMirroredStrategy()
    programs = {name: program(ops, strategy.mesh) for name, ops in WAYS.items()}
    taken: dict[tuple[str, float], list[float]] = {}
    given = {}
    for mb in options.mb:
        sizes = [int(mb * MB) // 4 // options.values] * options.values + [1024] * options.small
        given[mb] = [strategy.place_local(np.ones((1, n), np.float32)) for n in sizes]
        for run in programs.values():
            jax.block_until_ready(run(given[mb]))  # compiles
    for turn in range(options.turns):
        names = list(WAYS)[:: 1 if turn % 2 else -1]
        for mb in options.mb:
            for name in names:
                run, value = programs[name], given[mb]
                jax.block_until_ready(run(value))  # all are here
                start = time.perf_counter()
                jax.block_until_ready(run(value))
                taken.setdefault((name, mb), []).append(time.perf_counter() - start)
    if strategy.job.is_chief:
        size = strategy.mesh.size
        print(
            f"{size} processes, {options.values} values and {options.small} small ones, "
            f"{options.turns} turns: milliseconds"
        )
        for mb in options.mb:
            theirs = taken[THEIRS, mb]
            cells = [f"{mb:5g} MB"]
            for name in WAYS:
                mine = taken[name, mb]
                ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                cells.append(
                    f"{name} {statistics.median(mine) * 1e3:6.1f} (least {min(mine) * 1e3:5.1f}; "
                    f"ratio {middle:.2f}, {low:.2f}-{high:.2f})"
                )
            print("  ".join(cells), flush=True)


main()
