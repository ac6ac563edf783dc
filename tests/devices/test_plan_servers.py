"""`stratagem plan --strategy ps` on real steps: caught, cut into parts, counted, shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from rich.console import Console

import stratagem
from stratagem.cli import (
    calibrate_servers,
    plan_servers,
    plan_servers_plot,
    plan_servers_show,
    plan_trace_servers,
)
from stratagem.cli.main import main
from stratagem.coordinator import cluster_coordinator
from stratagem.coordinator.consistency import Bounded
from stratagem.keras_bridge import served
from stratagem.planning import job, machines, served_plan
from stratagem.step import by_lookup
from stratagem.strategies import PlannedServers
from stratagem.strategies.parameter_server import Consistency

ROWS, WIDTH, BATCH, FIELDS, HIDDEN = 100_000, 8, 16, 4, 5
HALF = ROWS // 2
IDS = np.random.default_rng(0).integers(0, ROWS, (64, FIELDS))


def catch(script, workers=2, servers=2, rows=0, table_rows=None, rule=None):
    """What is counted of the first step that a function runs, as the command would."""
    planned, seen = PlannedServers.of(workers, servers, rule), plan_trace_servers.Seen()
    asked = []
    wanted = plan_trace_servers.Wanted("", workers, servers, rows, table_rows or {})
    with pytest.raises(plan_trace_servers.Caught) as caught:
        with plan_trace_servers.replaced(planned, asked, seen, rows), planned.scope():
            script()
    return plan_trace_servers.count(caught.value, planned, asked, seen, wanted), planned


def embedding(optimizer="adagrad"):
    ids = keras.Input((FIELDS,), dtype="int32")
    looked_up = keras.layers.Embedding(ROWS, WIDTH, name="table")(ids)
    hidden = keras.layers.Dense(HIDDEN)(keras.layers.Flatten()(looked_up))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, "mse")
    return model


def divided():
    return stratagem.experimental.partitioners.FixedShardsPartitioner(2)


def fit():
    strategy = stratagem.ParameterServerStrategy(None, divided(), max_staleness=3)
    with strategy.scope():
        model = embedding()
    model.fit(IDS, np.ones((64, 1)), batch_size=BATCH, shuffle=False, verbose=0)


def test_the_parts_of_an_embedding_model():
    step, planned = catch(fit)
    assert step.work.caught.startswith("a train step of model 'functional")
    assert step.work.strategy == ("ParameterServerStrategy",)
    assert (step.work.rows, step.servers, step.work.writes) == (BATCH, 2, True)
    assert step.partitioner == "FixedShardsPartitioner(num_shards=2)"
    assert planned.consistency.max_staleness == 3
    # The table, by the rows that the first batch names.
    named = np.unique(IDS[:BATCH])
    (table,) = step.tables
    assert (table.name, table.rows, table.row_bytes) == ("table/embeddings", ROWS, 4 * WIDTH)
    assert (table.mentions, table.distinct, table.known) == (BATCH * FIELDS, len(named), "batch")
    shards = [load for load in step.loads if load.name == "table/embeddings"]
    assert [load.server for load in shards] == [0, 1]
    assert [load.rows for load in shards] == [np.sum(named < HALF), np.sum(named >= HALF)]
    for load in shards:
        assert load.held == 2 * HALF * 4 * WIDTH  # with Adagrad's slot
        assert load.pulled == load.rows * 4 * WIDTH
        assert load.asked == load.rows * 8
        assert load.updated == 2 * load.pulled
        assert load.pulled + load.asked <= load.pushed <= load.pulled + load.asked + 16
    # The rest, whole.
    weights = 4 * (FIELDS * WIDTH * HIDDEN + HIDDEN + HIDDEN + 1)
    assert sum(nbytes for _, nbytes in step.whole) == weights + 4  # the learning rate
    assert step.pulled == weights + 4 + sum(load.pulled for load in shards)
    # Products: forward, and gradients of both weights and of both inputs.
    products = 2 * BATCH * (FIELDS * WIDTH * HIDDEN + HIDDEN)
    assert step.work.operations["float32"] == 3 * products
    assert step.work.bytes < 4 * ROWS * WIDTH / 10  # not the whole table


def test_sums_that_travel_instead_of_rows(monkeypatch):
    monkeypatch.setattr(by_lookup, "_LEAST", 0)

    def pooled():
        strategy = stratagem.ParameterServerStrategy()
        with strategy.scope():
            ids = keras.Input((FIELDS,), dtype="int32")
            rows = keras.layers.Embedding(ROWS, WIDTH, name="table")(ids)
            mean = keras.layers.GlobalAveragePooling1D()(rows)
            model = keras.Model(ids, keras.layers.Dense(1)(mean))
            model.compile("adagrad", "mse")
        model.fit(IDS, np.ones((64, 1)), batch_size=BATCH, shuffle=False, verbose=0)

    step, _ = catch(pooled, servers=1)
    named = len(np.unique(IDS[:BATCH]))
    (table,) = step.tables
    assert (table.bags, table.distinct, table.mentions) == (BATCH, named, BATCH * FIELDS)
    (load,) = [load for load in step.loads if load.name == "table/embeddings"]
    assert load.pulled == BATCH * 4 * WIDTH
    places = 4 * BATCH * FIELDS
    assert load.asked == 8 * named + places
    assert load.pushed == pytest.approx(load.asked + load.pulled, abs=16)
    assert load.summed == named * 4 * WIDTH
    assert (load.rows, load.touched) == (BATCH * FIELDS, named)


def test_rows_that_the_user_knows_and_more_rows_than_the_script_has():
    step, _ = catch(fit, table_rows={"": 40})
    assert [(t.distinct, t.known) for t in step.tables] == [(40, "argument")]
    assert sum(load.rows for load in step.loads) == pytest.approx(40)
    few, _ = catch(fit, rows=BATCH // 2)
    assert (few.work.rows, few.tables[0].known) == (BATCH // 2, "batch")
    assert few.tables[0].distinct == len(np.unique(IDS[: BATCH // 2]))
    more, _ = catch(fit, rows=2 * BATCH)
    (table,) = more.tables
    assert (more.work.rows, table.known) == (2 * BATCH, "estimate")
    assert table.distinct == min(2 * len(np.unique(IDS[:BATCH])), 2 * BATCH * FIELDS)


def scheduled():
    strategy = stratagem.ParameterServerStrategy(None)
    coordinator = stratagem.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = keras.Variable(
            keras.initializers.RandomUniform(seed=1), shape=(ROWS, WIDTH), name="table"
        )
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([table])

    def replica_step(ids):
        with stratagem.GradientTape() as tape:
            loss = keras.ops.mean(stratagem.nn.embedding_lookup(table, ids) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return loss

    def step(iterator):
        return strategy.run(replica_step, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter([IDS[:BATCH], IDS])))
    coordinator.schedule(step, args=(iterator,))
    coordinator.join()


def test_a_scheduled_function_with_datasets_of_the_workers():
    step, _ = catch(scheduled)
    assert step.work.caught == "scheduled function scheduled.step"
    assert step.work.rows == BATCH
    assert [t.distinct for t in step.tables] == [len(np.unique(IDS[:BATCH]))]
    assert step.sent == 0  # the workers read their data
    assert step.work.arguments == BATCH * FIELDS * 4


def loop():
    strategy = stratagem.MirroredStrategy(["GPU:0", "GPU:1"])  # of a script for one machine
    dataset = strategy.experimental_distribute_dataset([(np.ones((32, 8), "float32"),)] * 3)
    with strategy.scope():
        weights = keras.Variable(np.ones((8, 2), "float32"))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weights])

    def step(x):
        with stratagem.GradientTape() as tape:
            loss = keras.ops.mean((x @ weights) ** 2)
        optimizer.apply(tape.gradient(loss, [weights]), [weights])

    for (x,) in dataset:
        strategy.run(step, args=(x,))


def test_a_loop_for_another_strategy():
    step, planned = catch(loop)
    assert (step.work.rows, step.work.strategy) == (32, ("MirroredStrategy",))
    assert step.tables == ()
    assert [nbytes for _, nbytes in step.whole] == [64, 4]  # the weights, the learning rate
    assert step.pulled == 64 + 4
    assert planned.consistency.mode == "asynchronous"


def test_each_worker_has_its_share_in_synchronous_training():
    rule = plan_trace_servers.Consistency("synchronous")
    step, planned = catch(fit, workers=4, rule=rule)
    assert step.work.rows == BATCH // 4
    assert planned.consistency == rule


def test_large_variables_have_a_place_and_no_value():
    planned = PlannedServers.of(1, 3)
    with planned.scope():
        table = keras.layers.Embedding(1 << 30, 1 << 10)
        table.build()
        small = keras.Variable(np.arange(3.0))
    assert table.embeddings.remote_spec.nbytes == 1 << 42
    np.testing.assert_array_equal(small.numpy(), [0, 1, 2])
    small.assign([3.0, 4.0, 5.0])
    np.testing.assert_array_equal(small.numpy(), [3, 4, 5])
    assert small.remote_spec.shards[0].server == 1


def test_the_simulation_is_on_the_terms_of_a_real_job():
    strategy = SimpleNamespace(consistency=Consistency(max_staleness=3), state_dir=None)
    strategy.snapshot_seconds = 600.0
    assert job.terms(Bounded(3)) == cluster_coordinator._terms(strategy)
    assert job.AHEAD == served._AHEAD


def test_the_report_and_the_picture(tmp_path):
    step, planned = catch(fit)
    rule = {"mode": "asynchronous", "max_staleness": 3, "backup_workers": 0}
    made = served_plan.plan(step, machines.load()["m5_8xlarge"], 2, rule)
    out = io.StringIO()
    plan_servers_show.show(made, Console(file=out, width=110))
    shown = out.getvalue()
    for text in (
        "2 workers, 2 ps, each Amazon EC2 m5.8xlarge", "table/embeddings",
        "asynchronous, max_staleness=3", "other numbers of workers", "2 ps serve", "For 2 workers",
    ):  # fmt: skip
        assert text in shown
    plan_servers_plot.draw(made, tmp_path / "plan.svg")
    assert "staleness: asynchronous, max_staleness=3" in (tmp_path / "plan.svg").read_text()


SCRIPT = """
import stratagem, keras, numpy as np
print("hello")
ids = keras.Input((4,), dtype="int32")
rows = keras.layers.Embedding(100, 3, name="table")(ids)
model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
model.compile("sgd", "mse")
model.fit(np.zeros((32, 4), "int32"), np.ones((32, 1)), batch_size=16)
raise SystemExit("it went on")
"""


@pytest.mark.processes
def test_the_command(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "stratagem.cli", "plan", "--strategy", "ps", "--workers", "4"]
    command += ["--servers", "2", "--table-rows", "table/embeddings=7", "--json", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    assert (shown["workers"], shown["servers"]) == (4, 2)
    assert shown["step"]["tables"][0]["distinct"] == 7
    assert shown["rows_per_second"] > 0
    assert "hello" in done.stderr
    assert "it went on" not in done.stderr


def test_wrong_tables_are_named(tmp_path, capsys, monkeypatch):
    step, _ = catch(fit)
    monkeypatch.setattr(plan_servers, "trace", lambda wanted: (step, {}))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--strategy", "ps", "--workers", "1", "--servers", "1", "--table-rows", "no=1"]
    assert main(["plan", *options, str(script)]) == 1
    assert "expected tables of table/embeddings. Got no" in capsys.readouterr().err


@pytest.mark.processes
def test_a_server_of_this_machine_is_measured(monkeypatch):
    for name, value in (("_REPEATS", 1), ("_TIMES", 1), ("_LARGE", 1 << 16), ("_CLOSURES", 10)):
        monkeypatch.setattr(calibrate_servers, name, value)
    found = calibrate_servers.measure()
    assert set(found) == set(machines.Serving.__dataclass_fields__)
    assert all(value > 0 for value in found.values())


def test_wrong_machines(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("")
    options = ["--strategy", "ps", "--workers", "1", "--servers", "1", "--machine", "h100"]
    assert main(["plan", *options, str(script)]) == 2
    assert "--machine: expected one of cpu, m5_16xlarge" in capsys.readouterr().err
    assert plan_servers.MACHINE in machines.load()
