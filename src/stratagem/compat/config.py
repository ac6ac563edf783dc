"""tf.config: virtual devices, and what the process sees."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import stratagem
from stratagem import config
from stratagem.compat.namespace import Namespace, first_of
from stratagem.config import LogicalDevice, PhysicalDevice

_log = logging.getLogger("stratagem")
_virtual: list[LogicalDeviceConfiguration] = []  # what was asked for, of the CPU


class LogicalDeviceConfiguration:
    """One virtual device (tf.config.LogicalDeviceConfiguration).

    Args:
        memory_limit: accepted for TensorFlow's sake; CPU devices share the machine's memory.
        experimental_priority: likewise.
        experimental_device_ordinal: likewise.
    """

    def __init__(
        self,
        memory_limit: float | None = None,
        experimental_priority: int | None = None,
        experimental_device_ordinal: int | None = None,
    ):
        self.memory_limit = memory_limit
        self.experimental_priority = experimental_priority
        self.experimental_device_ordinal = experimental_device_ordinal


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The devices of this machine (tf.config.list_physical_devices).

    Of type "CPU" there is one, however many virtual ones it is split into, and asking for it does
    not start JAX; any other question does, and virtual devices have to be chosen before.
    """
    cpu = PhysicalDevice("/physical_device:CPU:0", "CPU")
    if device_type is not None and device_type.upper() == "CPU":
        return [cpu]
    found = config.list_physical_devices(device_type)
    others = [device for device in found if device.device_type != "CPU"]
    return others if device_type is not None else [cpu, *others]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """The devices that strategies can use; starts JAX (tf.config.list_logical_devices)."""
    return config.list_logical_devices(device_type)


def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None:
    """Splits the CPU into virtual devices (of TensorFlow's name).

    Args:
        device: the CPU.
        logical_devices: one configuration for each device wanted.

    Raises:
        NotImplementedError: for a GPU, which JAX does not split.
        RuntimeError: JAX has started with another number of CPU devices.
    """
    if device.device_type != "CPU":
        raise NotImplementedError(
            f"Expected the CPU to split into virtual devices. Got {device.name}: JAX has no "
            "virtual GPUs. To rehearse several of them start the program with "
            f"STRATAGEM_REHEARSE=gpu:{len(logical_devices)} in its environment."
        )
    config.set_virtual_devices(len(logical_devices))
    _virtual[:] = logical_devices


def get_logical_device_configuration(
    device: PhysicalDevice,
) -> list[LogicalDeviceConfiguration] | None:
    """What `set_logical_device_configuration` was given for a device; None when nothing was."""
    return list(_virtual) if device.device_type == "CPU" and _virtual else None


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The devices that the program may use (tf.config.get_visible_devices)."""
    return list_physical_devices(device_type)


def set_visible_devices(devices: Any, device_type: str | None = None) -> None:
    """Leaves the program only some GPUs (tf.config.set_visible_devices).

    Args:
        devices: GPUs to keep; none hides all. CPUs cannot be hidden.
        device_type: "GPU", or None when the devices say it.

    Raises:
        NotImplementedError: for devices of another kind.
        RuntimeError: JAX has started with another choice. Listing the GPUs starts it, so that
            hiding some of them after that is too late.
    """
    chosen = [devices] if isinstance(devices, PhysicalDevice) else list(devices or ())
    kinds = {device.device_type for device in chosen} | ({device_type} if device_type else set())
    if kinds == {"CPU"}:
        return
    if kinds - {"GPU"} or not kinds:
        raise NotImplementedError(
            f"Expected GPUs to choose from. Got devices of {sorted(kinds) or 'no kind'}. Pass "
            "tf.config.list_physical_devices('GPU')[...] and 'GPU'; choose other devices where "
            "the strategy is made."
        )
    if chosen == config.list_physical_devices("GPU"):
        return
    config.set_visible_gpus(",".join(device.name.rpartition(":")[2] for device in chosen))


def set_memory_growth(device: PhysicalDevice, enable: bool) -> None:
    """Warns: how JAX takes a GPU's memory is chosen before the program starts."""
    if enable:
        _log.warning(
            "set_memory_growth(%s): JAX takes 75%% of a GPU's memory when it starts. Start the "
            "program with XLA_PYTHON_CLIENT_PREALLOCATE=false to let it grow instead.",
            device.name,
        )


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Refuses to run compiled functions as Python, which would need values in replicas.

    Raises:
        NotImplementedError: for True.
    """
    if run_eagerly:
        raise NotImplementedError(
            "Expected compiled functions: a replica's step is one program. Got "
            "run_functions_eagerly(True). Print with tf.print, and find faults with "
            "stratagem.debug."
        )


_EXPERIMENTAL = {
    "set_memory_growth": set_memory_growth,
    "VirtualDeviceConfiguration": LogicalDeviceConfiguration,
    "list_physical_devices": list_physical_devices,
    "list_logical_devices": list_logical_devices,
    "set_virtual_device_configuration": set_logical_device_configuration,
    "get_virtual_device_configuration": get_logical_device_configuration,
    "set_visible_devices": set_visible_devices,
    "get_visible_devices": get_visible_devices,
}

NAMESPACE = Namespace(
    "config",
    {
        fn.__name__: fn
        for fn in (
            LogicalDeviceConfiguration, LogicalDevice, PhysicalDevice, list_physical_devices,
            list_logical_devices, set_logical_device_configuration,
            get_logical_device_configuration, get_visible_devices, set_visible_devices,
            run_functions_eagerly,
        )
    }
    | {"experimental": Namespace("config.experimental", _EXPERIMENTAL)},
    # experimental_connect_to_cluster and what else the package's own config has of TensorFlow.
    elsewhere=first_of(stratagem.config),
)  # fmt: skip
