"""What a batch script with `slurm-watchdog run` in it lacks."""

from __future__ import annotations

import pytest

from slurm_watchdog.doctor.finding import examine
from slurm_watchdog.doctor.job_facts import JobFacts
from slurm_watchdog.doctor.run_rules import RUN_RULES
from slurm_watchdog.doctor.script import parse_script

HEAD = "#!/bin/bash\n#SBATCH --nodes=5 --ntasks-per-node=8 --no-kill\n"
FIRST = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
RUN = "~/w/bin/slurm-watchdog run --spares 1 -- srun python train.py\n"


def rules(text: str) -> list[str]:
    return [advice.rule for advice in examine(JobFacts(script=parse_script(text, "job.sh")), RUN_RULES)]


@pytest.mark.parametrize(
    "text",
    [
        HEAD + FIRST + RUN,
        HEAD + "export MASTER_ADDR=localhost\n" + RUN,
        HEAD + RUN.replace("python", "python t.py --init-method=env:// --dist-url tcp://localhost:29500"),
        HEAD + "slurm-watchdog run --nodes=4 --spares=1 srun torchrun --rdzv-endpoint=$MASTER_ADDR:29500 t.py\n",
        HEAD.replace("--nodes=5", "--nodes=1").replace("--no-kill", "") + RUN.replace("--spares 1", ""),
        HEAD.replace("--no-kill", "") + "export MASTER_ADDR=n1\nsrun python train.py\nslurm-watchdog status\n",
        HEAD + "slurm-watchdog run -- srun bash -c 'torchrun --nnodes $SLURM_NNODES --master-addr $MASTER_ADDR t.py'\n",
        HEAD + 'slurm-watchdog run -- srun bash -c "torchrun --nnodes \\$SLURM_NNODES \\${MASTER_ADDR} $HOME/t.py"\n',
        HEAD + '# slurm-watchdog run -- srun bash -c "$SLURM_NNODES"\n' + RUN,
        HEAD + RUN + 'srun bash -c "echo $SLURM_NNODES"\nhostname\n# hostname -I\n',
        HEAD + "echo $(hostname -I)\nsrun python train.py\n",
        HEAD.replace("#SBATCH", "#SBATCH hetjob\n#SBATCH") + "srun python train.py\n",
    ],
)
def test_a_script_that_can_be_restarted_in_place_gets_no_word(text: str) -> None:
    assert rules(text) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (HEAD.replace("--no-kill", "") + RUN, "run_no_kill"),
        (HEAD + "export MASTER_ADDR=gpu-17\n" + RUN, "run_master_addr"),
        (HEAD + "MASTER_ADDR=gpu-17 " + RUN, "run_master_addr"),
        (HEAD + RUN.replace("python", "torchrun --rdzv-endpoint=gpu-17:29500"), "run_master_addr"),
        (HEAD + RUN.replace("python", "torchrun --master_addr 10.0.0.7"), "run_master_addr"),
        (HEAD + RUN.replace("srun", "/opt/slurm/bin/srun"), "run_srun_path"),
        (HEAD + "srun -N4 slurm-watchdog run -- torchrun t.py\n", "run_in_step"),
        (HEAD + RUN.replace("python", "python t.py --dist-url tcp://gpu-17:29500"), "run_master_addr"),
        (HEAD + RUN.replace("--spares 1", "--spares 5"), "run_spares"),
        (HEAD + RUN.replace("--spares 1", "--nodes=5 --spares=1"), "run_spares"),
        (HEAD + "SLURM_WATCHDOG_SPARES=5 " + RUN.replace("--spares 1 ", ""), "run_spares"),
        (HEAD + "export SLURM_WATCHDOG_SPARES=5\n" + RUN.replace("--spares 1 ", ""), "run_spares"),
        (HEAD + '#SBATCH --comment="watchdog: spares=5"\n' + RUN.replace("--spares 1 ", ""), "run_spares"),
        (HEAD + 'slurm-watchdog run -- srun bash -c "torchrun --nnodes $SLURM_NNODES t.py"\n', "run_quotes"),
        (
            HEAD + 'slurm-watchdog run --spares 1 \\\n  -- srun /bin/sh -lc "echo \\"a\\"\n x ${MASTER_ADDR}:1"\n',
            "run_quotes",
        ),
        (HEAD + 'slurm-watchdog run -- srun bash --login -c "RANK=$SLURM_PROCID python t.py"\n', "run_quotes"),
        (HEAD + "export MASTER_ADDR=$(hostname -I | awk '{print $1}')\n" + RUN, "run_hostname_ip"),
        (HEAD + "ip=`hostname --ip-address`\n" + RUN, "run_hostname_ip"),
        ("#!/bin/bash\n#SBATCH -N2 -k\n#SBATCH hetjob\n#SBATCH -N2\n" + RUN, "run_heterogeneous"),
    ],
)
def test_a_script_that_cannot_hears_why(text: str, rule: str) -> None:
    assert rules(text) == [rule]
