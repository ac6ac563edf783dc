"""Formulas, topologies and machine files of `stratagem plan`."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re

import pytest
from rich.console import Console

from stratagem.cli import plan_show
from stratagem.collectives import cost
from stratagem.planning import allreduce, machines, predict, topology
from stratagem.planning.program import Compiled, Program
from stratagem.planning.topology import Level

MACHINES = machines.load()
NBYTES = 1 << 24


def program(**changes):
    values = dict(
        caught="a train step of model 'm'", strategy=("MirroredStrategy",), replicas=8, rows=256,
        rows_per_replica=32, idle=0, state=3_000_000, trainable=1_000_000, arguments=100_000,
        peak=5_000_000, operations={"float32": 1e10, "other": 1e6}, bytes=1e8, kernels=50,
        reduces=(1_000_000,),
    )  # fmt: skip
    return Program(**{**values, **changes})


def flat(members, alpha=1e-5, bandwidth=1e9):
    return (Level("link", members, alpha, 2 * (members - 1), bandwidth, bandwidth),)


def at(text):
    return topology.parse(text, MACHINES)


def test_planning_needs_no_jax():
    files = list(machines.BUILT_IN.parent.glob("*.py"))
    assert len(files) >= 6
    for file in files:
        assert not re.search(r"^\s*(import|from) (jax|keras|numpy)", file.read_text(), re.MULTILINE)


# Formulas.


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 16, 31, 64])
@pytest.mark.parametrize("op", ["ring", "tree", "doubling", "hierarchical", "star"])
def test_on_equal_links_the_formulas_are_those_of_the_collectives(op, p):
    nbytes = p * 1024  # so that a ring's chunks are whole
    mine = getattr(allreduce, op)(flat(p), nbytes)
    assert mine == pytest.approx(getattr(cost, op)(p, nbytes).seconds(1e-5, 1e-9))


@pytest.mark.parametrize("p", [2, 8, 64, 1024])
def test_nothing_is_faster_than_the_lower_bound(p):
    bound = 2 * (p - 1) / p * NBYTES / 1e9
    assert allreduce.platform(flat(p), NBYTES) >= bound
    for op in ("ring", "tree", "hierarchical", "star"):
        assert getattr(allreduce, op)(flat(p), NBYTES) >= bound


def test_the_platform_is_a_ring_for_much_and_trees_for_little():
    p, ring = 64, 2 * 63 * 1e-5
    assert allreduce.platform(flat(p), 1e9) == pytest.approx(ring + 2 * 63 / 64 * 1.0)
    assert allreduce.platform(flat(p), 8) == pytest.approx(2 * 6 * 1e-5, rel=1e-3)


@pytest.mark.parametrize("p", [4, 8])
def test_ring_and_doubling_cross_where_the_formula_says(p):
    # n* = alpha/beta * (2(p-1) - log2 p) / (log2 p - 2(p-1)/p), from setting both times equal.
    rounds, log = 2 * (p - 1), math.log2(p)
    crossing = 1e-5 * 1e9 * (rounds - log) / (log - rounds / p)
    ring, doubling = allreduce.ring, allreduce.doubling
    assert ring(flat(p), 0.9 * crossing) > doubling(flat(p), 0.9 * crossing)
    assert ring(flat(p), 1.1 * crossing) < doubling(flat(p), 1.1 * crossing)


@pytest.mark.parametrize("op", allreduce.OPS)
def test_more_bytes_and_more_machines_take_longer(op):
    where, reduce = at("h100:8x16"), allreduce.OPS[op]
    by_bytes = [reduce(where.levels(128), n) for n in (0, 1e3, 1e6, 1e9)]
    assert by_bytes == sorted(by_bytes)
    by_devices = [reduce(where.levels(p), 1e6) for p in (8, 16, 64, 512, 4096)]
    assert by_devices == sorted(by_devices)


def test_of_one_machine_and_many_the_slower_links_bind():
    inside, outside = at("v100:8x4").levels(32)
    time = allreduce.platform((inside, outside), 1e9)
    assert time == pytest.approx(2 * 7 / 8 * 1e9 / 150e9 + 2 * 3 / 4 * 1e9 / 12.5e9, rel=0.01)


# Topologies.


def test_devices_a_machine_and_machines():
    assert [level.members for level in at("h100:8x16").levels(128)] == [8, 16]
    assert [level.members for level in at("h100:8x16").levels(4)] == [4]
    assert [level.members for level in at("h100:8x16").levels(20)] == [8, 3]
    assert at("h100:8").levels(1) == ()
    # Eight adapters of 50 GB/s a machine, one for a pair of devices.
    assert at("h100:8x16").levels(128)[1].bandwidth == 400e9
    assert at("h100:8x16").levels(128)[1].stream == 50e9


def test_a_slice_is_a_ring_along_the_axes_that_wrap():
    (open_,) = at("v5e:8x8").levels(64)
    (closed,) = at("v5e:16x16").levels(256)
    assert (open_.bandwidth, closed.bandwidth) == (2 * 50e9, 4 * 50e9)
    assert (open_.rounds, closed.rounds) == (2 * 14, 2 * 16)
    assert [level.members for level in at("v5e:8x8").levels(1024)] == [256, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v5e", "expected a machine and its shape, such as v5e:8x8"),
        ("v5e:0x8", "expected a machine and its shape"),
        ("b9000:8", "expected one of the machines a100, cpu, h100.*Got 'b9000'"),
        ("h100:8x4x2", "expected devices a machine x machines for h100"),
        ("v5e:4x4x4", "expected a slice of v5e of at most 2 sides and 256 chips"),
        ("v5e:32x32", "expected a slice of v5e of at most 2 sides and 256 chips"),
    ],
)
def test_topologies_that_are_none(text, said):
    with pytest.raises(ValueError, match=said):
        at(text)


# Machines.


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_machine_says_where_its_figures_are_from(machine):
    assert len(machine.source) > 80
    assert machine.flops("float32") <= machine.peak["float32"]
    assert machine.links[0].alpha < machine.links[1].alpha


def test_the_users_file_replaces_and_adds(tmp_path):
    text = machines.BUILT_IN.read_text()
    start = text.index("[cpu]")
    mine = tmp_path / "machines.toml"
    mine.write_text(text[start:].replace("[cpu]", "[mine]").replace("[cpu.", "[mine."))
    mine.write_text(mine.read_text().replace("[[cpu.", "[[mine."))
    found = machines.load(mine)
    assert found["mine"] == dataclasses.replace(found["cpu"], name="mine")
    assert machines.load(tmp_path / "none.toml") == MACHINES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a", "expected TOML"),
        ("a = 1", "a: is no table"),
        ("[a]\nkind = 'x'", "a: memory is no positive number; .*a: kind is none of cpu, gpu, tpu"),
    ],
)
def test_machine_files_that_are_none(tmp_path, text, said):
    file = tmp_path / "machines.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        machines.load(file)


def test_all_faults_of_a_level_are_named(tmp_path):
    file = tmp_path / "machines.toml"
    head = machines.BUILT_IN.read_text().split("[[h100.levels]]")[0]
    levels = "[[h100.levels]]\nalpha = 1\nwidth = 2\n[[h100.levels]]\nname = 'x'\nalpha = 1\n"
    file.write_text(head + levels)
    with pytest.raises(ValueError, match=r"levels\[0\] has unknown width.*levels\[1\] needs name"):
        machines.load(file)


def test_convolutions_have_their_own_peak_where_it_is_known():
    machine = dataclasses.replace(
        MACHINES["cpu"], efficiency=0.5, peak={"float32": 8.0, "conv float32": 4.0, "other": 2.0}
    )
    kinds = ("float32", "conv float32", "conv float64", "other")
    assert [machine.flops(kind) for kind in kinds] == [4.0, 2.0, 1.0, 1.0]


# Predictions.


def test_a_step_that_computes_long_scales_perfectly():
    heavy = program(operations={"bfloat16": 1e16})
    for scaling in predict.plan(heavy, at("h100:8x16")).scaling:
        if scaling.op in ("NcclAllReduce", "DoublingAllReduce", "TreeAllReduce"):
            assert min(scaling.efficiency) > 0.99
            assert scaling.pays_to == predict.MOST


@pytest.mark.parametrize("text", ["h100:8x16", "a100:8x4", "v100:8x2", "v5e:8x8", "v5p:4x4x4"])
def test_efficiency_starts_at_one_and_never_exceeds_it(text):
    made = predict.plan(program(), at(text))
    for scaling in made.scaling:
        assert scaling.efficiency[0] == 1.0
        assert max(scaling.efficiency) == 1.0
        assert scaling.devices[-1] == 65_536


def test_a_step_that_only_communicates_stops_paying():
    light = program(operations={"other": 1.0}, bytes=1.0, kernels=0, reduces=(10**9,))
    made = predict.plan(light, at("v100:8x16"))
    assert {s.op: s.pays_to for s in made.scaling}["NcclAllReduce"] < 16
    assert made.step.bound == "all-reduce"


def test_the_parts_of_a_step():
    machine = at("h100:8").machine
    one = predict.step(program(), at("h100:8"), 1, "NcclAllReduce")
    operations = 1e10 / (494e12 / 2) + 1e6 / (67e12 / 2)
    assert one.compute == pytest.approx(operations + 50 * machine.kernel_seconds)
    assert one.reduce == 0.0
    assert one.input == pytest.approx(1e5 / machine.host_bandwidth)
    fed = dataclasses.replace(one, input=1.0)
    assert (fed.seconds, fed.bound) == (1.0, "input")


def test_bytes_bind_where_there_is_little_to_compute():
    moved = predict.compute(program(bytes=1e12, kernels=0), MACHINES["h100"])
    assert moved == pytest.approx(1e12 / 3.35e12)
    told = Compiled("libtpu", 10, 20, 30, 1.0, 2e12, 1)
    assert predict.compute(program(compiled=told, kernels=0), MACHINES["h100"]) == pytest.approx(
        2e12 / 3.35e12
    )
    assert program(compiled=told).memory == 60
    assert program().memory == 3_000_000 + 100_000 + 5_000_000


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        (dict(operations={"float32": 1e13}), predict.OPERATIONS),
        (dict(bytes=1e12), predict.MEMORY),
        (dict(kernels=10_000), predict.KERNELS),
    ],
)
def test_what_most_of_computing_is(changes, bound):
    one = predict.step(program(**changes), at("h100:1"), 1, "NcclAllReduce")
    assert one.bound == one.limit == bound
    kernels = changes.get("kernels", 50) * MACHINES["h100"].kernel_seconds
    assert one.kernels == pytest.approx(kernels)


def test_what_a_compiler_cannot_place_does_not_fit():
    assert predict.plan(program(), at("v5e:2x4")).fits
    refused = program(refused="RESOURCE_EXHAUSTED: Ran out of memory on HBM")
    assert not predict.plan(refused, at("v5e:2x4")).fits


def test_tpus_have_no_choice_of_ops():
    # At 65,536 chips doubling would be faster.
    made = predict.plan(program(replicas=65_536, rows=65_536, reduces=(8,)), at("v5e:16x16"))
    assert made.op == "NcclAllReduce"
    assert made.wins[-1][1] == "DoublingAllReduce"


def test_virtual_devices_take_turns():
    one, four = (predict.compute(program(kernels=0), MACHINES["cpu"], n) for n in (1, 4))
    assert four == pytest.approx(4 * one)


def test_what_is_gathered_grows_with_the_devices():
    grown = program(reduces=(1000, 50), growing=(800, 0), replicas=8)
    assert grown.reduced(8) == [1000, 50]
    assert grown.reduced(80) == [200 + 8000, 50]
    assert program(replicas=1, reduces=()).reduced(64) == [1_000_000]


def test_another_op_must_be_clearly_faster_than_the_platforms():
    # Two devices, much to send: the ring's time is the platform's but for a kernel.
    made = predict.plan(program(reduces=(10**9,)), at("h100:2"))
    assert made.op == "NcclAllReduce"
    assert made.wins[0] == (2, "NcclAllReduce")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(peak=10**12), r"does not fit: 1,000\.0 GB on a device of 80\.0 GB"),
        (dict(writes=False), "writes no trainable variable"),
        (dict(idle=3, rows=5), "3 of 8 replicas get no rows of a batch of 5"),
        (dict(rows=257, rows_per_replica=33), "A batch of 257 rows does not divide by 8"),
        (dict(unknown=2), "2 loops run an unknown number of times"),
        (dict(refused="INTERNAL: no"), "does not compile the step, .* estimates. It says: INTER"),
    ],
)
def test_notes(changes, said):
    (note,) = predict.plan(program(**changes), at("h100:8")).notes
    assert re.search(said, note)


def test_a_program_survives_json():
    full = program(growing=(1,), gathers=(2,), compiled=Compiled("c", 1, 2, 3, 4.0, 5.0, 6))
    assert Program.from_json(full.to_json()) == full


# What is shown.


def test_json_says_everything_that_is_predicted():
    shown = json.loads(plan_show.to_json(predict.plan(program(), at("v5e:2x4"))))
    assert shown["topology"] == {"name": "v5e:2x4", "devices": 8}
    assert shown["step"]["seconds"] == shown["step"]["compute"] + shown["step"]["reduce"]
    assert shown["rows_per_second"] == pytest.approx(256 / shown["step"]["seconds"])
    assert set(shown["ops"]) == set(shown["scaling"]) == set(allreduce.OPS)
    assert shown["memory"] == {"bytes": 8_100_000, "of": 16e9, "fits": True, "by": "estimate"}


def shown(made):
    out = io.StringIO()
    plan_show.show(made, Console(file=out, width=400))
    return out.getvalue()


def test_a_device_with_too_little_to_do_is_no_device_that_is_used():
    # 1 Gflop take 4 us, and 50 kernels 200: 50 times the rows and more keep the device busy.
    little = program(operations={"float32": 1e9}, bytes=1.0, rows=8, rows_per_replica=1)
    text = shown(predict.plan(little, at("h100:8")))
    assert "8 rows, at most 1 on a device" in text
    assert "(200 us of it 50 kernels of 4.00 us)" in text
    assert "of one alone, with 1 row on each" in text
    assert "Bound by kernels: each device has too little to do for 50 kernels. Give it" in text
    assert "50 or more" in text
    assert "Or take fewer devices" in text
    assert "Constants of h100: NVIDIA H100 datasheet" in text


def test_devices_that_are_half_used_are_not_given_up():
    half = program(operations={"float32": 4e10}, bytes=1.0)  # 162 us of work, 200 of kernels
    text = shown(predict.plan(half, at("h100:8")))
    assert "40 or more" in text
    assert "fewer devices" not in text


def test_what_to_choose():
    assert "- Choose NcclAllReduce, the default. It is the" in shown(
        predict.plan(program(), at("h100:8"))
    )
    text = shown(predict.plan(program(), at("v5e:2x4")))
    assert "- TPUStrategy leaves the all-reduce to the chips, as NcclAllReduce does." in text
    heavy = program(bytes=1e12)
    assert "Bound by memory traffic: the devices wait" in shown(predict.plan(heavy, at("h100:8")))


@pytest.mark.parametrize(("nbytes", "shown"), [(8, "8 B"), (1_230, "1.23 kB"), (0, "0 B")])
def test_bytes_are_whole(nbytes, shown):
    assert plan_show.size(nbytes) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 ns"),
        (1.234e-3, "1.23 ms"),
        (98.76e-6, "98.8 us"),
        (250, "250 s"),
        (2e-9, "2.00 ns"),
    ],
)
def test_times_have_three_figures(value, shown):
    assert plan_show.time(value) == shown
