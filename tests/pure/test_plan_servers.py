"""Parameter servers in `stratagem plan`: bounds by hand, the simulation against what is known."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.cli import plan_servers, plan_servers_show
from stratagem.coordinator.consistency import Bounded, Synchronous
from stratagem.planning import machines, served, served_plan, servers, staleness
from stratagem.planning.machines import Serving
from stratagem.planning.program import Program
from stratagem.planning.served import Load, Served, Table
from stratagem.planning.servers import Costs, Exchange

MACHINES = machines.load()
FREE = Serving(1e-12, 1e18, 1e18, 1e18, 1e-12, 1e-12, 1e18, 1e18, 1e-12, 1e9)
ASYNCHRONOUS = {"mode": "asynchronous", "max_staleness": None, "backup_workers": 0}


def costs(count=1, compute=1e-2, pull=1e-12, push=1e-12, nbytes=8.0, serving=FREE):
    exchange = Exchange(0.0, nbytes, nbytes, pull, push)
    return Costs((exchange,) * count, compute, serving.dispatch, 0.0, 0.0, serving)


def program(**changes):
    values = dict(
        caught="a train step of model 'm'", strategy=("ParameterServerStrategy",), replicas=1,
        rows=100, rows_per_replica=100, idle=0, state=0, trainable=0, arguments=0, peak=0,
        operations={"float32": 1e9}, bytes=1e6, kernels=10, reduces=(),
    )  # fmt: skip
    return Program(**{**values, **changes})


def dense(nbytes, count):
    """A model of so many bytes, pulled and pushed whole, evenly on so many servers."""
    part = nbytes / count
    loads = [
        Load("w", i, count > 1, part, pulled=part, pushed=part, updated=part) for i in range(count)
    ]
    return Served(program(), count, tuple(loads), (), (("w", int(nbytes)),), 0, 0)


def machine(**changes):
    found = MACHINES["m5_8xlarge"]
    return dataclasses.replace(found, serving=dataclasses.replace(FREE, **changes))


# Bounds, by hand.


@pytest.mark.parametrize(("workers", "count"), [(4, 1), (8, 2), (16, 4), (64, 16)])
def test_saturated_servers_are_as_the_formula_for_parameter_servers_says(workers, count):
    # p workers, k servers, n bytes, B: a round takes p/k * n/B, where k < p (anchors of B1).
    nbytes, bandwidth = 1e8, 1.25e9
    step = dense(nbytes, count)
    step = dataclasses.replace(step, work=program(operations={"other": 1.0}, bytes=1.0, kernels=1))
    found = servers.costs(step, machine(bandwidth=bandwidth, stream=bandwidth))
    assert found.bound == servers.NETWORK_OUT
    assert workers / found.rate(workers) == pytest.approx(workers / count * nbytes / bandwidth)
    # One worker pulls n, and then pushes n, each at B.
    assert found.seconds == pytest.approx(2 * nbytes / bandwidth, rel=1e-3)
    assert found.saturates == pytest.approx(2 * count, rel=1e-3)


def test_a_lookup_step_by_hand():
    s = Serving(
        latency=1e-4, bandwidth=1e9, stream=5e8, encrypt=1e9, message=1e-4, row=1e-6, copy=1e9,
        update=1e9, dispatch=1e-4, disk=1e8,
    )  # fmt: skip
    load = Load(
        "t", 0, False, 1e9, pulled=1e6, asked=1e5, pushed=1.1e6, rows=1e4, touched=1e4, updated=2e6
    )
    step = Served(program(), 1, (load,), (), (), 0, 0)
    found = servers.costs(step, dataclasses.replace(MACHINES["m5_8xlarge"], serving=s))
    (exchange,) = found.exchanges
    assert exchange.pull == pytest.approx(1e-4 + 1e-2 + 1.1e-3)
    assert exchange.push == pytest.approx(1e-4 + 1e-2 + 1.1e-3 + 2e-3)
    # There and back, one message, what goes over the wire at 0.5 GB/s, and the server's part.
    assert found.pull == pytest.approx(2e-4 + 1e-4 + 2.2e-3 + exchange.pull)
    assert found.push == pytest.approx(2e-4 + 1e-4 + 2.2e-3 + exchange.push)
    # 1 Gflop at half of 2 Tflop/s, and 10 kernels of 3 us.
    assert found.compute == pytest.approx(1e-3 + 3e-5)
    assert found.bound == servers.CPU
    assert found.rate(1000) == pytest.approx(1 / (exchange.pull + exchange.push))
    assert found.saturates == pytest.approx(found.seconds / (exchange.pull + exchange.push))
    assert found.requests == 2


@pytest.mark.parametrize(
    ("slow", "bound"),
    [
        ({"bandwidth": 1e6}, servers.NETWORK_OUT),
        ({"encrypt": 1e6}, servers.ENCRYPTION),
        ({"update": 1e6}, servers.CPU),
        ({"dispatch": 10.0}, servers.COORDINATOR),
    ],
)
def test_what_is_saturated_first_is_named(slow, bound):
    assert servers.costs(dense(1e6, 2), machine(**slow)).bound == bound


def test_servers_are_worth_it_as_long_as_they_are_the_limit():
    # A step takes 9 ms of computing, and each of k servers 10/k ms.
    step = dataclasses.replace(
        dense(1e6, 4), work=program(operations={"other": 1.0}, bytes=1.0, kernels=3000)
    )
    one = machine(update=1e8)
    alone = servers.costs(step, one, 1)
    assert alone.exchanges[0].push == pytest.approx(1e-2)
    assert alone.seconds == pytest.approx(9e-3 + 1e-2, rel=1e-3)
    # Up to 4 * 8 are looked at: 9 + 10/k <= (9 + 10/32) / 0.95 from k = 13 on.
    assert servers.worth(step, one, 8) == 13


def test_other_numbers_of_servers():
    loads = [
        Load("a", 0, True, 10.0, pulled=6.0), Load("a", 1, True, 10.0, pulled=2.0),
        Load("b", 0, False, 3.0), Load("c", 1, False, 5.0), Load("d", 0, False, 7.0),
    ]  # fmt: skip
    assert [x.held for x in served.on_each(loads, 2)] == [20.0, 15.0]
    assert [x.held for x in served.on_others(loads, 4)] == [8.0, 10.0, 12.0, 5.0]
    assert [x.pulled for x in served.on_others(loads, 4)] == [3.0, 3.0, 1.0, 1.0]
    three = [x.pulled for x in served.on_others(loads, 3)]  # the middle one has half of each third
    assert three == pytest.approx([4.0, 2.0 + 2.0 / 3, 4.0 / 3])
    assert [x.held for x in served.on_others(loads, 1)] == [35.0]


# The simulation.


@pytest.mark.parametrize("workers", [1, 2, 5, 12])
def test_equal_workers_are_stale_by_the_number_of_others(workers):
    found = staleness.simulate(costs(), workers, steps=50)
    assert found.mean == pytest.approx(workers - 1, abs=0.05)
    assert found.rate == pytest.approx(workers / 1e-2, rel=0.05)


@settings(max_examples=25)
@given(
    workers=st.integers(1, 8), bound=st.integers(0, 20), count=st.integers(1, 6),
    push=st.sampled_from([1e-12, 2e-3]), jitter=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_no_push_is_staler_than_the_bound(workers, bound, count, push, jitter, seed):
    job = costs(count, push=push)
    found = staleness.simulate(job, workers, Bounded(bound), steps=10, jitter=jitter, seed=seed)
    assert max(found.histogram) <= bound


def test_a_bound_of_twice_the_others_costs_nothing():
    free = staleness.simulate(costs(), 8, steps=50)
    bounded = staleness.simulate(costs(), 8, Bounded(14), steps=50)
    tight = staleness.simulate(costs(), 8, Bounded(3), steps=50)
    assert bounded.rate > 0.8 * free.rate
    assert tight.rate < 0.6 * free.rate


def test_short_closures_wait_with_the_worker_not_for_the_network():
    # A closure arrives 4 ms after it was sent, and takes 1: depth 2 would keep a worker waiting.
    far = dataclasses.replace(FREE, latency=4e-3)
    short = Costs((), 1e-3, far.dispatch, 0.0, 0.0, far)
    deep = staleness.simulate(short, 2, steps=300)
    # 4 closures for each worker, as `fit` schedules them, come and go in 8 + 1 ms.
    assert deep.rate == pytest.approx(2 * 4 / 9e-3, rel=0.1)


def test_synchronous_rounds_are_not_stale_and_wait_for_the_slowest():
    found = staleness.simulate(costs(), 8, Synchronous(), steps=50)
    assert set(found.histogram) == {0}
    assert 0.75 < found.rate / 800 < 0.95  # the slowest of 8 is 14 % slower than the mean
    assert found.dropped == 0.0
    backup = staleness.simulate(costs(), 8, Synchronous(1), steps=50)
    assert backup.dropped == pytest.approx(1 / 8, abs=0.01)


def test_hybrid_rows_are_as_stale_as_others_of_their_round():
    exchange = Exchange(0.0, 8.0, 8.0, 1e-12, 1e-12, by_row=True)
    job = dataclasses.replace(costs(), exchanges=(exchange,))
    found = staleness.simulate(job, 4, Synchronous(hybrid=True), steps=50)
    assert 0 < found.mean <= 3


@pytest.mark.parametrize("workers", [1, 4, 16])
@pytest.mark.parametrize("serving", [{}, {"bandwidth": 1e9}, {"encrypt": 1e9}, {"dispatch": 5e-3}])
def test_the_simulation_stays_below_the_bounds_and_near_them(workers, serving):
    s = dataclasses.replace(FREE, **serving)
    job = costs(3, pull=1e-3, push=2e-3, nbytes=1e6, serving=s)
    found = staleness.simulate(job, workers, steps=100)
    assert 0.75 * job.rate(workers) < found.rate < 1.05 * job.rate(workers)


def test_times_of_a_lonely_worker_are_the_closed_form():
    s = dataclasses.replace(FREE, bandwidth=1e9, stream=1e9, latency=1e-4, message=1e-4)
    job = costs(1, pull=1e-3, push=2e-3, nbytes=1e6, serving=s)
    found = staleness.simulate(job, 1, steps=20, jitter=0.0)
    assert found.pull == pytest.approx(job.pull)
    assert found.push == pytest.approx(job.push)
    assert found.compute == pytest.approx(job.compute)


def test_a_seed_repeats_a_simulation():
    first, same, other = (staleness.simulate(costs(), 4, seed=seed) for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_many_workers_and_servers_take_seconds():
    found = staleness.simulate(costs(100, pull=1e-4, push=1e-4), 150)
    assert found.closures >= 4 * 150


# The plan, and what is shown.


def step(**changes):
    loads = (
        Load("t", 0, True, 5e8, 1e6, asked=1e5, pushed=1e6, rows=4e3, touched=4e3, updated=2e6),
        Load("t", 1, True, 5e8, 1e6, asked=1e5, pushed=1e6, rows=4e3, touched=4e3, updated=2e6),
        Load("w", 0, False, 2e4, pulled=1e4, pushed=1e4, updated=2e4),
    )  # fmt: skip
    tables = (Table("t", 1_000_000, 256, 10_000, 8_000, "batch"),)
    values = dict(
        work=program(), servers=2, loads=loads, tables=tables, whole=(("w", 10_000),), sent=1000,
        returned=8, partitioner="FixedShardsPartitioner(num_shards=2)",
    )  # fmt: skip
    return Served(**{**values, **changes})


def plan(found=None, workers=3, rule=ASYNCHRONOUS, name="m5_8xlarge"):
    return served_plan.plan(found or step(), MACHINES[name], workers, rule)


def test_a_step_survives_json():
    assert Served.from_json(step().to_json()) == step()


def test_json_says_everything_that_is_predicted():
    made = plan()
    shown = json.loads(plan_servers_show.to_json(made))
    assert (shown["workers"], shown["servers"]) == (3, 2)
    assert shown["pulled"] == 2.01e6
    assert shown["rows_per_second"] == pytest.approx(100 * shown["steps_per_second"])
    assert shown["staleness"]["p95"] <= shown["staleness"]["max"]
    assert shown["memory"]["bytes"] == [5e8 + 2e4, 5e8]
    assert shown["snapshot"] == pytest.approx((5e8 + 2e4) / 0.25e9)
    assert {3} < {point["workers"] for point in shown["by_workers"]}
    assert {2, shown["worth"]} <= {point["servers"] for point in shown["by_servers"]}


@pytest.mark.parametrize(
    ("changes", "workers", "rule", "said"),
    [
        (dict(work=program(writes=False)), 2, {}, "writes no trainable variable"),
        (dict(loads=(Load("t", 0, False, 1e12, pulled=1e3, updated=1e3),)), 2, {}, "do not fit"),
        (dict(loads=(Load("t", 0, False, 1e9, pulled=1e3, updated=1e3),)), 2, {}, "2.0 times the"),
        (dict(whole=(("w", 10**7),)), 2, {}, "for MultiWorkerMirroredStrategy rather"),
        (dict(tables=(Table("t", 9, 4, 9, 9, "estimate"),)), 2, {}, "Say --table-rows"),
        ({}, 60, {}, "More workers bring no more rows a second, only staler gradients."),
        ({}, 3, {"max_staleness": 2}, "3 of them all have work from 4 on"),
        (dict(work=program(unknown=1)), 2, {}, "1 loops run an unknown number of times"),
    ],
)
def test_notes(changes, workers, rule, said):
    notes = plan(step(**changes), workers, {**ASYNCHRONOUS, **rule}).notes
    assert any(said in note for note in notes), notes


def test_a_coordinator_that_is_the_limit():
    tiny = (Load("w", 0, False, 1e3, 1e3, pushed=1e3, updated=1e3), Load("v", 1, False, 8.0))
    made = served_plan.plan(step(loads=tiny), machine(dispatch=1e-3), 60, ASYNCHRONOUS)
    (note,) = made.notes  # That the servers are not alike does not matter.
    assert "this is saturated: coordinator. More workers bring no more rows a second, and" in note


def test_where_workers_stop_helping_is_among_the_points():
    made = plan(workers=8)
    at = {point.workers: point.bound for point in made.by_workers}
    assert at[3] != "workers"  # 2.4 are enough
    assert at[2] == "workers"


def test_what_makes_servers_alike_depends_on_what_differs():
    rows = (Load("t", 0, True, 1e9, 9e5, updated=1.0), Load("t", 1, True, 1e9, 1e5, updated=1.0))
    (note,) = [n for n in plan(step(loads=rows), 1).notes if "not equal" in n]
    assert "number the rows in a random order" in note
    (note,) = [n for n in plan(step(loads=(rows[0],)), 1).notes if "not equal" in n]
    assert "A partitioner divides variables" in note


@pytest.mark.parametrize(
    ("steps", "shown"), [(0.1234, "0.123"), (99.94, "99.9"), (1436.2, "1,436"), (100.4, "100")]
)
def test_rates_have_three_figures_or_are_whole(steps, shown):
    assert plan_servers_show.rate(steps) == shown


def test_an_even_cluster_with_room_needs_no_notes():
    assert plan(workers=1).notes == ()


# Machines and options.


def test_machines_say_what_it_costs_to_serve():
    assert {"cpu", "m5_8xlarge", "m5_16xlarge"} <= {
        m.name for m in MACHINES.values() if m.serving is not None
    }
    with pytest.raises(
        ValueError, match="expected one of cpu, m5_16xlarge, m5_8xlarge. Got 'h100'"
    ):
        plan_servers.machine_of("h100", MACHINES)
    with pytest.raises(ValueError, match="says what it costs to serve on it. Got h100"):
        servers.costs(step(), MACHINES["h100"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("latency = 0", "serving.latency is no positive number"),
        ("speed = 1", "serving has unknown speed"),
    ],
)
def test_malformed_machines(tmp_path, line, said):
    text = machines.BUILT_IN.read_text()
    text = text[text.index("[cpu]") : text.index("[m5_8xlarge]")]
    file = tmp_path / "machines.toml"
    file.write_text(text.replace("latency = 50e-6", line))
    with pytest.raises(ValueError, match=said):
        machines.load(file)


@pytest.mark.parametrize("said", ["x", "0", "t=", "t=-1"])
def test_malformed_rows_of_tables(said):
    with pytest.raises(ValueError, match="--table-rows: expected a number from 1 on"):
        plan_servers.table_rows([said])


def test_rows_of_tables():
    assert plan_servers.table_rows(["5", "a/b=7"]) == {"": 5, "a/b": 7}
