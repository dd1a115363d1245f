"""transformers.Trainer with its own logging (a bar, a line every 500 steps), evaluation and checkpoints."""

import os

import faults
import tiny
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = tiny.Net()

    def forward(self, x, labels=None):
        predicted = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(predicted, labels), "logits": predicted}


class Rows(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return {"x": x, "labels": y}


class Note(TrainerCallback):
    def on_step_end(self, args, state, control, **rest):
        faults.made(state.global_step)


faults.begin()
faults.slow_torch_save()
arguments = TrainingArguments(
    output_dir="out", use_cpu=True, report_to=[], max_steps=faults.STEPS, per_device_train_batch_size=4,
    per_device_eval_batch_size=1, save_steps=faults.SAVE_EVERY, eval_strategy="steps", eval_steps=faults.EVALUATE_EVERY,
    dataloader_num_workers=1, remove_unused_columns=False,
)  # fmt: skip
trainer = Trainer(
    Model(),
    arguments,
    train_dataset=Rows(tiny.Samples()),
    eval_dataset=Rows(tiny.Held(2)),
    callbacks=[Note()],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)
