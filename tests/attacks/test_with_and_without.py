"""Every attack here is made twice: on the build as it is, where it must fail, and on the same build with one
defence taken out, where it must succeed. So no attack fails for want of an attack. The defence of a row is
the function or constant that stops it, replaced by one that does not; everything else is the code that is
shipped.

Attacks on the identity of the controller are in test_impostors.py, and on the shipped units in tests/integration.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect
from msgspec.structs import replace

from slurm_watchdog.agent.agent import Agent
from slurm_watchdog.agent.children.requests import BlockedCall, IdentifyProcesses, ResolveCalls, WorkerState
from slurm_watchdog.agent.commands import Commands
from slurm_watchdog.agent.courier.streams import TcpController
from slurm_watchdog.agent.delivery.sender import Sender
from slurm_watchdog.agent.delivery.spool import Spool
from slurm_watchdog.agent.evidence import stacks, tool
from slurm_watchdog.agent.logs import log_file
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.metrics import AgentMetrics
from slurm_watchdog.agent.proc.system_call import parse_syscall
from slurm_watchdog.agent.processes import identify, supervisor_link, terminate
from slurm_watchdog.agent.service import Service
from slurm_watchdog.agent.settings import settings_of
from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.base.loop import Signals
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.evidence import collector, store
from slurm_watchdog.controller.evidence.requests import FairSlots
from slurm_watchdog.controller.evidence.store import EvidenceShare
from slurm_watchdog.controller.incidents.judge import within_room
from slurm_watchdog.controller.ingest import endpoint
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.policy.decision import decide
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.identity.transport import peer_of
from slurm_watchdog.knowledge.syscalls import name_of
from slurm_watchdog.model.actions import Verdict
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity, Truth
from slurm_watchdog.model.kill_switch import FIELDS, compose_line
from slurm_watchdog.model.observations import EventKind, Process, Role
from slurm_watchdog.model.protocol import DumpStacks, JobWatch, WriteKillSwitch
from slurm_watchdog.model.report import JobDirectives, Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.model.supervisor import RestartOrder
from slurm_watchdog.parse.error_file import parse_error_file
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder
from slurm_watchdog.parse.kernel_log.line import parse_message
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.wire import codec
from slurm_watchdog.wire.rate_limits import Limits, TokenBuckets
from tests.builders import two_users
from tests.builders.agent_context import context_of
from tests.builders.fake_children import FakeChildren, looks
from tests.builders.forged_kernel_lines import forgeries
from tests.builders.identities import World
from tests.builders.open_doors import MARK, PEOPLE, doors
from tests.builders.page_requests import EVIDENCE, PROXY, controller, get, gets, named
from tests.builders.policy_inputs import INCIDENT, LIMITS
from tests.builders.program_paths import PROGRAM_PATHS
from tests.builders.sending import link_to
from tests.builders.supervisor_links import Peer, link_at, rows
from tests.builders.views import process, slurm_job
from tests.builders.wire_fill import filled
from tests.builders.workers import Asker, everything_of

MALLORY, VICTIM = 1500, 1501
JOB = "7"


@dataclass(frozen=True)
class Stage:
    """What an attack may use."""

    place: Path
    patch: pytest.MonkeyPatch


@dataclass(frozen=True)
class Row:
    """One attack. `findings` of the security review, `by` whom, `attack` says whether it succeeded, `without`
    takes its defence out."""

    findings: str
    by: str
    attack: Callable[[Stage], bool]
    without: tuple[tuple[str, Any], ...]


# ------------------------------------------------------------------------------------------------ a user with a job


def world() -> ClusterState:
    """Job 7 of the victim runs on n1; Mallory has a process there that says that it is of job 7."""
    found = ClusterState(silent_after_s=15, report_lifetime_s=60)
    nodes = (SlurmNode(name="n1", address="", state="ALLOCATED"),)
    found.apply_slurm(SlurmView(jobs=(slurm_job(job_id=JOB, nodes=("n1",), uid=VICTIM),), nodes=nodes), 0.0)
    return found


def claimed(**more: Any) -> Report:
    rank = process(0, job_id=JOB, uid=MALLORY, member_by="claim")
    return Report(node="n1", boot_id="b", agent_id="a", sequence=1, processes=(rank,), **more)


def forged_rank(stage: Stage) -> bool:
    """SLURM_JOB_ID of the victim's job in Mallory's environment: a rank that stops would have the job requeued."""
    cluster = world()
    cluster.apply_report(claimed(), 1.0)
    view = cluster.job_view(JOB, 2.0)
    assert view is not None
    return bool(view.ranks)


def forged_wish(stage: Stage) -> bool:
    """SLURM_WATCHDOG=off, or a kill switch of Mallory's choice, for the victim's job."""
    cluster = world()
    wish = JobDirectives(job_id=JOB, restarts=0, variables=(("SLURM_WATCHDOG", "off"),), uid=MALLORY)
    cluster.apply_report(claimed(wishes=(wish,)), 1.0)
    return JOB in cluster._wishes


def switch_that_is_a_program(stage: Stage) -> bool:
    """A kill switch at a place whose files are run, though a site allows switches below homes."""

    def taken(path: str) -> bool:
        children = FakeChildren()
        logs = JobLogs(looks(children), (), "n1", (), become_owner=True)
        logs.here.hear([JobWatch(job_id=JOB, restarts=0, uid=VICTIM)])
        command = WriteKillSwitch(id="w", job_id=JOB, restarts=0, path=path, uid=VICTIM, content='{"by": "x"}\n')
        Commands(context_of(children, logs), ("/home",)).accept((command,), 0.0)
        return bool(children.asked)

    assert taken("/home/ann/job/switch"), "an honest request is one"
    return any(taken(f"/home/ann/{path}") for path in PROGRAM_PATHS)


def words_that_a_shell_runs(stage: Stage) -> bool:
    """The line of a kill switch is given to sh, as sshd does with ~/.ssh/rc."""
    owned = stage.place / "owned"
    script = stage.place / "rc"
    script.write_text(compose_line(dict.fromkeys(FIELDS, f"$(: > {owned})")))
    subprocess.run(["/bin/sh", script], capture_output=True, check=False)
    return owned.exists()


def root_by_request(stage: Stage) -> bool:
    """A child that works as root, a system account or nobody."""
    asker = Asker()
    try:
        return any(asker.answer("files:/a", "echo", uid=uid).error is None for uid in (0, 1, 99, 65534, 2**32 - 1))
    finally:
        asker.children.close()


SECRET_OF_ROOT = "what-only-the-other-user-may-read"


def set_user_id_rank(stage: Stage) -> bool:
    """A rank that is a set-user-id program of root's: its environment and files are read for Mallory."""
    code = "import os, sys, time; os.setresuid(1500, 0, 0); sys.stdout.write('x'); sys.stdout.flush(); time.sleep(600)"
    rank = subprocess.Popen(
        [sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, cwd="/",
        env={"SLURM_JOB_ID": JOB, "RANK": "0", "NCCL_DEBUG": SECRET_OF_ROOT},
    )  # fmt: skip
    assert rank.stdout is not None and rank.stdout.read(1) == b"x"
    try:
        (told,) = identify.identify(IdentifyProcesses([rank.pid]), WorkerState(MALLORY))
    finally:
        rank.kill()
        rank.communicate()
    return bool(told.environ)


def stopped_child(stage: Stage) -> bool:
    """Mallory stops the child that looks at a filesystem as him: it is reported as one that does not answer."""
    asker = Asker()
    try:
        os.kill(asker.answer("a", "echo").value[2], signal.SIGSTOP)
        request = asker.ask("a", "echo", deadline_s=0.1)
        assert request is not None
        asker.children.settle(5, [request])
        return asker.answers[-1].timed_out or bool(asker.children.hung(time.monotonic() + 10))
    finally:
        asker.children.close()


def memory_after_the_call(stage: Stage) -> bool:
    """A process leaves its call between the look at it and the read of its memory (that moment is made long):
    what is read is another's."""
    fifo = stage.place / "fifo"
    os.mkfifo(fifo)
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", f"open({str(fifo)!r}, 'rb').read(); import time; time.sleep(600)"]
    )
    read_path = identify._read_path

    def opens() -> Any:
        """The call, while the process waits for a writer."""
        state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
        call = parse_syscall(Path(f"/proc/{child.pid}/syscall").read_bytes())
        waits = state == "S" and call is not None and name_of(call.number, os.uname().machine) == "openat"
        return call if waits else None

    try:
        while (call := opens()) is None:
            time.sleep(0.01)

        def slowly(pid: int, pointer: int) -> str:
            found = read_path(pid, pointer)
            fifo.write_bytes(b"go")
            while opens() is not None:
                time.sleep(0.01)
            return found

        stage.patch.setattr(identify, "_read_path", slowly)
        asked = BlockedCall(child.pid, child.pid, "openat", list(call.args))
        (found,) = identify.resolve_calls(ResolveCalls([asked]), WorkerState(os.getuid()))
        return bool(found.target.path)
    finally:
        child.kill()
        child.wait()


