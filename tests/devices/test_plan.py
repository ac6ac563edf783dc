"""`stratagem plan` on real steps: caught, counted, shown; and what it says when it cannot."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from rich.console import Console

import stratagem
from stratagem.cli import plan, plan_plot, plan_run, plan_show, plan_trace
from stratagem.cli.main import main
from stratagem.planning import machines, predict, topology
from stratagem.planning.program import Program
from stratagem.step import counting
from stratagem.strategies import PlannedStrategy

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "digits_mirrored.py"
RECORDED = Path(__file__).parent / "recorded_plan"


def catch(script, replicas=4, rows=0):
    """What is counted of the first step that a function runs, as the command would."""
    planned, asked = PlannedStrategy(replicas), []
    with pytest.raises(plan_trace.Caught) as caught, plan_trace.replaced(planned, asked, rows):
        with planned.scope():
            script()
    wanted = plan_trace.Wanted(out="", replicas=replicas, rows=rows)
    return plan_trace.count(caught.value, planned, asked, wanted)


def dense():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])


def custom_loop(rows=32):
    strategy = stratagem.MirroredStrategy(["GPU:0", "GPU:1"])  # which are not here
    x, y = np.ones((rows, 8), "float32"), np.ones((rows, 4), "float32")
    dataset = strategy.experimental_distribute_dataset([(x, y)] * 3)
    with strategy.scope():
        model, optimizer = dense(), keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def step(batch):
        inputs, targets = batch
        with stratagem.GradientTape() as tape:
            error = keras.ops.mean((model(inputs) - targets) ** 2, -1)
            loss = stratagem.nn.compute_average_loss(error)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    for batch in dataset:
        strategy.run(step, args=(batch,))


def own_function():
    strategy = stratagem.TPUStrategy(None)
    with strategy.scope():
        total = keras.Variable(jnp.zeros(3))

    @stratagem.function
    def twice():
        strategy.run(lambda: total.assign_add(jnp.ones(3)))
        strategy.run(lambda: total.assign_add(jnp.ones(3)))

    twice()


def fit(rows=30):
    model = dense()
    model.compile("sgd", "mse")
    model.fit(np.ones((90, 8)), np.ones((90, 4)), batch_size=rows, verbose=0)


def test_the_step_of_a_custom_loop_is_caught_and_counted():
    program = catch(custom_loop)
    assert program.caught == "strategy.run(custom_loop.step)"
    assert program.strategy == ("MirroredStrategy",)
    assert (program.rows, program.rows_per_replica, program.idle) == (32, 8, 0)
    weights = 4 * (8 * 4 + 4)
    assert program.trainable == weights
    assert program.reduces == (weights,)
    assert 2 * weights <= program.state <= 2 * weights + 16  # momenta; iterations, learning rate
    assert program.arguments == 4 * 8 * (8 + 4)
    # Forward, and the gradient of the weights; nobody wants that of the inputs.
    assert program.operations["float32"] == 2 * (2 * 8 * 8 * 4)
    assert program.writes


def test_fit_is_caught_without_a_strategy():
    program = catch(fit)
    assert program.caught.startswith("a train step of model 'sequential")
    assert program.strategy == ("none",)
    assert (program.rows, program.rows_per_replica) == (30, 8)


def test_a_function_is_caught_whole():
    program = catch(own_function)
    assert program.caught == "stratagem.function own_function.twice"
    assert program.strategy == ("TPUStrategy",)
    assert (program.rows, program.trainable, program.state) == (0, 12, 12)


def test_more_replicas_than_rows():
    program = catch(lambda: fit(rows=3))
    assert (program.rows, program.rows_per_replica, program.idle) == (3, 1, 1)


@pytest.mark.parametrize("script", [custom_loop, fit])
def test_the_rows_of_each_device_can_be_chosen(script):
    program = catch(script, rows=100)
    assert (program.rows, program.rows_per_replica, program.idle) == (400, 100, 0)
    assert program.arguments == 4 * 100 * (8 + 4)


def test_one_replica_has_nothing_to_reduce_yet():
    program = catch(custom_loop, replicas=1)
    assert program.reduces == ()
    assert program.reduced(64) == [4 * (8 * 4 + 4)]


def test_everything_is_as_before_afterwards():
    catch(fit)
    strategy = stratagem.OneDeviceStrategy("/cpu:0")
    assert type(strategy) is stratagem.OneDeviceStrategy
    fit_with = dense()
    fit_with.compile("sgd", "mse")
    fit_with.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)


# Counting, against XLA where it counts the same.


def counted(fn, *args):
    return counting.count(jax.make_jaxpr(fn)(*args), 1)


def convolve(x, k, stride=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, k, (stride,) * 2, "VALID", dimension_numbers=layout)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (jnp.matmul, [(32, 64), (64, 16)]),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(4, 8, 16), (4, 16, 8)]),
        (convolve, [(2, 16, 16, 3), (3, 3, 3, 8)]),
        (lambda x, k: convolve(x, k, 2), [(2, 17, 17, 3), (3, 3, 3, 8)]),
    ],
)
def test_products_are_counted_as_xla_counts_them(fn, shapes):
    args = [jnp.ones(shape) for shape in shapes]
    ours = sum(counted(fn, *args).operations.values())
    assert ours == pytest.approx(jax.jit(fn).lower(*args).cost_analysis()["flops"])


def test_loops_count_by_their_turns_and_branches_by_their_dearest():
    a = jnp.ones((16, 16))
    product = 2 * 16**3
    scan = counted(lambda x: jax.lax.scan(lambda c, _: (c @ a, None), x, length=5)[0], a)
    assert scan.operations["float32"] == 5 * product
    branch = counted(lambda x: jax.lax.cond(x[0, 0] > 0, lambda v: v @ a @ a, lambda v: v, x), a)
    assert branch.operations["float32"] == 2 * product
    loop = counted(lambda x: jax.lax.while_loop(lambda v: v[0, 0] < 9, lambda v: v @ a, x), a)
    assert (loop.operations["float32"], loop.unknown) == (product, 1)


def test_chains_are_fused_and_functions_taken_apart():
    x = jnp.ones(1000)
    chain = counted(lambda v: jax.nn.relu(v * 2 + 1) - jnp.where(v > 0, v, 1.0), x)
    assert (chain.bytes, chain.kernels, chain.peak) == (2 * 4000, 1, 0)
    total = counted(lambda v: jnp.sum(jnp.sin(v)), x)
    assert total.kernels == 2


def test_live_memory_is_what_a_backward_pass_waits_for():
    a = jnp.ones((100, 100))

    def loss(weights):
        x = a
        for w in weights:
            x = jnp.sin(x @ w)
        return jnp.sum(x)

    few, many = (counted(jax.grad(loss), [a] * n).peak for n in (2, 8))
    assert many - few >= 6 * a.nbytes


# The command.


@pytest.fixture(scope="module")
def demo():
    options = dict(script=str(DEMO), module=False, arguments=(), strategy="tpu", plot=None)
    wanted = plan.Config(**options, topology="v5e:8x8", per_device_batch=32, json=False)
    return plan.trace(wanted, topology.parse("v5e:8x8", machines.load()))


@pytest.mark.processes
def test_the_demos_step_is_caught(demo):
    assert demo.caught == "a train step of model 'sequential'"
    assert demo.strategy == ("MirroredStrategy",)
    assert (demo.rows, demo.rows_per_replica) == (64 * 32, 32)
    first, second = 32 * 64 * 9 * 1 * 32 * 2, 32 * 16 * 9 * 32 * 64 * 2
    dense_ones = 32 * (1024 * 64 + 64 * 10) * 2
    assert demo.operations["conv float32"] == 3 * second + 2 * first
    assert demo.operations["float32"] == 3 * dense_ones
    assert demo.trainable == 4 * (9 * 32 + 32 + 64 + 9 * 32 * 64 + 64 + 1024 * 64 + 64 + 650)
    assert max(demo.reduces) > demo.trainable
    assert demo.gathers  # the synchronized batch normalisation
    assert sum(demo.growing) > 0


@pytest.mark.parametrize("error", [ValueError("no slice\nmore"), RuntimeError("no slice")])
def test_a_compiler_that_refuses(monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(plan_trace, "_compile", refuse)
    program = Program.from_json((RECORDED / "demo.json").read_text())
    caught = plan_trace.Caught("a step", None, plan_trace.Batch((1,), 1))
    told = plan_trace.asked_compiler(program, caught, PlannedStrategy(64), "v5e:8x8")
    assert told == dataclasses.replace(program, refused="no slice")


@pytest.mark.processes
def test_a_compiler_that_ends_its_process(tmp_path):
    """What was counted before is planned with."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, keras, numpy as np\n"
        "from jax.experimental import topologies\n"
        "topologies.get_topology_desc = lambda **_: os._exit(139)\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "model.fit(np.ones((8, 4)), np.ones((8, 1)))\n"
    )

    def asked(out):
        wanted = plan_trace.Wanted(out=out, replicas=2, compiler="v5e:2x2")
        return json.dumps(dataclasses.asdict(wanted))

    found = plan_run.trace_process(
        plan_trace.__name__, asked, [str(script)], plan_run.environment()
    )
    program = Program.from_json(found)
    assert program.compiled is None
    assert program.refused == "nothing; it has ended its process"


