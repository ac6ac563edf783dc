"""Partitioners and placement as TensorFlow has them, and what is no plan."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.parameter_server.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from stratagem.parameter_server.plan import Placement, Shard, Spec, Unit


@pytest.mark.parametrize(
    ("partitioner", "shape", "parts"),
    [  # TensorFlow 2.21
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(20), (10, 3), [10, 1]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(4, 10), (6, 1), [6, 1]),
        (MinSizePartitioner(8, 10), (6, 1), [3, 1]),
        (MinSizePartitioner(256 << 10, 5), (1024, 1024), [5, 1]),
        (MinSizePartitioner(100, 5), (6, 1), [1, 1]),
        (MinSizePartitioner(), (1024, 1024), [1, 1]),
        (MaxSizePartitioner(4), (6, 1), [6, 1]),
        (MaxSizePartitioner(4, 2), (6, 1), [2, 1]),
        (MaxSizePartitioner(1024), (6, 1), [1, 1]),
        (MaxSizePartitioner(8), (5, 1), [3, 1]),
        (MaxSizePartitioner(1), (5, 2), [5, 1]),
    ],
)
def test_partitioners_of_tensorflow(partitioner, shape, parts):
    assert partitioner(shape, "float32") == parts


def test_partitioners_along_another_axis_and_of_strings():
    assert FixedShardsPartitioner(2)([3, 10], "float32", axis=1) == [1, 2]
    assert MaxSizePartitioner(32, bytes_per_string=16)([6, 1], "string") == [3, 1]
    assert MinSizePartitioner(32, 9, bytes_per_string=16)([6, 1], "string") == [3, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedShardsPartitioner(0),
        lambda: MinSizePartitioner(0),
        lambda: MinSizePartitioner(max_shards=0),
        lambda: MinSizePartitioner(bytes_per_string=0),
        lambda: MaxSizePartitioner(0),
        lambda: MaxSizePartitioner(1, -1),
        lambda: MaxSizePartitioner(1, bytes_per_string=0),
    ],
)
def test_partitioners_want_positive_numbers(make):
    with pytest.raises(ValueError, match="expected a positive number"):
        make()


def test_partitioners_want_an_axis_of_the_shape():
    with pytest.raises(ValueError, match="Expected an axis of the shape"):
        MinSizePartitioner()([], "float32")


def test_the_base_class_is_to_be_derived_from():
    with pytest.raises(NotImplementedError):
        Partitioner()((1,), "float32")


def test_placement_of_tensorflow():
    """Conformance row 52: two servers, two fixed shards."""
    placement = Placement(2, FixedShardsPartitioner(2))
    shapes = {"scalar": (), "vector": (3,), "matrix": (1, 2), "last": ()}
    specs = [placement.place(i, n, s, "float32") for i, (n, s) in enumerate(shapes.items())]
    assert [spec.shards for spec in specs] == [
        (Shard(0, 0, 1),),
        (Shard(1, 0, 2), Shard(0, 2, 3)),
        (Shard(1, 0, 1),),
        (Shard(0, 0, 1),),
    ]


@given(
    rows=st.integers(1, 50), parts=st.integers(1, 60), servers=st.integers(1, 5),
    before=st.integers(0, 7),
)  # fmt: skip
def test_shards_follow_each_other_and_the_first_have_a_row_more(rows, parts, servers, before):
    placement = Placement(servers, FixedShardsPartitioner(parts))
    for i in range(before):
        placement.place(i, "scalar", (), "int64")
    spec = placement.place(before, "table", (rows, 3), "float32")
    sizes = [shard.stop - shard.start for shard in spec.shards]
    n = min(rows, parts)
    assert sizes == [rows // n + 1] * (rows % n) + [rows // n] * (n - rows % n)
    assert [s.server for s in spec.shards] == [(before + i) % servers for i in range(n)]
    assert spec.nbytes == sum(size * spec.row_bytes for size in sizes) == rows * 12
    assert sorted(i for s in range(servers) for i in spec.held_by(s)) == list(range(n))
    assert [spec.shard_shape(i) for i in range(n)] == [(size, 3) for size in sizes]


def test_a_slot_lies_beside_its_variable_and_moves_no_counter():
    placement = Placement(3, FixedShardsPartitioner(2))
    weight = placement.place(0, "weight", (4, 2), "float32")
    slot = placement.place(1, "slot", (4, 2), "float32", beside=weight)
    assert (slot.shards, slot.beside) == (weight.shards, 0)
    assert placement.place(2, "next", (), "float32").shards == (Shard(2, 0, 1),)


@pytest.mark.parametrize("parts", [[0, 1], [2, 2], []])
def test_only_the_first_axis_is_cut(parts):
    placement = Placement(2, lambda shape, dtype: parts)
    with pytest.raises(ValueError, match="first number is positive and whose others are 1"):
        placement.place(0, "w", (4, 4), "float32")


def test_no_servers():
    with pytest.raises(ValueError, match="at least one parameter server"):
        Placement(0)


def test_a_dtype_that_servers_do_not_keep():
    with pytest.raises(ValueError, match="Expected a dtype of"):
        Placement(1).place(0, "w", (4,), "string")


def test_descriptions_travel():
    spec = Placement(2, FixedShardsPartitioner(2)).place(3, "w", (5, 2), "bfloat16")
    assert Spec.from_wire(spec.wire()) == spec
    unit = Unit("adam", (3, 4), {"kind": "rows"})
    assert Unit.from_wire(unit.wire()) == unit


_SPEC = Placement(1).place(0, "w", (5, 2), "float32").wire()


@pytest.mark.parametrize(
    "change",
    [
        {"vid": -1}, {"vid": True}, {"name": 3}, {"shape": [-5, 2]}, {"dtype": "object"},
        {"shards": [[0, 0, 4]]}, {"shards": [[0, 1, 5]]}, {"shards": []}, {"shards": [[0, 0]]},
        {"shards": [[0, 0, 3], [0, 4, 5]]}, {"shape": "52"}, {"beside": "w"}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_no_description_of_a_variable(change):
    with pytest.raises(ValueError, match="[Ee]xpected"):
        Spec.from_wire({**_SPEC, **change})


@pytest.mark.parametrize(
    "data", [None, {}, {"uid": "", "vids": [1], "program": {}}, {"uid": 1, "vids": [],
    "program": {}}, {"uid": 1, "vids": [1], "program": 1}],
)  # fmt: skip
def test_what_is_no_description_of_a_unit(data):
    with pytest.raises(ValueError, match="Expected a unit's description"):
        Unit.from_wire(data)


def test_a_spec_is_checked_however_it_is_made():
    spec = Spec.from_wire(_SPEC)
    with pytest.raises(ValueError, match="expected shards that follow each other"):
        dataclasses.replace(spec, shards=(Shard(0, 0, 4),))
