"""How frameworks write down that a step was done, that a phase began, that a checkpoint is complete.

A row is tried only if one of its `needles` is in the lower-cased line; the first row that matches wins, so special forms
stand before general ones. Groups: step, total, step_s, step_ms, rate (steps a second), updates, and
  epoch  with `step` of `total` in this epoch: together they rise on where `step` begins anew (`in_epoch`; the first epoch has
         the number `first_epoch`), and `epochs`, how many there are to be;
  count  a number that rises and is no step (samples, tokens, epochs): it proves that the loop turns and is never shown as a step.
Two `\\s*` never stand beside each other, not even around something optional: a line of blanks would take seconds.
See slurm_watchdog.knowledge.log_signatures for what a new needle costs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NUMBER = r"[-+]?(?:\d\.#\w+|\d[\d_,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)"


@dataclass(frozen=True)
class Pattern:
    """One way to write a count that rises."""

    name: str
    needles: tuple[str, ...]
    regex: re.Pattern[str]
    counted: bool = False
    """Tried only if COUNTED is in the lower-cased line, too, and no progress in prose: see PROSE."""
    in_epoch: bool = False
    """`step` begins anew with each `epoch`."""
    first_epoch: int = 0
    """The number that it gives to its first epoch."""


@dataclass(frozen=True)
class Sign:
    """One way to write that a phase began, or that a checkpoint is complete (`complete`)."""

    name: str
    needles: tuple[str, ...]
    regex: re.Pattern[str]
    phase: str | None = None
    complete: bool = False


def _pattern(name: str, needles: str | tuple[str, ...], regex: str, flags: int = 0) -> Pattern:
    return Pattern(name, (needles,) if isinstance(needles, str) else needles, re.compile(regex, flags))


def _in_epoch(name: str, needles: str | tuple[str, ...], regex: str, first_epoch: int = 0) -> Pattern:
    needles = (needles,) if isinstance(needles, str) else needles
    return Pattern(name, needles, re.compile(regex), in_epoch=True, first_epoch=first_epoch)


def _counted(name: str, regex: str) -> Pattern:
    return Pattern(name, STEP_WORDS, re.compile(regex, re.IGNORECASE), counted=True)


def _sign(
    name: str,
    needles: str | tuple[str, ...],
    regex: str,
    phase: str | None = None,
    complete: bool = False,
    flags: int = re.IGNORECASE,
) -> Sign:
    needles = (needles,) if isinstance(needles, str) else needles
    return Sign(name, needles, re.compile(regex, flags), phase, complete)


# Lines with a number that rises while nothing is trained: status reporters, queues, retries, loading, downloads.
NOT_PROGRESS = re.compile(
    r"\bPULSE\b|waiting to be scheduled|\bre-?try|\bretri|\battempt\b|\bresum(?:e|ed|ing)\b|\brestor|\bre-?start"
    r"|\bload(?:ed|ing)\b|\bdownload|\btokeniz|\bfetching\b|\bgenerating\b|\bfilter(?:ing)?\b|\bsanity\b|\bheartbeat\b"
    r"|\bcheckpoint(?:s|ing)?\b.*\b\d+\s*/\s*\d+|\bwarm-?up steps?\b|\bnum_(?:train_)?(?:steps|iters)\b|(?<!/)\bmax_(?:steps|iters)\b"
    r"|\btotal (?:optimization |training )?steps\b|\bNum (?:steps|batches)\b|^\s*Map\b|\bgradient accumulation\b"
    r"|\b(?:warm-?up|auto-?tun\w+|compil\w+|pre-?process\w*|micro|denois\w+|sampling|inference|install\w*|build\w*|set-?up|export\w*"
    r"|convert\w*|profil\w+|calibrat\w+|quantiz\w+)\b[\]\s|:>-]{0,3}(?:step|iter(?:ation)?|batch)\b[\s:#=\[]*\d",
    re.IGNORECASE,
)
NOT_PROGRESS_NEEDLES = (
    "pulse", "waiting to be", "retry", "re-try", "retri", "attempt", "resum", "restor", "restart", "re-start", "load",
    "tokeniz", "fetching", "generating", "filter", "sanity", "heartbeat", "checkpoint", "warm", "num_", "num ", "max_", "total ", "map",
    "accumulation", "auto", "compil", "process", "micro", "denois", "sampling", "inference", "install", "build", "set-up", "setup", "export",
    "convert", "profil", "calibrat", "quantiz",
)  # fmt: skip
"""One of them is in each lower-cased line that NOT_PROGRESS matches: to search for these is much quicker."""
# A step that is only spoken of: "starting from step 40", "timeout at step 30". "loss at step 10: 0.5" is one that was made.
SPOKEN_OF = re.compile(
    r"\b(?:at|from|to|until|till|since|after|every|before|beyond) (?:global[ _])?(?:step|iteration|iter|update)s?\b",
    re.IGNORECASE,
)
SPOKEN_OF_NEEDLES = {
    thing: tuple(
        f"{word}{thing}"
        for word in ("at", "from", "to", "until", "till", "since", "after", "every", "before", "beyond")
    )
    for thing in (" step", " iter", " update", " global")
}
"""What is counted, and then the words before it: one of them is in each lower-cased line that SPOKEN_OF matches."""
MADE = re.compile(r"\bloss\b", re.IGNORECASE)

SIGNS: tuple[Sign, ...] = (
    # hooks/slurm_watchdog_hooks/heartbeat.py; with "training" the line is progress.
    *(
        _sign(f"heartbeat_{phase}", '"slurm_watchdog_heartbeat"', rf'^\{{.*"phase": "{phase}".*"slurm_watchdog_heartbeat"', phase)
        for phase in ("starting", "evaluating", "checkpointing", "finishing")
    ),
    # Megatron-LM, Megatron-DeepSpeed
    _sign("megatron_saved", "successfully saved checkpoint", r"successfully saved checkpoint (?:from|at) iteration\s+(?P<step>\d+)", complete=True),
    _sign("megatron_saving", "saving checkpoint at iteration", r"saving checkpoint at iteration\s+(?P<step>\d+)", "checkpointing"),
    # Its result comes once for each of several data sets: the evaluation is over only with the next step.
    _sign("megatron_validation", "loss at iteration", r"(?:valid|validation|test) loss at iteration\s+(?P<step>\d+)", "evaluating"),
    _sign("megatron_exiting", "exiting program", r"\[?exiting program (?:at iteration|after)\s+\d+", "finishing"),
    _sign("megatron_datasets", "building train, validation", r"> building train, validation, and test datasets", "starting"),
    _sign("megatron_index", ("index map files", "dataset index builder"), r"could not find index map files, building|compiling dataset index builder", "starting"),
    _sign("megatron_begins", "start of training step", r"\[before the start of training step\]", "starting"),
    # DeepSpeed engine
    _sign("deepspeed_states", "_states.pt", r"\[Torch\] Saving \S*_states\.pt\.\.\.", "checkpointing"),
    _sign("deepspeed_saved", "checkpoint global_step", r"\[Torch\] Checkpoint global_step(?P<step>\d+) is ready now", complete=True),
    _sign("deepspeed_saving", "checkpoint global_step", r"Checkpoint global_step(?P<step>\d+) is about to be saved", "checkpointing"),
    # torchtitan and torch.distributed.checkpoint
    _sign("torchtitan_saved", "finished saving the checkpoint", r"Finished saving the checkpoint.*", complete=True),
    _sign("ray_saved", "checkpoint successfully created", r"\bCheckpoint successfully created at: ", complete=True),
    _sign("torchtitan_saving", "saving the checkpoint", r"Saving the checkpoint", "checkpointing"),
    _sign("torchtitan_begins", "training starts at step", r"\bTraining starts at step \d+", "starting"),
    _sign("torch_compile", "torch.compile", r"\bCompil(?:ing|ed) each \w+ with torch\.compile", "starting"),
    # Hugging Face Trainer, accelerate
    _sign("hf_begins", "running training", r"\*{5} Running training \*{5}", "starting"),
    _sign("hf_done", "train_runtime", r"^\{['\"]train_runtime['\"]: ", "finishing"),
    _sign("accelerate_saving", "saving current state to", r"\bSaving current state to ", "checkpointing"),
    _sign("hf_saving", "saving model checkpoint to", r"Saving model checkpoint to .*checkpoint-(?P<step>\d+)", "checkpointing"),
    _sign("hf_evaluation", "running evaluation", r"\*{5} Running Evaluation", "evaluating"),
    # fairseq, Composer, MaxText, Lightning, NeMo, MLPerf, and the loops of vision
    _sign("fairseq_begins", "begin training epoch", r"\bbegin training epoch \d+", "starting"),
    _sign("composer_evaluation", "eval batch=", r"\[Eval batch=\d+/\d+\]", "evaluating"),
    _sign("nemo2_validation", "validation: iteration", r"\bValidation: iteration \d+/\d+", "evaluating"),
    _sign("mmengine_evaluation", ("epoch(", "iter("), r"\b(?:Epoch|Iter)\((?:val|test)\)", "evaluating"),
    _sign("test_loop", "loss", r"Test:? +(?:\d+ )?\[ *\d+/\d+", "evaluating", flags=0),
    _sign("wenet_evaluation", ("cv batch ", "cv | batch "), r"\bCV (?:\| )?Batch \d+/\d+", "evaluating"),
    _sign("maxtext_evaluation", "eval metrics after step", r"\beval metrics after step: \d+", "evaluating"),
    _sign("detectron2_evaluation", "start inference on", r"\bStart inference on \d+ batches", "evaluating"),
    _sign("yolo_evaluation", "instances", r"\bClass +Images +Instances .*\d+% [━╸─]", "evaluating"),
    _sign("paddle_evaluation", "[eval][epoch", r"\[Eval\]\[Epoch \d+\]", "evaluating"),
    _sign("lightning_sanity", "sanity checking", r"\bSanity Checking\b", "starting"),
    _sign("lightning_done", "trainer.fit", r"`Trainer\.fit` stopped:(?: `max_steps=(?P<step>\d+)` reached)?", "finishing"),
    _sign("training_begins", "training", r"(?:^|[\]:|>-]\s)\s*(?:start(?:ing|ed)?|begin(?:ning)?|launching) (?:the )?(?:model )?(?:pre-?)?training(?: loop| run)?(?: from (?:scratch|step \d+|iteration \d+))?[.! ]*$|\btraining (?:started|starts|begins)[.! ]*$", "starting"),
    _sign("initializing", ("distributed", "process group", "process_group", "random seed"), r"\binitiali[sz](?:ing|ed) (?:the )?(?:torch[. ])?(?:distributed|process[ _]groups?)\b|\binit_process_group\b(?!.*(?:rror|line \d))|\bsetting random seeds? to \d", "starting"),
    _sign("datasets", "building", r"\bbuilding (?:the )?(?:train(?:ing)? (?:data ?)?(?:set|loader)s?|data ?loaders?)\b", "starting"),
    _sign("mlperf_starting", ":::mllog", r":::MLLOG \{.*\"key\": \"(?:init_start|init_stop|run_start)\"", "starting"),
    _sign("mlperf_evaluation", ":::mllog", r":::MLLOG \{.*\"key\": \"eval_start\"", "evaluating"),
    _sign("mlperf_finishing", ":::mllog", r":::MLLOG \{.*\"key\": \"run_stop\"", "finishing"),
    _sign("fairseq_saved", "saved checkpoint", r"Saved checkpoint .*@ \d+ epochs?, (?P<step>\d+) updates", complete=True),
    _sign("fairseq_saving", "preparing to save checkpoint", r"Preparing to save checkpoint .* @ (?P<step>\d+) updates", "checkpointing"),
    _sign("maxtext_saved", "saved a checkpoint at step", r"saved a checkpoint at step (?P<step>\d+)", complete=True),
    _sign("nanogpt_evaluation", "step ", r"^step (?P<step>\d+): train loss .*val loss", "evaluating"),
    _sign("validation_bar", "valid", r"\bValid(?:ation|ating)?\b(?: DataLoader \d+)?(?:\s*:)?\s+(?:\d+%\||[━╸╺╴╶─])", "evaluating"),
    _sign("evaluation_bar", "evaluat", r"\bEvaluat(?:ing|ion)\b(?:\s*:)?\s+\d+%\|", "evaluating"),
    _sign("eval_bar", "%|", r"^\s*(?:eval|val|test|testing)\b[^|]*\d%\||\bTesting DataLoader \d[^|]{0,200}%\||\bClass +Images +Instances .{0,200}\d%\|", "evaluating"),
    # Anybody
    _sign(
        "evaluation_step", ("step", "iter", "batch"),
        r"^(?:(?!\b(?:global|train)?[ _]?(?:step|iter|loss))[^=]){0,60}?\b(?:eval(?:uation)?|val(?:id(?:at(?:e|ion))?)?|test)[\]\s|:>_-]{1,4}(?:step|iter(?:ation)?|batch)\b[\s:#=\[]*\d",
        "evaluating",
    ),
    _sign("saved", "checkpoint", r"(?:checkpoint saved|saved checkpoint|checkpoint complete)\b.*?(?:step|iteration|iter)\D{0,3}(?P<step>\d+)", complete=True),
    _sign("saving", "saving checkpoint", r"saving checkpoint(?:.*?(?:step|iteration|iter)\D{0,3}(?P<step>\d+))?", "checkpointing"),
    _sign("transferring", ("checkpoint", "ckpt"), r"\b(?:upload|writ|sync|copy|push|export|consolidat|merg|gather|stag|flush)ing (?:[\w-]+ ){0,3}(?:checkpoint|ckpt)s?\b", "checkpointing"),
    _sign("evaluating", "evaluat", r"\b(?:start(?:ing|ed)?|begin(?:ning)?|running)\s+(?:the\s+)?(?:evaluation|validation)\b|\bevaluating\b(?! metrics)", "evaluating"),
    _sign("validating", "validat", r"\b(?:start(?:ing|ed)?|begin(?:ning)?|running)\s+(?:the\s+)?validation\b|\bvalidating\b", "evaluating"),
    _sign("finishing", "training", r"\btraining(?: loop| run)? (?:is |has )?(?:been )?(?:complete[d]?|finished|done|ended)\b|\b(?:finished|done|completed) training\b|\[after training is done\]|\bexiting (?:the )?training loop\b|\bend of training(?: reached)?[.! ]*$|\btotal training time\b|\btraining time:? (?:\d+ days?, )?\d+:\d\d:\d\d", "finishing"),
    _sign("max_steps", "reached", r"\breached (?:the )?max(?:imum)?[ _](?:number of )?(?:train(?:ing)?[ _])?(?:steps|iterations|epochs|iters)\b|\bmax(?:imum)?[ _](?:number of )?(?:train(?:ing)?[ _])?(?:steps|iterations|epochs|iters)\b[^a-z]*(?:was |were )?reached\b", "finishing"),
    _sign("torn_down", "process group", r"\b(?:destroying|tearing down) (?:the )?(?:\w+ )?process groups?\b|\bprocess groups? (?:was |were |has been )?destroyed\b", "finishing"),
    _sign("wandb_summary", "wandb", r"\bwandb: (?:Run (?:summary|history):|Synced \d+ W&B file)", "finishing"),
)  # fmt: skip

# Half of all prose about training has one of these words; with a number behind it, few lines.
COUNTED = re.compile(r"(?:step|iter(?:ation)?|update|batch)s?[\s:#=\[]*\d")
STEP_WORDS = ("step", "iter", "update", "batch")
STEP_WORD = r"(?:global[ _]?step|train[ _]?step|step|iteration|iter|update|batch)"

RATES = ("it/s", "s/it", "step/s", "s/step", "batch/s", "s/batch", "ba/s", "s/ba")
"""Of a bar of tqdm whose end is not known there is nothing else that a line of anything else lacks."""
BAR_RATE = r"(?:\s*\[[\d:]+<[\d:?]+,\s*(?:(?P<step_s>\d[\d.]*)\s*s/\w+|(?P<rate>\d[\d.]*)\s*\w+/s))?"
"""How long a step takes, as a bar of tqdm says it."""

PATTERNS: tuple[Pattern, ...] = (
    _pattern("nemo2", "global_step: ", r"Training epoch \d+, iteration \d+/\d+ .*?\bglobal_step: (?P<step>\d+)"),
    _pattern("megatron", "iteration", r"\biteration\s+(?P<step>\d+)\s*/\s*(?P<total>\d+)\s*\|"),
    _pattern("deepspeed", "step=", r"\bstep=(?P<step>\d+), skipped=\d+, lr="),
    _pattern("deepspeed_throughput", "global_step=", r"\bmicro_step=\d+/global_step=(?P<step>\d+)\b"),
    _pattern("deepspeed_pipeline", "steps: ", r"\bsteps: (?P<step>\d+) loss: \S+ iter time \(s\): (?P<step_s>[\d.]+)"),
    _pattern("nemo", "global_step=", r"\d+%\|.*\bglobal_step=(?P<step>\d+)(?:\.0*)?\b"),
    _in_epoch("lightning", "%|", r"\bEpoch\s+(?P<epoch>\d+)(?:/-?\d+)?\s*:\s+(?::\s+)?\d+%\|[^|]*\|\s*(?P<step>\d+)/(?P<total>\d+)\b" + BAR_RATE),
    _in_epoch("lightning_open", RATES, r"\bEpoch\s+(?P<epoch>\d+)(?:/-?\d+)?\s*:\s+\|[^|]*\|\s*(?P<step>\d+)/\?" + BAR_RATE),
    _in_epoch("lightning_rich", "epoch ", r"\bEpoch (?P<epoch>\d+)(?:/-?\d+)? [━╸╺╴╶─ ]+(?P<step>\d+)/(?P<total>\d+) \d+:\d\d:\d\d(?: • [\d:-]+ (?P<rate>\d[\d.]*)it/s)?"),
    _in_epoch("yolo", "%|", r"^\s*(?P<epoch>\d+)/(?P<epochs>\d+)\s+[\d.]+[GM]\s.{0,300}?\b\d{1,3}%\|[^|]*\|\s*(?P<step>\d+)/(?P<total>\d+)\b" + BAR_RATE, first_epoch=1),
    _in_epoch("yolo_line", RATES, r"^\s*(?P<epoch>\d+)/(?P<epochs>\d+)\s+[\d.]+[GM]\s.{0,300}?\b\d{1,3}% [━╸─]+ (?P<step>\d+)/(?P<total>\d+) (?:(?P<step_s>[\d.]+)s/it|(?P<rate>[\d.]+)it/s)", first_epoch=1),
    _in_epoch("fastai", "epoch ", r"\bEpoch (?P<epoch>\d+)/(?P<epochs>\d+) :\s+\|[^|]*\|\s*[\d.]+% \[(?P<step>\d+)/(?P<total>\d+) [\d:]+<[\d:?]+(?:\.\.\. (?P<loss>" + NUMBER + r"))?", first_epoch=1),
    _in_epoch("ignite", "%|", r"\bEpoch \[(?P<epoch>\d+)/(?P<epochs>\d+)\]: \[(?P<step>\d+)/(?P<total>\d+)\]\s+\d+%\|", first_epoch=1),
    _pattern("ignite_bar", "%|", r"^\s*\[(?P<step>\d+)/(?P<total>\d+)\]\s+\d+%\|[^\[|]*\[[\d:]+<"),
    _pattern("torchtune", "loss: ", r"^\s*\d+\|(?P<step>\d+)\|Loss: (?:[^|\[]*\|[^|]*\|[^\[]*" + BAR_RATE + r")?"),
    _pattern("tqdm", "%|", r"\d+%\|[^|]*\|\s*(?P<step>\d+)/(?P<total>\d+)\s*\[[\d:]+<[\d:?]+(?:,\s*(?:(?P<step_s>[\d.]+)\s*s/\w+|(?P<rate>[\d.]+)\s*\w+/s))?"),
    _pattern("tqdm_open", RATES, r"\|\s*(?P<step>\d+)/\?\s*\[[\d:]+<[\d:?]+,\s*(?:(?P<step_s>[\d.]+)\s*s/(?:it|ba|batch|step)\b|(?:(?P<rate>[\d.]+)|\?)\s*(?:it|ba|batch|step)/s)"),
    _pattern("tqdm_count", RATES, r"(?:^|[\s:])(?P<step>\d+)(?:it|ba|batch|step) \[[\d:]+, +(?:(?P<step_s>[\d.]+)\s*s/(?:it|ba|batch|step)\b|(?:(?P<rate>[\d.]+)|\?)\s*(?:it|ba|batch|step)/s)"),
    _in_epoch("paddlevideo", "train step:", r"\bepoch:\[\s*(?P<epoch>\d+)/(?P<epochs>\d+)\s*\]\s+train step:(?P<step>\d+)\b", first_epoch=1),
    _pattern("torchtitan", "step:", r"\bstep:\s*(?P<step>\d+)\s+loss:"),
    _pattern("verl", "step:", r"(?<![\w/])step:(?P<step>\d+) - .*?\S+:(?:.*?\btiming_s/step:(?P<step_s>[\d.]+))?"),
    _pattern("modded_nanogpt", "step:", r"\bstep:(?P<step>\d+)/(?P<total>\d+) .*?\btrain_time:[\d.]+m?s(?: step_avg:(?P<step_ms>[\d.]+)ms)?"),
    _pattern("llm_c", "step ", r"\bstep\s+(?P<step>\d+)/(?P<total>\d+) \| (?:train )?loss .*?(?:\|\s*|\()(?P<step_ms>[\d.]+) ms\b"),
    _pattern("nanogpt", "iter ", r"\biter (?P<step>\d+): loss (?:.*?\btime (?P<step_ms>[\d.]+)\s*ms)?"),
    _pattern("maxtext", "completed step", r"\bcompleted step:\s*(?P<step>\d+), seconds:\s*(?P<step_s>[\d.]+)"),
    _in_epoch("composer_epoch", "[batch=", r"\[epoch=(?P<epoch>\d+)(?:/(?P<epochs>\d+))?\]\[batch=(?P<step>\d+)/(?P<total>\d+)\]", first_epoch=1),
    _pattern("composer", "[batch=", r"\[batch=(?P<step>\d+)/(?P<total>\d+)\]"),
    _pattern("composer_samples", ("[sample=", "[token="), r"^\s*\[(?:sample|token)=(?P<count>\d+)/(?P<total>\d+)\]:?\s*$"),
    _pattern("composer_time", "train time/batch:", r"\bTrain time/batch: (?P<step>\d+)$"),
    _in_epoch("fairseq", "epoch ", r"\bepoch (?P<epoch>\d+):\s+(?P<step>\d+) / (?P<total>\d+)\b(?:.*?\bnum_updates=(?P<updates>\d+))?", first_epoch=1),
    _pattern("num_updates", "num_updates", r"\bnum_updates[\"']?\s*(?:[=:]\s*)?[\"']?(?P<step>\d+)"),
    _in_epoch("mmengine", "epoch", r"\bEpoch(?:\(train\))?\s+\[(?P<epoch>\d+)\]\s?\[\s*(?P<step>\d+)/(?P<total>\d+)\](?:.{0,200}?[\s,]time: (?P<step_s>\d[\d.]*))?", first_epoch=1),
    _pattern("mmengine_iter", "iter", r"\bIter(?:\(train\))?\s+\[\s*(?P<step>\d+)/(?P<total>\d+)\](?:.{0,200}?[\s,]time: (?P<step_s>\d[\d.]*))?"),
    _pattern("detectron2", "iter: ", r"\biter: (?P<step>\d+)\s+total_loss: (?:.*?\s(?:last_)?time: (?P<step_s>[\d.]+))?"),
    _in_epoch("metric_logger", "epoch", r"\bEpoch:? \[(?P<epoch>\d+)(?:/\d+)?\]:?\s*\[\s*(?P<step>\d+)/\s*(?P<total>\d+)\](?:.*?\b[Tt]ime:?\s+(?P<step_s>\d[\d.]*))?"),
    _in_epoch("timm", "loss", r"\bTrain: (?P<epoch>\d+) \[\s*(?P<step>\d+)/(?P<total>\d+)\b(?:.*?\bTime: (?P<step_s>\d[\d.]*)s)?"),
    _in_epoch("swin", "loss", r"\bTrain: \[(?P<epoch>\d+)/\d+\]\[(?P<step>\d+)/(?P<total>\d+)\](?:.*?\btime (?P<step_s>\d[\d.]*))?"),
    _in_epoch("bracket_pair", "loss", r"(?<!\S)\[(?P<epoch>\d+)/\d+\]\s?\[\s*(?P<step>\d+)/(?P<total>\d+)\]"),
    _pattern("mnist", "epoch: ", r"\bTrain Epoch: (?P<epoch>\d+) \[\s*(?P<part>\d+)/(?P<whole>\d+) \("),
    _pattern("keras", "loss: ", r"^\s*(?P<count>\d+)/(?P<total>\d+) (?:\[[=>.]+\]|[━╸╺╴╶─]+(?: |$)).*?\b(?:loss|acc(?:uracy)?): "),
    _pattern("keras_line", "loss: ", r"^\s*(?P<count>\d+)/(?P<total>\d+) - (?:\d+:)*\d+m?s\b.*? (?:loss|acc(?:uracy)?): "),
    _pattern("paddle_hapi", "loss: ", r"^\s*step\s+(?P<count>\d+)/(?P<total>\d+)(?: \[[=>.]+\])? - (?:lr: \S+ - )?loss: "),
    _pattern("epoch_header", "epoch ", r"^\s*Epoch (?P<count>\d+)/(?P<total>\d+)\s*$"),
    _in_epoch("word_model", "batches", r"\|\s*epoch\s+(?P<epoch>\d+)\s*\|\s*(?P<step>\d+)/\s*(?P<total>\d+) batches\s*\|(?:.{0,100}?\bms/batch\s+(?P<step_ms>\d[\d.]*))?", first_epoch=1),
    _in_epoch("mindformers", "per_step_time", r"\bEpoch:\[\s*(?P<epoch>\d+)/\s*(?P<epochs>\d+)\],? step:\[\s*(?P<step>\d+)/\s*(?P<total>\d+)\].{0,200}?\bper_step_time:\s*(?P<step_ms>\d[\d.]*)\s?ms", first_epoch=1),
    _pattern("mindformers_step", "per_step_time", r"\bstep(?::\[|\s)\s*(?P<step>\d+)/\s*(?P<total>\d+)(?:\]|\b).{0,200}?\bper_step_time:\s*(?P<step_ms>\d[\d.]*)\s?ms"),
    _in_epoch("mindspore", "loss is", r"\bepoch:\s*(?P<epoch>\d+),?\s+step:\s*(?P<step>\d+),\s*loss is\b", first_epoch=1),
    _in_epoch("mindcv", "epoch", r"\bEpoch:\s*\[\s*(?P<epoch>\d+)/\s*(?P<epochs>\d+)\],?\s+(?:batch|step):\s*\[\s*(?P<step>\d+)/\s*(?P<total>\d+)\]", first_epoch=1),
    _in_epoch("paddleclas", "iter: ", r"\[Train\]\[Epoch (?P<epoch>\d+)/(?P<epochs>\d+)\]\[Iter: (?P<step>\d+)/(?P<total>\d+)\]", first_epoch=1),
    _in_epoch("gluon", "batch", r"\bEpoch\s?\[?(?P<epoch>\d+)\]?[\s\]\[]{1,3}Batch\s?\[?(?:\d+-)?(?P<step>\d+)(?:/(?P<total>\d+))?\]"),
    _pattern("litgpt", "iter ", r"\bEpoch \d+ \| iter (?P<step>\d+) step \d+ \|"),
    _pattern("samples_of_epoch", "loss: ", r"^loss: [\d.]+\s+\[\s*(?P<count>\d+)/\s*(?P<total>\d+)\]$"),
    _in_epoch("espnet", "batch: ", r"\b(?P<epoch>\d+)epoch:train:\d+-(?P<step>\d+)batch: (?:.*\btrain_time=(?P<step_s>[\d.]+))?", first_epoch=1),
    _in_epoch("wenet", "batch ", r"\bTRAIN (?:\| )?Batch (?P<epoch>\d+)/(?P<step>\d+)\b"),
    _in_epoch("dllogger", "training iteration: ", r"\bTraining Epoch: (?P<epoch>\d+) Training Iteration: (?P<step>\d+)\b"),
    _in_epoch("dllogger_json", "step", r"\bDLLL \{.*\"type\": \"LOG\", \"step\": \[(?P<epoch>\d+), (?P<step>\d+)\], \"data\""),
    _pattern("mlperf", ":::mllog", r":::MLLOG \{.*\"key\": \"(?:block_stop|epoch_stop|tracked_stats|train_loss)\".*\"(?:samples_count|step_num|step|epoch_num)\": (?P<count>\d[\d.]*)"),
    _pattern("clu", "logging_writer", r"\blogging_writer\.py:\d+\] \[(?P<step>\d+)\] (?!Got|Hyper)\S"),
    _pattern("pax", "step_i", r"\bstep_i: (?P<step>\d+)\b"),
    _pattern("levanter", "progress on:train", r"\bProgress on:train (?P<count>\d[\d.]*[kMG]?)it/\S+it rate:(?:(?P<rate>\d[\d.]*)it/s|(?P<step_s>\d[\d.]*)s/it)?"),
    _pattern("stable_baselines", "total_timesteps", r"\|\s*(?:time/)?total_timesteps\s*\|\s*(?P<count>\d+)\s*\|"),
    # A dictionary of the Hugging Face Trainer behind what a logger writes first.
    _pattern("hf_logged", "epoch", r"\{'loss': .*'global_step/max_steps': '(?P<step>\d+)/(?P<total>\d+)'"),
    _pattern("dict_logged", ("step'", 'step"', "iteration'", 'iteration"', "iter'", 'iter"'), r"\{(?=[^{}]*['\"](?:[\w/]*loss|lr|learning_rate|grad_norm)['\"]\s*:)[^{}]*?['\"](?:train/|trainer/|training/)?(?:global_step|step|iteration|iter)['\"]\s*:\s*['\"]?(?P<step>\d+)\b"),
    _pattern("hf_epoch", "epoch", r"\{'loss': .*'epoch': '?(?P<count>\d[\d.]*)"),
    _counted("global_step", r"(?<![\w.-])global[ _-]?steps?\s*[:=]\s*(?P<step>\d+)(?:\s*/\s*(?P<total>\d+))?\b(?!\.\d*[1-9])"),
    _counted("key_value", r"(?<![\w.-])" + STEP_WORD + r"\s*=\s*(?P<step>\d+)(?:\s*/\s*(?P<total>\d+))?\b(?!\.\d*[1-9])"),
    _counted("step_of", r"(?<![\w.-])" + STEP_WORD + r"\s*(?:[:#]\s*)?\[?\s?(?P<step>\d+)\s*(?:/|of)\s*(?P<total>\d+)\b"),
    _counted("steps_of", r"(?<![\w.-])(?:steps|iterations|iters|updates)\s*(?:[:=]\s*)?\[?\s?(?P<step>\d+)\s*/\s*(?P<total>\d+)\b"),
    _counted("bracketed", r"\[\s*" + STEP_WORD + r"\s*(?:[:#=]\s*)?(?P<step>\d+)\s*\]"),
    _counted("step", r"(?:^|[\s|>,;\]:(])" + STEP_WORD + r"\s*(?:[:#]\s*)?(?P<step>\d+)(?=\s*(?:$|[\s|:,;)\]]))(?!\.\d)"),
    _pattern("tokens", "tokens", r"\b(?:consumed|processed|seen|total|trained)[ _]tokens\s*[:=]\s*(?P<count>\d[\d,_]*)\b(?!\.\d|/s)|\btokens[ _](?:seen|processed|consumed)\s*[:=]\s*(?P<count_b>\d[\d,_]*)\b", re.IGNORECASE),
    _pattern("samples", "samples", r"\b(?:consumed|processed|seen|total|trained)[ _]samples\s*[:=]\s*(?P<count>\d[\d,_]*)\b(?!\.\d|/s)|\bsamples[ _](?:seen|processed|consumed)\s*[:=]\s*(?P<count_b>\d[\d,_]*)\b", re.IGNORECASE),
)  # fmt: skip

# "Step 2: load the model": behind the number two words or more, and nothing that was measured ("loss=nan" was).
PROSE = re.compile(
    r"(?!.*(?:[=:]|(?:loss|ppl|perplexity|norm|reward)\b)\s*[-+]?(?:nan|inf)(?:inity)?\b)[^A-Za-z\d]*[A-Za-z]+[^A-Za-z\d]+[A-Za-z][^\d]*",
    re.IGNORECASE,
)
# A bar of tqdm whose description (what stands before it), or whose unit, says that it is of something else than training.
OTHER_LABEL = re.compile(
    r"\b(?!(?:pre-?)?training|fine-?tuning|learning|running\b)[a-z]+ing\b"
    r"|\b(?:eval|evaluation|test|val|valid|dev|predict|inference|rollout|sample|prompts|shapes|shards|tokens|download|upload|epoch_eval|ddim|plms)\b"
)
OTHER_UNIT = re.compile(
    r"\d\s?(?:[kmgt]?i?b|examples?|docs?|documents?|files?|shards?|texts?|prompts?|rows?|records?|lines?|requests?|modules?|layers?)/s\b",
)
"""Both are searched for in the lower-cased line."""

# What else such a line may say, whatever the framework.
# These are searched for in the lower-cased line, from where it has the needle.
_PLAIN = re.compile(
    rf"(?:step_time(?:_s)?|iter_time|step time(?: \(s\))?|time per step|(?:sec|seconds)_per_(?:step|iter(?:ation)?)|batch_cost|train_step_timing in s)\s*[=:]\s*(?P<value>{NUMBER})(?:\s*(?P<unit>ms)\b)?"
)
STEP_SECONDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "elapsed_time_per",
        re.compile(rf"elapsed_time_per_iteration_(?P<unit>m?s): (?P<value>{NUMBER})(?P<kilo>k)?"),
    ),
    ("iter time: ", re.compile(rf"iter time: (?P<value>{NUMBER})\s?(?P<unit>m?s)\b")),
    ("dt: ", re.compile(rf"\bdt: (?P<value>{NUMBER})\s?(?P<unit>m?s)\b")),
    ("elapsed time per", re.compile(rf"elapsed time per iteration \((?P<unit>m?s)\):\s*(?P<value>{NUMBER})")),
    ("step_tim", _PLAIN),
    ("iter_time", _PLAIN),
    ("step time", _PLAIN),
    ("time per step", _PLAIN),
    ("sec_per_step", _PLAIN),
    ("seconds_per_", _PLAIN),
    ("batch_cost", _PLAIN),
    ("train_step_timing", _PLAIN),
)
PER_STEP = re.compile(
    r"(?<![\w.])(?P<value>\d[\d.]*)\s?(?P<unit>ms|us|s|sec)/(?:step|it|iter|iteration|batch)\b"
)
"""40ms/step, 1.2 s/it: of a lower-cased line."""
STEPS_PER_SECOND = re.compile(
    r"(?:(?<![\w.])(?P<value>\d[\d.]*)\s?(?:steps?|its?|iters?|iterations?|batch(?:es)?)/s(?:ec(?:ond)?)?\b"
    r"|\b(?:train_|interval_)?(?:steps|iterations|iters|batches)[ _/]?(?:per[ _])?s(?:ec(?:ond)?)?[\"']?\s*[:=]\s*[\"']?(?P<named>\d[\d.]*))"
)
SAMPLES_PER_SECOND = re.compile(
    r"(?<![\w.,])(?P<value>\d[\d.,]{0,20})\s?(?:samples?|images|imgs?|sequences|seqs?|sentences)/s(?:ec(?:ond)?)?\b"
    r"|\b(?:samples|sequences|images)[ _/]?(?:per[ _])?s(?:ec(?:ond)?)?[\"']?\s*[:=]\s*[\"']?(?P<named>\d[\d.,]{0,20})"
)
GLOBAL_BATCH = re.compile(
    r"(?:(?:global|total|effective)[ _]?(?:train[ _])?batch(?:[ _]?size)?|(?<!micro)(?<!micro[ _])(?<![a-z])gbs)['\"]?\s*[:=]\s*(\d+)"
)
"""A batch over all ranks, which with the samples a second of all ranks gives the seconds of a step. Plain `batch_size` may be of one."""
LOSS = re.compile(
    rf"loss(?:(?<!\wloss)|(?<=\btrain_loss)|(?<=\breduced_train_loss)|(?<=\blm_loss))[\"']?\s*(?:[=:]\s*)?[\"']?(?P<loss>{NUMBER})"
)

OTHER_LOSS = re.compile(
    r"(?<![\w/.-])(?:(?P<log>ppl|perplexity)|nll|(?:nll|ce|ctc|mlm|cross[_-]entropy|total|train(?:ing)?|step|avg|average|mean|batch|running|epoch)[_/-]?loss)"
    rf"[\"']?\s*[=:]\s*[\"']?(?P<loss>{NUMBER})"
)
"""Of a lower-cased line without a plain loss: `nll_loss=nan`; the logarithm of a perplexity is a loss."""
GRADIENT_IS_NONE = re.compile(
    r"\b(?:grad(?:ient)?[_ ]?norm|gnorm)[\"']?\s*[=:]\s*[\"']?[-+]?(?:nan|\d\.#\w+)", re.IGNORECASE
)
LEFT_OUT = re.compile(r"\bnumber of nan iterations:\s*[1-9]")
"""Megatron leaves out a loss that is NaN, and counts: of a lower-cased line."""

LONE_LOSS_NEEDLES = (b"loss/train/total: ", b"train/CrossEntropyLoss=", b"train/CE loss=")
LONE_LOSS = re.compile(rb"(?:loss/train/total: |train/CrossEntropyLoss=|train/CE loss=) {0,8}([-+.\w]{1,24})")
"""Composer (LLM Foundry) and OLMo write the loss in a line of its own, below the one that counts."""

# Keys of a JSON line, or of the dictionary that the Hugging Face Trainer prints, in the order of trust.
STEP_KEYS = (
    "global_step",
    "global_step/max_steps",
    "current_steps",
    "step",
    "iteration",
    "iter",
    "num_updates",
    "trainer/global_step",
    "train/global_step",
    "training/global_step",
    "_step",
    "update",
)
EPOCH_KEYS = ("epoch", "train/epoch")
"""Where there is no step, the epoch rises, too: often it is fractional. It is a count, and no step."""
TRAINING_KEYS = ("loss", "train_loss", "train/loss", "lm loss", "lm_loss", "learning_rate", "lr", "grad_norm")
"""One of them has to stand beside an epoch: results of an evaluation carry the epoch as well."""
HEARTBEAT_PATTERN = "heartbeat"
HEARTBEAT_KEY = '"slurm_watchdog_heartbeat"'
"""In the line of JSON that `slurm_watchdog_hooks` writes: the trainer's own count, which is believed before all others."""
MAPPING_NEEDLES = ("step", "iter", "update", "epoch")
"""One of them is in each of STEP_KEYS and EPOCH_KEYS: a mapping without any is not decoded."""
TOTAL_KEYS = ("total_steps", "max_steps", "num_steps", "total_iterations", "train_iters")
RATE_KEYS = (
    "steps_per_second",
    "steps_per_sec",
    "train_steps_per_second",
    "it/s",
    "its_per_sec",
    "iterations_per_second",
    "perf/steps_per_sec",
)
"""Steps a second."""
SECONDS_KEYS = (
    "step_time", "step_time_s", "step_seconds", "seconds_per_step", "iter_time", "sec_per_step", "seconds_per_iteration", "time/step", "perf/step_time", "timing_s/step",
    "time_per_step", "train/step_time", "step_duration_s",
)  # fmt: skip
MILLISECONDS_KEYS = ("step_time_ms", "iter_time_ms", "ms_per_step", "step_ms")
LOSS_KEYS = ("loss", "train_loss", "train/loss", "lm loss", "lm_loss")