@pytest.mark.parametrize("text", ["v5e:8x8", "h100:8x8"])
def test_the_demos_report(text):
    program = Program.from_json((RECORDED / "demo.json").read_text())
    out = io.StringIO()
    made = predict.plan(program, topology.parse(text, machines.load()))
    plan_show.show(made, Console(file=out, width=110))
    shown = "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
    file = RECORDED / f"demo_{text.partition(':')[0]}.txt"
    assert shown == file.read_text(), "if this is wanted, record it: see recorded_plan/README.md"


def test_the_picture_is_drawn(tmp_path):
    program = Program.from_json((RECORDED / "demo.json").read_text())
    made = predict.plan(program, topology.parse("h100:8x8", machines.load()))
    plan_plot.draw(made, tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    for name in predict.OPS:
        assert f"<!-- {name}" in drawn  # matplotlib's comment above each text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('nothing')", "expected a training step.*Got the end of the script without one"),
        ("import sys; sys.exit(3)", "expected it to run as far as.*Got exit code 3 before"),
    ],
)
def test_scripts_without_a_step(tmp_path, source, said, capfd):
    script = tmp_path / "script.py"
    script.write_text(source)
    assert main(["plan", "--strategy", "mirrored", "--topology", "cpu:2", str(script)]) == 1
    assert re.search(said, capfd.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategy", "ps"], "--workers: expected a number from 1 on with --strategy ps"),
        (["--strategy", "ps", "--servers", "0"], "--servers: expected a number from 1 on"),
        (["--strategy", "ps", "--topology", "cpu:2"], "expected --workers, --servers and"),
        (["--strategy", "ps", "--max-staleness", "-1"], "max_staleness: expected None or a count"),
        (["--strategy", "ps", "--table-rows", "x"], "--table-rows: expected a number from 1 on"),
        (["--strategy", "tpu", "--workers", "2"], "--workers: expected --strategy ps with it. Got"),
        ([], "expected --strategy, one of tpu, gpu, mirrored, mwms, ps. Got none"),
        ([], "expected --topology, such as v5e:8x8"),
        ([], "expected a SCRIPT to plan. Got none"),
        (["none.py"], "SCRIPT: expected a Python file. Got none.py"),
        (["--per-device-batch", "0"], "--per-device-batch: expected at least 1. Got 0"),
        (["--plot", "a.gif"], "--plot: expected a name that ends in .png, .pdf, .svg"),
        (["--plot", "/no/folder/a.png"], "--plot: expected a folder that is there"),
        (["--calibrate", "x.py"], "--calibrate: expected no script with it"),
        (["--strategy", "tpu", "--topology", "h100:8"], "expected a slice of TPUs"),
        (["--strategy", "gpu", "--topology", "cpu:2"], "expected GPUs, such as h100:8x16"),
        (["--strategy", "mirrored", "--topology", "h100:8x2"], "the devices of one machine"),
        (["--strategy", "mwms", "--topology", "v5e:8x8"], "devices a machine x machines"),
        (["--strategy", "tpu", "--topology", "v9:8"], "expected one of the machines"),
    ],
)
def test_wrong_options(arguments, said, capsys):
    script = [str(DEMO)] if "--topology" in arguments else []
    assert main(["plan", *arguments, *script]) == 2
    assert said in capsys.readouterr().err


