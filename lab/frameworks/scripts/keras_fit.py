"""Keras on JAX, one process, `verbose=2` as its manual wants it of batch jobs; BackupAndRestore saves and resumes."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
import faults
import keras
import numpy as np

EPOCH = 10
"""Steps."""


class Rows(keras.utils.PyDataset):
    """Random numbers; `look` is where a fault of the data happens."""

    def __init__(self, batches, look):
        super().__init__(workers=1, use_multiprocessing=False)
        self.batches, self.look = batches, look

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        self.look()
        rng = np.random.default_rng(index)
        return rng.random((4, 32), dtype="float32"), rng.random((4, 1), dtype="float32")


class Note(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.first = epoch * EPOCH

    def on_train_batch_begin(self, batch, logs=None):
        faults.forward()

    def on_train_batch_end(self, batch, logs=None):
        faults.made(self.first + batch + 1)


class Backup(keras.callbacks.BackupAndRestore):
    def _save_model(self):
        if faults.save_is_slow():
            faults.slow_save()
        super()._save_model()


faults.begin()
model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
model.compile(optimizer="adam", loss="mse")
model.build((None, 32))
model.fit(
    Rows(EPOCH, faults.sample), epochs=faults.STEPS // EPOCH, verbose=2, callbacks=[Note(), Backup("backup")],
    validation_data=Rows(faults.evaluation_samples(4), faults.evaluated), validation_freq=3,
)  # fmt: skip
