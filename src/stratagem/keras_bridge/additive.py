"""Which metrics may be summed over replicas: those whose update only adds what the rows contribute.

A metric's state may be kept in parts that are added up exactly if (1) each update is
`new = old + f(rows)`, with an f that does not look at the old state, and (2) f of a batch is the
sum of f over any split of its rows. The first is proven by a data-flow walk over the traced update
(constant and copy propagation on a small lattice: Kildall, POPL 1973); the second, a question about
arithmetic, is tried out on random rows (property testing: Claessen and Hughes, ICFP 2000). A metric
that fails either, or that cannot be tried, is not summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

# State of a value: FREE does not depend on the old state, i >= 0 is `old[i] + something FREE`.
FREE, OTHER = -1, -2

_COPIES = frozenset({"mark", "copy", "copy_p"})
_SAME_SHAPE = frozenset({"convert_element_type", "broadcast_in_dim", "reshape", "squeeze"})
_LARGEST_TRIAL = 1 << 20  # elements of a leaf
_SHORTENED = 16  # axes of larger leaves are cut to this


def adds_to_old_state(closed: ClosedJaxpr, count: int) -> bool:
    """True when each of the `count` results is the input of the same position plus a FREE term.

    Args:
        closed: `(old state..., rows...) -> (new state...)`.
        count: number of state values.
    """
    inputs = [*range(count), *[FREE] * (len(closed.jaxpr.invars) - count)]
    return _walk(closed.jaxpr, inputs) == list(range(count))


def _walk(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    state: dict[Any, int] = dict.fromkeys(inner.constvars, FREE)
    state.update(zip(inner.invars, inputs, strict=True))

    def of(atom: Any) -> int:
        return FREE if isinstance(atom, Literal) else state[atom]

    for eqn in inner.eqns:
        outs = _outputs(eqn, [of(v) for v in eqn.invars])
        state.update(zip(eqn.outvars, outs, strict=True))
    return [of(v) for v in inner.outvars]


def _outputs(eqn: JaxprEqn, read: list[int]) -> list[int]:
    """States of an equation's results."""
    if all(s == FREE for s in read):
        return [FREE] * len(eqn.outvars)
    name = eqn.primitive.name
    unchanged = _kind(eqn.invars[0]) == _kind(eqn.outvars[0])
    if name in _COPIES or (name in _SAME_SHAPE and unchanged):
        return [read[0]]
    if name in ("add", "add_any") and FREE in read:
        return [read[1 - read.index(FREE)]]
    # The old state is the first operand, and nothing else here may depend on it.
    if name in ("sub", "scatter-add") and all(s == FREE for s in read[1:]):
        return [read[0]]
    if name == "select_n" and read[0] == FREE and len(set(read[1:])) == 1:
        return [read[1]]
    if name == "cond" and read[0] == FREE:
        branches = [_walk(b, read[1:]) for b in eqn.params["branches"]]
        return [outs[0] if len(set(outs)) == 1 else OTHER for outs in zip(*branches, strict=True)]
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if name in ("jit", "pjit", "closed_call") and body is not None:
        return _walk(body, read)
    return [OTHER] * len(eqn.outvars)


def _kind(atom: Any) -> tuple[Any, Any]:
    return atom.aval.shape, atom.aval.dtype


def adds_over_rows(
    update: Callable[[list[Any], list[Any]], list[Any]],
    state: Sequence[jax.ShapeDtypeStruct],
    leaves: Sequence[jax.ShapeDtypeStruct],
) -> bool:
    """True when trials find that a batch adds what its parts add. Call it outside any trace.

    Args:
        update: `(old state, leaves) -> new state`, traceable for any number of rows.
        state: shapes of the state.
        leaves: shapes of the rows' tensors, `[rows, ...]` each.
    """
    run = jax.jit(update)
    old = [np.full(s.shape, 3, s.dtype) for s in state]
    for seed in range(2):
        parts = [_rows(leaves, 2, seed, part) for part in range(2)]
        whole = [np.concatenate(pair) for pair in zip(*parts, strict=True)]
        try:
            added = [_added(run(old, rows), old) for rows in (*parts, whole)]
        except Exception:  # A metric that refuses such rows cannot be tried.
            return False
        for one, other, both in zip(*added, strict=True):
            if not np.all(np.isfinite(both)):
                return False
            if not np.allclose(one + other, both, rtol=1e-4, atol=1e-4):
                return False
    return True


def _added(new: Sequence[Any], old: Sequence[Any]) -> list[np.ndarray]:
    return [
        np.asarray(n, np.float64) - np.asarray(o, np.float64) for n, o in zip(new, old, strict=True)
    ]


def _rows(leaves: Sequence[Any], rows: int, seed: int, part: int) -> list[np.ndarray]:
    """Random tensors: integers are class numbers; the second trial has labels 0.0 and 1.0."""
    random = np.random.default_rng([seed, part])
    large = any(rows * np.prod(leaf.shape[1:], dtype=float) > _LARGEST_TRIAL for leaf in leaves)
    shapes = [tuple(min(n, _SHORTENED) if large else n for n in leaf.shape[1:]) for leaf in leaves]
    classes = max(
        [2, *(s[-1] for s, leaf in zip(shapes, leaves, strict=True) if s and _real(leaf))]
    )
    made = []
    for i, (shape, leaf) in enumerate(zip(shapes, leaves, strict=True)):
        if _real(leaf):
            values: Any = random.random((rows, *shape))
            values = np.round(values) if seed and i == 0 else values
        else:
            values = random.integers(0, classes, (rows, *shape))
        made.append(values.astype(leaf.dtype))
    return made


def _real(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating))