def mounts_that_never_answer(stage: Stage) -> bool:
    """Forty FUSE mounts of Mallory's own, with logs, directories and checkpoints on each: nobody else is
    looked at any more."""
    asker = Asker(12)
    try:
        for _ in range(3):
            for key, uid in everything_of(MALLORY):
                asker.ask(key, "hang", 600.0, deadline_s=0.05, uid=uid)
            time.sleep(0.3)
            asker.children.poll(time.monotonic() + 1)
        asked = [asker.ask("files:/home:1501", "echo", uid=VICTIM), asker.ask("node:mounts", "echo")]
        served = [each for each in asked if each is not None]
        asker.children.settle(5, served)
        return len(served) < 2 or len(asker.answers) < 2 or any(each.error for each in asker.answers[-2:])
    finally:
        asker.children.close()


def thousands_of_new_processes(stage: Stage) -> bool:
    """Three thousand processes of Mallory's that nobody has looked at yet: the victim's one is not looked at for
    minutes."""
    table = World(1).table
    table.read_owner = lambda pid: VICTIM if pid == 3001 else MALLORY
    return 3001 not in set(table._next_new(set(range(2, 3002))))


def pickle_for_a_dump(stage: Stage) -> bool:
    """Where a rank's Flight Recorder dump should be lies a pickle that starts a program when it is read."""
    mark = stage.place / "ran"
    with suppress(ValueError):
        parse_flight_recorder(f"cos\nsystem\n(S'touch {mark}'\ntR.".encode(), 0)
    return mark.exists()


