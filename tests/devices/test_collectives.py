"""Every cross-device op: right sums, the same bits everywhere, and the bytes its formula says."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from stratagem.collectives import (
    AutoAllReduce,
    CrossDeviceOps,
    DoublingAllReduce,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
    TreeAllReduce,
)
from stratagem.collectives.hierarchical import hierarchical_rounds
from stratagem.collectives.packs import Packing
from stratagem.collectives.tree import tree_rounds

AXIS = "replica"
REPLICAS = [2, 3, 4, 5, 8]
OPS = {
    "nccl": NcclAllReduce(),
    "nccl-unpacked": NcclAllReduce(num_packs=0),
    "nccl-3-packs": NcclAllReduce(num_packs=3),
    "hierarchical": HierarchicalCopyAllReduce(),
    "hierarchical-unpacked": HierarchicalCopyAllReduce(num_packs=0),
    "hierarchical-3-packs": HierarchicalCopyAllReduce(num_packs=3),
    "one-device": ReductionToOneDevice(),
    "one-device-root-1": ReductionToOneDevice(reduce_to_device=1),
    "ring": RingAllReduce(),
    "ring-2-packs": RingAllReduce(num_packs=2),
    "tree": TreeAllReduce(),
    "tree-unpacked": TreeAllReduce(num_packs=0),
    "doubling": DoublingAllReduce(),
    "auto": AutoAllReduce(),
}
PLAIN = ["nccl", "hierarchical", "one-device", "ring", "tree", "doubling"]
# Shapes and dtypes of one replica's values; 41 float32 elements divide by no number of replicas.
MIXED = [
    ((3, 5), "float32"),
    ((), "float32"),
    ((7,), "bfloat16"),
    ((5, 5), "float32"),
    ((2, 3), "int32"),
    ((2, 2), "float16"),
    ((0, 4), "float32"),
    ((3,), "uint8"),
    ((2,), "complex64"),
]


def mesh_of(replicas: int) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:replicas]), (AXIS,))


def per_replica(step: Callable[..., Any], replicas: int) -> Callable[..., Any]:
    """Maps a step over stacked arguments `[replicas, ...]`; the results are stacked as well."""

    def body(*args: jax.Array) -> Any:
        return jax.tree.map(lambda y: y[None], step(*(x[0] for x in args)))

    spec = P(AXIS)
    return jax.jit(
        jax.shard_map(body, mesh=mesh_of(replicas), in_specs=spec, out_specs=spec, check_vma=False)
    )


def all_reduce(ops: CrossDeviceOps, replicas: int) -> Callable[..., Any]:
    return per_replica(lambda *values: ops.all_reduce(values, AXIS, replicas), replicas)


def whole_numbers(replicas: int) -> list[jax.Array]:
    """Values whose sums every dtype holds exactly, whatever the order."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.integers(0, 16, (replicas, *shape)), dtype=dtype) for shape, dtype in MIXED
    ]


def assert_same_bits(stacked: Any) -> None:
    rows = np.asarray(stacked)
    for row in rows[1:]:
        assert row.tobytes() == rows[0].tobytes()


@dataclasses.dataclass
class Traffic:
    """What a compiled program sends."""

    messages: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    permutes: int
    all_reduces: int
    all_reduce_bytes: int


_BYTES = {"pred": 1, "u8": 1, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "f32": 4, "c64": 8}


def _nbytes(shapes: str) -> int:
    return sum(
        _BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
    )


def traffic(hlo: str, replicas: int) -> Traffic:
    """Reads it off the HLO text."""
    messages: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    permutes = all_reduces = all_reduce_bytes = 0
    for line in hlo.splitlines():
        found = re.search(r"= (.*?) (collective-permute|all-reduce|all-gather)(-start)?\(", line)
        if not found:
            continue
        shapes, kind = found.group(1), found.group(2)
        if kind == "collective-permute":
            permutes += 1
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}?,? ", line + " ")
            for source, target in re.findall(r"\{(\d+),(\d+)\}", pairs.group(0)):
                assert source != target
                messages[int(source)] += 1
                sent[int(source)] += _nbytes(shapes)
        elif kind == "all-reduce":
            all_reduces += 1
            all_reduce_bytes += _nbytes(shapes)
        else:
            pytest.fail(f"a collective that no op uses: {line}")
    return Traffic(
        tuple(messages[r] for r in range(replicas)),
        tuple(sent[r] for r in range(replicas)),
        permutes,
        all_reduces,
        all_reduce_bytes,
    )


