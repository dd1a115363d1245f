"""A trainer with a retention limit whose loss goes bad: the checkpoint from before is kept from it, and resumed from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.training_job import SAVE_INTERVAL, inject, submit, training
from tests.rig.cluster import Cluster
from tests.rig.rights import USER
from tests.rig.stack import Watchdog


def test_the_checkpoint_from_before_a_nan_outlives_the_trainers_limit_and_a_job_resumes_from_it(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    settings = {"policy": {"keep_checkpoint": True, "kinds": {"loss_nan": {"mode": "act"}}}}
    watchdog = watch(mode="observe", settings=settings)
    job = submit(cluster, "--keep-last 2", nodes=2)
    training(watchdog, job, at_least=SAVE_INTERVAL + 5)
    inject(cluster, "nan.rank0")

    def kept_note() -> Any:
        for incident in watchdog.incidents(job):
            if incident["kind"] == "loss_nan":
                texts = [text for _, text in _timeline(watchdog.explain(incident["id"]))]
                return next((text for text in texts if text.startswith("kept the checkpoint")), None)
        return None

    note = watchdog.wait_for(kept_note, 60, "the checkpoint to be kept")
    found = re.search(r"of step (\d+), from before it: (\S+) \(hard links", note)
    assert found is not None, note
    step, kept = int(found[1]), Path(found[2])
    original = cluster.shared / f"checkpoints-{job}" / kept.name
    assert kept == Path(f"{original.parent}.kept-by-slurm-watchdog") / f"global_step{step}"
    assert f"load_checkpoint('{kept.parent}', tag='{kept.name}')" in note and kept.owner() == USER
    names = sorted(path.relative_to(kept) for path in kept.rglob("*"))
    assert names

    watchdog.wait_for(lambda: not original.exists(), 60, "the trainer to delete its own")
    assert sorted(path.relative_to(kept) for path in kept.rglob("*")) == names
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    watchdog.wait_for(lambda: "kept the checkpoint" in str(watchdog.slack.texts()), 30, "Slack to hear of it")
    cluster.slurm("scancel", job)

    again = submit(cluster, f"--checkpoint-dir {kept.parent}", nodes=2)
    training(watchdog, again, at_least=step + 1)
    log = (Path(cluster.directory) / "log" / f"job-{again}.out").read_text()
    assert f"at iteration {step}" in log and "lm loss: nan" not in log.lower(), log[-3000:]


def _timeline(explained: Any) -> list[tuple[Any, str]]:
    return [(each["at"], each["text"]) for each in explained["timeline"]]
