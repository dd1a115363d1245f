"""Slurm's commands as the controller finds them: in front of those that change something stands a script that
answers as it likes.

Every such request is logged as one JSON line, with the state of the job before and after what Slurm really
did; the script goes on when the controller that asked is dead.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rig.commands import search_path

FATES = ("ok", "done_and_lost", "lost", "refused", "done_late", "slow")
"""What becomes of a request: done and said; done, and the answer never comes; nothing at all; refused; done
when nobody waits any more; done after a while."""
COMMANDS = ("scontrol", "scancel", "sbatch", "squeue", "sinfo", "sacct", "sdiag")

SCRIPT = r"""#!/bin/bash
# %(name)s, as the controller finds it.
here=%(here)s real=%(real)s
case "%(name)s:$1" in
    scontrol:requeue* | scontrol:update | scontrol:release | scontrol:hold | scontrol:uhold | scancel:* | sbatch:*) ;;
    *) exec "$real" "$@" ;;
esac
exec 9>"$here/lock"
flock 9
read -r fate <"$here/fates" || fate=ok
sed -i 1d "$here/fates"
exec 9>&-
job=""
for word in "$@"; do
    [[ $word =~ ^(JobId=)?([0-9]+(_[0-9]+)?)$ ]] && job=${BASH_REMATCH[2]}
done
state() {
    [[ -z $job ]] || "${real%%/*}/scontrol" --oneliner show job "$job" 2>/dev/null |
        grep -oE '(JobState|Restarts|StartTime|Reason)=[^ ]*' | tr '\n' ' '
}
do_it() {
    local asked before code after
    asked=$(date +%%s.%%N) before=$(state)
    "$real" "$@"
    code=$? after=$(state)
    printf '{"asked": %%s, "done": %%s, "words": "%(name)s %%s", "job": "%%s", "fate": "%%s", "code": %%d, "before": "%%s", "after": "%%s"}\n' \
        "$asked" "$(date +%%s.%%N)" "${*//\"/}" "$job" "$fate" "$code" "$before" "$after" >>"$here/requests.log"
    return $code
}
case $fate in
    done_and_lost) do_it "$@" >/dev/null 2>&1; exec sleep 300 ;;
    lost) exec sleep 300 ;;
    refused) echo "%(name)s error: Access/permission denied for job $job" >&2; exit 1 ;;
    done_late) (sleep 12; do_it "$@") </dev/null >/dev/null 2>&1 & exec sleep 300 ;;
    slow) sleep 4; do_it "$@" ;;
    *) do_it "$@" ;;
esac
"""


@dataclass(frozen=True)
class Request:
    """One request that reached Slurm. Times are dates in seconds."""

    asked: float
    done: float
    words: str
    job_id: str
    fate: str
    code: int
    before: dict[str, str]
    after: dict[str, str]

    @property
    def requeued_run(self) -> int | None:
        """The restart count of the run that this request put back into the queue; None if it put back none."""
        before, after = self.before.get("Restarts"), self.after.get("Restarts")
        if before is None or after is None or int(after) <= int(before):
            return None
        return int(before)


class Tools:
    """The directory with the commands; everything of it lies in `directory`."""

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir(parents=True)
        self.fates([])
        for name in COMMANDS:
            real = shutil.which(name, path=search_path())
            if real is None:
                continue
            file = directory / name
            file.write_text(SCRIPT % {"name": name, "here": directory, "real": real})
            file.chmod(0o755)

    def fates(self, fates: list[str]) -> None:
        """What the next requests meet with; after them all are well again."""
        new = self.directory / "fates.new"
        new.write_text("".join(f"{fate}\n" for fate in fates))
        new.rename(self.directory / "fates")

    def weather(self, rng: random.Random, count: int, share: float) -> None:
        """Of the next `count` requests so many go wrong, in whichever way."""
        self.fates([rng.choice(FATES[1:]) if rng.random() < share else "ok" for _ in range(count)])

    def requests(self) -> Iterator[Request]:
        """All that reached Slurm, oldest first."""
        log = self.directory / "requests.log"
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        for row in sorted(rows, key=lambda row: row["done"]):
            yield Request(
                asked=row["asked"],
                done=row["done"],
                words=row["words"],
                job_id=row["job"],
                fate=row["fate"],
                code=row["code"],
                before=_fields(row["before"]),
                after=_fields(row["after"]),
            )


def _fields(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split() if "=" in word)
