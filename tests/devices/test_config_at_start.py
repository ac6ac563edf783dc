"""What must happen before the JAX backend starts, each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.processes

_CHOSEN_HERE = ("NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "STRATAGEM_REHEARSE")

# Many asynchronous steps, each with collectives that depend on each other: stops for good within
# a few steps when the pool is as small as the number of devices (jax 0.10, two devices, two cores).
_STEPS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("replica",))

def step(w, x):
    for _ in range(3):
        w = jax.lax.psum(jnp.tanh(x @ w).T @ x, "replica") * 1e-3
    return w

run = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=(P(), P("replica")), out_specs=P(), check_vma=False)
)
w = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P()))
x = jax.device_put(jnp.ones((64 * mesh.size, 64)), NamedSharding(mesh, P("replica")))
for _ in range(400):
    w = run(w, x)
w.block_until_ready()
"""


def _python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: text for name, text in os.environ.items() if name not in _CHOSEN_HERE}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _prints(program: str, **environment: str) -> str:
    done = _python(program, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _fails(program: str, **environment: str) -> str:
    done = _python(program, **environment)
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_set_virtual_devices_gives_devices_whose_collectives_never_stop():
    program = f"""
from stratagem import _jax, config
config.set_virtual_devices(4)
{_STEPS}
config.ensure_safe_cpu_pool(jax.devices())
print(len(jax.devices()), _jax.cpu_pool_threads() in (None, 16) or _jax.cpu_pool_threads() > 16)
"""
    assert _prints(program) == "4 True"


@pytest.mark.parametrize(
    "environment",
    [
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        {"JAX_NUM_CPU_DEVICES": "2"},
    ],
)
def test_devices_that_others_configured_are_safe_as_well(environment):
    program = f"import stratagem\n{_STEPS}\nprint(stratagem.config.resolve_devices())"
    assert _prints(program, **environment) == "[CpuDevice(id=0), CpuDevice(id=1)]"


def test_devices_configured_in_jax_after_the_import_are_safe_as_well():
    program = """
    import jax
    from stratagem import config
    jax.config.update("jax_num_cpu_devices", 16)
    print(len(config.resolve_devices()))
    """
    assert _prints(program) == "16"


def test_a_backend_that_started_with_a_small_pool_is_refused():
    program = """
    import os
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    jax.devices()
    os.environ["NPROC"] = "8"
    from stratagem import config
    print(len(config.resolve_devices(["cpu:0"])))
    config.resolve_devices()
    """
    done = _python(program, NPROC="3")
    assert done.stdout.strip() == "1"
    assert "2 CPU devices need a pool of at least 8 threads" in done.stderr
    assert "has started with 3" in done.stderr


def test_a_rehearsal_gives_cpu_devices_the_names_of_accelerators():
    program = """
    import jax
    from stratagem import config
    print(config.list_devices())
    print(config.resolve_devices(["/gpu:0", "GPU:1"]), config.resolve_devices())
    print([config.device_name(device) for device in jax.devices()], jax.default_backend())
    print(config.list_physical_devices("GPU")[1])
    """
    assert _prints(program, STRATAGEM_REHEARSE="gpu:2", JAX_PLATFORMS="").splitlines() == [
        "['CPU:0', 'CPU:1', 'GPU:0', 'GPU:1']",
        "[CpuDevice(id=0), CpuDevice(id=1)] [CpuDevice(id=0), CpuDevice(id=1)]",
        "['/device:GPU:0', '/device:GPU:1'] cpu",
        "PhysicalDevice(name='/physical_device:GPU:1', device_type='GPU')",
    ]


def test_a_rehearsal_on_part_of_the_virtual_devices():
    program = """
    from stratagem import config
    config.set_virtual_devices(3)
    print(len(config.resolve_devices()), config.device_name(config.resolve_device("cpu:2")))
    """
    assert _prints(program, STRATAGEM_REHEARSE="TPU:2") == "2 /device:CPU:2"


@pytest.mark.parametrize("text", ["gpu", "gpu:0", "npu:2", "gpu:two"])
def test_a_malformed_rehearsal(text):
    error = _fails("import stratagem", STRATAGEM_REHEARSE=text)
    assert error.startswith("ValueError: STRATAGEM_REHEARSE: expected a kind (cpu, gpu, tpu)")
    assert error.endswith(f"got {text!r}.")


def test_a_rehearsal_after_the_backend_started():
    error = _fails("import jax; jax.devices(); import stratagem", STRATAGEM_REHEARSE="gpu:2")
    assert error.startswith("RuntimeError: STRATAGEM_REHEARSE=gpu:2 needs 2 CPU devices")
    assert "already started (cpu; CPU devices: 1). Import stratagem before" in error


def test_fewer_virtual_devices_than_the_rehearsal_needs():
    program = "from stratagem import config; config.set_virtual_devices(2)"
    error = _fails(program, STRATAGEM_REHEARSE="gpu:4")
    assert "set_virtual_devices(2): STRATAGEM_REHEARSE=gpu:4 needs 4 CPU devices" in error
