"""Composer's Trainer with its bar, `save_folder` and `autoresume`."""

import os

import faults
import stubs  # noqa: F401 -- before Composer, which wants torchvision even where there are no images
import tiny
import torch
from composer import Callback, ComposerModel, Trainer
from composer.utils import dist
from torch.utils.data import DataLoader


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = tiny.Net()

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def eval_forward(self, batch, outputs=None):
        return self.forward(batch)

    def get_metrics(self, is_train):
        return {}


class Note(Callback):
    def batch_end(self, state, logger):
        faults.made(int(state.timestamp.batch))


os.environ.setdefault("NODE_RANK", os.environ.get("GROUP_RANK", "0"))  # as its own launcher does
faults.begin()
faults.slow_torch_save()
dist.initialize_dist("cpu")
samples, held = tiny.Samples(), tiny.Held(2)
net = Model()
trainer = Trainer(
    model=net,
    train_dataloader=DataLoader(samples, batch_size=4, num_workers=1, sampler=dist.get_sampler(samples)),
    eval_dataloader=DataLoader(held, batch_size=1, sampler=dist.get_sampler(held)),
    max_duration=f"{faults.STEPS}ba",
    eval_interval=f"{faults.EVALUATE_EVERY}ba",
    optimizers=torch.optim.AdamW(net.parameters(), lr=1e-3),
    save_folder="checkpoints",
    save_interval=f"{faults.SAVE_EVERY}ba",
    run_name="tiny",
    autoresume=True,
    device="cpu",
    callbacks=[Note()],
)
trainer.fit()
