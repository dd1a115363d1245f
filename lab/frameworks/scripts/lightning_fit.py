"""Lightning's Trainer. With `rich` installed its bar is Rich's, which writes nothing to a file before the
end; BAR=tqdm asks for the other."""

import os

import faults
import tiny
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from torch.utils.data import DataLoader


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = tiny.Net()

    def training_step(self, batch, number):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, number):
        inputs, targets = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Note(Callback):
    def on_train_batch_end(self, trainer, *rest):
        faults.made(trainer.global_step)


faults.slow_torch_save()
saving = ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=faults.SAVE_EVERY, save_last=True, save_top_k=1)
bar = [TQDMProgressBar()] if os.environ.get("BAR") == "tqdm" else []
trainer = Trainer(
    accelerator="cpu", strategy="ddp", devices=int(os.environ.get("WORLD_SIZE", "1")), max_steps=faults.STEPS,
    val_check_interval=faults.EVALUATE_EVERY, check_val_every_n_epoch=None, callbacks=[Note(), saving, *bar],
    logger=False,
)  # fmt: skip
faults.begin()
last = "checkpoints/last.ckpt"
trainer.fit(
    Model(),
    DataLoader(tiny.Samples(), batch_size=4, num_workers=1),
    DataLoader(tiny.Held(2), batch_size=1),
    ckpt_path=last if os.path.exists(last) else None,
)
