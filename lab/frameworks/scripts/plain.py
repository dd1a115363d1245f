"""A loop of one's own with DistributedDataParallel: a line every ten steps, as most of them have it."""

import os

import faults
import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

PATH = "checkpoints/last.pt"


def main():
    dist.init_process_group("gloo")
    faults.begin()
    faults.slow_torch_save()
    rank, net = dist.get_rank(), tiny.Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if os.path.exists(PATH):
        saved = torch.load(PATH)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        if rank == 0:
            print(f"resumed from {PATH}, step {step}", flush=True)
    samples = tiny.Samples()
    batches = iter(DataLoader(samples, batch_size=4, num_workers=1, sampler=DistributedSampler(samples)))
    while step < faults.STEPS:
        inputs, targets = next(batches)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        faults.made(step)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}/{faults.STEPS} loss {loss.item():.4f}", flush=True)
        if step % faults.SAVE_EVERY == 0:
            if rank == 0:
                os.makedirs("checkpoints", exist_ok=True)
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, PATH + ".part")
                os.replace(PATH + ".part", PATH)
            dist.barrier()
        if step % faults.EVALUATE_EVERY == 0:
            evaluate(net, rank)
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(net, rank):
    net.eval()
    total = count = 0
    for inputs, targets in DataLoader(tiny.Held(), batch_size=4):
        total += torch.nn.functional.mse_loss(net(inputs), targets).item()
        count += 1
    net.train()
    if rank == 0:
        print(f"validation loss {total / count:.4f}", flush=True)


main()
