"""The same custom loop by hand: jax.distributed, one jitted shard_map, one psum over Gloo."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import pair
import problems
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def replica_step(params: Any, x: Any, y: Any) -> Any:
    """One replica's step: `x` is `[rows of this replica, 784]`."""

    def average_loss(params: Any) -> Any:
        w1, b1, w2, b2 = params
        logits = jax.nn.relu(x @ w1 + b1) @ w2 + b2
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
        return -jnp.sum(chosen) / problems.WIDE_BATCH

    loss, grads = jax.lax.psum(jax.value_and_grad(average_loss)(params), "replica")
    return loss, [p - problems.LOOP_RATE * g for p, g in zip(params, grads, strict=True)]


def main() -> None:
    arguments = measure.options()
    with pair.partner() as rank:
        jax.distributed.initialize(pair.addresses()[0], pair.WORKERS, rank)
        mesh = Mesh(np.asarray(jax.devices()), ("replica",))
        rows, same = NamedSharding(mesh, P("replica")), NamedSharding(mesh, P())
        mapped = jax.shard_map(
            replica_step,
            mesh=mesh,
            in_specs=(P(), P("replica"), P("replica")),
            out_specs=(P(), P()),
            check_vma=False,
        )
        compiled = jax.jit(mapped, donate_argnums=0)

        def place(array: np.ndarray, sharding: Any) -> Any:
            return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

        params = [place(w, same) for w in problems.wide_weights()]

        def step(batch: Any) -> Any:
            nonlocal params
            loss, params = compiled(params, *batch)
            return loss

        batches = [tuple(place(a, rows) for a in batch) for batch in problems.wide_batches()]
        measure.loop(step, batches, arguments.steps, arguments.samples, jax.block_until_ready)
        measure.say(loss=float(step(batches[0])), about={"jax": jax.__version__})


if __name__ == "__main__":
    main()
