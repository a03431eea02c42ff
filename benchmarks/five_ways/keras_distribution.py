"""Keras on JAX: `keras.distribution.DataParallel`, `fit` with sample weights, `OrbaxCheckpoint`."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
from job import (
    ACCUMULATE,
    BATCH,
    CLASSES,
    COORDINATOR,
    EPOCHS,
    FOLDER,
    HIDDEN,
    LENGTH,
    RANK,
    RATE,
    WIDTH,
    WORLD,
    data,
    pause,
    save,
    weights,
)

if WORLD > 1:
    keras.distribution.initialize(COORDINATOR, WORLD, RANK)
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))

model = keras.Sequential(
    [
        keras.Input((LENGTH, WIDTH)),
        keras.layers.Dense(HIDDEN, activation="relu"),
        keras.layers.Dense(CLASSES),
    ]
)
model.set_weights(weights())
model.compile(
    optimizer=keras.optimizers.SGD(
        RATE, gradient_accumulation_steps=ACCUMULATE if ACCUMULATE > 1 else None
    ),
    loss=keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    ),
)


class Loader(keras.utils.PyDataset):
    rows, size = data(), BATCH // ACCUMULATE // WORLD

    def __len__(self):
        return -(-len(self.rows["x"]) // (self.size * WORLD))

    def __getitem__(self, index):
        begin = (index * WORLD + RANK) * self.size
        batch = {name: each[begin : begin + self.size] for name, each in self.rows.items()}
        pause()
        return batch["x"], batch["label"], batch["mask"]


epoch, callbacks = 0, []
if FOLDER:
    callbacks = [keras.callbacks.OrbaxCheckpoint(FOLDER)]
    if (newest := max(map(int, filter(str.isdigit, os.listdir(FOLDER))), default=None)) is not None:
        model.load_weights(FOLDER)
        epoch = newest + 1
model.fit(
    Loader(), epochs=EPOCHS, initial_epoch=epoch, shuffle=False, callbacks=callbacks, verbose=0
)
save(model.get_weights())