@functools.cache
def compiled(name: str, replicas: int) -> Any:
    return all_reduce(OPS[name], replicas).lower(*whole_numbers(replicas)).compile()


# Each op between each number of replicas; its variants, which share the code, between two.
CASES = [(name, n) for name in OPS for n in (REPLICAS if name in PLAIN else (3, 8))]


@pytest.mark.parametrize(("name", "replicas"), CASES)
class TestEveryOp:
    def test_sums_mixed_shapes_and_dtypes_to_the_same_bits(self, name, replicas):
        values = whole_numbers(replicas)
        sums = compiled(name, replicas)(*values)
        for value, total, (shape, dtype) in zip(values, sums, MIXED, strict=True):
            assert total.shape == (replicas, *shape)
            assert total.dtype == dtype
            wide = np.complex128 if dtype == "complex64" else np.float64
            expected = np.asarray(value).astype(wide).sum(0)
            np.testing.assert_array_equal(np.asarray(total)[0].astype(wide), expected)
            assert_same_bits(total)

    def test_the_compiled_program_sends_what_the_formula_says(self, name, replicas):
        ops = OPS[name]
        avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in MIXED]
        seen = traffic(compiled(name, replicas).as_text(), replicas)
        formula = ops.cost(avals, replicas)
        if not isinstance(ops, NcclAllReduce):
            assert seen.all_reduces == 0
            assert seen.permutes == formula.rounds
            assert seen.messages == formula.messages
            assert seen.bytes_sent == formula.bytes_sent
            return
        assert seen.permutes == 0
        # One for each dtype: XLA joins what it can; bfloat16 it widens to float32 on CPU.
        assert seen.all_reduces == 5
        nbytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)
        assert seen.all_reduce_bytes == nbytes + 7 * 2
        assert formula.max_bytes == pytest.approx(2 * (replicas - 1) / replicas * nbytes, abs=15)