def output_bomb(stage: Stage) -> bool:
    """A program that looks at a job's memory and prints what it finds: 64 MiB here."""
    code = "import sys\nfor _ in range(64): sys.stdout.write('x' * 2**20)"
    means = tool.Means(20.0, stacks.MAX_OUTPUT, 1 << 30, 20, 4096)
    return len(next(tool.run_tools([lambda: ([sys.executable, "-I", "-S", "-c", code], means)], []))[1].out) > 32 << 20


def empty_lines_in_an_error_file(stage: Stage) -> bool:
    """A rank leaves an error file whose stack is forty thousand empty lines; a whole MiB of them would take minutes."""
    data = msgspec.json.encode({"message": {"message": "x", "extraInfo": {"py_callstack": "\n" * 40_000}}})
    begun = time.process_time()
    parse_error_file(data)
    return time.process_time() - begun > 0.3


def key_in_an_error_line(stage: Stage) -> bool:
    """Nobody's attack: a library logs the key with which it was refused."""
    key = "0123456789abcdef0123456789abcdef"
    line = f"requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://x.example/v1?api_key={key}"
    fact = parse_line(line)
    assert fact is not None and fact.kind is EventKind.ERROR
    return key in str(log_file.shown(log_file.make_event(fact, 0.0)))


def kernel_line_of_a_name(stage: Stage) -> bool:
    """A program whose name and file are the words of a driver's fault crashes: the kernel writes them down."""
    return bool(forgeries())


def kernel_line_of_another_device(stage: Stage) -> bool:
    """Words of a driver with its device's address, in a record that is of no device: a user made the kernel print them."""
    line = "mlx5_core 0000:5e:00.0: poll_health:738:(pid 0): device's health compromised - reached miss count"
    return parse_message(line, 3, "") is not None


def storm_of_one(stage: Stage) -> bool:
    """Fifty jobs of Mallory's in the same trouble, and as many restarts: the victim's job is not helped."""
    mine = decide(
        replace(two_users.world(two_users.JOB, two_users.BUSY_MALLORY), incident=INCIDENT, config=LIMITS), "d"
    )
    return mine.verdict is not Verdict.ALLOWED