# What stands before a line, most often to name the rank (Ray names a process: `(RayTrainWorker pid=7, ip=10.0.0.4) `); `local` is a rank on an unnamed node and therefore names no rank.
PREFIXES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("torchrun", re.compile(r"\[(?:default|[A-Za-z_]*worker)(?P<local>\d+)\]:\s?")),
    ("rank", re.compile(r"\[rank(?P<rank>\d+)\]:?\s?")),
    (
        "host_rank",
        re.compile(
            r"\[(?P<host>(?!\w*_)(?=[\w.-]*\d[\w.-]*:)(?![\w.-]+\.(?:py|cc|cpp|cu|h|rs|go)\d?:)[A-Za-z][\w.-]*):(?P<rank>0|[1-9]\d{0,4})\]:?\s?"
        ),
    ),
    ("module", re.compile(r"\[[A-Za-z][\w./-]*:\d{1,5}\]:?\s?")),  # a logger's, of nobody
    (
        "ray",
        re.compile(
            r"\((?:raylet|[A-Za-z_]\w{0,60}(?:\([^()]{0,80}\))? (?:\w{1,20}=[^\s)]{1,80} )?pid=\d{1,9})(?:, ip=[\w.:-]{1,60})?\) ?"
        ),
    ),
    ("srun_label", re.compile(r" {0,5}(?P<rank>\d{1,6}): ")),
    ("host", re.compile(r"(?P<host>[a-z][\w.]*-[\w.-]*\d): ")),
)

