"""A controller with many incidents at once."""

from __future__ import annotations

from slurm_watchdog.base import clock
from slurm_watchdog.config.notify import Notify, Webhook
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.decision_inputs import CHUNK
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.notify.dispatcher import make_notifier
from slurm_watchdog.slurm.client import SlurmUnavailable
from tests.builders import views
from tests.builders.notices import incident

ACTING = Config(restart="all")
TOLD = Config(notify=Notify(webhook=Webhook(url_file="/url")))


class NoSlurm:
    """Gives no answer; nothing here asks it for any but a view."""

    def notes(self) -> tuple[str, ...]:
        return ()

    async def read_view(self) -> SlurmView:
        raise SlurmUnavailable("not asked")


def make(
    journal: Journal, number: int, chunk: int = CHUNK, config: Config = ACTING
) -> tuple[Controller, list[Incident]]:
    """A controller that has just heard of as many jobs, each with an incident that fires."""
    notifier = make_notifier(TOLD, journal.outbox)
    controller = Controller(
        config, journal=journal, slurm=NoSlurm(), notifier=notifier, metrics=ControllerMetrics(),  # type: ignore[arg-type]
        chunk=chunk,
    )  # fmt: skip
    now, wall = clock.monotonic(), clock.wall()
    names = [f"n{n}" for n in range(number)]
    jobs = tuple(views.slurm_job(job_id=str(n), nodes=(name,)) for n, name in enumerate(names))
    nodes = tuple(SlurmNode(name=name, address="127.0.0.1", state="ALLOCATED") for name in names)
    controller.state.apply_slurm(SlurmView(jobs=jobs, nodes=nodes), now, wall)
    incidents = [
        incident(n, jobs_now=(str(n),), runs=((str(n), 0),), actionable=True, fired_at=wall, opened_at=wall)
        for n in range(number)
    ]
    for each in incidents:
        controller.judge.add(each)
    return controller, incidents
