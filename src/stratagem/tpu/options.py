"""Options of TensorFlow's TPU compiler, which programs hand over in RunOptions."""

from __future__ import annotations

from typing import NamedTuple


class XLAOptions(NamedTuple):
    """`RunOptions.experimental_xla_options`; here nothing changes by it.

    Attributes:
        use_spmd_for_xla_partitioning: JAX always partitions so.
        enable_xla_dynamic_padder: parts of any shapes run in any case.
    """

    use_spmd_for_xla_partitioning: bool = True
    enable_xla_dynamic_padder: bool = True
