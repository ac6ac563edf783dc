"""The devices there are, and virtual ones to rehearse on. Only this file reads the environment.

Importing it also makes JAX the backend of a Keras that is not imported yet.

`STRATAGEM_REHEARSE=gpu:4` (or `tpu:8`, `cpu:4`) makes device strings of that kind mean virtual CPU
devices, so that a script written for several accelerators runs unedited on a machine without any.
It is read when `stratagem` is imported, and holds for the life of the process.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import jax

from stratagem import _jax
from stratagem.connect import experimental_connect_to_cluster as experimental_connect_to_cluster
from stratagem.device_strings import KINDS, Address, kind_of, parse
from stratagem.device_strings import LogicalDevice as LogicalDevice
from stratagem.device_strings import PhysicalDevice as PhysicalDevice

_REHEARSE = "STRATAGEM_REHEARSE"
_KERAS_BACKEND = "KERAS_BACKEND"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

# XLA:CPU runs the devices of one process on one thread pool, and a device that waits for the
# others in a collective keeps its thread. A pool of as many threads as devices, or fewer, can be
# full of waiting devices (seen: two devices on two cores stop for good, jax 0.10). The size is
# read from the environment variable NPROC when the CPU client starts.
_POOL = "NPROC"
_POOL_THREADS_PER_DEVICE = 4

DeviceLike: TypeAlias = str | LogicalDevice | PhysicalDevice | jax.Device


def list_devices(kind: str | None = None) -> list[str]:
    """Lists the devices of this process; starts the JAX backend.

    Args:
        kind: `"cpu"`, `"gpu"` or `"tpu"` in any case; None for every kind, CPU first.

    Returns:
        Device strings such as `"CPU:0"` and `"GPU:1"`, all of which a strategy accepts. Under
        `STRATAGEM_REHEARSE` the virtual devices are listed under the rehearsed names too.
    """
    if kind is not None:
        return [str(address) for address in _addresses() if address.kind == kind_of(kind)]
    return [str(address) for address in _addresses()]


def list_logical_devices(kind: str | None = None) -> list[LogicalDevice]:
    """`list_devices` in the shape of `tf.config.list_logical_devices`."""
    return [LogicalDevice(f"/device:{name}", name.partition(":")[0]) for name in list_devices(kind)]


def list_physical_devices(kind: str | None = None) -> list[PhysicalDevice]:
    """`list_devices` in the shape of `tf.config.list_physical_devices`; starts the backend."""
    return [
        PhysicalDevice(f"/physical_device:{name}", name.partition(":")[0])
        for name in list_devices(kind)
    ]


def set_virtual_devices(count: int) -> None:
    """Splits this machine's CPU into `count` devices; call it before anything else uses JAX.

    Args:
        count: CPU devices wanted, at least 1. They share the machine's cores.

    Raises:
        RuntimeError: the JAX backend has started with another number of CPU devices.
        ValueError: `count` is below 1, or below what `STRATAGEM_REHEARSE` asks for.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"set_virtual_devices: expected an int, got {count!r}.")
    if count < 1:
        raise ValueError(f"set_virtual_devices: expected at least 1 device, got {count}.")
    if _rehearsal is not None and count < _rehearsal.count:
        raise ValueError(
            f"set_virtual_devices({count}): {_REHEARSE}={_rehearsal} needs "
            f"{_rehearsal.count} CPU devices. Ask for at least as many, or unset {_REHEARSE}."
        )
    if started := _jax.started_backends():
        cpus = _cpu_devices()
        if len(cpus) != count:
            raise RuntimeError(
                f"set_virtual_devices({count}): the JAX backend has already started "
                f"({', '.join(started)}; CPU devices: {len(cpus)}), and its devices cannot be "
                "changed any more. Call stratagem.config.set_virtual_devices at the very start of "
                "the program, before any array is made, any device is listed and any strategy or "
                f"Keras model is created; or start the program with {_REHEARSE}=cpu:{count}."
            )
        ensure_safe_cpu_pool(cpus)
        return
    jax.config.update("jax_num_cpu_devices", count)
    _widen_cpu_pool()


def set_visible_gpus(gpus: str) -> None:
    """Leaves this process only some of its machine's GPUs, such as `"0,1"`.

    Raises:
        RuntimeError: the JAX backend has started with another choice.
    """
    if (found := os.environ.get(_VISIBLE_GPUS)) != gpus and _jax.started_backends():
        raise RuntimeError(
            f"set_visible_gpus({gpus!r}): the JAX backend has already started with {_VISIBLE_GPUS}="
            f"{found}. Resolve the cluster before anything uses JAX."
        )
    os.environ[_VISIBLE_GPUS] = gpus


def environment() -> Mapping[str, str]:
    """The environment variables of this process, read-only, as they are at each look-up."""
    return MappingProxyType(os.environ)


