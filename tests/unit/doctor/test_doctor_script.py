"""What a batch script lacks: its text in, the findings out; nothing where it is kept well, in the styles in which
people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.doctor.finding import Advice, Level
from slurm_watchdog.doctor.script import examine_script, parse_options, parse_script

HEAD = """#!/bin/bash
#SBATCH --job-name=gpt --nodes=4 --ntasks-per-node=8
#SBATCH --requeue
"""
POLLS = {"train.py": 'switch = os.environ.get("SLURM_WATCHDOG_KILL_SWITCH", "")'}
SILENT = {"train.py": "for step in range(10): pass"}

WELL_KEPT = {
    "srun": HEAD + """
module load pytorch/2.4
srun --kill-on-bad-exit=1 --wait=60 --label python train.py --save checkpoints
""",
    "short options, in a variable": HEAD + """
ARGS="-K1 -W 60 --cpu-bind=none"
srun $ARGS -l python3 train.py --output_dir out
""",
    "torchrun on each node, through a shell": HEAD.replace("--ntasks-per-node=8", "--ntasks-per-node=1") + """
export LAUNCHER="torchrun --nnodes $SLURM_NNODES \\
    --nproc_per_node 8 --tee 3 \\
    "
export CMD=" \\
    train.py \\
    --save $CHECKPOINT_PATH \\
    --kill-switch-path $KILL_SWITCH_PATH \\
    "
SRUN_ARGS=" \\
    --wait=60 \\
    --kill-on-bad-exit=1 \\
    "
srun $SRUN_ARGS --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee -a main_log.txt
""",
    "an array, and utilities before": HEAD + """#SBATCH --array=1-10%1

srun hostname
srun --ntasks-per-node=1 nvidia-smi -L
srun --ntasks-per-node=1 bash -c 'mkdir -p /tmp/data; rsync -a /scratch/data /tmp/data'
srun -l --kill-on-bad-exit --wait 60 python -u train.py --ckpt_dir run/$SLURM_ARRAY_TASK_ID
""",
    "heterogeneous": """#!/bin/bash
#SBATCH --requeue
#SBATCH --ntasks=1 --mem=8g
#SBATCH hetjob
#SBATCH --nodes=8 --ntasks-per-node=8 --gpus-per-node=8

srun -l --kill-on-bad-exit=1 --wait=60 ./coordinator : python -u train.py --save /scratch/run
""",
    "a container": HEAD + """
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
IMAGE=/images/pytorch_24.05-py3.sif
srun --kill-on-bad-exit=1 --wait=60 --output=rank-%t.log \\
  singularity exec --nv --bind /scratch \\
  $IMAGE python train.py --save_dir /scratch/run
""",
    "with our wrapper": HEAD.replace("--requeue", "--requeue --signal=B:USR1@600") + """
exec ./batch.sh -- srun --label --kill-on-bad-exit=1 --wait=60 python elsewhere/main.py save=$OUT/checkpoints
""",
    "options in the environment": HEAD + """
export SLURM_KILL_BAD_EXIT=1 SLURM_WAIT=60 SLURM_LABELIO=1
srun python train.py --save x
""",
    "one task": """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --gpus=1
#SBATCH --requeue
python -u train.py --save x
srun python -u train.py --save x
""",
    "set elsewhere": HEAD + """
source ./environment.sh
srun $SRUN_OPTIONS --label python train.py --save x
""",
    "a here-document and a function": HEAD + """