def look_alike_of_slurmstepd(stage: Stage) -> bool:
    """Mallory's `sleep` under the name and with the title of a step of the job: no orphan on the node's GPUs
    would be ended."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        program = shutil.copy("/bin/sleep", f"{directory}/slurmstepd")
        user = MALLORY if os.geteuid() == 0 else None
        look_alike = subprocess.Popen([f"slurmstepd: [{JOB}.0]", "60"], executable=program, user=user)
        try:
            return JOB in dict(terminate._steps(dict(terminate._processes()))).values()
        finally:
            look_alike.kill()
            look_alike.wait()


def supervisor_of_a_stranger(stage: Stage) -> bool:
    """A process of Mallory's that is taken for one of the victim's job says at the agent's socket that it supervises it:
    orders would go to it, and its status would count."""
    link = link_at(stage.place, uid=VICTIM)
    peer = Peer(stage.place)
    peer.say()
    found = [row for _ in range(5) for row in rows(link)]
    link.close()
    return bool(found)


def all_connections_of_one(stage: Stage) -> bool:
    """Mallory connects until no one else's supervisor can."""
    link = link_at(stage.place)
    peers = []
    for _ in range(supervisor_link.MAX_CONNECTIONS):
        peers.append(Peer(stage.place))
        rows(link)
    taken = len(link._peers)
    link.close()
    return taken >= supervisor_link.MAX_CONNECTIONS


def peer_that_never_reads(stage: Stage) -> bool:
    """What is sent to it fills its buffer, and who waits for room there waits for ever: the agent's loop."""
    link, peer = link_at(stage.place), Peer(stage.place)
    peer.say()
    waiting = threading.Event()

    def loop() -> None:
        assert any(rows(link) for _ in range(5)), "its order is for it"
        for number in range(5000):
            order = RestartOrder(decision=str(number), step_id="0", start=1, why="x" * 200)
            link.give("7", 2, order, time.monotonic())
        waiting.set()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    held_up = not waiting.wait(5)
    peer.sock.close()
    thread.join(20)
    link.close()
    return held_up


def line_without_end(stage: Stage) -> bool:
    """A line that never ends fills the agent's memory."""
    link, peer = link_at(stage.place), Peer(stage.place)
    longest = 0
    with suppress(OSError):
        for _ in range(150):
            rows(link)
            peer.sock.sendall(b"x" * 8192)
            longest = max([longest, *(len(each.rest) for each in link._peers.values())])
    link.close()
    return longest > 1_000_000


def agent_left_behind(stage: Stage) -> bool:
    """`attach` was killed, and an hour later its agents still ask its port, which may be anybody's by then."""
    settings = settings_of(parse_config(f"agent: {{node_name: n1, kernel_log: '', state_directory: '{stage.place}', give_up_after: 10min}}"))  # fmt: skip
    agent = Agent(settings)
    try:
        sender = Sender(Spool(10**6, 60), link_to([TcpController("http://127.0.0.1:1", "n1")]))
        service = Service(agent, sender, AgentMetrics(), Signals())
        service.tick(service.sender.heard_at + 3600.0)
        return not service.signals.stop
    finally:
        agent.close()


def evidence_without_end(stage: Stage) -> bool:
    """A job that flaps all day: a collection every five minutes, as large as one may be."""
    settings = Config().controller
    share = EvidenceShare(settings.evidence_per_day)
    kept = sum(
        store.MAX_COLLECTION_BYTES
        for _ in range(288)
        if share.acquire(MALLORY, store.MAX_COLLECTION_BYTES, 0.0) is None
    )
    return kept > 10 << 30 or share.acquire(VICTIM, 1 << 20, 0.0) is not None


def places_for_evidence(stage: Stage) -> bool:
    """A hundred jobs of Mallory's hang: the victim's evidence waits for all of them."""

    async def run() -> bool:
        slots = FairSlots(collector.AT_ONCE, collector.OF_ONE_USER)
        leave, began = asyncio.Event(), asyncio.Event()

        async def hold(uid: int) -> None:
            async with slots.of(uid):
                if uid == VICTIM:
                    began.set()
                await leave.wait()

        work = [asyncio.create_task(hold(uid)) for uid in [MALLORY] * 100 + [VICTIM]]
        for _ in range(20):
            await asyncio.sleep(0)
        waits = not began.is_set()
        leave.set()
        await asyncio.gather(*work)
        return waits

    return asyncio.run(run())


