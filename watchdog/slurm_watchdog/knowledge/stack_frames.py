"""Known frames: which function in which file means that a rank waits for its peers, for data, for storage:
`data/stack_frames.conf`.

A row is (place, function pattern, file pattern); patterns are whole-match regular expressions, the first row
that fits wins. Sources: torch, DeepSpeed, Megatron-LM, accelerate, Lightning, JAX, Ray, Horovod and mpi4py as
their users' dumps show them, the interpreter's own library, and clients that upload a checkpoint. Native frames
(`py-spy --native`, gdb) have a table of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

import msgspec

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.entries import Fields, Reader, read_shipped
from slurm_watchdog.knowledge.site_rows import SiteRows

# Words that tell what a rank may be about where its frames are no one's but the program's own: a loop of pure Python that
# goes round for minutes may be an index that is built, a score that is computed. They are matched whole, in lower case,
# as `operation_words` cuts a name; `x*` is any word that begins so. The list errs on the side of work: a name in it costs
# a later verdict, and never an accusation.
WORK: Final[tuple[str, ...]] = tuple(
    """
    eval* valid* test* metric* scor* bleu* rouge* meteor wer cer ppl perplex* accuracy recall distance* edit* leven*
    align* judge* verif* sanity sav* dump* export* conver* serial* deserial* pickl* load loads loading restor*
    checkpoint* ckpt* consolidat* shard* gather* upload* download* read reads reading reader writ* copy* compress*
    zip* build* index* indic* token* detoken* pack* shuffl* sort* merg* dedup* filter* bucket* count counts counting
    stats statistics hist* map mapping collat* encod* decod* pars* json* yaml* csv* regex* clean* normali* augment*
    transform* prepar* preproc* process processing postproc* mask* sampl* generat* infer* predict* compil* jit* trace
    tracing autotun* tune tuning quant* calib* bench* profil* warm* setup* init* import* analy* cluster* kmeans hash*
    matching matcher* search* mcts rollout* simul* env envs environment episode* solv* assign* hungarian partition*
    balanc* plan planning tree* graph* comput* calc* crunch* work works workload burn* report* summar* plot* draw*
    render* visuali* print* log logs logging collect gc walk* scan* skip* interpolat*
    """.split()  # noqa: SIM905  a table of words
)

WAITING: Final[tuple[str, ...]] = ("wait*", "poll*", "spin*", "until", "ready", "await*")
"""What is called so does nothing until another does something."""


@lru_cache(maxsize=8192)
def operation_words(name: str) -> frozenset[str]:
    """`Trainer._buildIndex2` -> trainer, build, index."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return frozenset(part.lower() for part in parts)


@lru_cache(maxsize=8192)
def has_word(name: str, words: tuple[str, ...]) -> bool:
    """Whether one of the words of a name is in `words`."""
    found = operation_words(name)
    return not found.isdisjoint(words) or any(
        word.startswith(stem[:-1]) for stem in words if stem.endswith("*") for word in found
    )


class Place(StrEnum):
    """Where a rank's main thread stands."""

    COLLECTIVE = "waits in a collective"
    P2P = "waits for a neighbour in the pipeline"
    RENDEZVOUS = "waits for the other ranks to join"
    DATALOADER = "waits for its data loader"
    CHECKPOINT = "writes or reads a checkpoint"
    TEARDOWN = "is shutting down"
    DEBUGGER = "sits at a debugger prompt"
    LOCK = "waits for a lock"
    QUEUE = "waits for a queue"
    BACKWARD = "is in the backward pass"
    """DistributedDataParallel reduces gradients in there: a rank that waits for its peers shows no collective."""
    DEVICE = "waits for its GPU"
    """Which may in turn wait for the other ranks: with NCCL collectives the wait shows up here."""
    NETWORK = "talks to a server over the network"
    FILESYSTEM = "is in a call to a file system"
    COMPILATION = "compiles"
    PREPARATION = "prepares its data set"
    TOKENIZER = "tokenizes"
    IMPORT = "imports modules"
    SUBPROCESS = "waits for a process it started"
    SLEEP = "sleeps"
    COLLECTING = "collects garbage"
    SIGNAL = "is in a signal handler"
    REMOTE = "waits for a Ray object"
    GIL = "waits for the interpreter's lock"
    CRASH = "is crashing"
    STOPPED = "is stopped"  # By a signal or a debugger: /proc says so, and no frame.
    OTHER = "runs elsewhere"


