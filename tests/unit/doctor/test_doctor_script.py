"""What a batch script lacks, rule by rule, and nothing where it is kept well, in all the styles in which
people write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.cli.main import main
from slurm_watchdog.doctor.cluster_rules import settings_of
from slurm_watchdog.doctor.finding import Advice, Level, examine, exit_code
from slurm_watchdog.doctor.job_facts import JobFacts, SlurmSettings, WatchedJob
from slurm_watchdog.doctor.script import parse_options, parse_script, programs
from slurm_watchdog.doctor.script_rules import SCRIPT_RULES
from slurm_watchdog.doctor.torch_rules import torch_version

HEAD = """#!/bin/bash
#SBATCH --job-name=gpt --nodes=4 --ntasks-per-node=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/%x-%j.out
"""
POLLS = {"train.py": 'switch = os.environ.get("SLURM_WATCHDOG_KILL_SWITCH", "")'}

WELL_KEPT = {
    "srun": HEAD + """
module load pytorch/2.4
export PYTHONUNBUFFERED=1
srun --kill-on-bad-exit=1 --wait=60 python train.py --save checkpoints
""",
    "short options, in a variable": HEAD + """
export PYTHONUNBUFFERED=1
ARGS="-K1 -W 60 --cpu-bind=none"
srun $ARGS -l python3 train.py --output_dir out
""",
    "torchrun on each node, through a shell": HEAD.replace("--ntasks-per-node=8", "--ntasks-per-node=1") + """
export LAUNCHER="torchrun --nnodes $SLURM_NNODES \\
    --nproc_per_node 8 \\
    --rdzv_backend c10d \\
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
srun -u --kill-on-bad-exit --wait 60 python -u train.py --ckpt_dir run/$SLURM_ARRAY_TASK_ID
""",
    "heterogeneous": """#!/bin/bash
#SBATCH --requeue --open-mode=append
#SBATCH --ntasks=1 --mem=8g
#SBATCH hetjob
#SBATCH --nodes=8 --ntasks-per-node=8 --gpus-per-node=8

srun --kill-on-bad-exit=1 --wait=60 ./coordinator : python -u train.py --save /scratch/run
""",
    "a container": HEAD + """
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export PYTHONUNBUFFERED=1
IMAGE=/images/pytorch_24.05-py3.sif
srun --kill-on-bad-exit=1 --wait=60 \\
  singularity exec --nv --bind /scratch \\
  $IMAGE python train.py --save_dir /scratch/run
""",
    "a container of the container's own plugin": HEAD + """
srun --container-image=nvcr.io#nvidia/pytorch:24.05-py3 --container-mounts=/scratch:/scratch \\
     --kill-on-bad-exit=1 --wait=60 \\
     python -u train.py --save /scratch/run
""",
    "with our wrapper": HEAD.replace("--requeue", "--requeue --signal=B:USR1@600") + """
export PYTHONUNBUFFERED=1
exec ./batch.sh -- srun --kill-on-bad-exit=1 --wait=60 python elsewhere/main.py save=checkpoints
""",
    "options in the environment": HEAD + """
export SLURM_KILL_BAD_EXIT=1 SLURM_WAIT=60 PYTHONUNBUFFERED=1
srun python train.py --save x
""",
    "one task": """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --gpus=1
#SBATCH --requeue --open-mode=append
python -u train.py --save x
srun python -u train.py --save x
""",
    "set elsewhere": HEAD + """
source ./environment.sh
srun $SRUN_OPTIONS python train.py --save x
""",
    "a here-document and a function": HEAD + """
cat <<EOF > ds.json
{"train_batch_size": 8}
srun python nothing.py
EOF
train() {
    srun --kill-on-bad-exit=1 --wait=60 python -u train.py --deepspeed_config ds.json --save x "$@"
}
if [ -n "$SLURM_JOB_ID" ]; then train --resume; fi
""",
    "mpirun": HEAD + """