def questions_to_a_node(stage: Stage) -> bool:
    """Questions about a hundred jobs of Mallory's wait for a node: none about the victim's is taken."""

    async def run() -> bool:
        commands = CommandQueue()
        asked = [(f"{n}", MALLORY) for n in range(100)] + [("victim", VICTIM)]
        work = [
            asyncio.create_task(commands.ask("n1", DumpStacks(id=name, job_id=name, restarts=0), 60.0, uid))
            for name, uid in asked
        ]
        for _ in range(20):
            await asyncio.sleep(0)
        refused = "victim" not in {each.id for each in commands.pop("n1")}
        for each in work:
            each.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        return refused

    return asyncio.run(run())


# ------------------------------------------------------------------------------------------------ a node that
# is not ours any more


def short_processes(stage: Stage) -> bool:
    """Ranks that live for one report each, 512 at a time, for a hundred reports: all are remembered for an hour."""
    cluster = world()
    for sequence in range(1, 41):
        rows = tuple(
            replace(process(n, job_id=JOB, uid=VICTIM), pid=sequence * 1000 + n, start_ticks=sequence)
            for n in range(512)
        )
        report = Report(node="n1", boot_id="b", agent_id="a", sequence=sequence, processes=rows)
        cluster.apply_report(report, float(sequence))
    run = cluster.runs._runs[JOB]
    return len(run.processes) > 10_000


def report_of_rows(stage: Stage) -> bool:
    """75,000 processes in one report, which has room for them."""
    cluster = world()
    one = process(0, job_id=JOB, uid=VICTIM)
    rows = tuple(replace(one, pid=n, start_ticks=n, role=Role.HELPER, rank=None) for n in range(1, 75_000))
    cluster.apply_report(Report(node="n1", boot_id="b", agent_id="a", sequence=1, processes=rows), 1.0)
    return len(cluster.runs._runs[JOB].processes) > 5_000


def report_of_one_text(stage: Stage) -> bool:
    """A name of four megabytes: within the size of a report, and kept with each row."""
    plain = filled(inspect.type_info(Report))
    plain["processes"][0][Process.__struct_fields__.index("comm")] = "x" * (4 << 20)
    return len(codec.decode_report(msgspec.msgpack.encode(plain)).processes[0].comm) > 100_000


def number_that_is_none(stage: Stage) -> bool:
    """What is not a number: every comparison with it is false."""
    plain = filled(inspect.type_info(Report))
    plain["processes"][0][Process.__struct_fields__.index("cpu_s")] = float("nan")
    with suppress(codec.WireError):
        codec.decode_report(msgspec.msgpack.encode(plain))
        return True
    return False


def brackets_without_end(stage: Stage) -> bool:
    """A report that begins with a hundred thousand brackets: what takes it gives up in a way that nobody expects."""
    try:
        codec.decode_report(b"\x81\xa7unknown" + b"\x91" * 100_000)
    except codec.WireError:
        return False
    except RecursionError:
        return True
    raise AssertionError("it was taken")


def report_flood(stage: Stage) -> bool:
    """A thousand reports at once."""
    known = TokenBuckets(endpoint.REPORTS_AT_ONCE, endpoint.REPORTS_A_SECOND)
    return sum(known.acquire("n1", 100.0) for _ in range(1000)) > 500


def faults_without_end(stage: Stage) -> bool:
    """A thousand GPUs of one node, each with a fault: a thousand incidents."""
    found = [
        Finding(kind=IncidentKind.GPU_FAULT, subject=f"gpu:{n}", truth=Truth.BAD, culprits=(Culprit(node="n1"),), summary="x", severity=Severity.CRITICAL)
        for n in range(1000)
    ]  # fmt: skip
    return len(within_room(found, [], LeftOut())) > 500


# ------------------------------------------------------------------------------------------------ a stranger,
# a curious colleague


def connections_of_one(stage: Stage) -> bool:
    """Two hundred connections from one address."""
    limits = Limits(most=10_000)
    return sum(limits.opened("10.9.9.9", 100.0) == "" for _ in range(200)) > 100


def evidence_of_somebody_else(stage: Stage) -> bool:
    """A member of the socket's group asks for all that there is."""
    answers = doors(PEOPLE["a stranger in the socket's group"], stage.place)
    return any(MARK in text for _, text in answers.values())


def evidence_without_the_password(stage: Stage) -> bool:
    """A user of the management node asks the page's port himself."""
    page = controller(stage.place, f"{PROXY}, operators: [daemon]")
    return get(page, EVIDENCE, headers=named("daemon") | {"Authorization": "Bearer a-guess"})[0] == 200


