"""Dumps in texts: which processes are ranks, which rank each is, which dumps are of one process at another time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import plural
from slurm_watchdog.diagnose.stacks.places import frame_key, is_native, main_thread, normal_file, place_of
from slurm_watchdog.knowledge.stack_frames import NO_RANK_COMMANDS, NO_RANKS, Place
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.observations import Role
from slurm_watchdog.parse.stacks import headers as head
from slurm_watchdog.parse.stacks.frame_lines import begins_program
from slurm_watchdog.parse.stacks.headers import Dump, DumpHeader
from slurm_watchdog.parse.stacks.py_spy_json import why_broken
from slurm_watchdog.parse.stacks.text import parse_stacks

MAX_DUMPS = 200_000
MAX_WORDS = 65_536  # Characters of a file without stacks in which its first words are looked for.
MAX_TID = 2**23  # Numbers of threads are below (PID_MAX_LIMIT is 2**22), addresses above.
CONTAINER_PID = 500
"""In containers ranks of different nodes often have the same small pids; without a host their files tell them apart."""
_RAY = late_regex(r"(^|/)ray/|(^|/)threading\.py$")
"""Frames by which Ray calls a function of the program: all its processes have them."""
_NO_PYTHON = late_regex(r"find python version|no such process", re.IGNORECASE)
"""What py-spy says of a shell whose command line has the name of the script in it, which `pgrep -f` lists as well."""
_INNER = 8  # So deep below its callers Ray waits for an object.


class RankProcess(Struct):
    """One rank, with every dump of it in the order in which they were given."""

    host: str = ""
    rank: int | None = None
    pid: int = 0
    dumps: tuple[ProcessStack, ...] = ()
    error: str | None = None  # Why it could not be dumped; None if it could, at least once.
    source: str = ""


class RankAssignment(Struct):
    """Who is who in a set of dumps."""

    ranks: tuple[RankProcess, ...] = ()
    others: tuple[tuple[str, Dump], ...] = ()  # (what it is, its dump): workers, launchers, services.
    world: int = 0  # How many ranks the job has, as far as anything says so; 0 if nothing does.


Key = tuple[str, int, int, str]


def dumps_of(texts: Mapping[str, str], nodes_of: Callable[[str], Sequence[str]]) -> tuple[list[Dump], list[str]]:
    """The dumps in the texts of files, by name, whatever their order; what is broken, and was read in part, or not.
    `nodes_of` a set of nodes gives their names, or raises ValueError."""
    dumps: list[Dump] = []
    spoilt: list[str] = []
    parsed = {name: parse_stacks(texts[name], name) for name in sorted(texts)}
    headers = {name: head.header_of_file(name) for name in parsed}
    whose = {name: (each.host, each.rank, each.label, each.local_rank) for name, each in headers.items()}
    told = {whose[name] for name, found in parsed.items() if found}
    for name, found in parsed.items():
        broken = "" if found and texts[name].rstrip().endswith(("]", "}")) else why_broken(texts[name])
        if broken:
            was_read = f"; of what is whole in it {plural(len(found), 'dump was', 'dumps were')} read"
            spoilt.append(f"{name}: {broken}{was_read if found else ''}")
        if found:
            dumps += found
        elif len(texts) > 1 and whose[name] not in told and whose[name][:3] != ("", None, None):
            # A rank that could not be dumped. Beside a rank's stacks there may be other files of it: they are no ranks.
            dumps.append(Dump(source=name, error=broken or _first_words(texts[name])))
    return list(islice((each for dump in dumps for each in _of_each_node(dump, nodes_of)), MAX_DUMPS)), spoilt


def _first_words(text: str) -> str:
    """Those of a file without stacks, which may say why."""
    words = next((line.strip() for line in text[:MAX_WORDS].splitlines() if line.strip()), "")
    plain = words.isprintable() and "\ufffd" not in words
    return words[:200] if words and plain else "its file holds no stack" if text else "its file is empty"


def _of_each_node(dump: Dump, nodes_of: Callable[[str], Sequence[str]]) -> Iterator[Dump]:
    """A dump that several nodes wrote alike (`gpu[01-02]`, as `clush -b` and `dshbak -c` print it) is one of each."""
    nodes: Sequence[str] = (dump.header.host,)
    if "[" in dump.header.host or "," in dump.header.host:
        with suppress(ValueError):
            nodes = nodes_of(dump.header.host)
    for node in nodes:
        yield replace(dump, header=replace(dump.header, host=node)) if len(nodes) > 1 else dump


def assign_ranks(dumps: Sequence[Dump], world: int | None = None) -> RankAssignment:
    """Sorts dumps into ranks and others. `world` is the number of ranks, if it is known."""
    with_commands = [_with_command(dump) for dump in _with_pids_of_files(dumps)]
    world = world or max((dump.header.world for dump in with_commands), default=0)
    candidates: list[Dump] = []
    others: list[tuple[str, Dump]] = []
    for dump in with_commands:
        reason = no_rank(dump)
        if reason:
            others.append((reason, dump))
        else:
            candidates.append(dump)
    for what, find in (
        ("another program", _other_programs),
        ("a driver of Ray", _ray_drivers),
        ("an idle worker of Ray", _idle_ray_workers),
    ):
        odd = find(candidates)
        others += [(what, dump) for dump in odd]
        left_out = {id(dump) for dump in odd}
        candidates = [dump for dump in candidates if id(dump) not in left_out]
    processes = _by_process(candidates, world)
    processes, seconds = _numbered(processes, world)
    others += [("a second process of its rank", dump) for each in seconds for dump in each]
    ranks = tuple(sorted((_process(index, each) for index, each in enumerate(processes)), key=_order))
    return RankAssignment(ranks=ranks, others=tuple(others), world=world)


def no_rank(dump: Dump) -> str:
    """What a process is if its frames (the innermost first) or its command say that it holds no rank; else empty."""
    if dump.header.role in ("worker", "helper"):
        return f"a {dump.header.role}"
    if dump.error is not None and dump.header.rank is None and _NO_PYTHON.search(dump.error):
        return "no Python process, or one that had ended"
    thread = main_thread(_stack(dump, 0))
    for frame in thread.frames if thread is not None else ():
        name = frame.function.rpartition(".")[2]
        if name == "_wrap" and re.search(r"(^|/)(spawn|api)\.py$", frame.file):
            return ""
        for reason, function, file in NO_RANKS:
            if re.fullmatch(function, name) and re.fullmatch(file if file != r".*" else r"(?s).*", frame.file):
                return reason
    program = head.program_of(dump.command)
    return next((reason for reason, pattern in NO_RANK_COMMANDS if re.search(pattern, program)), "")


def _with_pids_of_files(dumps: Sequence[Dump]) -> list[Dump]:
    """With what the name of each file says; what stands in the text counts more."""
    in_file: dict[str, set[int]] = {}
    for dump in dumps:
        in_file.setdefault(dump.source, set()).add(dump.pid)
    pids = {source: tuple(sorted(each)) for source, each in in_file.items()}
    found = []
    for dump in dumps:
        by_file = head.header_of_file(dump.source, pids[dump.source])
        if len(pids) == 1 and not head.is_named_for_its_host(dump.source):
            by_file = replace(by_file, host="")  # someone's name for the only file there is
        if len(pids) == 1 and len(pids[dump.source]) > 1:
            by_file = replace(
                by_file, rank=None, local_rank=None
            )  # it names one of those that it holds, or what was seen
        found.append(replace(dump, header=replace(by_file, pid=0).overlaid(dump.header), pid=dump.pid or by_file.pid))
    return found


def _with_command(dump: Dump) -> Dump:
    command = head.header_of_command(dump.command) if dump.command else DumpHeader()
    header = replace(command, rank=None).overlaid(dump.header)
    return replace(dump, header=header)


def _other_programs(dumps: Sequence[Dump]) -> list[Dump]:
    """Processes that run another script than the majority does, and forked children where most are none. What is the
    only one to have a rank is that rank, whatever it runs."""
    of_rank = Counter(dump.header.rank for dump in dumps)
    scripts: dict[int, tuple[str, bool]] = {}
    for index, dump in enumerate(dumps):
        thread = main_thread(_stack(dump, 0))
        if thread is None or len(thread.frames) < 3:
            continue
        own = [frame for frame in thread.frames if not is_native(frame.file)]
        forked = any(f.function.endswith("_bootstrap") and f.file.endswith("multiprocessing/process.py") for f in own)
        script = own[-1].file if own and own[-1].function == "<module>" else ""
        scripts[index] = (normal_file(script).rpartition("/")[2], forked)
    odd = []
    for position in (0, 1):
        counts = Counter(each[position] for each in scripts.values())
        if len(counts) < 2:
            continue
        common, many = counts.most_common(1)[0]
        if many <= len(scripts) / 2 or common in ("", True):
            continue
        odd += [
            dumps[i]
            for i, each in scripts.items()
            if each[position] != common and each[position] not in ("", False)
            if dumps[i].header.rank is None or of_rank[dumps[i].header.rank] > 1
        ]
    return odd


def _ray_drivers(dumps: Sequence[Dump]) -> list[Dump]:
    """Those that wait for a Ray object below a function of their own: the trainer of a reinforcement learning job that
    waits for what its workers do. A worker that waits for its data is below the same function as its peers."""
    begins, waits = dict[int, str](), set[int]()
    for index, dump in enumerate(dumps):
        thread = main_thread(_stack(dump, 0)) if dump.header.rank is None else None
        if thread is None:
            continue
        own = [frame for frame in thread.frames if not is_native(frame.file) and not _RAY.search(frame.file)]
        begins[index] = frame_key(own[-1]) if own else ""
        if any(place_of(frame.function, frame.file) is Place.REMOTE for frame in thread.frames[:_INNER]):
            waits.add(index)
    often = Counter(begins.values())
    return [dumps[i] for i in sorted(waits) if len(waits) < len(begins) and often[begins[i]] == 1]


def _idle_ray_workers(dumps: Sequence[Dump]) -> list[Dump]:
    """Those without a rank, among others that have one, that Ray keeps for the next task: no frame is the program's."""
    ranked = any(dump.header.rank is not None for dump in dumps)
    return [dump for dump in dumps if ranked and dump.header.rank is None and _is_idle_ray_worker(dump)]