mpirun -np 32 python -u train.py --save x
""",
}  # fmt: skip


def advice(text: str, **changes: Any) -> list[Advice]:
    script = parse_script(text, "job.sh")
    return list(examine(JobFacts(**{"script": script, "read": POLLS, **changes}), SCRIPT_RULES))


def rules(text: str, **changes: Any) -> set[str]:
    return {each.rule for each in advice(text, **changes)}


@pytest.mark.parametrize("style", WELL_KEPT)
def test_a_well_kept_script_lacks_nothing(style: str) -> None:
    assert advice(WELL_KEPT[style]) == []


@pytest.mark.parametrize("style", WELL_KEPT)
def test_of_a_well_kept_script_whose_trainer_can_not_be_read_nothing_worse_than_a_hint_is_said(
    style: str,
) -> None:
    assert exit_code(advice(WELL_KEPT[style], read={})) == 0


WELL = WELL_KEPT["srun"]


@pytest.mark.parametrize(
    ("rule", "level", "text"),
    [
        ("requeue", Level.WARNING, WELL.replace("#SBATCH --requeue\n", "")),
        ("requeue", Level.WARNING, WELL.replace("--requeue", "--no-requeue")),
        ("open_mode", Level.WARNING, WELL.replace("#SBATCH --open-mode=append\n", "")),
        ("open_mode", Level.WARNING, WELL.replace("append", "truncate")),
        ("kill_on_bad_exit", Level.WARNING, WELL.replace("--kill-on-bad-exit=1 ", "")),
        ("kill_on_bad_exit", Level.WARNING, WELL.replace("--kill-on-bad-exit=1", "-K0")),
        ("wait", Level.HINT, WELL.replace("--wait=60 ", "")),
        ("nccl_error_handling", Level.WARNING, WELL + "export TORCH_NCCL_ASYNC_ERROR_HANDLING=0\n"),
        ("nccl_error_handling", Level.HINT, WELL + "export NCCL_ASYNC_ERROR_HANDLING=1\n"),
        ("nccl_error_handling", Level.WARNING, WELL.replace("pytorch/2.4", "pytorch/1.13") + "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1\n"),
        ("nccl_error_handling", Level.WARNING, WELL.replace("pytorch/2.4", "pytorch/1.12")),
        ("nccl_monitoring", Level.HINT, WELL + "export TORCH_NCCL_ENABLE_MONITORING=0\n"),
        ("nccl_flight_recorder", Level.HINT, WELL + "export TORCH_NCCL_DUMP_ON_TIMEOUT=1\n"),
        ("nccl_ras", Level.HINT, WELL + "export NCCL_RAS_ENABLE=0\n"),
        ("nccl_flight_recorder_pipe", Level.HINT, WELL + "export TORCH_FR_BUFFER_SIZE=2000\n"),
        ("nccl_timeout", Level.HINT, WELL + "export NCCL_TIMEOUT=3600\n"),
        ("checkpoint_directory", Level.HINT, WELL.replace("--save checkpoints", "--config run.yaml")),
        ("ignored_directive", Level.WARNING, WELL + "#SBATCH --time=10:00\n"),
        ("opted_out", Level.HINT, WELL.replace("--requeue", "--requeue --comment=watchdog=off")),
        ("buffered_output", Level.HINT, WELL.replace("export PYTHONUNBUFFERED=1\n", "")),
    ],
)  # fmt: skip
def test_script_finding_has_the_line_to_add(rule: str, level: Level, text: str) -> None:
    (found,) = advice(text)
    assert (found.rule, found.level) == (rule, level)
    assert found.sentence.endswith(".")
    assert found.evidence
    assert found.add or rule == "opted_out"


def test_variables_about_collectives_that_do_what_they_seem_to_are_left_alone() -> None:
    asked = WELL + "export TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/tmp/ask_ TORCH_NCCL_DUMP_ON_TIMEOUT=1 "
    assert rules(asked + "TORCH_NCCL_TRACE_BUFFER_SIZE=2000\n") == set()
    assert rules(asked + "TORCH_FR_BUFFER_SIZE=2000\n") == set()
    assert rules(WELL + "export TORCH_NCCL_ENABLE_MONITORING=1 NCCL_RAS_ENABLE=1\n") == set()
    assert (
        rules(
            WELL.replace("srun ", "export NCCL_TIMEOUT=60\nsrun ").replace("--save", "--timeout $NCCL_TIMEOUT --save")
        )
        == set()
    )
    reads = {"train.py": POLLS["train.py"] + '; seconds = int(os.environ["NCCL_TIMEOUT"])'}
    assert [each.rule for each in advice(WELL + "export NCCL_TIMEOUT=60\n", read=reads)] == []


GPUS = WELL.replace("pytorch/2.4", "pytorch/2.13").replace(
    "#SBATCH --requeue\n", "#SBATCH --requeue --gpus-per-node=8\n"
)


def test_of_a_pytorch_that_records_by_itself_the_pipe_is_suggested_for_a_job_of_several_gpus() -> None:
    (found,) = advice(GPUS)
    assert (found.rule, found.level) == ("nccl_flight_recorder_pipe", Level.HINT)
    pipe = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/tmp/ask_fr_${SLURM_JOB_ID}_"
    assert found.add == f"export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 {pipe}"
    one = GPUS.replace("--nodes=4 --ntasks-per-node=8", "--nodes=1 --ntasks=1").replace(
        "--gpus-per-node=8", "--gres=gpu:h100:1"
    )
    for silent in (
        WELL, GPUS.replace(" --gpus-per-node=8", ""), GPUS + f"export {pipe}\n", GPUS + "export TORCH_FR_BUFFER_SIZE=0\n",
        GPUS.replace("pytorch/2.13", "pytorch/2.12"), GPUS.replace("module load pytorch/2.13\n", ""), one,
        GPUS + "source ./settings.sh\n",
    ):  # fmt: skip
        assert rules(silent) == set(), silent
    assert rules(one.replace("gpu:h100:1", "gpu:h100:4")) == {"nccl_flight_recorder_pipe", "tasks"}
    assert rules(GPUS.replace("module load pytorch/2.13\n", ""), torch=(2, 14)) == {"nccl_flight_recorder_pipe"}


def test_the_right_name_of_the_variable_depends_on_the_release_of_pytorch() -> None:
    bare = WELL.replace("module load pytorch/2.4\n", "")
    assert rules(bare) == set()  # it is not known, and on by default for years
    (old,) = advice(bare, torch=(1, 13))
    assert old.add == "export NCCL_ASYNC_ERROR_HANDLING=1"
    assert advice(bare, torch=(2, 0)) == advice(bare, torch=(2, 2)) == []  # on by itself
    launched = bare.replace("python train.py", "torchrun train.py").replace(
        "--ntasks-per-node=8", "--ntasks-per-node=1"
    )
    assert advice(launched, torch=(1, 13)) == []  # it sets it itself


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("module load pytorch/2.1.2-gpu", (2, 1)),
        ("docker.io/pytorch/pytorch:1.13.1-cuda11.6-cudnn8-runtime", (1, 13)),
        ("nvcr.io/nvidia/pytorch:23.10-py3", (2, 0)),
        ("nvcr.io/nvidia/pytorch:20.12-py3", (1, 13)),
        ("nvcr.io#nvidia/pytorch:24.05-py3", (2, 2)),
        ("conda activate torch==2.3.1", (2, 3)),
        ("conda activate py38-pt111", None),
        ("", None),
    ],
)
def test_the_release_of_pytorch_is_read_from_names_of_modules_and_images(
    text: str, version: tuple[int, int] | None
) -> None:
    assert torch_version(text) == version


def test_script_rules_are_silent_where_slurm_conf_has_the_setting() -> None:
    bare = "#!/bin/bash\n#SBATCH --nodes=4\nexport PYTHONUNBUFFERED=1\nsrun python train.py --save x\n"
    assert rules(bare) == {"requeue", "open_mode", "kill_on_bad_exit"}
    with_defaults = SlurmSettings(requeue=True, append=True, kill_on_bad_exit=True)
    assert rules(bare, slurm=with_defaults) <= {"wait"}
    without = SlurmSettings(requeue=False, append=False, kill_on_bad_exit=False)
    assert rules(bare, slurm=without) == rules(bare)


@pytest.mark.parametrize(
    ("version", "parameters", "option", "advised"),
    [
        ("25.11.3", "idle_on_node_suspend,enable_expedited_requeue", "", True),
        ("26.05.0-rc1", "enable_expedited_requeue", "--requeue", True),
        ("25.11.2", "enable_expedited_requeue", "", False),
        ("26.05.0", "(null)", "", False),
        ("26.05.0", "enable_expedited_requeue", "--requeue=expedite", False),
        ("26.05.0", "enable_expedited_requeue", "--no-requeue", False),
    ],
)
def test_an_expedited_requeue_is_advised_where_the_cluster_has_it(
    version: str, parameters: str, option: str, advised: bool
) -> None:
    settings = settings_of({"SLURM_VERSION": version, "SlurmctldParameters": parameters})
    text = f"#!/bin/bash\n#SBATCH {option}\nsrun python train.py\n"
    found = examine(JobFacts(script=parse_script(text), slurm=settings), SCRIPT_RULES)
    assert ("requeue_expedite" in {advice.rule for advice in found}) is advised


def test_a_job_is_judged_by_what_slurm_has_of_it() -> None:
    bare = WELL.replace("#SBATCH --requeue\n", "")
    assert rules(bare, requeueable=True) == set()
    assert rules(WELL, requeueable=False) == {"requeue"}
    text = "#!/bin/bash\nsrun -K -W60 -u python train.py --save x"
    submitted = parse_script(text, given=["--requeue", "--open-mode=append"])
    assert list(examine(JobFacts(script=submitted, read=POLLS), SCRIPT_RULES)) == []
    text = WELL.replace("#SBATCH --open-mode=append\n", "")
    assert [each.level for each in advice(text, options_known=False)] == [Level.HINT]
    assert [each.level for each in advice(text, options_known=True)] == [Level.WARNING]


def test_a_kill_switch_that_nobody_polls_is_named_with_the_program() -> None:
    (found,) = advice(WELL, read={"train.py": "for step in range(10): pass"})
    assert (found.rule, found.level, found.where) == ("kill_switch", Level.HINT, "train.py")
    exported = WELL.replace("srun", 'export KILL_SWITCH="/run/stop"\nsrun')
    (found,) = advice(exported, read={"train.py": "for step in range(10): pass"})
    assert (found.rule, found.level) == ("kill_switch", Level.WARNING)
    assert advice(exported, read=POLLS) == []
    assert advice(WELL, read={"train.py": "from slurm_watchdog_hooks.lightning import WatchdogCallback"}) == []


@pytest.mark.parametrize(
    ("watched", "rule"),
    [
        (WatchedJob(known=False), "not_watched"),
        (WatchedJob(running_s=900.0, ranks=0, step=5), "no_ranks"),
        (WatchedJob(running_s=7200.0, ranks=8, step=None), "no_steps"),
        (WatchedJob(running_s=900.0, ranks=8, step=None), None),
        (WatchedJob(running_s=30.0, ranks=0), None),
        (WatchedJob(running_s=7200.0, ranks=8, step=100), None),
        (None, None),
    ],
)
def test_of_a_job_that_runs_it_is_said_whether_its_ranks_and_steps_are_seen(
    watched: WatchedJob | None, rule: str | None
) -> None:
    assert rules(WELL, watched=watched) == ({rule} if rule else set())


def test_directives_are_read_as_slurm_reads_them() -> None:
    script = parse_script(
        "#!/bin/bash\n#SBATCH -J 'a b' -N2 -n 16 --time 10:00 -o %j.out # words\n##SBATCH --requeue\n# SBATCH --requeue\n"
        "#SBATCH --time=20:00\n\necho\n#SBATCH --requeue\n"
    )
    assert script.directive("job-name") == "a b"
    assert (script.directive("nodes"), script.directive("ntasks"), script.directive("output")) == (
        "2",
        "16",
        "%j.out",
    )
    assert script.directive("time") == "20:00"
    assert script.directive("requeue") is None
    assert script.ignored == (("#SBATCH --requeue", 8),)


def test_options_and_what_they_start_are_told_apart() -> None:
    words = ["-N", "2", "-K", "--wait=60", "-l", "--mpi", "pmix", "--exclusive", "python", "-u", "x.py"]
    options = [
        ("nodes", "2"),
        ("kill-on-bad-exit", ""),
        ("wait", "60"),
        ("label", ""),
        ("mpi", "pmix"),
        ("exclusive", ""),
    ]
    assert parse_options(words) == (options, ["python", "-u", "x.py"])
    assert parse_options(["--", "x"]) == ([], ["x"])


def test_programs_are_found_behind_launchers_and_shells() -> None:
    text = 'srun bash -c "torchrun a/train.py --x 1"\npython tools/prep.py\nCMD="main.py --y"\naccelerate launch $CMD'
    assert programs(parse_script(text)) == ("a/train.py", "tools/prep.py", "main.py")


@given(st.text(alphabet=st.sampled_from(list("srun #SBATCH-=$\"'\\\n;|&(){}<>`EOFab 1"))))
def test_no_text_is_too_odd_to_be_read(text: str) -> None:
    advice(text)


def test_a_very_large_script_is_read_in_bounded_time() -> None:
    assert isinstance(advice("A=$A$A\n" * 20_000 + "srun $A python x.py\n" + "'" * 100_000), list)


TASKS = {
    "tasks_and_tasks_of_a_node": ("--nodes=1 --ntasks=1 --ntasks-per-node=2 --gres=gpu:2", "python t.py", "contradicts"),
    "fewer_than_the_nodes_hold": ("-N 4 -n 8 --ntasks-per-node=8 --gpus-per-node=8", "python t.py", "contradicts"),
    "more_than_the_nodes_hold": ("--nodes=2 --ntasks=24 --ntasks-per-node=8", "python t.py", "contradicts"),
    "one_task_for_eight_gpus": ("--nodes=2 --ntasks-per-node=1 --gres=gpu:h100:8", "python t.py", "7 GPUs of each node"),
    "a_launcher_in_each_task": ("--nodes=2 --ntasks-per-node=8 --gpus-per-node=8", "torchrun t.py", "8 times on each node"),
    "gpus_of_the_whole_job": ("--nodes=2 --ntasks-per-node=1 --gpus=8", "python t.py", "3 GPUs of each node"),
    "as_many_as_asked": ("--nodes=2 --ntasks=16 --ntasks-per-node=8 --gpus-per-node=8", "python t.py", None),
    "a_launcher_a_node": ("--nodes=2 --ntasks-per-node=1 --gpus-per-node=8", "torchrun t.py", None),
    "fewer_by_the_step": ("--nodes=2 --ntasks=16 --ntasks-per-node=8", "--ntasks=2 --ntasks-per-node=1 python t.py", None),
    "nodes_in_a_range": ("--nodes=2-4 --ntasks=16 --ntasks-per-node=8", "python t.py", None),
    "nodes_left_to_slurm": ("--ntasks=16 --ntasks-per-node=8", "python t.py", None),
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "found"), [("python t.py", 1), ("torchrun t.py", 0), ("mpirun python t.py", 0), ("./t", 0)]
)
def test_tasks_that_nothing_starts(command: str, found: int, tmp_path: Path) -> None:
    script = tmp_path / "t.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH --ntasks=8\n{command}\n")
    done = CliRunner().invoke(main, ["doctor", str(script), "--json"])
    assert sum("only srun starts them" in each["sentence"] for each in json.loads(done.stdout)["findings"]) == found


@pytest.mark.parametrize("name", TASKS)
def test_numbers_of_tasks_that_contradict_each_other(name: str, tmp_path: Path) -> None:
    options, command, words = TASKS[name]
    script = tmp_path / "t.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH {options}\nsrun {command}\n")
    done = CliRunner().invoke(main, ["doctor", str(script), "--json"])
    found = [each for each in json.loads(done.stdout)["findings"] if each["rule"] == "tasks"]
    assert [words in each["sentence"] for each in found if words] == ([True] if words else []), found
    assert words is not None or not found
