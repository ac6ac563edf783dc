"""The same custom loop by hand: one jitted shard_map with donated state and one psum.

Stratagem is not imported. run.py sets the size of XLA's thread pool (NPROC), without which two
devices on two cores stop for good.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import problems
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def replica_step(params: Any, x: Any, y: Any) -> Any:
    """One replica's step: `x` is `[rows of this replica, 10]`."""

    def average_loss(params: Any) -> Any:
        w1, b1, w2, b2 = params
        predicted = jax.nn.relu(x @ w1 + b1) @ w2 + b2
        return jnp.sum(jnp.mean((y - predicted) ** 2, axis=-1)) / problems.LOOP_BATCH

    loss, grads = jax.lax.psum(jax.value_and_grad(average_loss)(params), "replica")
    return loss, [p - problems.LOOP_RATE * g for p, g in zip(params, grads, strict=True)]


def main() -> None:
    jax.config.update("jax_num_cpu_devices", problems.REPLICAS)
    arguments = measure.options()
    mesh = Mesh(np.asarray(jax.devices()[: problems.REPLICAS]), ("replica",))
    rows, same = NamedSharding(mesh, P("replica")), NamedSharding(mesh, P())
    compiled = jax.jit(
        jax.shard_map(
            replica_step,
            mesh=mesh,
            in_specs=(P(), P("replica"), P("replica")),
            out_specs=(P(), P()),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    params = jax.device_put(problems.loop_weights(), same)

    def step(batch: Any) -> Any:
        nonlocal params
        loss, params = compiled(params, *batch)
        return loss

    batches = jax.device_put(problems.loop_batches(), rows)
    measure.loop(step, batches, arguments.steps, arguments.samples, jax.block_until_ready)
    measure.say(loss=float(step(batches[0])), about={"jax": jax.__version__})


if __name__ == "__main__":
    main()