def _is_idle_ray_worker(dump: Dump) -> bool:
    own = [frame for thread in dump.threads for frame in thread.frames if begins_program(thread.frames)]
    return bool(own) and all(is_native(frame.file) or re.search(r"(^|/)ray/", frame.file) for frame in own)


def _by_process(dumps: Sequence[Dump], world: int) -> list[list[Dump]]:
    """The dumps of each process. If there are as many dumps as ranks, each is a rank of its own."""
    each_its_own = 0 < world == len(dumps)
    found: dict[Key | int, list[Dump]] = {}
    for index, dump in enumerate(dumps):
        header = dump.header
        place = header.host or (
            f"label {header.label}" if header.label is not None and dump.pid < CONTAINER_PID else ""
        )
        if not place and header.rank is None and 0 < dump.pid < CONTAINER_PID:
            place = dump.source
        rank = header.rank if header.rank is not None else -1
        key: Key | int = index
        if each_its_own:
            pass
        elif dump.pid or rank >= 0:
            key = (place, dump.pid, rank, "")
        elif address := _address_of_main(dump):
            key = (place or dump.source, 0, rank, address)
        found.setdefault(key, []).append(dump)
    return list(found.values())


def _address_of_main(dump: Dump) -> str:
    """The address by which faulthandler names the main thread: `dump_traceback_later(repeat=True)` writes one
    process again and again, with no pid. Two programs have it at different addresses; a forked child has its
    parent's, and is left out."""
    thread = main_thread(_stack(dump, 0))
    if thread is None or thread.thread_id < MAX_TID:
        return ""
    forked = any(
        f.function.endswith("_bootstrap") and f.file.endswith("multiprocessing/process.py") for f in thread.frames
    )
    return "" if forked else hex(thread.thread_id)


