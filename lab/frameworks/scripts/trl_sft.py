"""TRL's supervised fine-tuning of a very small language model with words of its own."""

import os

import faults
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

WORDS = ["[PAD]", "[EOS]", "[UNK]", *(f"w{number}" for number in range(60))]


class Note(TrainerCallback):
    def on_step_end(self, args, state, control, **rest):
        faults.made(state.global_step)


def fault(model, inputs):
    """Before each forward pass: TRL puts a forward of its own into the model."""
    if model.training:
        faults.forward()


class Collator:
    """TRL's own, and the place of the data's faults: it runs in the loader's workers."""

    def __init__(self, own):
        self.own = own

    def __call__(self, rows):
        if any(row.get("held") for row in rows):
            for _ in rows:
                faults.evaluated()
        else:
            faults.sample()
        return self.own(rows)


def rows(count, held):
    texts = [" ".join(WORDS[3 + (number * each) % 60] for each in range(1, 17)) for number in range(count)]
    return Dataset.from_dict({"text": texts, "held": [held] * count})


faults.begin()
faults.slow_torch_save()
words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")
model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_positions=64, n_embd=32, n_layer=1, n_head=2))
model.register_forward_pre_hook(fault)
arguments = SFTConfig(
    output_dir="out", use_cpu=True, bf16=False, report_to=[], max_steps=faults.STEPS, per_device_train_batch_size=4,
    per_device_eval_batch_size=1, save_steps=faults.SAVE_EVERY, eval_strategy="steps", eval_steps=faults.EVALUATE_EVERY,
    dataloader_num_workers=1, max_length=32, remove_unused_columns=False,
)  # fmt: skip
trainer = SFTTrainer(
    model,
    args=arguments,
    train_dataset=rows(4000, False),
    eval_dataset=rows(2 * faults.evaluation_samples(8), True),
    processing_class=tokenizer,
    callbacks=[Note()],
)
trainer.data_collator = Collator(trainer.data_collator)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)
