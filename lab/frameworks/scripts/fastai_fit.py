"""fastai's Learner with its own bar, one process; SaveModelCallback saves each epoch, and the next run begins
with that one."""

import glob
import os

import faults
import tiny
import torch
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Callback, Learner

EPOCH = 10
"""Steps."""


class Note(Callback):
    order = 50

    def after_batch(self):
        if self.training:
            faults.made(self.first + self.learn.train_iter)


faults.begin()
faults.slow_torch_save()
training = DataLoader(tiny.Samples(EPOCH * 4), bs=4, num_workers=1, shuffle=False)
held = DataLoader(tiny.Held(), bs=4, num_workers=0)
note = Note()
learner = Learner(DataLoaders(training, held), tiny.Net(), loss_func=torch.nn.functional.mse_loss, cbs=[note])
saved = sorted(glob.glob("models/epoch_*.pth"), key=os.path.getmtime)
first = 0
if saved:
    name = os.path.basename(saved[-1]).removesuffix(".pth")
    first = int(name.rpartition("_")[2]) + 1
    learner.load(name)
note.first = first * EPOCH  # fastai counts the iterations of this run alone
learner.fit(
    faults.STEPS // EPOCH,
    cbs=SaveModelCallback(every_epoch=True, fname="epoch", with_opt=True),
    start_epoch=first,
)
