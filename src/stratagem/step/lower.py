"""Stage 6: a program becomes one `jax.jit(jax.shard_map(...))`, with the state donated.

`evaluate` is where the traced equations run: JAX's own as they are, ours as calls into the
collectives room. Each all-reduce of a level goes there as one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from stratagem import variables
from stratagem.step import primitives
from stratagem.step.arguments import Argument
from stratagem.step.fuse import schedule
from stratagem.step.program import bind, read_all, write_all
from stratagem.step.trace import Program


def evaluate(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Runs one replica's program, inside `shard_map` (or on one device without collectives)."""
    env: dict[Any, Any] = {}
    write_all(env, closed.jaxpr.constvars, closed.consts)
    write_all(env, closed.jaxpr.invars, inputs)
    for level in schedule(closed.jaxpr):
        for eqn in level.eqns:
            write_all(env, eqn.outvars, perform(eqn, read_all(env, eqn.invars)))
        if level.reduces:
            totals = run_all_reduce(*read_all(env, level.operands), **level.fused)
            write_all(env, level.totals, totals)
        for eqn in level.gathers:
            env[eqn.outvars[0]] = run_all_gather(*read_all(env, eqn.invars), **eqn.params)
    return read_all(env, closed.jaxpr.outvars)


def perform(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """One equation that is not a collective."""
    if eqn.primitive is primitives.mark_p:
        return list(values)
    if eqn.primitive is primitives.replica_id_p:
        return [jax.lax.axis_index(primitives.AXIS)]
    if eqn.primitive is primitives.tape_start_p:
        return [jnp.zeros((), jnp.int32)]
    return bind(eqn, values)


def run_all_reduce(
    *values: Any, ops: tuple[str, ...], via: Any, replicas: int, weight: float | None = None
) -> list[Any]:
    """What an all-reduce does inside the compiled program."""
    del weight  # concerns the gradient alone
    first = jax.lax.axis_index(primitives.AXIS) == 0
    sent = [
        jnp.where(first, v, jnp.zeros_like(v)) if op == "first" else v
        for v, op in zip(values, ops, strict=True)
    ]
    sums = via.all_reduce(sent, primitives.AXIS, replicas)
    return [
        primitives.divide(s, replicas) if op == "mean" else s
        for s, op in zip(sums, ops, strict=True)
    ]


def run_all_gather(
    value: Any, *, sizes: tuple[int, ...], via: Any, weight: float | None = None
) -> Any:
    """What an all-gather does inside the compiled program: pad, gather, cut, join."""
    del weight
    largest = max(sizes)
    padding = [(0, largest - value.shape[0])] + [(0, 0)] * (value.ndim - 1)
    stacked = via.all_gather(jnp.pad(value, padding), primitives.AXIS, len(sizes))
    return jnp.concatenate([stacked[r, :size] for r, size in enumerate(sizes)])


# For those inside a loop or a branch, which JAX lowers.
_lowerings: dict[Any, Any] = {
    primitives.all_reduce_p: run_all_reduce,
    primitives.all_gather_p: run_all_gather,
    primitives.replica_id_p: lambda: jax.lax.axis_index(primitives.AXIS),
    primitives.mark_p: lambda x, **_: x,
}
for _primitive, _rule in _lowerings.items():
    mlir.register_lowering(
        _primitive, mlir.lower_fun(_rule, multiple_results=_primitive.multiple_results)
    )


def state_spec(program: Program, variable: Any) -> PartitionSpec:
    """Layout of a variable at the program's boundary: components are split, others replicated."""
    split = variables.is_on_read(variable) and not program.aggregated
    return PartitionSpec(primitives.AXIS) if split else PartitionSpec()


def boundary(
    program: Program,
    run: Any,
    mesh: jax.sharding.Mesh | None,
    split: Sequence[bool],
    *,
    keep: bool = False,
) -> Any:
    """The jitted function `(donated, kept, arguments) -> (outputs, new state)` of a program.

    Args:
        program: gives the layout of state and results.
        run: `(inputs) -> outputs` on one replica; inputs and outputs as in `program.jaxpr`.
        mesh: over the replicas, or None for one device.
        split: for each argument, whether it is stacked `[replicas, ...]` (else replicated).
        keep: leave the written variables' old values where they are.
    """
    donated = [i in program.written for i in range(len(program.variables))]
    # A step that may fail, or that may fail its checks, must not destroy the state.
    donate = () if program.checks or keep else 0
    if mesh is None:

        def one(given: list[Any], kept: list[Any], arguments: list[Any]) -> Any:
            outs = run([*weave(donated, given, kept), *arguments])
            return outs[: program.num_outputs], outs[program.num_outputs :]

        return jax.jit(one, donate_argnums=donate)

    stacked, same = PartitionSpec(primitives.AXIS), PartitionSpec()
    specs = [state_spec(program, v) for v in program.variables]
    in_specs = (
        [s for s, d in zip(specs, donated, strict=True) if d],
        [s for s, d in zip(specs, donated, strict=True) if not d],
        [stacked if s else same for s in split],
    )
    kinds = [kind for kind, _ in program.out_leaves if kind != "static"]
    out_specs = (
        [same if kind == "shared" else stacked for kind in kinds],
        [specs[i] for i in program.written],
    )
    new_axis = (
        [kind == "local" for kind in kinds],  # "rows" already have the axis that is split
        [spec == stacked for spec in out_specs[1]],
    )

    def replica(given: list[Any], kept: list[Any], arguments: list[Any]) -> Any:
        given, kept, arguments = (
            [v[0] if spec == stacked else v for v, spec in zip(vs, ss, strict=True)]
            for vs, ss in zip((given, kept, arguments), in_specs, strict=True)
        )
        outs = run([*weave(donated, given, kept), *arguments])
        results, state = outs[: program.num_outputs], outs[program.num_outputs :]
        return tuple(
            [jnp.asarray(v)[None] if new else v for v, new in zip(vs, axes, strict=True)]
            for vs, axes in zip((results, state), new_axis, strict=True)
        )

    sharded = jax.shard_map(
        replica, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(sharded, donate_argnums=donate)


def describe_inputs(
    strategy: Any,
    given: Sequence[tuple[Any, bool]],
    kept: Sequence[tuple[Any, bool]],
    arguments: Sequence[Argument],
) -> tuple[list[Any], list[Any], list[Any]]:
    """What `boundary`'s function takes: shapes, dtypes and layouts, without values.

    Args:
        strategy: knows the layouts.
        given: donated variables, each with whether its value is in components.
        kept: the other variables, likewise.
        arguments: the dynamic arguments.
    """
    home, stacked = strategy.layouts
    count = strategy.num_replicas_in_sync

    def describe(shape: Sequence[int], dtype: Any, split: bool) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
        whole = (count, *shape) if split else tuple(shape)
        return jax.ShapeDtypeStruct(whole, dtype, sharding=stacked if split else home)

    def variable(slot: tuple[Any, bool]) -> jax.ShapeDtypeStruct:
        spec = variables.local_spec(slot[0])
        return describe(spec.shape, spec.dtype, slot[1])

    return (
        [variable(slot) for slot in given],
        [variable(slot) for slot in kept],
        [describe(a.padded, a.dtype, a.split and count > 1) for a in arguments],
    )


def weave(donated: Sequence[bool], given: list[Any], kept: list[Any]) -> list[Any]:
    """Puts the donated and the kept variables back into the program's order."""
    given_iter, kept_iter = iter(given), iter(kept)
    return [next(given_iter) if d else next(kept_iter) for d in donated]
