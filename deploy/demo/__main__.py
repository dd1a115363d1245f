"""The story of case 1 and its sequels, live on this machine: `make demo`.

Four acts on a real Slurm with real processes: a filesystem freezes and thaws; a rank hangs in its data
loader while PULSE lines keep coming; an operator moves the run off a node; the same hang again in a job that has a
supervisor and a spare node, and is restarted in place. The last line printed is `RESULT
{json}`: for each of the acts "a" to "d" that ended as it should, {"incident", "detected_after_s",
"culprit", "action", "resumed_at_step", "steps_lost"}, and of the hangs "back_after_s". The exit code is 0 if
all four did; that a restart lost more steps than it should is a note, and no failure. On a busy machine every time
of the configuration is longer, and every wait as well. The nodes' GPUs are simulated cards (tests/rig/cards.py):
the agents read them through the real pynvml. Without a C compiler there are none, and culprits have no GPU. With
KEEP=1 in the environment everything stays up until Ctrl-C, to be looked at, whatever the story came to.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from deploy.demo.teller import Teller, echo
from tests.rig.cards import SimulatedCards, describe, simulated_cards
from tests.rig.cluster import Cluster
from tests.rig.commands import ClusterError
from tests.rig.debian_packages import ensure_packages, why_impossible
from tests.rig.patience import busyness
from tests.rig.rights import own_program
from tests.rig.stack import COMMAND, PORT, START_GRACE_S, Watchdog, WatchdogError, train_script

SAVE_INTERVAL = 10
EVAL_INTERVAL = 200
HUNG_RANK = 2
RANKS_PER_NODE = 2
STEP_S = 0.4
ASKED_AGAIN = 4  # times: a restart that is refused since the ranks of a new run are not read yet
SLOWEST = 4.0  # times of the configuration are at most so many times as long: a job must live that long


class WrongEnd(Exception):
    """The story took a turn that it must not take."""


class Story:
    """The cluster, the job and the watchdog of the demo."""

    def __init__(self, cluster: Cluster, watchdog: Watchdog, teller: Teller, cards: SimulatedCards | None = None):
        self.cluster = cluster
        self.cards = cards
        self.watchdog = watchdog
        self.teller = teller
        self.job = self.name = ""
        self.requeued_s = 0.0
        self._told: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Starts the watchdog, submits the training job and sees its first steps."""
        self.watchdog.start()
        self.teller.say("we", f"watchdog: {len(self.watchdog.agents)} agents and a controller, mode act")
        page, metrics = f"http://{PAGE}", _metrics(self.cluster)
        self.teller.say("we", f"while this runs, the page: {page}; metrics: {metrics} (make demo KEEP=1 leaves it up)")
        self.job = self._submit("tr11-176B-demo", "-N3")
        self.teller.say("we", f"submitted job {self.job}: 6 ranks on 3 of {len(self.cluster.nodes)} nodes")
        self._see_first_steps()

    def _submit(self, name: str, *options: str, ahead: str = "") -> str:
        """A training in a batch script, with `ahead` before its srun; returns the job's id."""
        shared, self.name = self.cluster.shared, name
        script = train_script(
            self.cluster,
            f"--log {shared}/{name}.txt",
            f"--steps 100000 --step-seconds {STEP_S} --save-interval {SAVE_INTERVAL}",
            f"--eval-interval {EVAL_INTERVAL} --eval-seconds 1",
            f"--fault-dir {shared}/faults",
            ranks_per_node=RANKS_PER_NODE,
            ahead=ahead,
        )
        (shared / "faults").mkdir(exist_ok=True)
        (shared / "faults").chmod(0o777)
        return self.cluster.sbatch(script, *options, f"--output={self.output(name)}", f"--job-name={name}")

    def output(self, name: str) -> Path:
        return self.cluster.directory / "log" / f"{name}.out"

    def _see_first_steps(self) -> None:
        self.watchdog.wait_for(lambda: self.watchdog.step(self.job) >= 5, 60, "the first steps")
        job = self.told()
        self.teller.say("training", f"runs on {', '.join(job['nodes'])}, step {job['step']}, {job['ranks']} ranks")

    def told(self) -> Any:
        """What the watchdog's status says of the job; where Slurm does not list it at this moment, that."""
        jobs = (job for job in self.watchdog.status()["jobs"] if job["job_id"] == self.job)
        return next(jobs, {"nodes": [], "limit_s": None})

    # ------------------------------------------------------------------------------------ helpers

    def incident(self, kind: str, timeout_s: float) -> dict[str, Any]:
        found: dict[str, Any] = self.watchdog.wait_for(
            lambda: self.watchdog.firing(self.job, kind), timeout_s, f"a {kind} to fire"
        )
        self.teller.say("watchdog", f"{kind}, {found['detected_after_s']:.0f} s after it began:")
        self.teller.say("watchdog", found["summary"])
        for fact in found["evidence"][:4]:
            self.teller.say("watchdog", f"  {fact}")
        return found

    def follow(self, incident_id: str, timeout_s: float) -> dict[str, Any]:
        """Tells every operation as it happens; returns the ended action."""

        def ended() -> dict[str, Any] | None:
            for action in self.watchdog.explain(incident_id)["actions"]:
                for operation in action["operations"]:
                    key = (
                        action["decision_id"],
                        f"{operation['operation']}{operation['attempt']}{operation['outcome']}",
                    )
                    if operation["outcome"] and key not in self._told:
                        self._told.add(key)
                        self.teller.say("watchdog", f"  {operation['operation']}: {operation['detail']}")
                if action["end"]:
                    end: dict[str, Any] = action
                    return end
            return None

        action: dict[str, Any] = self.watchdog.wait_for(ended, timeout_s, "the action to end")
        self.teller.say("watchdog", action["end"]["detail"])
        return action

    def say_slack(self, since: int) -> None:
        """What Slack got since its message number `since`, when the last of it says that the incident is over."""
        slack = self.watchdog.slack
        self.watchdog.wait_for(
            lambda: any("(over)" in text for text in slack.texts()[since:]),
            30,
            "Slack to hear that it is over",
        )
        for text in slack.texts()[since:]:
            self.teller.say("slack", text.splitlines()[0] if text else "")

    def tell_cards(self, culprit: dict[str, Any]) -> None:
        """What the culprit's card says beside the others, and that the incident names that card and no other."""
        if self.cards is None:
            return
        index = culprit["rank"] % RANKS_PER_NODE
        own = self.cards.uuid(culprit["node"], index)
        used = [(node, i, card) for node, i, card in self.cards.cards() if card.processes]
        looks: dict[str, int] = {}
        for node, i, card in used:
            if card.uuid == own:
                self.teller.say("cards", f"simulated, the culprit's ({node}, card {i}): {describe(card)}")
            else:
                looks[describe(card)] = looks.get(describe(card), 0) + 1
        for look, number in looks.items():
            whose = f"all {number} others" if number == len(used) - 1 else f"{number} others"
            self.teller.say("cards", f"simulated, {whose}: {look}")
        named = culprit["gpu_uuid"]
        self.check(named == own, f"named {named}, but rank {culprit['rank']} has {own}")
        self.teller.say("watchdog", f"  its GPU: {named}, card {index} of {culprit['node']}")

    def check(self, good: bool, what: str) -> None:
        if not good:
            raise WrongEnd(what)

    def note_lost(self, lost: int, most: int) -> None:
        """More lost steps than a restart should cost are worth a note: on a busy machine a step may come in between."""
        if not 0 <= lost <= most:
            self.teller.say("we", f"note: {lost} steps were lost, where at most {most} should be")

    def _nodes(self) -> list[str]:
        nodes: list[str] = self.watchdog.wait_for(lambda: self.told()["nodes"], 20, "the nodes of the job")
        return nodes

    def _is_between_checkpoints(self) -> bool:
        """Some steps after a checkpoint: a restart would lose them, unless the run saves first."""
        step = self.watchdog.step(self.job)
        return step > SAVE_INTERVAL and 3 <= step % SAVE_INTERVAL <= SAVE_INTERVAL - 3

    def _may_hang(self) -> bool:
        """Between two checkpoints, with no evaluation near, which may take its time, and once the watchdog knows how
        long a step takes: right after an outage it does not."""
        soon = EVAL_INTERVAL - self.watchdog.step(self.job) % EVAL_INTERVAL
        known = (self.told()["limit_s"] or float("inf")) < START_GRACE_S * self.watchdog.pace
        return known and soon > 6 * SAVE_INTERVAL and self._is_between_checkpoints()

    # ------------------------------------------------------------------------------------ the acts

    def filesystem_freezes(self) -> dict[str, Any]:
        """(a) Nothing may be done about an outage but to tell, and to wait."""
        self.teller.act("(a) The parallel filesystem stops answering")
        slack = len(self.watchdog.slack.messages)
        before = self.cluster.job(self.job)
        step = self.watchdog.step(self.job)
        self.cluster.freeze()
        self.teller.say("we", f"froze {self.cluster.shared}: every process that writes there waits in state D")
        incident = self.incident("filesystem_outage", 60)
        self.tell_cards(incident["culprits"][0])
        time.sleep(4)
        now = self.cluster.job(self.job)
        untouched = all(before.get(key) == now.get(key) for key in ("Restarts", "ExcNodeList", "JobState"))
        self.check(untouched, "the job was touched during a filesystem outage")
        kept = next(i for i in self.watchdog.incidents(self.job) if i["id"] == incident["id"])
        actions = [d["action"] for d in kept["decisions"] if d["verdict"] == "allowed"]
        self.check(actions == ["none"], f"actions during a filesystem outage: {actions}")
        self.teller.say("watchdog", "nothing restarted, no node excluded: " + kept["decisions"][0]["reason"])
        self.cluster.thaw()
        self.teller.say("we", "thawed it")
        self.watchdog.wait_for(lambda: self.watchdog.step(self.job) > step + 3, 30, "training to continue")
        self.teller.say("training", f"continues by itself, at step {self.watchdog.step(self.job)}")
        self.watchdog.wait_for(lambda: self._is_resolved(incident["id"]), 30, "the incident to close itself")
        self.teller.say("watchdog", "the incident is over: it has closed itself")
        others = [i["kind"] for i in self.watchdog.incidents(self.job) if i["id"] != incident["id"]]
        self.say_slack(slack)
        culprit = incident["culprits"][0]
        self.check(culprit["mount"] == str(self.cluster.shared), f"the mount is {culprit['mount']}")
        self.check(culprit["pid"] is not None and culprit["rank"] is not None, f"no rank is identified: {culprit}")
        return {
            "act": "a",
            "incident": incident["kind"],
            "detected_after_s": round(incident["detected_after_s"], 1),
            "culprit": culprit,
            "action": "none",
            "resumed_at_step": None,
            "steps_lost": 0,
            "other_incidents": others,
        }

    def _is_resolved(self, incident_id: str) -> bool:
        return str(self.watchdog.explain(incident_id)["incident"]["state"]) == "resolved"

    def rank_hangs(self) -> dict[str, Any]:
        """(b) The hang is found although PULSE lines keep the log growing."""
        self.teller.act("(b) A rank hangs in its data loader; PULSE lines keep coming")
        end = self._hang("b")
        self.requeued_s = end["back_after_s"]
        self.teller.say("training", f"makes steps again {self.requeued_s:.0f} s after it stood still")
        return end

    def restarted_in_place(self) -> dict[str, Any]:
        """(d) The same, in a job with a supervisor and a spare node: nothing is queued."""
        self.teller.act("(d) The same hang, in a job with `slurm-watchdog run --spares 1` in its batch script")
        self.cluster.slurm("scancel", self.job)
        self.cluster.wait_for_job_state(self.job, "CANCELLED")
        for node in self.cluster.nodes:
            self.cluster.wait_for_node_state(node, "IDLE")
        program = own_program(self.cluster.place, self.cluster.directory)
        self.job = self._submit("tr11-176B-spare", "-N4", "--no-kill", ahead=f"{program} run --spares 1 --")
        self.teller.say("we", f"submitted job {self.job}: 4 nodes, of which one waits")
        self._see_first_steps()
        end = self._hang("d")
        restarts = int(self.cluster.job(self.job)["Restarts"])
        self.check(restarts == 0, f"the job was requeued {restarts} times")
        self.teller.say(
            "training",
            f"makes steps again {end['back_after_s']:.0f} s after it stood still, on {', '.join(self._nodes())}",
        )
        self.teller.say(
            "we",
            f"by requeue, in act (b), it took {self.requeued_s:.0f} s: here credentials last for 5 s, as Slurm is "
            "shipped for 120 s, and so long a requeued job waits",
        )
        return end

    def _hang(self, act: str) -> dict[str, Any]:
        """Rank HUNG_RANK gets no more data, and the watchdog does what it does; returns the lines about the act."""
        slack = len(self.watchdog.slack.messages)
        nodes = self._nodes()
        self.watchdog.wait_for(self._may_hang, 60)
        step = self.watchdog.step(self.job)
        (self.cluster.shared / "faults" / f"dataloader_hang.rank{HUNG_RANK}").touch()
        self.teller.say(
            "we",
            f"rank {HUNG_RANK} gets no more data, from soon after step {step} on: it uses what is loaded, then hangs",
        )
        incident = self.incident("collective_hang", 60)
        stood_still_at = time.monotonic() - incident["detected_after_s"]
        output = self.output(self.name).read_text(errors="replace").splitlines()
        pulse = [line for line in output if "PULSE" in line]
        self.teller.say("training", f"and still its log grows: {pulse[-1][:100]}")
        culprit = incident["culprits"][0]
        hung_node = nodes[HUNG_RANK // RANKS_PER_NODE]
        named = [(c["rank"], c["node"]) for c in incident["culprits"]]
        self.check(named == [(HUNG_RANK, hung_node)], f"named {named}, but it is rank {HUNG_RANK} on {hung_node}")
        if act == "b":  # of a job that is some seconds old it is not known yet which cards its processes use
            self.tell_cards(culprit)
        action = self.follow(incident["id"], 90)
        end, back_after_s = action["end"], time.monotonic() - stood_still_at
        self.check(end["ok"], f"the restart failed: {end['detail']}")
        self.note_lost(end["steps_lost"], SAVE_INTERVAL)
        self.say_slack(slack)
        return {
            "act": act,
            "incident": incident["kind"],
            "detected_after_s": round(incident["detected_after_s"], 1),
            "culprit": culprit,
            "action": action["action"],
            "resumed_at_step": end["resumed_at_step"],
            "steps_lost": end["steps_lost"],
            "back_after_s": round(back_after_s, 1),
        }

    def operator_moves_the_run(self) -> dict[str, Any]:
        """(c) A healthy job leaves a node through the kill switch."""
        self.teller.act("(c) An operator wants a node back: `slurm-watchdog restart --exclude`")
        self.watchdog.wait_for(self._is_between_checkpoints, 60)
        slack = len(self.watchdog.slack.messages)
        node = self._nodes()[0]
        self.teller.say("we", f"slurm-watchdog restart {self.job} --exclude {node} --reason 'fan replacement'")
        incident = self._restart_without(node)
        action = self.follow(incident["id"], 90)
        end = action["end"]
        nodes = self._nodes()
        self.teller.say("training", f"runs on {', '.join(nodes)}")
        self.check(node not in nodes, f"the job still has {node}")
        self.note_lost(end["steps_lost"], 0)
        self.say_slack(slack)
        return {
            "act": "c",
            "incident": incident["kind"],
            "detected_after_s": 0.0,
            "culprit": {"node": node},
            "action": action["action"],
            "resumed_at_step": end["resumed_at_step"],
            "steps_lost": end["steps_lost"],
        }

    def _restart_without(self, node: str) -> dict[str, Any]:
        """The incident of the restart. It is asked for again where the job was requeued a moment ago, so that its ranks
        have not been read yet, and where a busy machine's controller has not answered, unless it has begun."""
        words = ("restart", self.job, "--exclude", node, "--reason", "fan replacement", "--no-wait")
        for _ in range(1 + ASKED_AGAIN):
            done = self.watchdog.command(*words)
            said = done.stdout + done.stderr
            began = [
                each
                for each in self.watchdog.incidents(self.job)
                if each["kind"] == "operator_restart" and (done.returncode == 0 or each["state"] == "firing")
            ]
            if began:
                return dict(max(began, key=lambda each: each["opened_at"]))
            if not ("ask again in" in said or "did not answer" in said):
                break
            time.sleep(15)
        raise WrongEnd(f"restart said: {said}")


PAGE = "127.0.0.1:9767"
"""`controller.page_listen` as it is shipped."""


def tell(nodes: int = 4) -> int:
    """Tells the whole story. Returns 0 if every act ended as it should."""
    teller = Teller()
    acts: list[dict[str, Any]] = []
    wrong: Exception | None = None
    try:
        with contextlib.ExitStack() as stack:
            story = None
            try:
                story = _set_up(stack, teller, nodes)
                story.begin()
                for act in (
                    story.filesystem_freezes,
                    story.rank_hangs,
                    story.operator_moves_the_run,
                    story.restarted_in_place,
                ):
                    acts.append(act())
            except (ClusterError, WatchdogError, WrongEnd) as error:
                wrong = error
                echo(f"\nThe demo went wrong: {error!s}", fg="red")
                if story is not None:
                    _last_lines(story)
            if os.environ.get("KEEP") and story is not None:
                _keep(story, teller)
    except KeyboardInterrupt:
        wrong = WrongEnd("stopped")
        echo("\nstopped; everything is taken down again")
    print("RESULT " + json.dumps({act.pop("act"): act for act in acts}), flush=True)
    return 1 if wrong or len(acts) < 4 else 0


def _set_up(stack: contextlib.ExitStack, teller: Teller, nodes: int) -> Story:
    """Slurm and its cards, and a watchdog that is not started yet; all of it ends with `stack`."""
    pace = min(SLOWEST, max(1.0, busyness() / 2))
    if pace > 1:
        teller.say("we", f"this machine is busy: every time of the configuration is {pace:.1f} times as long")
    teller.say("we", "starting Slurm: slurmctld, munged and one slurmd a node, each in its own namespaces")
    # Slurm itself must not take a node that gets no processor for one that is down.
    options = {"SlurmdTimeout": str(round(15 * pace)), "MessageTimeout": str(round(10 * pace))} if pace > 1 else {}
    cluster = stack.enter_context(Cluster(nodes=nodes, options=options))
    cards = simulated_cards(cluster)
    if cards is None:
        teller.say("we", "no C compiler here, so no simulated cards: the nodes have no GPUs")
    else:
        stack.enter_context(cards)
        teller.say("we", "each node has simulated cards: a stand-in for NVIDIA's library lists them")
    environment = cards.environment if cards is not None else None
    # Of one job in an hour it restarts one, and the story has two that hang.
    settings = {"controller": {"page_listen": PAGE}, "policy": {"budget_window": "20s"}}
    watchdog = Watchdog(cluster, mode="act", settings=settings, agent_env=environment, pace=pace)
    stack.callback(watchdog.close)
    return Story(cluster, watchdog, teller, cards)


def _last_lines(story: Story) -> None:
    """What the job and each part of the watchdog said last."""
    with contextlib.suppress(OSError):
        output = story.output(story.name).read_text(errors="replace")
        echo(f"\n--- {story.name}\n{chr(10).join(output.splitlines()[-12:])}")
    for part in ("controller", *(f"agent-{node}" for node in story.watchdog.nodes)):
        echo(f"\n--- {part}\n{story.watchdog.log_tail(part, 12)}")


def _metrics(cluster: Cluster) -> str:
    return f"http://{cluster.controller_address}:{PORT}/metrics"


def _keep(story: Story, teller: Teller) -> None:
    cluster, watchdog = story.cluster, story.watchdog
    teller.act("KEEP=1: everything stays up until Ctrl-C")
    teller.say("we", f"{COMMAND} status --socket {watchdog.socket}")
    teller.say("we", f"the page: http://{PAGE}")
    teller.say("we", f"metrics: {_metrics(cluster)}")
    teller.say("we", f"Slurm: SLURM_CONF={cluster.env['SLURM_CONF']} squeue")
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()


def main() -> int:
    """Checks that this machine can do it, then tells the story."""
    try:
        ensure_packages()
    except ClusterError as error:
        echo(str(error), fg="red")
        return 2
    reason = why_impossible()
    if reason is not None:
        echo(f"The demo cannot run here: {reason}", fg="red")
        return 2
    return tell()


if __name__ == "__main__":
    sys.exit(main())