def name_in_a_header(stage: Stage) -> bool:
    """Somebody who has learnt the proxy's password names an operator, from an address that is no proxy's."""
    page = controller(stage.place, f"{PROXY}, operators: [daemon]")
    return get(page, EVIDENCE, headers=named("daemon"), source="127.0.0.2")[0] == 200


def everybody_locked_out(stage: Stage) -> bool:
    """Somebody with a login at the site's proxy sends wrong passwords: the proxy's address is that of all others, too."""
    page = controller(stage.place, PROXY)
    guesses = [named("games") | {"Authorization": f"Bearer guess {number}"} for number in range(25)]
    assert gets(page, *guesses)[-1] == 429
    return gets(page, *guesses, named("daemon"))[-1] == 429


def unlimited_guesses_by_names(stage: Stage) -> bool:
    """Somebody whose address is no proxy's sends a new name with every guess."""
    page = controller(stage.place, PROXY)
    guesses = [named(f"u{number}") | {"Authorization": f"Bearer guess {number}"} for number in range(25)]
    return 429 not in gets(page, *guesses, source="127.0.0.2")


def nothing(*_: object, **__: object) -> None:
    return None


def same(value: Any, *_: object) -> Any:
    return value


def yes(*_: object) -> bool:
    return True


def blocking(sock: socket.socket) -> tuple[int, int]:
    sock.setblocking(True)
    return peer_of(sock)