FRAMEWORKS: dict[str, str] = {
    "nemo2": "nemo", "nemo": "nemo", "megatron": "megatron", "deepspeed": "deepspeed", "deepspeed_throughput": "deepspeed",
    "deepspeed_pipeline": "deepspeed", "lightning": "lightning", "lightning_rich": "lightning", "yolo": "yolo", "torchtune": "torchtune",
    "torchtitan": "torchtitan", "verl": "verl", "modded_nanogpt": "nanogpt", "llm_c": "llm.c", "nanogpt": "nanogpt", "maxtext": "maxtext",
    "composer": "composer", "composer_epoch": "composer", "composer_time": "composer", "fairseq": "fairseq", "num_updates": "fairseq",
    "mmengine": "mmengine", "mmengine_iter": "mmengine", "detectron2": "detectron2", "timm": "timm", "swin": "swin", "espnet": "espnet",
    "keras": "keras", "wenet": "wenet", "mlperf": "mlperf", "clu": "jax", "pax": "pax", "levanter": "levanter", "stable_baselines": "stable_baselines",
    "hf_logged": "huggingface", "hf_epoch": "huggingface", "hf_trainer": "huggingface", "hf_trainer_epoch": "huggingface",
    "dllogger": "dllogger", "dllogger_json": "dllogger", "lightning_open": "lightning", "yolo_line": "yolo", "fastai": "fastai", "ignite": "ignite",
    "ignite_bar": "ignite", "keras_line": "keras", "composer_samples": "composer", "mindformers": "mindspore", "mindformers_step": "mindspore",
    "mindspore": "mindspore", "mindcv": "mindspore", "paddleclas": "paddle", "paddlevideo": "paddle", "paddle_hapi": "paddle", "gluon": "mxnet", "litgpt": "litgpt",
}  # fmt: skip
"""Whose way of writing a row is, where it is one framework's; the others stand for themselves."""
