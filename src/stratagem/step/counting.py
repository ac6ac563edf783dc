"""What one replica's program does, counted in its equations: operations, bytes, live memory.

A model of XLA's fusion: products, convolutions, reductions, gathers, scatters and sorts read their
operands from memory and write their results there. Chains of everything else between them are
fused, so that only what enters and leaves a chain crosses memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from stratagem.step.fuse import COLLECTIVES, live, schedule

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_KERNELS = (
    *_PRODUCTS, "sort", "gather", "scatter", "scatter-add", "scatter_add", "cumsum", "fft", "top_k",
    "dynamic_update_slice", "concatenate", "select_and_scatter_add", "argmax", "argmin", "cholesky",
    "all_reduce", "all_gather",
)  # fmt: skip
_MOVES = (
    "reshape", "broadcast_in_dim", "transpose", "squeeze", "convert_element_type", "slice", "iota",
    "copy", "stop_gradient", "mark", "replica_id", "tape_start", "pad", "rev", "concatenate",
    "gather", "dynamic_slice", "dynamic_update_slice", "split",
)  # fmt: skip
_LOOPS = ("scan", "while", "cond")


@dataclass
class Count:
    """Totals of a program; sizes are bytes.

    Attributes:
        operations: by type of the products' operands, `"conv"` before it for convolutions; or
            `"other"`.
        bytes: that cross the device's memory.
        kernels: launches.
        peak: most bytes of values that live at once, without the inputs.
        reduces: of each fused all-reduce.
        growing: of each, what would be more with more replicas: sums of something gathered.
        gathers: of each all-gather, what one replica sends.
        unknown: loops of an unknown number of turns, counted as one.
    """

    operations: dict[str, float] = field(default_factory=dict)
    bytes: float = 0.0
    kernels: int = 0
    peak: int = 0
    reduces: list[int] = field(default_factory=list)
    growing: list[int] = field(default_factory=list)
    gathers: list[int] = field(default_factory=list)
    unknown: int = 0

    def add(self, other: Count, times: int = 1) -> None:
        """Adds another program, run so often; the peak is the caller's to know."""
        for name, number in other.operations.items():
            self.operations[name] = self.operations.get(name, 0.0) + times * number
        self.bytes += times * other.bytes
        self.kernels += times * other.kernels
        self.reduces += times * other.reduces
        self.growing += times * other.growing
        self.gathers += times * other.gathers
        self.unknown += other.unknown


@dataclass(frozen=True)
class _Node:
    """An equation, with its values by key: functions that it calls are taken apart."""

    eqn: JaxprEqn
    inputs: list[int]
    outputs: list[int]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def loops(self) -> bool:
        return self.name in _LOOPS

    @property
    def heavy(self) -> bool:
        return self.name in _KERNELS or self.name.startswith(("reduce_", "cum")) or self.loops


class _Flat:
    """The live equations of a jaxpr, calls of functions inlined; loops and branches are kept.

    Attributes:
        nodes: in order.
        sizes: bytes of each value.
        results: keys of the outputs.
        nested: collectives inside of functions, each by itself.
    """

    def __init__(self, jaxpr: Any):
        self.nodes: list[_Node] = []
        self.sizes: list[int] = []
        self.nested: list[JaxprEqn] = []
        keys = {v: self._key(v) for v in (*jaxpr.constvars, *jaxpr.invars)}
        self.results = set(self._inline(jaxpr, keys, 0))

    def _key(self, v: Any) -> int:
        self.sizes.append(_size(v))
        return len(self.sizes) - 1

    def _inline(self, jaxpr: Any, keys: dict[Any, int], depth: int) -> list[int]:
        def key(v: Any) -> int:
            if isinstance(v, Literal):  # part of the code
                self.sizes.append(0)
                return len(self.sizes) - 1
            if v not in keys:
                keys[v] = self._key(v)
            return keys[v]

        for eqn in live(jaxpr):
            bodies = _bodies(eqn)
            inputs = [key(v) for v in eqn.invars]
            if bodies and eqn.primitive.name not in _LOOPS:
                body = bodies[0]
                inner = {v: self._key(v) for v in body.constvars}
                inner.update(zip(body.invars, inputs, strict=True))
                outs = self._inline(body, inner, depth + 1)
                keys.update(zip(eqn.outvars, outs, strict=True))
                continue
            if depth and eqn.primitive in COLLECTIVES:
                self.nested.append(eqn)
            self.nodes.append(_Node(eqn, inputs, [key(v) for v in eqn.outvars]))
        return [key(v) for v in jaxpr.outvars]


def count(closed: ClosedJaxpr, replicas: int) -> Count:
    """Counts one replica's program, traced for so many, the collectives as they are fused."""
    found = _count(closed.jaxpr)
    levels = schedule(closed.jaxpr)
    found.gathers += [_size(eqn.invars[0]) for level in levels for eqn in level.gathers]
    # The gradient of what was gathered is as large as all of it.
    gathered = {replicas * n for n in found.gathers}
    for level in levels:
        if sizes := [_size(v) for v in level.operands]:
            found.reduces.append(sum(sizes))
            found.growing.append(sum(n for n in sizes if n in gathered))
    return found


def _count(jaxpr: Any) -> Count:
    found, flat = Count(), _Flat(jaxpr)
    _add_collectives(found, flat.nested)
    inside = {i: _add_node(found, node) for i, node in enumerate(flat.nodes)}
    _add_bytes(found, flat)
    found.peak = _peak(flat, inside)
    return found


