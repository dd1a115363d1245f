"""mmengine's Runner by iterations, its own lines every ten, CheckpointHook, `resume=True`."""

import os

import faults
import tiny
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = tiny.Net()

    def forward(self, inputs, targets, mode):
        predicted = self.net(inputs)
        if mode == "loss":
            return {"loss": torch.nn.functional.mse_loss(predicted, targets)}
        return [predicted, targets]


class Error(BaseMetric):
    def process(self, data_batch, data_samples):
        predicted, targets = data_samples
        self.results.append(float((predicted - targets).abs().mean()))

    def compute_metrics(self, results):
        return {"error": sum(results) / max(1, len(results))}


class Note(Hook):
    priority = "VERY_HIGH"

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        faults.made(runner.iter + 1)


def loader(dataset, endless, workers):
    kind = "InfiniteSampler" if endless else "DefaultSampler"
    return {
        "dataset": dataset,
        "batch_size": 4,
        "num_workers": workers,
        "sampler": {"type": kind, "shuffle": False},
        "collate_fn": {"type": "default_collate"},
    }


torch.cuda.set_device = lambda device: None  # MMEngine calls it with every launcher, also without a GPU
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = (
    "1"  # MMEngine 0.10's checkpoints hold more than PyTorch 2.6 and later load
)
faults.begin()
faults.slow_torch_save()
runner = Runner(
    model=Model(),
    work_dir="work",
    train_dataloader=loader(tiny.Samples(), True, 1),
    val_dataloader=loader(tiny.Held(2), False, 0),
    val_evaluator=[Error()],
    train_cfg={"by_epoch": False, "max_iters": faults.STEPS, "val_interval": faults.EVALUATE_EVERY},
    val_cfg={},
    optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-3}},
    default_hooks={
        "checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": faults.SAVE_EVERY},
        "logger": {"type": "LoggerHook", "interval": 10},
    },
    custom_hooks=[Note()],
    launcher="pytorch",
    env_cfg={"dist_cfg": {"backend": "gloo"}},
    resume=True,
    cfg={"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}},  # without GPUs: no device ids
)
runner.train()
