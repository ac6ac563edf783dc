"""MirroredStrategy: a copy of each variable on every local device, kept equal."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem import config
from stratagem.collectives import CrossDeviceOps
from stratagem.strategies.abstract import Strategy


class MirroredStrategy(Strategy):
    """Synchronous training on the devices of one machine.

    Each device must hold the whole model. Gradients, metrics and statistics of a step travel in
    one all-reduce.

    Args:
        devices: TF device strings; None or [] takes all local accelerators, else all CPU devices.
        cross_device_ops: NcclAllReduce() (default), HierarchicalCopyAllReduce(),
            ReductionToOneDevice(), RingAllReduce() or TreeAllReduce().

    Raises:
        ValueError: a device does not exist or is named twice.
        TypeError: cross_device_ops is no CrossDeviceOps object.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ):
        if isinstance(devices, str):
            raise TypeError(
                f"Expected a list of device strings. Got {devices!r}. Write devices=[{devices!r}]."
            )
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(
                "Expected cross_device_ops to be a CrossDeviceOps object such as "
                f"NcclAllReduce(). Got {cross_device_ops!r}."
            )
        super().__init__(config.resolve_devices(devices), cross_device_ops)
