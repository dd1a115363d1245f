"""One training script a framework, on the CPU: each saves and resumes as its documentation says, with our
hooks in it."""

from __future__ import annotations

PLAIN = """
import os, sys, time
sys.path.insert(0, {trainers!r})
import torch, torch.distributed as dist
from slurm_watchdog_hooks import KillSwitch

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first, path = 0, "checkpoint.pt"
if os.path.exists(path):
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    first = saved["step"] + 1
switch = KillSwitch(poll_seconds=0.1)
for step in range(first, 2000):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if rank == 0:
        print(f"step {{step}}", flush=True)
    if switch.agreed():
        if rank == 0:
            torch.save({{"model": model.module.state_dict(), "step": step}}, path + ".partial")
            os.replace(path + ".partial", path)
        dist.barrier()
        print(f"rank {{rank}} leaves at step {{step}}: {{switch.reason or 'another rank'}}", flush=True)
        sys.exit(0)
    time.sleep(0.02)
"""

DEEPSPEED = """
import os, sys, time
sys.path.insert(0, {trainers!r})
import torch, torch.distributed as dist, deepspeed
from slurm_watchdog_hooks import KillSwitch

deepspeed.init_distributed("gloo")
model = torch.nn.Linear(8, 8)
engine, _, _, _ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={{"train_micro_batch_size_per_gpu": 4, "optimizer": {{"type": "SGD", "params": {{"lr": 0.01}}}}}},
)
tag, state = engine.load_checkpoint("checkpoints")
first = (state or {{}}).get("step", -1) + 1
rank = dist.get_rank()
switch = KillSwitch(poll_seconds=0.1)
for step in range(first, 2000):
    loss = engine(torch.ones(4, 8)).sum()
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print(f"step {{step}}", flush=True)
    if switch.agreed():
        engine.save_checkpoint("checkpoints", tag=f"step{{step}}", client_state={{"step": step}})
        print(f"rank {{rank}} leaves at step {{step}}: {{switch.reason or 'another rank'}}", flush=True)
        sys.exit(0)
    time.sleep(0.02)
"""

HF_MODEL = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        return {{"loss": self.linear(x).sum()}}

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100000
    def __getitem__(self, index):
        return {{"x": torch.ones(8)}}
"""

HF = (
    """
import os, sys, time
sys.path.insert(0, {trainers!r})
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from slurm_watchdog_hooks.huggingface import WatchdogCallback, last_checkpoint
"""
    + HF_MODEL
    + """
class Say(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.02)
        if state.is_world_process_zero:
            print(f"step {{state.global_step}}", flush=True)
    def on_train_end(self, args, state, control, **kwargs):
        print(f"rank {{args.process_index}} leaves at step {{state.global_step}}", flush=True)

args = TrainingArguments(
    output_dir="out", max_steps=2000, per_device_train_batch_size=2, save_strategy="no", report_to=[],
    use_cpu=True, disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
)
trainer = Trainer(Model(), args, train_dataset=Data(), callbacks=[Say(), WatchdogCallback(poll_seconds=0.1)])
trainer.train(resume_from_checkpoint=last_checkpoint("out"))
"""
)

LIGHTNING = """
import os, sys, time
sys.path.insert(0, {trainers!r})
import torch
from lightning.pytorch import LightningModule, Trainer, Callback
from slurm_watchdog_hooks.lightning import WatchdogCallback, last_checkpoint

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def training_step(self, batch, _):
        return self.linear(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

class Say(Callback):
    def on_train_batch_end(self, trainer, module, *rest):
        time.sleep(0.02)
        if trainer.is_global_zero:
            print(f"step {{trainer.global_step}}", flush=True)
    def on_train_end(self, trainer, module):
        print(f"rank {{trainer.global_rank}} leaves at step {{trainer.global_step}}", flush=True)

trainer = Trainer(
    max_steps=2000, accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]), logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Say(), WatchdogCallback("checkpoints", poll_seconds=0.1)],
)
data = torch.utils.data.DataLoader(torch.ones(100000, 8), batch_size=2)
trainer.fit(Model(), data, ckpt_path=last_checkpoint("checkpoints"))
"""

SCRIPTS = {"torch": PLAIN, "deepspeed": DEEPSPEED, "transformers": HF, "lightning": LIGHTNING}
"""Module that has to be there -> its script. `{trainers}` is the folder with slurm_watchdog_hooks."""
