"""Takes nodes out of service, and gives back those that we took out and that nobody has touched since."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from slurm_watchdog.actuate.answered import answered
from slurm_watchdog.model.actions import OperationOutcome, Outcome
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.slurm_states import is_drained
from slurm_watchdog.slurm.client import Refusal, SlurmClient, SlurmRefused, SlurmUnavailable


@answered
async def drain(client: SlurmClient, nodes: Sequence[str], reason: str, note: Callable[[SlurmNode], None]) -> Outcome:
    """Drains `nodes`; `note` gets each as Slurm has it afterwards. One that is out already keeps its reason."""
    done, left = [], []
    for name in nodes:
        before = await client.read_node(name)
        if before is None or is_drained(before.state):
            why = "Slurm does not know it" if before is None else f"drained already: {before.reason}"
            left.append(f"{name} ({why})")
            continue
        await client.drain_node(name, reason)
        after = await client.read_node(name)
        if after is not None and after.reason.startswith(reason):
            note(after)
        done.append(name)
    words = [f"drained: {', '.join(done)}"] if done else []
    words += [f"left as it is: {', '.join(left)}"] if left else []
    return (OperationOutcome.DONE if done else OperationOutcome.SKIPPED), "; ".join(words)


async def undrain(client: SlurmClient, node: str, reason: str, reason_at: float | None) -> tuple[bool, str]:
    """Gives back a node if reason and time of its drain are still ours. (whether this is settled, a sentence)."""
    try:
        now = await client.read_node(node)
        if now is None:
            return True, f"Slurm does not know {node} any more"
        if not is_drained(now.state):
            return True, f"{node} is back in service already"
        if reason_at is None or now.reason != reason or now.reason_at != reason_at:
            return True, f"{node} stays drained: its reason was changed since ({now.reason})"
        await client.undrain_node(replace(now, reason=reason, reason_at=reason_at))
    except SlurmRefused as error:
        if error.kind is Refusal.CHANGED:
            return True, f"{node} stays drained: it was changed since"
        return error.terminal, f"{node} cannot be given back: {error}"
    except SlurmUnavailable as error:
        return False, f"{node} is not given back yet: {error}"
    return True, f"{node} is given back: our drain was over, and nobody had touched it"
