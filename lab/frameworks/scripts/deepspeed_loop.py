"""DeepSpeed's engine in a loop of one's own, which leaves the lines to DeepSpeed (`steps_per_print`)."""

import os

import faults
import tiny
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch.distributed as dist
from torch.utils.data import DataLoader


def main():
    deepspeed.init_distributed("gloo")
    faults.begin()
    faults.slow_torch_save()
    net = tiny.Net()
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "steps_per_print": 10,
        },
    )
    engine.load_checkpoint("checkpoints")
    samples = tiny.Samples()
    sampler = torch.utils.data.DistributedSampler(samples)
    batches = iter(DataLoader(samples, batch_size=4, num_workers=1, sampler=sampler))
    while engine.global_steps < faults.STEPS:
        inputs, targets = next(batches)
        engine.backward(torch.nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
        faults.made(engine.global_steps)
        if engine.global_steps % faults.SAVE_EVERY == 0:
            engine.save_checkpoint("checkpoints")
        if engine.global_steps % faults.EVALUATE_EVERY == 0:
            engine.eval()
            with torch.no_grad():
                for inputs, _ in DataLoader(tiny.Held(), batch_size=4):
                    engine(inputs)
            engine.train()
    dist.destroy_process_group()


main()