@pytest.mark.parametrize(("name", "replicas"), CASES)
def test_floats_agree_to_the_bit_also_in_what_follows(name, replicas):
    """The sum stays the same on all replicas when the compiler fuses it with its neighbours."""
    rng = np.random.default_rng(1)
    ops = OPS[name]

    def step(a: jax.Array, b: jax.Array) -> Any:
        half = (a * 3).astype(jnp.bfloat16)
        total, half_total = ops.all_reduce([a * b, half], AXIS, replicas)
        return total, total * 1.7 - 0.3, half_total, half_total.astype(jnp.float32) * 1.1

    a, b = (jnp.asarray(rng.normal(size=(replicas, 257)), jnp.float32) for _ in range(2))
    results = per_replica(step, replicas)(a, b)
    for result in results:
        assert_same_bits(result)
    np.testing.assert_allclose(results[0][0], np.sum(np.asarray(a) * b, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_nan_and_infinity_reach_every_replica(name):
    value = np.ones((4, 9), np.float32)
    value[2, 0], value[1, 4], value[3, 8] = np.nan, np.inf, -np.inf
    (total,) = all_reduce(OPS[name], 4)(jnp.asarray(value))
    expected = np.full(9, 4.0, np.float32)
    expected[[0, 4, 8]] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(np.asarray(total), np.tile(expected, (4, 1)))


@pytest.mark.parametrize(("replicas", "small"), [(3, 0), (3, 8), (4, 8)])
def test_a_ring_keeps_values_and_sums_in_one_buffer(replicas, small):
    """A second one made it three times slower between processes: new pages in every step."""
    sizes = [1 << 20] + [1024] * small
    values = [jax.ShapeDtypeStruct((replicas, n), jnp.float32) for n in sizes]
    program = all_reduce(RingAllReduce(), replicas).lower(*values).compile()
    held = program.memory_analysis().temp_size_in_bytes
    assert held < 4 * sum(sizes) * (1 + 3 / replicas)
    assert traffic(program.as_text(), replicas).permutes == 2 * (replicas - 1)


@pytest.mark.parametrize("name", OPS)
def test_one_replica_and_no_values(name):
    ops = OPS[name] if name != "one-device-root-1" else ReductionToOneDevice(0)
    (same,) = all_reduce(ops, 1)(jnp.arange(3.0)[None])
    np.testing.assert_array_equal(same[0], [0, 1, 2])
    assert per_replica(lambda x: ops.all_reduce([], AXIS, 2), 2)(jnp.ones(2)) == []


@pytest.mark.parametrize("replicas", range(2, 34))
def test_schedules_reach_every_replica_once(replicas):
    """By simulation, for more replicas than there are devices."""
    for rounds in (
        tree_rounds(replicas),
        *(sum(hierarchical_rounds(replicas, k), []) for k in (0, 3)),
    ):
        holds = [{r} for r in range(replicas)]
        for pairs in rounds:
            assert len({s for s, _ in pairs}) == len(pairs) == len({t for _, t in pairs})
            for source, target in pairs:
                assert not holds[source] & holds[target]
                holds[target] |= holds[source]
        assert sum(h == set(range(replicas)) for h in holds) == 1


def test_reduces_in_the_documented_order():
    value = jnp.asarray([[1e8], [-1e8], [1.0], [0.5]], jnp.float32)
    (in_order,) = all_reduce(ReductionToOneDevice(reduce_to_device=3), 4)(value)
    (pairwise,) = all_reduce(TreeAllReduce(), 4)(value)
    assert float(in_order[0, 0]) == 1.5  # ((1e8 - 1e8) + 1) + 0.5
    assert float(pairwise[0, 0]) == 1.5  # (1e8 - 1e8) + (1 + 0.5)
    value = jnp.asarray([[1.0], [1e8], [-1e8], [0.5]], jnp.float32)
    (in_order,) = all_reduce(ReductionToOneDevice(), 4)(value)
    assert float(in_order[0, 0]) == 0.5  # 1 is lost in 1e8


class TestNccl:
    def test_calls_psum_once_through_the_module(self, monkeypatch):
        calls = []
        real = jax.lax.psum
        monkeypatch.setattr(jax.lax, "psum", lambda x, axis: (calls.append(x), real(x, axis))[1])
        all_reduce(NcclAllReduce(), 2).lower(*whole_numbers(2))
        assert [len(x) for x in calls] == [len({dtype for _, dtype in MIXED})]

    def test_a_large_value_is_not_copied_to_join_others(self, monkeypatch):
        calls = []
        real = jax.lax.psum
        monkeypatch.setattr(jax.lax, "psum", lambda x, axis: (calls.append(x), real(x, axis))[1])
        values = [jnp.ones((2, n)) for n in (3, 1 << 15, 4)]
        sums = all_reduce(NcclAllReduce(), 2)(*values)
        assert [[v.shape for v in x] for x in calls] == [[(7,), (1 << 15,)]]
        assert [s.shape for s in sums] == [v.shape for v in values]
        assert all((s == 2).all() for s in sums)

    # One pack: two joined for a dtype.
    @pytest.mark.parametrize(("num_packs", "expected"), [(0, 3), (1, 2), (2, 4), (100, 43)])
    def test_num_packs_in_the_traced_program(self, num_packs, expected):
        values = [jnp.ones((2, 40)), jnp.ones((2, 1)), jnp.ones((2, 2), jnp.int32)]
        text = all_reduce(NcclAllReduce(num_packs), 2).lower(*values).as_text()
        assert text.count("stablehlo.all_reduce") == expected


def test_packs_are_equal_and_the_last_takes_the_rest():
    values = [jax.ShapeDtypeStruct((10,), "float32"), jax.ShapeDtypeStruct((2,), "int32")]
    assert Packing(values, 3).sizes == [(3, 4), (3, 4), (4, 4), (1, 4), (1, 4)]
    assert Packing(values, 0).sizes == [(10, 4), (2, 4)]


class TestReductionToOneDevice:
    def test_folds_with_a_function(self):
        def product(parts: list[jax.Array]) -> jax.Array:
            return functools.reduce(jnp.multiply, parts)

        ops = ReductionToOneDevice(accumulation_fn=product)
        (result,) = all_reduce(ops, 2)(jnp.asarray([2.0, 3.0]))
        np.testing.assert_array_equal(result, [6, 6])

    def test_the_function_sees_values_in_their_shapes_and_in_replica_order(self):
        seen = []

        def first(parts: list[jax.Array]) -> jax.Array:
            seen.append([p.shape for p in parts])
            return parts[0]

        ops = ReductionToOneDevice(2, first)
        a, b = all_reduce(ops, 3)(jnp.arange(12.0).reshape(3, 2, 2), jnp.asarray([7.0, 8.0, 9.0]))
        np.testing.assert_array_equal(a, np.tile([[[0, 1], [2, 3]]], (3, 1, 1)))
        np.testing.assert_array_equal(b, [7, 7, 7])
        assert seen == [[(2, 2)] * 3, [()] * 3]

    def test_a_device_becomes_its_replica(self):
        devices = jax.devices("cpu")[:3]
        ops = ReductionToOneDevice("/cpu:2")
        assert ops.placed_on(devices).reduce_to_device == 2
        assert ops.placed_on(devices[::-1]).reduce_to_device == 0
        assert ReductionToOneDevice(devices[1]).placed_on(devices).reduce_to_device == 1
        plain = ReductionToOneDevice()
        assert plain.placed_on(devices) is plain

    def test_errors(self):
        with pytest.raises(TypeError, match=r"Expected accumulation_fn as a function.*Got 3"):
            ReductionToOneDevice(accumulation_fn=3)
        with pytest.raises(ValueError, match=r"to be the device of a replica.*Got '/cpu:5'"):
            ReductionToOneDevice("/cpu:5").placed_on(jax.devices("cpu")[:2])
        with pytest.raises(ValueError, match=r"as the index of a replica\. Got '/cpu:0'"):
            all_reduce(ReductionToOneDevice("/cpu:0"), 2)(jnp.ones(2))
        with pytest.raises(ValueError, match=r"to be a replica, 0 to 1\. Got 2"):
            all_reduce(ReductionToOneDevice(2), 2)(jnp.ones(2))
        stack = ReductionToOneDevice(accumulation_fn=jnp.stack)
        with pytest.raises(ValueError, match=r"float32\[4\]\. Got float32\[2, 4\]"):
            all_reduce(stack, 2)(jnp.ones((2, 4)))


class TestErrors:
    @pytest.mark.parametrize("name", PLAIN)
    def test_values_without_a_sum_are_all_named(self, name):
        values = [jnp.ones((2, 3), bool), jnp.ones(2), jax.random.split(jax.random.key(0))]
        message = r"Got values\[0\]: bool\[3\], values\[2\]: key<fry>\[\].*Cast booleans"
        with pytest.raises(TypeError, match=message):
            all_reduce(OPS[name], 2)(*values)

    @pytest.mark.parametrize("name", PLAIN)
    def test_wrong_axis_size(self, name):
        step = per_replica(lambda x: OPS[name].all_reduce([x], AXIS, 2), 3)
        with pytest.raises(ValueError, match=r"size of axis 'replica', 3\. Got 2"):
            step(jnp.ones(3))

    @pytest.mark.parametrize(
        "made", [NcclAllReduce, HierarchicalCopyAllReduce, RingAllReduce, TreeAllReduce]
    )
    def test_num_packs(self, made):
        with pytest.raises(ValueError, match=r"num_packs of 0 or more\. Got -1"):
            made(num_packs=-1)
        with pytest.raises(TypeError, match=r"num_packs as an integer\. Got 1\.5"):
            made(num_packs=1.5)

    def test_the_base_class_is_abstract(self):
        with pytest.raises(NotImplementedError, match=r"CrossDeviceOps to define all_reduce\("):
            CrossDeviceOps().all_reduce([], AXIS, 2)
        with pytest.raises(NotImplementedError, match=r"CrossDeviceOps to define cost\("):
            CrossDeviceOps().cost([], 2)


@pytest.mark.parametrize("replicas", [1, 3])
def test_all_gather_stacks(replicas):
    value = jnp.arange(replicas * 2).reshape(replicas, 2)
    out = per_replica(lambda x: RingAllReduce().all_gather(x, AXIS, replicas), replicas)(value)
    assert out.shape == (replicas, replicas, 2)
    for row in out:
        np.testing.assert_array_equal(row, value)


@pytest.mark.parametrize(
    ("mb", "replicas", "chosen"),
    [
        ([], 2, DoublingAllReduce),
        ([4, 1], 2, DoublingAllReduce),
        ([5], 2, NcclAllReduce),
        ([4], 4, NcclAllReduce),
        ([2] * 4, 4, DoublingAllReduce),
        ([2] * 5, 4, NcclAllReduce),
        ([1], 8, DoublingAllReduce),
    ],
)
def test_large_values_are_left_to_the_platform(mb, replicas, chosen):
    values = [jax.ShapeDtypeStruct((n << 18,), "float32") for n in mb]
    ops = AutoAllReduce()
    assert type(ops.chosen(values, replicas)) is chosen
    assert ops.cost(values, replicas) == chosen().cost(values, replicas)
