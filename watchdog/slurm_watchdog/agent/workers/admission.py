"""Which child may be started: so many in all, of one user, about one mount, and fewer once they hang.
Whatever hangs, the others are served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from slurm_watchdog.agent.workers.worker import Worker, group_of

MAX_WORKERS = 48  # A node has a handful of mounts and users; more children would be an attack on the node.
MAX_HUNG_OF_GROUP = 8  # And so many about one mount, or of one kind: the ninth would teach nothing new.
MAX_HUNG_OF_USER = 4  # Children that are one user and hang, or have not answered anything yet: the others are served.
MAX_OF_USER = 12  # Children that are one user: one for each mount with his files.
KEPT_FREE = 12  # Places that no child of a user takes: for who identifies, reads stacks, GPUs and the kernel's log.
LIMITED_S = 60.0  # So long it is said that a user was limited.


@dataclass
class Admission:
    """Judges by the children that there are: `workers`, by key."""

    workers: Mapping[str, Worker]
    max_workers: int
    drop: Callable[[Worker], None]  # Ends an idle child, to make room.
    _limited: dict[int, float] = field(default_factory=dict)  # User -> when he was refused a child last.

    def may_hang(self, key: str, instead_of: str = "") -> bool:
        """Whether a child under `key` could hang without there being too many that do."""
        hung = [worker.key for worker in self.workers.values() if worker.hung and worker.key != instead_of]
        group = group_of(key)
        return sum(group_of(each) == group for each in hung) < MAX_HUNG_OF_GROUP

    def may_start(self, key: str, uid: int, now: float) -> bool:
        """Whether a child may be started for `key` as `uid`; ends an idle one where that makes room."""
        if not self.may_hang(key):
            return False
        if uid >= 0 and not self._may_have(uid):
            self._limited[uid] = now
            self._limited = {each: at for each, at in self._limited.items() if now - at < LIMITED_S}
            return False
        users = [worker for worker in self.workers.values() if worker.uid >= 0]
        kept_free = min(KEPT_FREE, self.max_workers // 4)
        if uid >= 0 and len(users) >= self.max_workers - kept_free:
            return self._make_room(users)
        if len(self.workers) < self.max_workers:
            return True
        return self._make_room(self.workers.values())

    def _may_have(self, uid: int) -> bool:
        """Whether this user may have one more child. Who has none may always: places run out for those who hang."""
        mine = [worker for worker in self.workers.values() if worker.uid == uid]
        if sum(worker.hung or not worker.proven for worker in mine) >= MAX_HUNG_OF_USER:
            return False
        return len(mine) < MAX_OF_USER or self._make_room(mine)

    def _make_room(self, among: Iterable[Worker]) -> bool:
        idle = [worker for worker in among if worker.request is None]
        if idle:
            self.drop(min(idle, key=lambda worker: worker.used_at))
        return bool(idle)

    def problems(self, now: float) -> Iterator[str]:
        """Why something was not asked: a sentence each."""
        groups = Counter(group_of(worker.key) for worker in self.workers.values() if worker.hung)
        for group, count in groups.items():
            if count >= MAX_HUNG_OF_GROUP:
                yield f"probes: {count} children of {group} hang: no more of them are started"
        hung = Counter(worker.uid for worker in self.workers.values() if worker.hung)
        for uid in [uid for uid, at in self._limited.items() if now - at < LIMITED_S and hung[uid]]:
            yield f"probes: {hung[uid]} children of uid {uid} hang or do not answer: no more are started for this user"
        if len(self.workers) >= self.max_workers and all(
            worker.request is not None for worker in self.workers.values()
        ):
            yield f"probes: all {len(self.workers)} children are busy or hang: nothing more is asked"