def _add_node(found: Count, node: _Node) -> int:
    """Adds the operations of one equation; returns the bytes that live inside of it."""
    eqn = node.eqn
    if not node.loops:
        dtype = str(getattr(eqn.invars[0].aval, "dtype", "")) if eqn.invars else ""
        kind = dtype if node.name in _PRODUCTS else "other"
        kind = f"conv {kind}" if node.name.startswith("conv_general") else kind
        if number := _operations(eqn):
            found.operations[kind] = found.operations.get(kind, 0.0) + number
        return 0
    counts = []
    for body in _bodies(eqn):
        counts.append(_count(body))
        # Collectives in a loop or a branch stay where they are, each by itself.
        _add_collectives(counts[-1], [e for e in live(body) if e.primitive in COLLECTIVES])
    if node.name == "cond":  # the branch that costs most
        found.add(max(counts, key=lambda c: (sum(c.operations.values()), c.bytes)))
    else:
        for body_count in counts:
            found.add(body_count, times=eqn.params["length"] if node.name == "scan" else 1)
        found.unknown += node.name == "while"
    return max(c.peak for c in counts)


def _add_collectives(found: Count, eqns: Sequence[JaxprEqn]) -> None:
    for eqn in eqns:
        if eqn.primitive.name == "all_reduce":
            found.reduces.append(sum(map(_size, eqn.invars)))
            found.growing.append(0)
        else:
            found.gathers.append(_size(eqn.invars[0]))


def _bodies(eqn: JaxprEqn) -> list[Any]:
    """The jaxprs that an equation runs. Of a custom rule, what it stands for."""
    names = ("jaxpr", "call_jaxpr", "branches", "body_jaxpr", "cond_jaxpr", "fun_jaxpr")
    found = []
    for name in names:
        value = eqn.params.get(name)
        for body in value if isinstance(value, (tuple, list)) else [value]:
            if hasattr(getattr(body, "jaxpr", body), "eqns"):
                found.append(getattr(body, "jaxpr", body))
    return found


def _operations(eqn: JaxprEqn) -> float:
    name = eqn.primitive.name
    out = _elements(eqn.outvars[0])
    if name == "dot_general":
        ((contracted, _), _) = eqn.params["dimension_numbers"]
        return 2.0 * out * math.prod(_shape(eqn.invars[0])[i] for i in contracted)
    if name == "conv_general_dilated":
        # Each output sums over the kernel's window and input features; of a gradient's dilated
        # input only every stride-th element is there.
        kernel, numbers = _shape(eqn.invars[1]), eqn.params["dimension_numbers"]
        window = math.prod(kernel) / kernel[numbers.rhs_spec[0]]
        return 2.0 * out * window / math.prod(eqn.params["lhs_dilation"])
    if name in _MOVES or eqn.primitive in COLLECTIVES:
        return 0.0
    # A reduction touches each element of its operand, the rest each element of its result.
    return float(max(out, *map(_elements, eqn.invars)) if "reduce" in name else out)


def _add_bytes(found: Count, flat: _Flat) -> None:
    """Values that cross memory: operands and results of kernels, what chains take and leave.

    A value is written once, and read once by each kernel and once by the chains together.
    """
    maker = {key: node for node in flat.nodes for key in node.outputs}
    by_kernels: Counter[int] = Counter()
    by_chains: set[int] = set()
    for node in flat.nodes:
        if node.loops:
            continue  # reads inside, which are counted there
        if node.heavy:
            by_kernels.update(node.inputs)
        else:
            by_chains.update(node.inputs)
    for key in {*by_kernels, *by_chains, *flat.results}:
        made_by = maker.get(key)
        chained = made_by is not None and not made_by.heavy
        if chained and key not in flat.results and not by_kernels[key]:
            continue  # never leaves its chain
        written = made_by is not None and not made_by.loops
        found.bytes += flat.sizes[key] * (written + by_kernels[key] + (key in by_chains))
        found.kernels += chained
    found.kernels += sum(node.heavy and not node.loops for node in flat.nodes)


def _peak(flat: _Flat, inside: dict[int, int]) -> int:
    """The most bytes that live at once, if equations run in order and values go when last used.

    Values inside a fused chain never are in memory. Results are not counted: the new state takes
    the place of the old one.
    """
    last = {key: i for i, node in enumerate(flat.nodes) for key in node.inputs}
    read = {key for node in flat.nodes if node.heavy for key in node.inputs}
    alive: dict[int, int] = {}
    now = most = 0
    for i, node in enumerate(flat.nodes):
        for key in node.outputs:
            if key in last and key not in flat.results and (node.heavy or key in read):
                alive[key] = flat.sizes[key]
                now += alive[key]
        most = max(most, now + inside[i])
        for key in set(node.inputs):
            if last[key] == i:
                now -= alive.pop(key, 0)
    return most


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _elements(v: Any) -> int:
    return math.prod(_shape(v))


def _size(v: Any) -> int:
    return size_of(v.aval)


def size_of(described: Any) -> int:
    """Bytes of what has a `shape` and a `dtype`; 16 for a random key, 0 for what has no dtype."""
    dtype = getattr(described, "dtype", None)
    if dtype is None:
        return 0
    key = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return math.prod(described.shape) * (16 if key else int(np.dtype(dtype).itemsize))
