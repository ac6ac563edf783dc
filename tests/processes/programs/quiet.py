"""`fit` with a progress bar and a log file, as every process is asked for it."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from pathlib import Path

import stratagem

sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
from jobs import report

logging.basicConfig(level=logging.INFO, force=True)
strategy = stratagem.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
with tempfile.TemporaryDirectory() as folder:
    log = Path(folder, "log.csv")
    callbacks = [keras.callbacks.CSVLogger(log)]
    model.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=callbacks, batch_size=2)
    if strategy.cluster_resolver.task_id == 1:
        time.sleep(1)  # the chief, which hosts the service, comes to its end before
    saved = Path(folder, "only_the_chief.keras")
    if strategy.cluster_resolver.task_id == 0:
        model.save(saved)
    report({"log": log.stat().st_size if log.exists() else 0, "saved": saved.exists()})
