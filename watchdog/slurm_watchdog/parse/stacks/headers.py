"""Who is dumped, as the text around a dump says it: headers, prefixes of lines, command lines, names of files."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from functools import lru_cache

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.evidence import Frame, ThreadStack

_HOSTLIKE = r"[A-Za-z](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_FILE_WORDS = (
    r"py-?_?spy|pystack|gdb|faulthandler|fault|traces?|stacks?|stacktraces?|dumps?|threads?|hang|hung|bt"
    r"|backtraces?|node|host|process|proc|"
    r"python|raw|all|full|native|output|out|log|stderr|stdout|txt|json|md|report|case|set|main|before"
    r"|after|first|second|third|final|new|old"
)


class DumpHeader(Struct, kw_only=False):
    """What a header says about a process. `label`: a number in front of lines (`srun --label`), of an unknown task."""

    host: str = ""
    rank: int | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    procs_per_node: int = 0
    world: int = 0
    pid: int = 0
    label: int | None = None
    role: str = ""

    def overlaid(self, other: DumpHeader) -> DumpHeader:
        """This, and where the other says something, the other."""
        values = {
            field: getattr(other, field)
            for field in self.__struct_fields__
            if getattr(other, field) not in ("", 0, None) or (getattr(other, field) == 0 and field in _ZERO_IS_KNOWN)
        }
        return replace(self, **values) if values else self

    def followed_by(self, header: DumpHeader) -> DumpHeader:
        """What holds below the next header: a new host forgets the rank, a new rank keeps the host."""
        if header.host:
            return header
        return replace(header, host=self.host, world=self.world, label=self.label)


_ZERO_IS_KNOWN = frozenset({"rank", "local_rank", "node_rank", "label"})

_LABEL = late_regex(r"(\d{1,5}): ?(.*)$", re.S)
_MPI_TAG = late_regex(r"\[[\w.@-]{1,80},(\d{1,6})\]<std(?:out|err)>: ?(.*)$", re.S)
"""`mpirun --tag-output` of Open MPI: `[1,3]<stdout>:`, and `[prterun-n1-77@1,3]<stdout>:` from release 5 on."""
_BRACKETS = late_regex(r"\[([^\]\s]{1,80})\]:? ?(.*)$", re.S)
_RAY = late_regex(r"\(([\w.:-]+)[^)]*?pid=(\d+)(?:, ip=([\w.:-]+))?[^)]*\) ?(.*)$", re.S)
_HOST = late_regex(rf"((?:\./)?(?:[\w.-]+/)*(?:{_HOSTLIKE}|\d+(?:\.\d+){{3}}))(?::|-(?= ))(?:\d+[:-])? ?(.*)$", re.S)
_STRUCTURAL = late_regex(
    r'(?:Process \d+|Python v?3|Fatal Python error|Thread |Current thread|Traceback |\s+\S.*\)$|\s+File "|#\d+ |Error: '
    r"|Reason: |Permission |Failed to |"
    r"\s{8,}\S|$|=+ |-+ |#+ |\*+ )"
)


def parse_prefix(line: str, known: Container[str]) -> tuple[str, DumpHeader | None, str]:
    """(the prefix of a line, what it says, the rest). A prefix counts only if what follows can be part of a dump."""
    first = line[:1]
    if not first or first.isspace() or first in "#`>-*=":
        return "", None, line
    for pattern, read in _PREFIXES:
        match = pattern.match(line)
        if match is None:
            continue
        rest = match[match.lastindex or 1]
        if not _STRUCTURAL.match(rest) or (
            not rest.strip() and line[: match.start(match.lastindex or 1)].strip() not in known
        ):
            continue
        header = read(match)
        if header is None:
            continue
        return line[: match.start(match.lastindex or 1)].strip(), header, rest
    return "", None, line


def _read_brackets(match: re.Match[str]) -> DumpHeader | None:
    text = match[1]
    rank = re.fullmatch(r"(?i)rank[_: =-]?(\d{1,6})", text)
    if rank is not None:
        return DumpHeader(rank=int(rank[1]))
    local = re.fullmatch(r"(?i)(?:default|trainer|worker|local_?rank)_?(\d{1,4})", text)
    if local is not None:
        return DumpHeader(local_rank=int(local[1]))
    pod = re.fullmatch(rf"pod/({_HOSTLIKE})(?:/[\w.-]+)?", text)
    if pod is not None:
        return DumpHeader(host=pod[1])
    both = re.fullmatch(rf"({_HOSTLIKE})[:/](?:rank)?(\d{{1,6}})", text)
    if both is not None:
        return DumpHeader(host=both[1], rank=int(both[2]))
    return DumpHeader(host=text) if re.fullmatch(_HOSTLIKE, text) and re.search(r"\d", text) else None


def _read_host(match: re.Match[str]) -> DumpHeader | None:
    name = match[1]
    if re.fullmatch(
        r"(?i)error|reason|process|thread|python[\d.]*|warning|info|note|traceback|usage|arguments|locals"
        r"|file|root|main|"
        r"py-?spy|pystack|gdb|pdsh|clush|s?run|ssh|sudo|timeout|strace|nsenter|docker|kubectl|(?:ba|da|z)?sh|env",
        name,
    ):
        return None
    if "/" in name or re.search(r"\.(out|txt|log|json)$|^trace-", name):
        return header_of_file(name)
    return DumpHeader(host=name)


_PREFIXES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], DumpHeader | None]], ...] = (
    (_LABEL, lambda match: DumpHeader(label=int(match[1]))),
    (_MPI_TAG, lambda match: DumpHeader(label=int(match[1]))),
    (_BRACKETS, _read_brackets),
    (_RAY, lambda match: DumpHeader(host=match[3] or "", pid=int(match[2]) % 2**31)),
    (_HOST, _read_host),
)

_TOKEN = late_regex(
    r"""(?ix)
    (?P<local> local[_ -]?rank[_ :=\#-]*(?P<local_value>\d{1,4}) | \bgpu[_ :=\#-]*(?P<gpu>\d)\b )
  | (?P<node_rank> node[_-]rank[_ :=\#-]*(?P<node_rank_value>\d{1,5}) )
  | (?P<rank> \b(?:global[_ -]?|world[_ -]?)?rank[_ :=\#-]*(?P<rank_value>\d{1,6})
        (?:\s*(?:/|of)\s*(?P<world>\d{1,6}))? )
  | (?P<pid> \bpid[_ :=\#-]*(?P<pid_value>\d{1,8}) )
  | (?P<host> \b(?P<word>node(?:name)?|host(?:name)?|machine|server|pod|ip)\b[_ :=\#-]*
        (?P<host_value>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?) )
  | (?P<date> \d{4}-\d\d-\d\d[T ]?[\d:.,+Z]* | \b\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d+)?\b )
  | (?P<filler> \b(?:on|at|for|of|from|the|stacks?|traces?|py-?spy|dump(?:ed|s)?|process(?:es)?|
        begin|end|start|output|python|world|size|main|thread|nodes?|
        (?:snapshot|attempt|sample|round|dump|job|jobid|step)[ _\#=:]*\d+)\b )
  | (?P<name> [A-Za-z0-9][\w./-]*[A-Za-z0-9] | [A-Za-z0-9] )
    """
)  # fmt: skip
FOREIGN_CHARS = 40  # A header in another language is no longer; what is, is a sentence.
_FOREIGN = late_regex(r"[^\x00-\x7f]+")
_ELSEWHERE = {
    "rank": ("rang", "rango", "ранг", "ランク", "랭크", "秩"),
    "node": ("knoten", "nœud", "noeud", "nodo", "узел", "ノード", "节点", "節點", "노드", "węzeł"),
}
"""What the two words are called by those who do not write English."""
_ENGLISH = {word: english for english, words in _ELSEWHERE.items() for word in words}
_FOREIGN_WORD = late_regex(
    rf"(?<![^\W\d_])(?:{'|'.join(sorted(_ENGLISH, key=len, reverse=True))})(?![^\W\d_])", re.IGNORECASE
)
_PROC_STACK = late_regex(r"\W*/proc/([1-9]\d{0,8})/stack\W*$")
_DECORATION = " \t#=-*_>:[](){}<>|`~,;+.!\"'&$"


@lru_cache(maxsize=4096)
def parse_header(line: str) -> DumpHeader | None:
    """What a line between dumps says, and nothing else: `=== n1 rank 3 ===`, `Node 48:`, `==> trace-n1.out <==`."""
    if not 1 < len(line) <= 160 or line[:4] == "    ":
        return None
    shell = re.match(r"^\W*ssh(?: -\S+)* (?:[\w.-]+@)?([A-Za-z][\w.-]*\d[\w.-]*)\s*$", line)
    if shell is not None:
        return DumpHeader(host=shell[1])
    if (process := _PROC_STACK.match(line)) is not None:
        return DumpHeader(pid=int(process[1]))
    text = _in_english(line.strip())
    bare = text.strip(_DECORATION)
    if not bare.isascii() and len(bare) <= FOREIGN_CHARS and text.endswith((":", "：", "=", "-", "】", "]")):
        bare = _FOREIGN.sub(" ", bare).strip(_DECORATION)  # a word of another language beside the rank
    if not bare:
        return None
    decorated = bool(re.match(r"^(==+|--+|\#+|\*\*|\[|>>+|::+|=+>|<<+|~~+|@+)", text)) or text.endswith(":")
    if (file := re.fullmatch(r"(?:==> |\.?/)?((?:[\w.-]+/)*[\w.-]+?)(?: <==)?:?", text.strip("#*` "))) is not None and (
        "<==" in text
        or re.search(r"\.(out|txt|log|json|stack|dump)$", file[1])
        or re.fullmatch(rf"trace-{_HOSTLIKE}", file[1])
    ):
        header = header_of_file(file[1])
        return header if header != DumpHeader() else None
    return _by_tokens(bare, decorated)


def _in_english(text: str) -> str:
    """The header with its word for a rank or a node in English, if it has no English one besides."""
    low = text.lower()

    def translated(found: re.Match[str]) -> str:
        english = _ENGLISH[found[0].lower()]
        return found[0] if english in low else english

    return _FOREIGN_WORD.sub(translated, text)


def _by_tokens(text: str, decorated: bool) -> DumpHeader | None:
    header, names, position = DumpHeader(), list[str](), 0
    for match in _TOKEN.finditer(text):
        if text[position : match.start()].strip(_DECORATION + "/@%"):
            return None
        position = match.end()
        if match["local"]:
            header = replace(header, local_rank=int(match["local_value"] or match["gpu"]))
        elif match["node_rank"]:
            header = replace(header, node_rank=int(match["node_rank_value"]))
        elif match["rank"]:
            header = replace(header, rank=int(match["rank_value"]), world=int(match["world"] or 0))
        elif match["pid"]:
            header = replace(header, pid=int(match["pid_value"]))
        elif match["host"]:
            value = match["host_value"]
            header = replace(header, host=f"{match['word']} {value}" if value.isdigit() else value)
        elif match["name"]:
            names.append(match["name"])
    if text[position:].strip(_DECORATION):
        return None
    plain = [name for name in names if not re.fullmatch(_FILE_WORDS, name, re.I)]
    known = header.rank is not None or header.local_rank is not None or bool(header.host) or bool(header.pid)
    if len(plain) > 1 or (plain and not known and not decorated):
        return None
    if plain:
        hostlike = re.fullmatch(_HOSTLIKE, plain[0]) and re.search(r"\d", plain[0])
        if header.host or not hostlike:
            return None
        header = replace(header, host=plain[0])
    return header if header != DumpHeader() else None


@lru_cache(maxsize=4096)
def header_of_file(path: str, pids: tuple[int, ...] = ()) -> DumpHeader:
    """What a file's name says: `rank_12.txt`, `stack-n07-4711.json`, `n07/rank3.txt`. `pids` are those it holds."""
    redirected = _REDIRECTED.search(path)
    if redirected is not None:
        return DumpHeader(label=int(redirected[1]))
    parts = path.split("/")
    header = _by_name(parts[-1], pids)
    for folder in reversed(parts[:-1][-3:]):
        outer = _by_name(folder, ())
        header = replace(outer, label=None).overlaid(header) if header.host != folder else header
    return header


_OCCASION = (
    r"(?<![a-z\d])(?:samples?|snapshots?|rounds?|attempt|take|pass|try|run|iter(?:ation)?|step|job(?:id)?)"
    r"[-_]?\d{1,10}(?![a-z\d])"
)
"""In a name: which of several dumps it is, or of which job; no node and no rank."""
_REDIRECTED = late_regex(r"(?:^|/)attempt_\d+/(\d{1,5})/(?:stdout|stderr|error)\.\w+$")
"""Where torchrun writes what a rank of its node prints (`--redirects`, `--tee`)."""
_HOST_FILE = late_regex(
    r"(?i)(?:^|/)(?:trace|stacks?|py-?spy|dumps?)[-_][^/]*$|(?:^|[/._-])(?:node|host|gpu|compute|worker"
    r"|nid|cn|n|r\d+n|dgx|h100|a100|ip)[-_]?\d[^/]*$|\d+(?:\.\d+){3}"
)
_INTERPRETER = late_regex(r"(^|/)(python|pypy)[\d.]*$")
_RULE = late_regex(r"(?:-{3,}|={3,})\s*$")
_BETWEEN_RULES = late_regex(r"([A-Za-z][\w.,\[\]-]{0,2000}?)(?: \(\d+\))?\s*$")


def is_rule(line: str) -> bool:
    """Whether a line is nothing but dashes: `clush -b` and `dshbak` write a node's name between two of them."""
    return _RULE.match(line) is not None


def header_below_rule(line: str) -> DumpHeader | None:
    """What a line directly below a rule names: `gpu03`, or `gpu[01-02,04]` where several nodes wrote the same."""
    name = _BETWEEN_RULES.match(line)
    return DumpHeader(host=name[1]) if name is not None and re.search(r"\d", name[1]) else None


def is_named_for_its_host(path: str) -> bool:
    """Whether a file is named for its node by a custom (`trace-jean-07.out`, `gpu07.txt`), and not for the occasion."""
    return _HOST_FILE.search(path) is not None


def _by_name(name: str, pids: tuple[int, ...]) -> DumpHeader:
    if name.endswith((".md", ".markdown", ".rst")):
        return DumpHeader()
    address = re.match(r"(?:.*[_-])?(\d{1,3}(?:\.\d{1,3}){3})(?!\d)", name)
    if address is not None:
        return DumpHeader(host=address[1])
    stem = re.sub(
        r"(\.(gz|txt|out|log|json|jsonl|err|dump|stacks?|trace|pyspy|spy|bt|gdb|tmp))+$", "", name, flags=re.I
    )
    header = DumpHeader()
    for field, pattern in (
        (
            "local_rank",
            r"(?<![a-z])(?:local[_-]?rank[_-]?|lrank[_-]?|(?:gpu|cuda)[_-]?(?=\d(?:[_.-]|$)))(\d{1,4})(?!\d)",
        ),
        ("node_rank", r"(?<![a-z])node[_-]?rank[_-]?(\d{1,5})(?!\d)"),
        ("rank", r"(?<![a-z])(?:global[_-]?|g)?rank[_-]?(\d{1,6})(?!\d)"),
        ("pid", r"(?<![a-z])pid[_-]?(\d{1,8})(?!\d)"),
    ):
        match = re.search(pattern, stem, re.I)
        if match is not None and not (len(pids) > 1 and match[0].lower().startswith(("gpu", "cuda"))):
            header = replace(header, **{field: int(match[1])})
            stem = f"{stem[: match.start()]}-{stem[match.end() :]}"
    stem = re.sub(_OCCASION, "-", stem, flags=re.I)
    stem = re.sub(r"(?<!\d)20\d\d-?\d\d-?\d\d([T_-]?\d\d[-:]?\d\d([-:]?\d\d)?)?(?!\d)", "-", stem)
    trailing = re.search(r"(?:^|[-_.])(\d{1,8})$", stem.strip("-_. "))
    if trailing is not None and (int(trailing[1]) in pids or (len(trailing[1]) >= 5 and not header.pid)):
        header = replace(header, pid=int(trailing[1]))
        stem = stem.strip("-_. ")[: trailing.start()]
    words = rf"(?:{_FILE_WORDS})"
    stem = re.sub(rf"^(?:{words}(?:[-_.]+|$))+", "", stem.strip("-_. "), flags=re.I)
    stem = re.sub(rf"(?:(?:^|[-_.]+){words})+$", "", stem, flags=re.I).strip("-_. ")
    number = re.fullmatch(rf"(?:(?!node|host){words}|worker|actor|trainer|task|w|p|r)?[-_]?(\d{{1,5}})", stem, re.I)
    if number is not None:
        return replace(header, label=int(number[1])) if header.rank is None else header
    if re.fullmatch(_HOSTLIKE, stem) and re.search(r"\d", stem):
        return replace(header, host=stem)
    return header


def header_of_command(command: str) -> DumpHeader:
    """What a command line says: `--rank`, `RANK=`, `--local_rank`, `--node_rank`, `--world_size`, `--nproc_per_node`"""

    def value(*names: str) -> int | None:
        for name in names:
            match = re.search(rf"(?<![\w-])-{{0,2}}{name}[= ](\d{{1,6}})(?![\w.])", command)
            if match is not None:
                return int(match[1])
        return None

    return DumpHeader(
        rank=value(
            "RANK",
            "SLURM_PROCID",
            "OMPI_COMM_WORLD_RANK",
            "PMI_RANK",
            "-global[_-]rank",
            "-rank",
            "-process[_-]id",
            "-process[_-]index",
        ),
        local_rank=value("LOCAL_RANK", "SLURM_LOCALID", "-local[_-]rank", "-local[_-]process[_-]index"),
        node_rank=value("NODE_RANK", "GROUP_RANK", "SLURM_NODEID", "-node[_-]rank", "-machine[_-]rank"),
        procs_per_node=value("LOCAL_WORLD_SIZE", "-nproc[_-]per[_-]node", "-num[_-]gpus") or 0,
        world=value("WORLD_SIZE", "SLURM_NTASKS", "-world[_-]size", "-num[_-]processes") or 0,
    )


def program_of(command: str) -> str:
    """What a command line runs, without what it is given: `python -m torch.distributed.run`, `/usr/bin/torchrun`. Of a
    script's own arguments (`--report_to tensorboard --output_dir x`) nothing can be told."""
    words = command.split()
    if not words or not _INTERPRETER.search(words[0]):
        return " ".join((*words[:2], ""))
    for at in range(1, len(words)):
        if words[at] == "-c":
            return command
        if words[at] == "-m":
            return " ".join((*words[: at + 2], ""))
        if not words[at].startswith("-") and words[at - 1] not in ("-X", "-W"):
            return " ".join((*words[: at + 1], ""))
    return command


# Where the interpreter begins to run a program.
AT_EXIT = Frame(function="_run_exitfuncs", file="atexit")
"""Who calls an exit handler: the interpreter itself, which shows no frame of its own for it."""
ROOTS = ("<module>", "_run_module_as_main", "_shutdown")
"""Where a program's own main thread begins; all else that the interpreter calls in it, it calls when the program is
over. `threading._shutdown`, which waits for other threads then, says so by its own name."""


class Dump(Struct):
    """The stacks of one process, once, and what the text around them says of the process."""

    source: str = ""  # The file.
    at: int = 0  # Its place among the dumps of that file, from 0.
    header: DumpHeader = DumpHeader()
    pid: int = 0  # 0 if unknown.
    parent: int = 0
    command: str = ""
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None
