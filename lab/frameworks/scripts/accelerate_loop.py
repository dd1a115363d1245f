"""accelerate as its examples have it: prepare, backward, a tqdm bar, save_state and load_state."""

import os

import faults
import tiny
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tqdm.auto import tqdm


def main():
    accelerator = Accelerator(cpu=True)
    faults.begin()
    faults.slow_torch_save()
    model = tiny.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = DataLoader(tiny.Samples(), batch_size=4, num_workers=1)
    held = DataLoader(tiny.Held(2), batch_size=4)
    model, optimizer, training, held = accelerator.prepare(model, optimizer, training, held)
    step = 0
    saved = sorted(os.listdir("checkpoints")) if os.path.isdir("checkpoints") else []
    if saved:
        accelerator.load_state(os.path.join("checkpoints", saved[-1]))
        step = int(saved[-1].removeprefix("step_"))
    bar = tqdm(range(faults.STEPS), initial=step, disable=not accelerator.is_local_main_process)
    batches = iter(training)
    while step < faults.STEPS:
        inputs, targets = next(batches)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        faults.made(step)
        bar.update(1)
        if step % faults.SAVE_EVERY == 0:
            accelerator.save_state(f"checkpoints/step_{step:04d}")
        if step % faults.EVALUATE_EVERY == 0:
            model.eval()
            with torch.no_grad():
                for inputs, targets in held:
                    accelerator.gather_for_metrics((model(inputs), targets))
            model.train()
    accelerator.end_training()


main()