def _numbered(processes: list[list[Dump]], world: int) -> tuple[list[list[Dump]], list[list[Dump]]]:
    """(processes with their rank, processes that can only be children of another). No two have the same rank."""
    seconds: list[list[Dump]] = []
    by_rank: dict[int, list[list[Dump]]] = {}
    for each in processes:
        rank = each[0].header.rank
        if rank is not None:
            by_rank.setdefault(rank, []).append(each)
    for same in by_rank.values():
        if len(same) > 1:
            hosts = {each[0].header.host for each in same}
            if len(hosts) == 1 and len(same) < len(processes) and all(each[0].pid for each in same):
                same.sort(key=lambda each: each[0].pid)
                seconds += same[1:]
            else:
                for each in same:
                    _set_rank(each, None)
    processes = [each for each in processes if not any(each is second for second in seconds)]
    for source in (_rank_by_command, _rank_by_node_and_place, _rank_by_label):
        without = [each for each in processes if each[0].header.rank is None]
        if not without:
            break
        taken = {each[0].header.rank for each in processes}
        ranks = [source(each[0]) for each in without]
        known = [rank for rank in ranks if rank is not None]
        sound = (
            len(set(known)) == len(known) and not taken & set(known) and (not world or all(r < world for r in known))
        )
        if source is _rank_by_label:  # dump1, dump2 may be anything; 0 to n-1 are ranks
            sound = sound and len(known) > 1 and 0 in known and max(known) < 2 * len(known)
        if sound and (source is _rank_by_command or len(known) == len(without) == len(processes)):
            for each, rank in zip(without, ranks, strict=True):
                _set_rank(each, rank)
    return processes, seconds


