"""Names and devices, on the eight virtual CPU devices that conftest.py asks for."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from stratagem import _jax, config


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("/cpu:0", 0),
        ("cpu:1", 1),
        ("CPU:2", 2),
        ("cpu", 0),
        ("/device:CPU:3", 3),
        ("device:cpu:3", 3),
        ("/physical_device:CPU:4", 4),
        ("/job:worker/replica:0/task:1/device:CPU:5", 5),
        ("/job:localhost/replica:0/task:0/DEVICE:cpu:7", 7),
        (config.LogicalDevice("/device:CPU:6", "CPU"), 6),
    ],
)
def test_tf_device_strings_name_local_devices(name, index):
    assert config.resolve_device(name) is jax.local_devices()[index]


def test_a_jax_device_resolves_to_itself():
    device = jax.local_devices()[3]
    assert config.resolve_device(device) is device


@pytest.mark.parametrize("names", [None, [], ()])
def test_no_names_mean_all_devices(names):
    assert config.resolve_devices(names) == jax.local_devices()


def test_named_devices_keep_their_order():
    assert config.resolve_devices(["cpu:5", "/cpu:0"]) == [
        jax.local_devices()[5],
        jax.local_devices()[0],
    ]


def test_names_and_devices_round_trip():
    for device in jax.local_devices():
        assert config.resolve_device(config.device_name(device)) is device
    assert config.device_name(jax.local_devices()[2]) == "/device:CPU:2"


def test_lists_of_devices():
    assert config.list_devices() == [f"CPU:{i}" for i in range(8)]
    assert config.list_devices("Cpu") == config.list_devices()
    assert config.list_devices("gpu") == []
    assert config.list_logical_devices("CPU")[1] == ("/device:CPU:1", "CPU")
    assert config.list_physical_devices()[1].name == "/physical_device:CPU:1"
    assert config.list_physical_devices("GPU") == []
    assert config.resolve_devices(config.list_logical_devices()) == jax.local_devices()


def _fake_device(client, process_index, id, platform):
    return SimpleNamespace(client=client, process_index=process_index, id=id, platform=platform)


def test_accelerators_come_before_cpu_devices(monkeypatch):
    client = SimpleNamespace()
    gpus = [_fake_device(client, 0, i, "gpu") for i in range(2)]
    client.devices = lambda: gpus
    local_devices = jax.local_devices
    monkeypatch.setattr(
        jax,
        "local_devices",
        lambda backend=None: local_devices(backend=backend) if backend else gpus,
    )
    assert config.list_devices()[7:] == ["CPU:7", "GPU:0", "GPU:1"]
    assert config.resolve_devices() == gpus
    assert config.resolve_device("cuda:1") is gpus[1]
    assert config.device_name(gpus[1]) == "/device:GPU:1"


def test_a_device_of_another_process_is_named_with_its_task():
    client = SimpleNamespace()
    ours, theirs = (_fake_device(client, process, process, "cpu") for process in (0, 3))
    client.devices = lambda: [ours, theirs]
    assert config.device_name(theirs) == "/job:worker/replica:0/task:3/device:CPU:0"


def test_an_unknown_device_lists_what_there_is_and_how_to_rehearse():
    with pytest.raises(ValueError, match="no such devices") as caught:
        config.resolve_devices(["/gpu:0", "cpu:0", "GPU:1"])
    text = str(caught.value)
    assert "['/gpu:0', 'GPU:1']" in text
    assert "CPU:0, CPU:1, CPU:2" in text
    assert "STRATAGEM_REHEARSE=gpu:2" in text
    assert "stratagem.config.set_virtual_devices(2)" in text


def test_an_unknown_cpu_device_suggests_more_of_them():
    with pytest.raises(ValueError, match=r"STRATAGEM_REHEARSE=cpu:12 .*\(12\)"):
        config.resolve_device("cpu:11")


@pytest.mark.parametrize(
    "name",
    ["", "gpu:", "gpu:one", "gpu:-1", "/gpu:0/extra", "0", "/job:worker", "cpu:0 cpu:1", "fpga:0"],
)
def test_malformed_names(name):
    with pytest.raises(
        ValueError, match="malformed device strings: .*Expected the like of .*cpu, gpu, tpu"
    ):
        config.resolve_device(name)


def test_every_malformed_name_is_named():
    with pytest.raises(ValueError, match=r"\['gpu:one', '0'\]"):
        config.resolve_devices(["gpu:one", "cpu:0", "0"])


def test_repeated_devices():
    with pytest.raises(ValueError, match=r"more than once: \['/device:CPU:0'\] in .*one replica"):
        config.resolve_devices(["cpu:0", "cpu:1", "/device:CPU:0"])


def test_names_of_the_wrong_type():
    with pytest.raises(TypeError, match="expected device strings such as '/gpu:0', got 3"):
        config.resolve_devices(["cpu:0", 3])
    with pytest.raises(TypeError, match="expected a list of device strings, got 'cpu:0' alone"):
        config.resolve_devices("cpu:0")


def test_virtual_devices_cannot_come_too_late():
    with pytest.raises(RuntimeError, match=r"already started \(cpu; CPU devices: 8\).*very start"):
        config.set_virtual_devices(4)


def test_asking_again_for_the_same_number_is_no_error():
    config.set_virtual_devices(8)


@pytest.mark.parametrize("count", [0, -1])
def test_too_few_virtual_devices(count):
    with pytest.raises(ValueError, match=f"at least 1 device, got {count}"):
        config.set_virtual_devices(count)


@pytest.mark.parametrize("count", [2.0, "2", True, None])
def test_a_count_is_an_int(count):
    with pytest.raises(TypeError, match="expected an int, got"):
        config.set_virtual_devices(count)


def test_a_pool_that_is_too_small_is_refused(monkeypatch):
    monkeypatch.setattr(_jax, "cpu_pool_threads", lambda: 31)
    with pytest.raises(RuntimeError, match=r"8 CPU devices .*least 32 threads.*with 31.*NPROC=32"):
        config.resolve_devices()
    assert len(config.resolve_devices(["cpu:0", "cpu:1"])) == 2


def test_one_device_needs_no_pool(monkeypatch):
    monkeypatch.setattr(_jax, "cpu_pool_threads", lambda: 1)
    config.ensure_safe_cpu_pool(jax.local_devices()[:1])


def test_the_pool_is_as_large_as_was_asked_for():
    threads = _jax.cpu_pool_threads()
    if threads is None:
        pytest.skip("this system does not list a process's threads in /proc")
    assert threads >= 32
    config.ensure_safe_cpu_pool(jax.local_devices())
