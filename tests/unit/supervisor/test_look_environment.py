"""What the step that looks at the nodes gets of the batch script's environment."""

from __future__ import annotations

from slurm_watchdog.supervisor.launcher import look_environment

KEPT = {
    "PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_PARTITION": "gpu",
    "SLURM_CLUSTER_NAME": "c", "SLURM_WATCHDOG_PREFLIGHT": "true", "SLURM_ARRAY_TASK_ID": "5",
}  # fmt: skip
OPTIONS = (
    "SLURM_LABELIO", "SLURM_STDOUTMODE", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU",
    "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_EXPORT_ENV", "SRUN_CPUS_PER_TASK", "SRUN_CONTAINER",
    "SLURM_STEP_GRES", "SLURM_OPEN_MODE", "SLURM_HINT", "SLURMD_DEBUG",
)  # fmt: skip


def test_no_option_of_the_commands_steps_reaches_the_look_and_what_leads_to_the_job_does() -> None:
    assert look_environment({**KEPT, **dict.fromkeys(OPTIONS, "1")}) == KEPT
