"""Several supervised jobs of one user on one node: none is kept from being read by another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from slurm_watchdog.agent.collectors.supervisor import SupervisorCollector
from slurm_watchdog.agent.workers.answer_types import SupervisorFile
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.supervisor import PROTOCOL, SupervisorState, SupervisorStatus

STATUS = SupervisorStatus(protocol=PROTOCOL, state=SupervisorState.RUNNING, step_id="0", nodes=("n1",))


class OneChild:
    """Takes one request at a time; `quick`: answers it while it is waited for."""

    def __init__(self, quick: bool):
        self.quick, self.asked = quick, list[list[str]]()
        self._then: Callable[[Any], None] | None = None

    def ask(self, key: str, request: Any, deadline_s: float, now: float, then: Any, uid: int) -> int | None:
        if self._then is not None:
            return None
        self.asked.append(request.names)
        self._then = then
        return len(self.asked)

    def settle(self, seconds: float, requests: Iterable[int]) -> None:
        if self.quick:
            self.answer()

    def answer(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            found = {name: SupervisorFile(status=STATUS) for name in self.asked[-1] if name != "3.0"}
            then(Answer(request=1, key="one", value=found))


def collector(child: OneChild, jobs: int) -> SupervisorCollector:
    watched = {str(n): JobWatch(job_id=str(n), restarts=0, uid=5, log_paths=("/log",)) for n in range(1, jobs + 1)}
    logs = SimpleNamespace(owner_of=lambda job_id: 5, key_of=lambda path, uid: "one")
    settings = SimpleNamespace(probe_deadline=2.0)
    jobs_here = SimpleNamespace(watch=watched)
    context: Any = SimpleNamespace(workers=child, jobs=jobs_here, logs=logs, settings=settings, sections=None)
    return SupervisorCollector(context)


def test_all_of_them_are_read_at_once_and_one_without_a_supervisor_is_none() -> None:
    section = collector(OneChild(quick=True), jobs=6).collect(100.0)
    assert sorted(each.job_id for each in section.supervisors) == list("12456")


def test_a_child_that_is_busy_is_asked_again_when_it_is_free() -> None:
    child = OneChild(quick=False)
    reads = collector(child, 2)
    reads.collect(100.0)
    reads.collect(105.0)
    assert child.asked == [["1.0", "2.0"]]
    child.answer()
    assert len(reads.collect(110.0).supervisors) == 2
    assert child.asked == [["1.0", "2.0"]] * 2