cat <<EOF > ds.json
{"train_batch_size": 8}
srun python nothing.py
EOF
train() {
    srun -l --kill-on-bad-exit=1 --wait=60 python -u train.py --deepspeed_config ds.json --save x "$@"
}
if [ -n "$SLURM_JOB_ID" ]; then train --resume; fi
""",
    "mpirun": HEAD + "mpirun -np 32 python -u train.py --save x\n",
}  # fmt: skip
WELL = WELL_KEPT["srun"]


def advice(text: str, **changes: Any) -> list[Advice]:
    return list(examine_script(parse_script(text, "job.sh"), **{"read": POLLS, **changes}))


def rules(text: str, **changes: Any) -> list[str]:
    return [each.rule for each in advice(text, **changes)]


@pytest.mark.parametrize("style", WELL_KEPT)
def test_a_well_kept_script_lacks_nothing(style: str) -> None:
    assert advice(WELL_KEPT[style]) == []
    assert advice(WELL_KEPT[style], read={}) == []


BARE = "#!/bin/bash\n#SBATCH --nodes=4\nsrun -l -W60 python train.py --save x\n"
EXPORTED = WELL.replace("srun", 'export KILL_SWITCH="/run/stop"\nsrun')


@pytest.mark.parametrize(
    ("rule", "level", "text", "seen"),
    [
        ("requeue", Level.WARNING, WELL.replace("#SBATCH --requeue\n", ""), {}),
        ("requeue", Level.WARNING, WELL.replace("#SBATCH --requeue\n", ""), {"slurm": {"JobRequeue": "0"}}),
        ("requeue", Level.WARNING, WELL.replace("--requeue", "--no-requeue"), {}),
        ("requeue", Level.WARNING, WELL, {"requeueable": False}),
        ("kill_on_bad_exit", Level.WARNING, WELL.replace("--kill-on-bad-exit=1 ", ""), {}),
        ("kill_on_bad_exit", Level.WARNING, WELL.replace("--kill-on-bad-exit=1", "-K0"), {}),
        ("kill_on_bad_exit", Level.WARNING, BARE, {"slurm": {"JobRequeue": "1", "KillOnBadExit": "0"}}),
        ("wait", Level.HINT, WELL.replace("--wait=60 ", ""), {}),
        ("nccl_error_handling", Level.WARNING, WELL + "export TORCH_NCCL_ASYNC_ERROR_HANDLING=0\n", {}),
        ("nccl_error_handling", Level.WARNING, WELL.replace("srun", "NCCL_ASYNC_ERROR_HANDLING=0 srun"), {}),
        ("checkpoint_directory", Level.HINT, WELL.replace("--save checkpoints", "--config run.yaml"), {}),
        ("rank_prefixes", Level.HINT, WELL.replace("--label ", ""), {}),
        ("rank_prefixes", Level.HINT, WELL_KEPT["torchrun on each node, through a shell"].replace("--tee 3", ""), {}),
        ("kill_switch", Level.HINT, WELL, {"read": SILENT}),
        ("kill_switch", Level.WARNING, EXPORTED, {"read": SILENT}),
    ],
)  # fmt: skip
def test_what_a_script_lacks_is_said_alone_and_with_the_line_to_add(
    rule: str, level: Level, text: str, seen: dict[str, Any]
) -> None:
    (found,) = advice(text, **seen)
    assert (found.rule, found.level) == (rule, level)
    assert found.sentence.endswith(".")
    assert found.evidence
    assert found.add
    assert rule != "kill_switch" or found.where == "train.py"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (BARE, {"slurm": {"JobRequeue": "1", "KillOnBadExit": "1"}}),
        (WELL.replace("#SBATCH --requeue\n", ""), {"requeueable": True}),
        (WELL.replace("--save checkpoints", "--config run.yaml"), {"checkpoint_directories": ["{workdir}/x"]}),
        (EXPORTED, {}),
        (WELL, {"read": {"train.py": "from slurm_watchdog_hooks.lightning import WatchdogCallback"}}),
    ],
)
def test_nothing_is_said_of_what_slurm_the_site_or_the_trainer_has(text: str, seen: dict[str, Any]) -> None:
    assert rules(text, **seen) == []


RUN_HEAD = "#!/bin/bash\n#SBATCH --nodes=5 --ntasks-per-node=8 --no-kill --requeue\n"
FIRST = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
RUN = "~/w/bin/slurm-watchdog run --spares 1 -- srun -l -K1 -W60 python train.py --save x\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (RUN_HEAD + FIRST + RUN, []),
        (RUN_HEAD + "export MASTER_ADDR=localhost\n" + RUN, []),
        (RUN_HEAD + RUN.replace("python", "python t.py --init-method=env:// --dist-url tcp://localhost:29500"), []),
        (RUN_HEAD + RUN.replace("python", "torchrun --tee 3 --rdzv-endpoint=$MASTER_ADDR:29500"), []),
        (RUN_HEAD.replace("--nodes=5", "--nodes=1").replace("--no-kill", "") + RUN.replace("--spares 1", ""), []),
        (RUN_HEAD + "export MASTER_ADDR=n1\n" + RUN.replace("~/w/bin/slurm-watchdog run --spares 1 -- ", ""), []),
        (RUN_HEAD.replace("--no-kill", "") + RUN, ["run_no_kill"]),
        (RUN_HEAD + "export MASTER_ADDR=gpu-17\n" + RUN, ["run_master_addr"]),
        (RUN_HEAD + "MASTER_ADDR=gpu-17 " + RUN, ["run_master_addr"]),
        (RUN_HEAD + RUN.replace("python", "torchrun --tee 3 --rdzv-endpoint=gpu-17:29500"), ["run_master_addr"]),
        (RUN_HEAD + RUN.replace("python", "torchrun --tee 3 --master_addr 10.0.0.7"), ["run_master_addr"]),
        (RUN_HEAD + RUN.replace("python", "python t.py --dist-url tcp://gpu-17:29500"), ["run_master_addr"]),
        (RUN_HEAD + "srun -N4 -l -K -W60 slurm-watchdog run -- torchrun --tee 3 t.py --save x\n", ["run_in_step"]),
        (RUN_HEAD + RUN.replace("--spares 1", "--spares 5"), ["run_spares"]),
        (RUN_HEAD + RUN.replace("--spares 1", "--nodes=5 --spares=1"), ["run_spares"]),
        (RUN_HEAD + "SLURM_WATCHDOG_SPARES=5 " + RUN.replace("--spares 1 ", ""), ["run_spares"]),
        (RUN_HEAD + "export SLURM_WATCHDOG_SPARES=5\n" + RUN.replace("--spares 1 ", ""), ["run_spares"]),
        (RUN_HEAD + '#SBATCH --comment="watchdog: spares=5"\n' + RUN.replace("--spares 1 ", ""), ["run_spares"]),
    ],
)
def test_a_script_that_cannot_be_restarted_in_place_hears_why(text: str, found: list[str]) -> None:
    assert rules(text) == found


def test_directives_are_read_as_slurm_reads_them() -> None:
    script = parse_script(
        "#!/bin/bash\n#SBATCH -J 'a b' -N2 -n 16 --time 10:00 -o %j.out # words\n##SBATCH --requeue\n# SBATCH --requeue\n"
        "#SBATCH --time=20:00\n\necho\n#SBATCH --requeue\n",
        given=["--nodes=3"],
    )
    assert script.directives.get("job-name") == "a b"
    assert (script.nodes, script.directives.get("ntasks"), script.directives.get("output")) == (3, "16", "%j.out")
    assert script.directives.get("time") == "20:00"
    assert script.directives.get("requeue") is None


def test_options_and_what_they_start_are_told_apart() -> None:
    words = ["-N", "2", "-K", "--wait=60", "-l", "--mpi", "pmix", "--exclusive", "python", "-u", "x.py"]
    options = {"nodes": "2", "kill-on-bad-exit": "", "wait": "60", "label": "", "mpi": "pmix", "exclusive": ""}
    assert parse_options(words) == (options, ["python", "-u", "x.py"])
    assert parse_options(["--", "x"]) == ({}, ["x"])


def test_programs_are_found_behind_launchers_and_shells() -> None:
    text = 'srun bash -c "torchrun a/train.py --x 1"\npython tools/prep.py\nCMD="main.py --y"\naccelerate launch $CMD'
    assert parse_script(text).programs == ("a/train.py", "tools/prep.py", "main.py")


@given(st.text(alphabet=st.sampled_from(list("srun #SBATCH-=$\"'\\\n;|&(){}<>`EOFab 1"))))
def test_no_text_is_too_odd_to_be_read(text: str) -> None:
    advice(text)


def test_a_very_large_script_is_read_in_bounded_time() -> None:
    assert isinstance(advice("A=$A$A\n" * 20_000 + "srun $A python x.py\n" + "'" * 100_000), list)
