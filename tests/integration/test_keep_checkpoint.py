"""A trainer with a retention limit whose loss goes bad: the checkpoint from before is kept from it, and resumed from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.training_job import (
    SAVE_INTERVAL,
    ended_action,
    inject,
    submit,
    submit_supervised,
    training,
)
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
    assert {path.name for path in kept.parent.iterdir()} == {kept.name, "latest"}
    watchdog.wait_for(lambda: "kept the checkpoint" in str(watchdog.slack.texts()), 30, "Slack to hear of it")
    cluster.slurm("scancel", job)

    again = submit(cluster, f"--checkpoint-dir {kept.parent}", nodes=2)
    training(watchdog, again, at_least=step + 1)
    log = (Path(cluster.directory) / "log" / f"job-{again}.out").read_text()
    assert f"at iteration {step}" in log and "lm loss: nan" not in log.lower(), log[-3000:]


def test_a_bad_loss_goes_back_in_place_to_the_kept_checkpoint_by_the_trainers_option_and_so_does_the_hang_after_it(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    ladder = ["evidence", "restart_step", "requeue"]
    kinds = {"loss_nan": {"mode": "act", "ladder": ladder}, "collective_hang": {"mode": "act", "ladder": ladder}}
    policy = {"keep_checkpoint": True, "kinds": kinds, "budget_window": "10s"}
    watchdog = watch(mode="observe", settings={"policy": policy})
    job = submit_supervised(cluster, nodes=3, spares=1, run_options="--resume-option '--resume-from {checkpoint}'")
    training(watchdog, job, at_least=SAVE_INTERVAL + 5)
    inject(cluster, "nan.rank0")

    incident = watchdog.wait_for(lambda: _firing(watchdog, job, "loss_nan"), 60, "the loss to be reported")
    action = ended_action(watchdog, incident)
    kept = _resumed_from(action)
    assert kept is not None and action["end"]["ok"] and action["action"] == "restart_step", action
    own = cluster.shared / f"checkpoints-{job}"
    assert kept.parent in (own, Path(f"{own}.kept-by-slurm-watchdog")), action
    output = Path(cluster.directory) / "log" / f"job-{job}.out"
    loaded = f"loading checkpoint from {kept.parent} at iteration {int(kept.name.removeprefix('global_step'))}"
    again = output.read_text().partition(loaded)[2]
    assert again and "lm loss: nan" not in again.lower(), output.read_text()[-3000:]

    newest = max(int(path.name.removeprefix("global_step")) for path in own.glob("global_step*"))
    inject(cluster, "dataloader_hang.rank3")
    hang = watchdog.wait_for(lambda: _firing(watchdog, job, "collective_hang"), 90, "the hang to be reported")
    again = output.read_text().partition(loaded)[2]  # the controller may know of an earlier step
    reached = max(map(int, re.findall(r"iteration +(\d+)/", again)))
    after = ended_action(watchdog, hang)
    assert after["end"]["ok"] and cluster.job(job)["Restarts"] == "0", after
    assert _resumed_from(after) == (kept if reached < newest else None), (reached, newest, after)


def _resumed_from(action: Any) -> Path | None:
    found = re.search(r"it resumes from (\S+), by the trainer's own option", action["reason"])
    return None if found is None else Path(found[1])


def _firing(watchdog: Watchdog, job: str, kind: str) -> str | None:
    return next((each["id"] for each in watchdog.incidents(job) if each["kind"] == kind), None)


def _timeline(explained: Any) -> list[tuple[Any, str]]:
    return [(each["at"], each["text"]) for each in explained["timeline"]]