def _set_rank(process: list[Dump], rank: int | None) -> None:
    process[:] = [replace(dump, header=replace(dump.header, rank=rank)) for dump in process]


def _rank_by_command(dump: Dump) -> int | None:
    return head.header_of_command(dump.command).rank if dump.command else None


def _rank_by_node_and_place(dump: Dump) -> int | None:
    header = dump.header
    if header.node_rank is None or header.local_rank is None or not header.procs_per_node:
        return None
    return header.node_rank * header.procs_per_node + header.local_rank


def _rank_by_label(dump: Dump) -> int | None:
    return dump.header.label  # in front of each line, or the name of each file


def _process(index: int, dumps: list[Dump]) -> RankProcess:
    good = [dump for dump in dumps if dump.error is None]
    newest = (good or dumps)[-1]
    host = newest.header.host
    if not host and newest.header.label is not None and newest.header.rank is None:
        host = f"task {newest.header.label}"
    return RankProcess(
        host=host,
        rank=newest.header.rank,
        pid=newest.pid,
        dumps=tuple(replace(_stack(dump, index), node=host, rank=newest.header.rank) for dump in good),
        error=None if good else newest.error,
        source=newest.source,
    )


def _stack(dump: Dump, index: int) -> ProcessStack:
    return ProcessStack(
        node=dump.header.host, pid=dump.pid, start_ticks=index, job_id="", role=Role.RANK, rank=dump.header.rank,
        threads=dump.threads, error=dump.error,
    )  # fmt: skip


def _order(process: RankProcess) -> tuple[object, ...]:
    frames = process.dumps[-1].threads[0].frames[:1] if process.dumps and process.dumps[-1].threads else ()
    name = frames[0].function if frames else ""
    return (process.rank if process.rank is not None else 1 << 40, process.host, process.pid, process.source, name)
