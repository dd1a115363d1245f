"""A loop with timm's own parts and its train.py's lines: create_model, create_optimizer, AverageMeter,
CheckpointSaver, resume_checkpoint."""

import logging
import os

import faults
import stubs  # noqa: F401 -- before timm, whose data part wants torchvision
import timm
import torch
import torch.distributed as dist
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, CheckpointSaver, setup_default_logging
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCH = 10
"""Steps."""


class Images(torch.utils.data.Dataset):
    def __init__(self, length, look):
        self.length, self.look = length, look

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.look()
        return torch.full((3, 32, 32), (index % 97) / 97.0), index % 10


def main():
    setup_default_logging()
    log = logging.getLogger("train")
    dist.init_process_group("gloo")
    faults.begin()
    faults.slow_torch_save()
    rank = dist.get_rank()
    net = timm.create_model("test_vit", pretrained=False, num_classes=10, img_size=32)
    optimizer = create_optimizer_v2(net, opt="adamw", lr=1e-3)
    epoch = 0
    if os.path.exists("output/last.pth.tar"):
        epoch = resume_checkpoint(net, "output/last.pth.tar", optimizer, log_info=rank == 0) or 0
    os.makedirs("output", exist_ok=True)
    saver = CheckpointSaver(net, optimizer, checkpoint_dir="output", max_history=2) if rank == 0 else None
    model = DistributedDataParallel(net)
    images = Images(EPOCH * 2 * dist.get_world_size(), faults.sample)
    loader = DataLoader(images, batch_size=2, num_workers=1, sampler=DistributedSampler(images))
    for number in range(epoch, faults.STEPS // EPOCH):
        losses = AverageMeter()
        for index, (inputs, targets) in enumerate(loader):
            faults.forward()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.update(loss.item(), len(inputs))
            faults.made(number * EPOCH + index + 1)
            if rank == 0 and (index % 5 == 0 or index + 1 == EPOCH):
                done = 100.0 * index / (EPOCH - 1)
                line = "Train: %d [%4d/%d (%3.0f%%)]  Loss: %#.3g (%#.3g)"
                log.info(line, number, index, EPOCH, done, losses.val, losses.avg)
        if (number + 1) % 3 == 0:
            evaluate(net, rank, log)
        if saver is not None:
            saver.save_checkpoint(number, metric=-losses.avg)
        dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(net, rank, log):
    net.eval()
    held = DataLoader(Images(faults.evaluation_samples(8), faults.evaluated), batch_size=4)
    for index, (inputs, _) in enumerate(held):
        net(inputs)
        if rank == 0 and index % 50 == 0:
            log.info("Test: [%4d/%d]  Time: 0.050 (0.050)", index, len(held) - 1)
    net.train()


main()
