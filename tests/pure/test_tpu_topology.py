"""Topology and DeviceAssignment: which core is where, and whose it is."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.tpu.experimental import DeviceAssignment, Topology


def mesh(x: int, y: int = 1, z: int = 1, cores: int = 1, tasks: int = 1) -> Topology:
    """All cores of a box, x first."""
    at = [np.unravel_index(i, (x, y, z, cores), order="F") for i in range(x * y * z * cores)]
    return Topology((x, y, z, cores), np.asarray(at).reshape(tasks, -1, 4))


def test_a_topology():
    topology = mesh(2, 2, cores=2, tasks=2)
    assert (topology.num_tasks, topology.num_tpus_per_task, topology.mesh_rank) == (2, 4, 4)
    assert topology.task_ordinal_at_coordinates((1, 1, 0, 0)) == 0
    assert topology.task_ordinal_at_coordinates((1, 1, 0, 1)) == 1
    assert topology.tpu_device_ordinal_at_coordinates((1, 1, 0, 1)) == 3
    assert topology.missing_devices.shape == (0, 4)
    with pytest.raises(ValueError, match=r"the coordinates of a core, one of .* Got \(2, 0, 0, 0"):
        topology.task_ordinal_at_coordinates((2, 0, 0, 0))


def test_missing_cores():
    topology = Topology((2, 1, 1, 1), [[[1, 0, 0, 0]]])
    assert topology.missing_devices.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("shape", "coordinates", "told"),
    [
        ((2, 2), [[[0, 0]]], "mesh_shape: expected four positive integers"),
        ((2, 0, 1, 1), [[[0, 0, 0, 0]]], "mesh_shape: expected four positive integers"),
        ((2, 1, 1, 1), [[0, 0, 0, 0]], r"device_coordinates: expected the shape \[tasks"),
        ((2, 1, 1, 1), [[[2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, -1]]],
         r"outside it: \[\(0, 0, 0, -1\), \(2, 0, 0, 0\)\]; several times: \[\(0, 0, 0, 0\)\]"),
    ],
)  # fmt: skip
def test_malformed_topologies(shape, coordinates, told):
    with pytest.raises(ValueError, match=told):
        Topology(shape, coordinates)


def test_one_core_a_replica():
    assignment = DeviceAssignment.build(mesh(2, 2, tasks=2), num_replicas=3)
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (3, 1)
    assert assignment.core_assignment[:, 0, :2].tolist() == [[0, 0], [1, 0], [0, 1]]
    assert assignment.coordinates(2, 0) == (0, 1, 0, 0)
    assert assignment.tpu_ordinal(1) == 1
    assert assignment.lookup_replicas(0, 0) == [0, 1]
    assert assignment.lookup_replicas(1, 0) == [2]


def test_blocks_and_strides():
    blocks = DeviceAssignment.build(mesh(4, 2), [2, 1, 1, 1], num_replicas=4)
    assert blocks.core_assignment[..., :2].tolist() == [
        [[0, 0], [1, 0]], [[2, 0], [3, 0]], [[0, 1], [1, 1]], [[2, 1], [3, 1]],
    ]  # fmt: skip
    apart = DeviceAssignment.build(mesh(4), [2, 1, 1, 1], [2, 1, 1, 1], num_replicas=2)
    assert apart.core_assignment[..., 0].tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_replicas": 5}, r"between 1 and 4, since a mesh of \[4, 1, 1, 1\] .* Got 5"),
        ({"num_replicas": 0}, "between 1 and 4"),
        ({"computation_shape": [8, 1, 1, 1]}, "between 1 and 0"),
        ({"computation_shape": [2, 1]}, "computation_shape: expected 4 positive integers"),
        ({"computation_stride": [0, 1, 1, 1]}, "computation_stride: expected 4 positive integers"),
    ],
)
def test_what_cannot_be_built(arguments, told):
    with pytest.raises(ValueError, match=told):
        DeviceAssignment.build(mesh(4), **arguments)


@pytest.mark.parametrize(
    ("cores", "told"),
    [
        ([[0, 0, 0, 0]], r"core_assignment: expected the shape \[replicas"),
        ([[[9, 0, 0, 0]]], "the coordinates of a core, one of"),
        ([[[0, 0, 0, 0]], [[0, 0, 0, 0]]], r"each core once. Got several times: \[\(0, 0, 0, 0"),
    ],
)
def test_malformed_assignments(cores, told):
    with pytest.raises(ValueError, match=told):
        DeviceAssignment(mesh(4), np.asarray(cores))