def resolve_device(name: DeviceLike) -> jax.Device:
    """Finds the local device that a TF device string names; starts the JAX backend.

    Args:
        name: `"/gpu:0"`, `"GPU:0"`, `"/device:GPU:0"`, `"gpu"` (the first one) or
            `"/job:worker/replica:0/task:1/device:GPU:0"`, in any case. The job, replica and task
            are ignored: they name this process. An entry of `list_logical_devices` and a local
            `jax.Device` do as well.

    Raises:
        ValueError: the string is malformed, or there is no such device.
    """
    return _resolve_all([name])[0]


def resolve_devices(names: Iterable[DeviceLike] | None = None) -> list[jax.Device]:
    """Finds the local devices for a strategy; starts the JAX backend.

    Args:
        names: device strings as `resolve_device` takes them. None or none at all: all local
            accelerators, or, where there are none, all CPU devices.

    Raises:
        ValueError: malformed, unknown or repeated names; all of them are named.
        RuntimeError: see `ensure_safe_cpu_pool`.
    """
    if isinstance(names, (str, LogicalDevice, PhysicalDevice)):
        raise TypeError(f"devices: expected a list of device strings, got {names!r} alone.")
    wanted = [] if names is None else list(names)
    devices = _resolve_all(wanted) if wanted else _accelerators() or _cpu_devices()
    ensure_safe_cpu_pool(devices)
    return devices


def devices_of(kind: str) -> list[jax.Device]:
    """The local devices of a kind, under `STRATAGEM_REHEARSE` the virtual ones; starts JAX."""
    return [device for address, device in _addresses().items() if address.kind == kind_of(kind)]


def how_to_rehearse(kind: str, count: int) -> str:
    """The setting that makes virtual CPU devices stand in for accelerators, for error texts."""
    return f"{_REHEARSE}={kind}:{count}"


def device_name(device: jax.Device) -> str:
    """The name TF users know a device by: `"/device:GPU:0"`.

    The index counts the devices of that kind in the device's own process; a device of another
    process has that process's task in front. Under `STRATAGEM_REHEARSE` it is the rehearsed name.
    """
    siblings = [d for d in device.client.devices() if d.process_index == device.process_index]
    index = siblings.index(device)
    kind = kind_of(device.platform)
    if kind == "cpu" and _rehearsal is not None and index < _rehearsal.count:
        kind = _rehearsal.kind
    name = f"/device:{kind.upper()}:{index}"
    if device.process_index != jax.process_index():
        return f"/job:worker/replica:0/task:{device.process_index}{name}"
    return name


def ensure_safe_cpu_pool(devices: Iterable[jax.Device]) -> None:
    """Refuses CPU devices whose collectives could wait for each other for ever.

    Args:
        devices: the devices of one strategy; devices that are no CPUs do not count.

    Raises:
        RuntimeError: several are CPU devices and the CPU client started with too few threads.
    """
    count = sum(device.platform == "cpu" for device in devices)
    needed = _POOL_THREADS_PER_DEVICE * count
    threads = _jax.cpu_pool_threads() or _pool_setting()
    if count > 1 and threads < needed:
        raise RuntimeError(
            f"{count} CPU devices need a pool of at least {needed} threads, or a collective may "
            f"wait for ever; JAX's CPU client has started with {threads}. The pool cannot grow "
            "any more. Import stratagem before anything uses JAX, and choose the number of "
            f"devices with stratagem.config.set_virtual_devices({count}); or start the program "
            f"with {_POOL}={needed} in its environment."
        )


@dataclass(frozen=True)
class _Rehearsal:
    kind: str
    count: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}"


def _read_rehearsal() -> _Rehearsal | None:
    text = os.environ.get(_REHEARSE, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"([a-z]+):(\d+)", text, re.IGNORECASE)
    if match is None or match[1].lower() not in KINDS or int(match[2]) < 1:
        raise ValueError(
            f"{_REHEARSE}: expected a kind ({', '.join(KINDS)}), a colon and a number of devices, "
            f"such as gpu:4; got {text!r}."
        )
    return _Rehearsal(match[1].lower(), int(match[2]))


def _begin_rehearsal(rehearsal: _Rehearsal) -> None:
    if started := _jax.started_backends():
        cpus = _cpu_devices()
        if jax.default_backend() != "cpu" or len(cpus) < rehearsal.count:
            raise RuntimeError(
                f"{_REHEARSE}={rehearsal} needs {rehearsal.count} CPU devices and nothing else; "
                f"the JAX backend has already started ({', '.join(started)}; CPU devices: "
                f"{len(cpus)}). Import stratagem before anything uses JAX."
            )
        return
    # A real accelerator would be JAX's default device, and the program would run on both.
    jax.config.update("jax_platforms", "cpu")
    if _configured_cpu_devices() < rehearsal.count:
        jax.config.update("jax_num_cpu_devices", rehearsal.count)