def test_no_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: None)
    assert main(["plan", "--plot", "a.png"]) == 2
    assert "--plot: expected matplotlib. Got none" in capsys.readouterr().err


@pytest.mark.processes
def test_json_and_nothing_else_on_standard_output(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import stratagem, keras, numpy as np\nprint('hello')\n"
        "model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])\n"
        "model.compile('sgd', 'mse')\n"
        "model.fit(np.ones((32, 8)), np.ones((32, 4)), batch_size=16)\n"
        "raise SystemExit('it went on')\n"
    )
    command = [sys.executable, "-m", "stratagem.cli", "plan", "--strategy", "mwms"]
    done = subprocess.run(
        [*command, "--topology", "h100:2x2", "--json", str(script)],
        env={**os.environ, "TF_CONFIG": "{not read}"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    shown = json.loads(done.stdout)
    assert shown["topology"]["devices"] == 4
    assert shown["program"]["reduces"]
    assert "hello" in done.stderr
    assert "it went on" not in done.stderr


# Calibration: what is written can be read, and other machines stay.


def test_calibration_is_written_beside_other_machines(tmp_path, monkeypatch, capsys):
    names = (
        "product convolution other memory_bandwidth host_bandwidth kernel_seconds device_alpha "
        "device_bandwidth process_alpha process_bandwidth"
    ).split() + list(machines.Serving.__dataclass_fields__)
    monkeypatch.setattr(plan.calibrate, "measure", lambda: dict.fromkeys(names, 3.5))
    text = machines.BUILT_IN.read_text()
    file = tmp_path / "settings" / "machines.toml"
    file.parent.mkdir()
    file.write_text(text[text.index("[v5e]") : text.index("[v5p]")] + text[text.index("[cpu]") :])
    assert plan.calibrate.act(file) == 0
    found = machines.load(file)
    assert found["cpu"].peak == {"float32": 3.5, "conv float32": 3.5, "other": 3.5}
    assert found["cpu"].links[1].group_bandwidth == 3.5
    assert found["cpu"].serving.row == 3.5
    assert found["v5e"] == machines.load()["v5e"]
    assert f"written to {file}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            subprocess.CalledProcessError(9, ["python", "devices"]),
            "expected 'devices' to be measured. Got exit code 9",
        ),
        (
            subprocess.TimeoutExpired(["python", "devices"], 300),
            "expected 'devices' to be measured within 300 s. Got no end of it. Run it again",
        ),
    ],
)
def test_a_measurement_that_fails_is_named(tmp_path, monkeypatch, capsys, error, text):
    def fail():
        raise error

    monkeypatch.setattr(plan.calibrate, "measure", fail)
    assert plan.calibrate.act(tmp_path / "machines.toml") == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "machines.toml").exists()
