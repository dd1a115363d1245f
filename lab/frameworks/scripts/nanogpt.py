"""A loop after the manner of nanoGPT: `iter 40: loss 4.2, time 250.00ms, mfu …`, estimates its loss at
intervals, saves ckpt.pt."""

import os
import time

import faults
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

VOCABULARY, BLOCK, BATCH = 65, 32, 4
OUT = "out"


class Text(Dataset):
    """Random letters."""

    def __init__(self, length, look):
        self.length, self.look = length, look

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.look()
        letters = torch.randint(VOCABULARY, (BLOCK + 1,), generator=torch.Generator().manual_seed(index))
        return letters[:-1], letters[1:]


class GPT(torch.nn.Module):
    """One block of a transformer."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 32)
        self.block = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, letters, targets):
        if self.training:
            faults.forward()
        logits = self.head(self.block(self.embedding(letters)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    dist.init_process_group("gloo")
    faults.begin()
    faults.slow_torch_save()
    master = dist.get_rank() == 0
    raw = GPT()
    optimizer = torch.optim.AdamW(raw.parameters())
    iter_num, path = 0, os.path.join(OUT, "ckpt.pt")
    if os.path.exists(path):
        print(f"Resuming training from {OUT}", flush=True)
        saved = torch.load(path)
        raw.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        iter_num = saved["iter_num"]
    model = DistributedDataParallel(raw)
    batches = iter(DataLoader(Text(100000, faults.sample), batch_size=BATCH, num_workers=1))
    began = time.time()
    while iter_num < faults.STEPS:
        if iter_num and iter_num % faults.EVALUATE_EVERY == 0 and master:
            loss = estimate_loss(raw)
            print(f"step {iter_num}: train loss {loss:.4f}, val loss {loss:.4f}", flush=True)
        if iter_num and iter_num % faults.SAVE_EVERY == 0 and master:
            os.makedirs(OUT, exist_ok=True)
            state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
            print(f"saving checkpoint to {OUT}", flush=True)
            torch.save(state, path)
        loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        faults.made(iter_num + 1)
        now = time.time()
        if master:
            print(
                f"iter {iter_num}: loss {loss.item():.4f}, time {1000 * (now - began):.2f}ms, mfu -100.00%",
                flush=True,
            )
        began = now
        iter_num += 1
    dist.destroy_process_group()


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = [
        model(*batch).item()
        for batch in DataLoader(Text(faults.evaluation_samples(8), faults.evaluated), batch_size=BATCH)
    ]
    model.train()
    return sum(losses) / len(losses)


main()