ROWS = {
    "a rank by environment": Row("H4", "user", forged_rank, (("slurm_watchdog.controller.state.door._is_of_job", yes),)),
    "a directive by environment": Row("H4", "user", forged_wish, (("slurm_watchdog.controller.state.door._is_wish", yes),)),
    "a kill switch at a program's place": Row("H1", "user", switch_that_is_a_program, (("slurm_watchdog.agent.commands.problem_of_path", nothing),)),
    "a shell runs the kill switch": Row("H1", "user", words_that_a_shell_runs, (("slurm_watchdog.model.kill_switch.clean_field", str),)),
    "a child works as root": Row("C1 C2 L11", "user", root_by_request, (("slurm_watchdog.agent.children.become_user.refusal_as", nothing),)),
    "a set-user-id program as rank": Row("C2", "user", set_user_id_rank, (("slurm_watchdog.agent.children.become_user.refusal_to_look", nothing),)),
    "mounts that never answer": Row("H5", "user", mounts_that_never_answer, (("slurm_watchdog.agent.children.children.Children._may_have", yes), ("slurm_watchdog.agent.children.children.KEPT_FREE", 0), ("slurm_watchdog.agent.children.children.MAX_HUNG_OF_MOUNT", 1000))),
    "thousands of new processes": Row("H5", "user", thousands_of_new_processes, (("slurm_watchdog.agent.proc.table.fair_share", lambda rows, most, owner: (rows[:most], {})),)),
    "memory after the call": Row("L2", "user", memory_after_the_call, (("slurm_watchdog.agent.processes.identify._check_in_call", yes),)),
    "a child is stopped": Row("M1", "user", stopped_child, (("slurm_watchdog.agent.children.look.why_no_answer", nothing),)),
    "another user's supervisor": Row("N6", "user", supervisor_of_a_stranger, (("slurm_watchdog.agent.processes.supervisor_link.peer_of", lambda sock: (os.getpid(), VICTIM)),)),
    "all connections of supervisors": Row("N6", "user", all_connections_of_one, (("slurm_watchdog.agent.processes.supervisor_link.MAX_OF_USER", 1 << 40),)),
    "a supervisor that never reads": Row("N6", "user", peer_that_never_reads, (("slurm_watchdog.agent.processes.supervisor_link.peer_of", blocking),)),
    "a supervisor's line without end": Row("N6", "user", line_without_end, (("slurm_watchdog.agent.processes.supervisor_link.MAX_LINE_BYTES", 16 << 20),)),
    "a pickle for a dump": Row("L12", "user", pickle_for_a_dump, (("slurm_watchdog.parse.flight_recorder_format._NoNames", pickle.Unpickler),)),
    "a debugger's output": Row("M2", "user", output_bomb, (("slurm_watchdog.agent.evidence.stacks.MAX_OUTPUT", 1 << 40),)),
    "empty lines in an error file": Row("H5", "user", empty_lines_in_an_error_file, (("slurm_watchdog.parse.error_file._FRAME", re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)),)),
    "a key in an error line": Row("H6 L6", "user", key_in_an_error_line, (("slurm_watchdog.parse.training_log.text.mask_cut", same),)),
    "a kernel line by a program's name": Row("L1", "user", kernel_line_of_a_name, (("slurm_watchdog.parse.kernel_log.line.USER_TEXT", ()),)),
    "a kernel line in no record of its device": Row("L1", "user", kernel_line_of_another_device, (("slurm_watchdog.parse.kernel_log.line._is_of", yes),)),
    "a storm of one user": Row("M5", "user", storm_of_one, (("slurm_watchdog.controller.policy.guards.over_budget", lambda spent, uid, allowed, most, others: "used up" if spent.total() >= allowed else None),)),
    "a look-alike of slurmstepd": Row("L10", "user", look_alike_of_slurmstepd, (("slurm_watchdog.agent.processes.terminate._is_slurms", yes),)),
    "an agent of attach that is left behind": Row("M8", "user", agent_left_behind, (("slurm_watchdog.agent.service.Service._follow_controller", nothing),)),
    "evidence without end": Row("M10", "user", evidence_without_end, (("slurm_watchdog.controller.evidence.store.EvidenceShare.acquire", nothing),)),
    "all places for evidence": Row("H5", "user", places_for_evidence, (("slurm_watchdog.controller.evidence.collector.OF_ONE_USER", collector.AT_ONCE),)),
    "a node's queue of questions": Row("H5", "user", questions_to_a_node, (("slurm_watchdog.controller.ingest.command_queue.OF_ONE_USER", 1000),)),
    "processes that live for seconds": Row("H3", "node", short_processes, (("slurm_watchdog.controller.state.run_updates.GONE_OF_ROLE", 1 << 40),)),
    "a report of 75,000 processes": Row("H3 H5", "node", report_of_rows, (("slurm_watchdog.controller.state.cluster.admit", lambda report, *_: (report, 0, {})),)),
    "a text of four megabytes": Row("M9", "node", report_of_one_text, (("slurm_watchdog.wire.codec.cut_texts", same),)),
    "a number that is none": Row("L9", "node", number_that_is_none, (("slurm_watchdog.wire.codec.check_numbers", nothing),)),
    "brackets without end": Row("M9", "node", brackets_without_end, (("slurm_watchdog.wire.codec.RecursionError", KeyError),)),
    "a flood of reports": Row("M4", "node", report_flood, (("slurm_watchdog.wire.rate_limits.TokenBuckets.acquire", yes),)),
    "a thousand faults": Row("M9", "node", faults_without_end, (("slurm_watchdog.controller.incidents.judge.OF_ONE", 1 << 40),)),
    "connections of one address": Row("C1", "stranger", connections_of_one, (("slurm_watchdog.wire.rate_limits.Limits.opened", lambda *_: ""),)),
    "somebody else's evidence": Row("H2 M6", "colleague", evidence_of_somebody_else, (("slurm_watchdog.controller.policy.access.may_see", yes),)),
    "evidence without the page's password": Row("M6", "colleague", evidence_without_the_password, (("slurm_watchdog.controller.api.web_page._knows", yes),)),
    "a lock-out of everybody behind the proxy": Row("L11", "user", everybody_locked_out, (("slurm_watchdog.controller.api.web_page.Login.who_tries", lambda _, request: request.remote),)),
    "guesses under new names": Row("L11", "stranger", unlimited_guesses_by_names, (("slurm_watchdog.controller.api.web_page.is_trusted", yes),)),
    "a name in a header": Row("M6", "stranger", name_in_a_header, (("slurm_watchdog.controller.api.web_page.is_trusted", yes),)),
}  # fmt: skip


NEEDS_ROOT = frozenset({"a set-user-id program as rank", "mounts that never answer"})


@pytest.fixture(autouse=True)
def root(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["name"] in NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip("needs root: processes of several users")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ROWS)
def test_an_attack_on_the_build_as_it_is_fails(name: str, stage: Stage) -> None:
    assert not ROWS[name].attack(stage)


@pytest.mark.parametrize("name", ROWS)
def test_the_same_attack_succeeds_where_its_defence_is_taken_out(name: str, stage: Stage) -> None:
    for target, weak in ROWS[name].without:
        stage.patch.setattr(
            target, weak, raising=False
        )  # a name that the module takes from Python's own may be put over it
    assert ROWS[name].attack(stage)