def _configured_cpu_devices() -> int:
    """CPU devices that the backend will start with, whoever asked for them."""
    # Holds JAX_NUM_CPU_DEVICES too; -1 when neither was set. (JAX declares no types for its flags.)
    count: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if count >= 0:
        return count
    flags = os.environ.get("XLA_FLAGS", "")
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(found[-1]) if found else 1


def _pool_setting() -> int:
    """Threads of the CPU pool, as XLA would choose them from the environment now."""
    text = os.environ.get(_POOL, "")
    if text.strip().isdecimal():
        return int(text)
    affinity = getattr(os, "sched_getaffinity", None)  # Linux; the cores we may use.
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _widen_cpu_pool() -> None:
    """Sets the size of XLA's CPU pool for several devices; without effect once it has started."""
    count = _configured_cpu_devices()
    needed = _POOL_THREADS_PER_DEVICE * count
    if count > 1 and _pool_setting() < needed and not _jax.started_backends():
        os.environ[_POOL] = str(needed)


def _cpu_devices() -> list[jax.Device]:
    _widen_cpu_pool()
    try:
        return jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out.
        return []


def _accelerators() -> list[jax.Device]:
    if _rehearsal is not None:
        return _cpu_devices()[: _rehearsal.count]
    _widen_cpu_pool()
    return [device for device in jax.local_devices() if device.platform != "cpu"]


def _addresses() -> dict[Address, jax.Device]:
    """Every local device under each of its names, CPU first."""
    table = {Address("cpu", i): device for i, device in enumerate(_cpu_devices())}
    for i, device in enumerate(_accelerators()):
        kind = kind_of(device.platform) if _rehearsal is None else _rehearsal.kind
        table[Address(kind, i)] = device
    return table


def _resolve_all(names: list[DeviceLike]) -> list[jax.Device]:
    table = _addresses()
    kinds = {*KINDS, *(address.kind for address in table)}
    found: list[jax.Device] = []
    malformed: list[str] = []
    unknown: list[tuple[str, Address]] = []
    for name in names:
        if isinstance(name, jax.Device):
            found.append(name)
            continue
        text = name.name if isinstance(name, (LogicalDevice, PhysicalDevice)) else name
        if not isinstance(text, str):
            raise TypeError(f"devices: expected device strings such as '/gpu:0', got {name!r}.")
        address = parse(text)
        if address is None or address.kind not in kinds:
            malformed.append(text)
        elif address in table:
            found.append(table[address])
        else:
            unknown.append((text, address))
    if malformed:
        raise ValueError(
            f"malformed device strings: {malformed}. Expected the like of '/gpu:0', 'GPU:0', "
            "'/device:GPU:0' or '/job:worker/replica:0/task:1/device:GPU:0', with a kind out of "
            f"{', '.join(sorted(kinds))}."
        )
    if unknown:
        raise ValueError(_unknown_devices(unknown, table))
    repeated = [str(names[i]) for i, device in enumerate(found) if device in found[:i]]
    if repeated:
        raise ValueError(
            f"devices named more than once: {repeated} in {[str(name) for name in names]}. "
            "Name each device once; each one runs one replica."
        )
    return found


def _unknown_devices(unknown: list[tuple[str, Address]], table: Iterable[Address]) -> str:
    count = 1 + max(address.index for _, address in unknown)
    kind = next((a.kind for _, a in unknown if a.kind != "cpu"), "cpu")
    return (
        f"no such devices: {[text for text, _ in unknown]}. This process has: "
        f"{', '.join(map(str, table))}. To rehearse on virtual CPU devices without an edit, start "
        f"the program with {how_to_rehearse(kind, count)} in its environment; or call "
        f"stratagem.config.set_virtual_devices({count}) before anything uses JAX, and name CPU "
        "devices."
    )


def _choose_keras_backend() -> None:
    """Keras picks its backend at its first import: from the environment, else from its file."""
    keras = sys.modules.get("keras")
    if keras is not None:
        found, where = keras.config.backend(), "keras was imported first"
    else:
        # An empty value is one that was never set.
        found = os.environ.get(_KERAS_BACKEND) or "jax"
        where = f"{_KERAS_BACKEND}={found}"
    if found != "jax":
        raise ImportError(
            f"Expected Keras on its JAX backend. Got backend {found!r} ({where}). Set "
            f"{_KERAS_BACKEND}=jax in the environment of the program, or unset it and import "
            "stratagem before keras."
        )
    if keras is None:
        os.environ[_KERAS_BACKEND] = found


_choose_keras_backend()
_rehearsal = _read_rehearsal()
if _rehearsal is not None:
    _begin_rehearsal(_rehearsal)
_widen_cpu_pool()
