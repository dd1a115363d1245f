"""Ray Train: two workers, a report with a checkpoint every so many steps; the next run begins with the newest
that lies in its storage."""

import glob
import os
import tempfile

import faults
import ray
import ray.train
import ray.train.torch
import tiny
import torch
from torch.utils.data import DataLoader

PLACE = os.path.abspath("results")


def worker(config):
    context = ray.train.get_context()
    os.environ["RANK"] = str(context.get_world_rank())
    faults.begin()
    faults.slow_torch_save()
    net = tiny.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    step = 0
    if config["saved"]:
        saved = torch.load(config["saved"])
        net.load_state_dict(saved["model"])
        step = saved["step"]
    model = ray.train.torch.prepare_model(net)
    batches = iter(DataLoader(tiny.Samples(), batch_size=4, num_workers=1))
    while step < faults.STEPS:
        inputs, targets = next(batches)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        faults.made(step)
        if step % faults.EVALUATE_EVERY == 0:
            net.eval()
            for inputs, _ in DataLoader(tiny.Held(), batch_size=4):
                net(inputs)
            net.train()
        if step % faults.SAVE_EVERY == 0:
            report(context, net, step, loss.item())


def report(context, net, step, loss):
    with tempfile.TemporaryDirectory() as place:
        checkpoint = None
        if context.get_world_rank() == 0:
            torch.save({"model": net.state_dict(), "step": step}, os.path.join(place, "model.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(place)
        ray.train.report({"step": step, "loss": loss}, checkpoint=checkpoint)


ray.init(num_cpus=4, include_dashboard=False)
saved = sorted(glob.glob(f"{PLACE}/tiny*/**/model.pt", recursive=True), key=os.path.getmtime)
trainer = ray.train.torch.TorchTrainer(
    worker,
    train_loop_config={"saved": saved[-1] if saved else ""},
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(name=f"tiny{faults.RUN}", storage_path=PLACE),
)
trainer.fit()
