"""CentralStorageStrategy: variables once, in the host's memory; accelerators only compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from stratagem import config, context
from stratagem.strategies.abstract import Strategy
from stratagem.values import ReduceOp


class CentralStorageStrategy(Strategy):
    """Synchronous training with one copy of each variable, on a device of its own.

    Each step has two programs (step/split.py). The replicas compute gradients on the compute
    devices; for that, the variables that they read are copied there and let go after the step. The
    reduced gradients go to the parameter device, which updates the variables. Optimizer slots, and
    whatever else only the update reads, never leave it; between steps the compute devices hold no
    variables. The results are those of MirroredStrategy.

    Worth it where variables with their slots do not fit beside the activations. The price is that
    all weights that the model reads, each table whole, travel to each device in every step, of
    `predict` too, and the gradients back. `lower` shows the replicas' program, without the update.

    Args:
        compute_devices: TF device strings; None or [] takes all local accelerators, else one CPU
            device.
        parameter_device: TF device string; None takes the compute device where there is one, else
            "CPU:0".

    Raises:
        ValueError: a device does not exist or is named twice, or JAX has no CPU device.
        TypeError: compute_devices is no list.
    """

    central = True

    def __init__(
        self,
        compute_devices: Sequence[config.DeviceLike] | None = None,
        parameter_device: config.DeviceLike | None = None,
    ):
        if isinstance(compute_devices, str):
            raise TypeError(
                f"Expected a list of device strings. Got {compute_devices!r}. Write "
                f"compute_devices=[{compute_devices!r}]."
            )
        devices = config.resolve_devices(compute_devices)
        if not compute_devices and config.device_name(devices[0]).startswith("/device:CPU"):
            devices = devices[:1]  # the device of several replicas on one CPU has to be named
        if parameter_device is None and len(devices) > 1:
            parameter_device = _host()
        self._keeper = (
            devices[0] if parameter_device is None else config.resolve_device(parameter_device)
        )
        super().__init__(devices)

    def _lay_out(self, devices: Sequence[jax.Device]) -> None:
        super()._lay_out(devices)
        config.ensure_safe_cpu_pool({*self._local_devices, self._keeper})
        self.home = SingleDeviceSharding(self._keeper)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Name of the device that holds the variables."""
        return (config.device_name(self._keeper),)

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None
    ) -> Any:
        """As `Strategy.reduce`, to the parameter device, where variables are."""
        total = super().reduce(reduce_op, value, axis)
        if context.current().trace is not None:
            return total
        return jax.tree.map(lambda x: self.place(x) if isinstance(x, jax.Array) else x, total)

    def __repr__(self) -> str:
        computing = ", ".join(self.worker_devices)
        (keeping,) = self.parameter_devices
        return (
            f"<{type(self).__name__} with variables on {keeping}, computing on [{computing}], made "
            f"at {self._made_at}>"
        )


def _host() -> jax.Device:
    """The CPU device that keeps variables when none is named."""
    found = config.devices_of("CPU")
    if not found:
        raise ValueError(
            "parameter_device: expected a CPU device to keep the variables on. Got none, since "
            "JAX_PLATFORMS leaves the CPU out. Add it (JAX_PLATFORMS=cuda,cpu), or name another "
            'device, such as parameter_device="GPU:0".'
        )
    return found[0]
