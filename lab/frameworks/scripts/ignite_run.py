"""pytorch-ignite: an Engine, its tqdm bar, Checkpoint with DiskSaver, resumed from the newest file."""

import glob
import os

import faults
import ignite.distributed as idist
import tiny
import torch
from ignite.contrib.handlers import ProgressBar
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch.utils.data import DataLoader

EPOCH = 65


def training(rank):
    faults.begin()
    faults.slow_torch_save()
    model = idist.auto_model(tiny.Net())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = DataLoader(tiny.Samples(EPOCH * 4 * idist.get_world_size()), batch_size=4, num_workers=1, sampler=None)
    if idist.get_world_size() > 1:
        sampler = torch.utils.data.DistributedSampler(loader.dataset)
        loader = DataLoader(loader.dataset, batch_size=4, num_workers=1, sampler=sampler)

    def update(engine, batch):
        model.train()
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def look(engine, batch):
        model.eval()
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1]).item()

    trainer, evaluator = Engine(update), Engine(look)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: faults.made(engine.state.iteration))
    parts = {"trainer": trainer, "model": model, "optimizer": optimizer}
    saver = Checkpoint(parts, DiskSaver("checkpoints", require_empty=False), n_saved=2)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=faults.SAVE_EVERY), saver)

    @trainer.on(Events.ITERATION_COMPLETED(every=faults.EVALUATE_EVERY))
    def evaluate():
        evaluator.run(DataLoader(tiny.Held(), batch_size=4))

    if idist.get_rank() == 0:
        ProgressBar().attach(trainer, output_transform=lambda loss: {"loss": loss})
    saved = sorted(glob.glob("checkpoints/*.pt"), key=os.path.getmtime)
    if saved:
        Checkpoint.load_objects(parts, torch.load(saved[-1]))
    trainer.run(loader, max_epochs=faults.STEPS // EPOCH)


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(training)
