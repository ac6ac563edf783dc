"""Bus bandwidth of each cross-device op, by size of the value and number of replicas.

    python benchmarks/collectives_bench.py [--quick] [--json FILE] [--plot FILE]

Runs on the accelerators of this machine if there are two or more, else on eight virtual CPU
devices. Each sample is one call of a compiled program that runs the op several times on a float32
value, each on the result of the one before. Samples are interleaved over the ops, so that a slow
moment of the machine meets all of them; the figures are medians, with the quartiles as spread.

Bus bandwidth is `n/t * 2(p-1)/p` (see `stratagem.collectives.cost.bus_bandwidth`). On virtual CPU
devices it shows the cost of copies in shared memory and of waiting for each other, not of a link.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stratagem import config

if __name__ == "__main__":
    config.set_virtual_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stratagem.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
    TreeAllReduce,
    cost,
)

KB, MB = 1024, 1024 * 1024
SIZES = (KB, 16 * KB, 256 * KB, 4 * MB, 64 * MB)
QUICK_SIZES = (KB, 64 * KB, MB)
REPLICAS = (2, 4, 8)
OPS: dict[str, CrossDeviceOps] = {
    "nccl": NcclAllReduce(),
    "ring": RingAllReduce(),
    "tree": TreeAllReduce(),
    "hierarchical": HierarchicalCopyAllReduce(),
    "one_device": ReductionToOneDevice(),
}


@dataclass(frozen=True)
class Result:
    """One op at one size: seconds of one all-reduce, and bytes per second of bus bandwidth."""

    ops: str
    replicas: int
    nbytes: int
    samples: int
    seconds: float
    seconds_quartiles: tuple[float, float]
    bus_bandwidth: float
    bus_bandwidth_quartiles: tuple[float, float]
    bytes_sent_by_busiest: int


def devices() -> list[jax.Device]:
    """Accelerators if there are several, else the CPU devices."""
    found = config.resolve_devices()
    return found if len(found) > 1 else jax.devices("cpu")


def repeats_in_program(nbytes: int) -> int:
    """All-reduces in one call: enough that the call itself does not count."""
    return max(1, min(50, 4 * MB // nbytes))


def program(ops: CrossDeviceOps, mesh: Mesh, repeats: int) -> Callable[[jax.Array], jax.Array]:
    """Compiles `repeats` all-reduces in a row of a value `[replicas, elements]`."""

    def step(stacked: jax.Array) -> jax.Array:
        def once(_: Any, value: jax.Array) -> jax.Array:
            return ops.all_reduce([value], "replica", mesh.size)[0]

        return jax.lax.fori_loop(0, repeats, once, stacked[0])[None]

    spec = P("replica")
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def measure(replicas: int, nbytes: int, samples: int) -> list[Result]:
    """Times all ops at one size, in turns."""
    mesh = Mesh(np.array(devices()[:replicas]), ("replica",))
    sharding = NamedSharding(mesh, P("replica"))
    # Zeros, because sums of sums of anything else overflow.
    value = jax.device_put(jnp.zeros((replicas, nbytes // 4), jnp.float32), sharding)
    repeats = repeats_in_program(nbytes)
    programs = {name: program(ops, mesh, repeats) for name, ops in OPS.items()}
    for run in programs.values():
        run(value).block_until_ready()  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in OPS}
    for _ in range(samples):
        for name, run in programs.items():
            start = time.perf_counter()
            run(value).block_until_ready()
            seconds[name].append((time.perf_counter() - start) / repeats)
    return [_result(name, replicas, nbytes, taken) for name, taken in seconds.items()]


def _result(name: str, replicas: int, nbytes: int, seconds: list[float]) -> Result:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    value = jax.ShapeDtypeStruct((nbytes // 4,), jnp.float32)

    def bandwidth(t: float) -> float:
        return cost.bus_bandwidth(replicas, nbytes, t)

    return Result(
        ops=name,
        replicas=replicas,
        nbytes=nbytes,
        samples=len(seconds),
        seconds=median,
        seconds_quartiles=(low, high),
        bus_bandwidth=bandwidth(median),
        bus_bandwidth_quartiles=(bandwidth(high), bandwidth(low)),
        bytes_sent_by_busiest=OPS[name].cost([value], replicas).max_bytes,
    )


def size_name(nbytes: int) -> str:
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"


def table(results: Sequence[Result]) -> str:
    """Bus bandwidth in GB/s; the fastest of a row has a star."""
    lines = []
    for replicas in sorted({r.replicas for r in results}):
        lines.append(
            f"\n{replicas} replicas, bus bandwidth in GB/s: median, half the interquartile range"
        )
        lines.append("".join([f"{'size':>7}", *(f"{name:>17} " for name in OPS)]))
        for nbytes in sorted({r.nbytes for r in results if r.replicas == replicas}):
            row = {r.ops: r for r in results if (r.replicas, r.nbytes) == (replicas, nbytes)}
            best = max(row.values(), key=lambda r: r.bus_bandwidth).ops
            cells = [f"{size_name(nbytes):>7}"]
            for name in OPS:
                median = row[name].bus_bandwidth
                low, high = row[name].bus_bandwidth_quartiles
                spread = (high - low) / 2 / median
                cells.append(f"{median / 1e9:>11.3g} ±{spread:>4.0%}{'* '[name != best]}")
            lines.append("".join(cells))
    return "\n".join(lines)


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws one panel for each number of replicas."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = sorted({r.replicas for r in results})
    figure, axes = plt.subplots(
        1, len(counts), figsize=(4 * len(counts), 3.6), sharey=True, squeeze=False
    )
    for axis, replicas in zip(axes[0], counts, strict=True):
        for name in OPS:
            line = [r for r in results if (r.replicas, r.ops) == (replicas, name)]
            sizes = [r.nbytes for r in line]
            axis.plot(sizes, [r.bus_bandwidth / 1e9 for r in line], marker="o", label=name)
            low, high = zip(*(r.bus_bandwidth_quartiles for r in line), strict=True)
            axis.fill_between(sizes, np.array(low) / 1e9, np.array(high) / 1e9, alpha=0.2)
        axis.set(xscale="log", yscale="log", xlabel="bytes", title=f"{replicas} replicas")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("bus bandwidth, GB/s")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    there = devices()
    return {
        "platform": there[0].platform,
        "device": there[0].device_kind,
        "devices": len(there),
        "cpu_cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few samples")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures (matplotlib)")
    options = parser.parse_args(arguments)

    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()), file=sys.stderr)
    results = []
    for replicas in (n for n in REPLICAS if n <= about["devices"]):
        for nbytes in QUICK_SIZES if options.quick else SIZES:
            samples = 5 if options.quick or nbytes > 16 * MB else 15
            results += measure(replicas, nbytes, samples)
            print(f"measured {replicas} replicas, {size_name(nbytes)}", file=sys.stderr)
    print(table(results))
    if options.json:
        record = {"machine": about, "results": [asdict(r) for r in results]}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    if options.plot:
        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
