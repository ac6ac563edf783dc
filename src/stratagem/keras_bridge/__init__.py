"""The hooks that make plain Keras code run under a strategy. Importing stratagem installs them."""

from __future__ import annotations

from stratagem.keras_bridge import layers, losses, optimizer, trainer, variables

for _room in (variables, optimizer, losses, layers, trainer):
    _room.install()