CLASSES: Final[dict[Place, str]] = {place: place.name.lower() for place in Place} | {
    Place.P2P: "pipeline",
    Place.DEVICE: "device_wait",
    Place.PREPARATION: "data_preparation",
    Place.COLLECTING: "garbage_collection",
    Place.SIGNAL: "signal_handler",
    Place.REMOTE: "ray",
    Place.OTHER: "working",
}
"""The word for a place in `group-stacks --json`."""

_PLACES = {word: place for place, word in CLASSES.items()}


def _place(fields: Fields) -> Place:
    return _PLACES[fields.name_of(tuple(_PLACES)) or CLASSES[Place.OTHER]]


def _row(*keys: str, name: Callable[[Fields], str] | None = None) -> Reader:
    """A row: what the name of its section means (None: it is for people), and its expressions, matched as a whole."""
    return lambda fields: (*((name(fields),) if name else ()), *(fields.alternatives(key) for key in keys))


def _word(fields: Fields) -> str:
    return fields.entry.name


READERS: Final[Mapping[str, Reader]] = {
    "frame": _row("function", "file", name=_place),
    "native": _row("function", name=_place),
    "context": _row("function", "file", name=_word),
    "not_a_rank": _row("function", "file", name=_word),
    "not_a_rank_command": _row("command", name=_word),  # Searched for in a command line.
    "thread": _row("thread", "function", name=_word),
    "idle_loop": _row("function", "file"),
    "momentary": _row("function", "file"),
}
_SHIPPED = read_shipped("stack_frames.conf", READERS)
FRAMES: Final[tuple[tuple[Place, str, str], ...]] = _SHIPPED["frame"]
NATIVE: Final[tuple[tuple[Place, str], ...]] = _SHIPPED["native"]
"""Native functions, innermost first; what they mean where the Python frames say nothing better."""


class FrameTable(msgspec.Struct, frozen=True, eq=False):
    """The rows in force; the first that fits wins."""

    frames: tuple[tuple[Place, str, str], ...]
    native: tuple[tuple[Place, str], ...]


def frame_table() -> FrameTable:
    """The rows in force in this process."""
    return _table(site_rows.current())


@lru_cache(maxsize=2)
def _table(site: SiteRows) -> FrameTable:
    return FrameTable(
        site.before("frame", FRAMES, lambda row: row[0]), site.before("native", NATIVE, lambda row: row[0])
    )


CONTEXTS: Final[tuple[tuple[str, str, str], ...]] = _SHIPPED["context"]
"""What a rank is about as a whole, whatever its innermost frame: (context, function pattern, file pattern)."""

NO_RANKS: Final[tuple[tuple[str, str, str], ...]] = _SHIPPED["not_a_rank"]
"""Frames of processes of a job that hold no rank. A forked child keeps its parent's command line: its frames tell."""

NO_RANK_COMMANDS: Final[tuple[tuple[str, str], ...]] = _SHIPPED["not_a_rank_command"]

THREADS: Final[tuple[tuple[str, str, str], ...]] = _SHIPPED["thread"]
"""What a thread other than the main one is for: (role, pattern of its name, pattern of a function in it)."""

TRAINING_THREAD = r"TrainingThread\(.*"
"""The thread in which Ray Train trains (`ray/train/v2/_internal/execution/worker_group/thread_runner.py`)."""

IDLE_LOOPS: Final[tuple[tuple[str, str], ...]] = _SHIPPED["idle_loop"]
"""Where a main thread stands that lets another thread train (Ray, notebooks)."""

WAITING_ROOMS = (
    r"(.*/(lib/)?python3\.\d+t?/((site|dist)-packages/)?)?(threading|queue|selectors|socket|ssl|subprocess|popen_fork|popen_spawn_posix|"
    r"concurrent/.*|asyncio/.*|multiprocess(ing)?/.*|contextlib|_weakrefset|functools)\.py"
)
"""Frames of the interpreter's own waiting rooms: what matters is who called them. `connection.py` and
`queues.py` appear without their package when py-spy shortens the path."""

SHORTENED_WAITING_ROOMS = r"(connection|queues|popen_fork|synchronize|resource_sharer)\.py"

MOMENTARY: Final[tuple[tuple[str, str], ...]] = _SHIPPED["momentary"]
"""Calls that one rank makes for a moment in every healthy job: one snapshot of them proves nothing."""
