"""Words in the names of functions and files that tell what a rank may be about where its frames are nobody's
but the program's own.

A loop of pure Python that goes round for minutes may be an index that is built, a score that is computed, a
shard that is packed: its name says so, as a rule. The words are matched whole, in lower case, as
`operation_words` cuts a name; `x*` is any word that begins so. The list errs on the side of work: a name in
it costs a later verdict, and never an accusation.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

WORK: Final[tuple[str, ...]] = (
    "eval*", "valid*", "test*", "metric*", "scor*", "bleu*", "rouge*", "meteor", "wer", "cer", "ppl", "perplex*", "accuracy", "recall",
    "distance*", "edit*", "leven*", "align*", "judge*", "verif*", "sanity",
    "sav*", "dump*", "export*", "conver*", "serial*", "deserial*", "pickl*", "load", "loads", "loading", "restor*", "checkpoint*", "ckpt*",
    "consolidat*", "shard*", "gather*", "upload*", "download*", "read", "reads", "reading", "reader", "writ*", "copy*", "compress*", "zip*",
    "build*", "index*", "indic*", "token*", "detoken*", "pack*", "shuffl*", "sort*", "merg*", "dedup*", "filter*", "bucket*", "count",
    "counts", "counting", "stats", "statistics", "hist*", "map", "mapping", "collat*", "encod*", "decod*", "pars*", "json*", "yaml*",
    "csv*", "regex*", "clean*", "normali*", "augment*", "transform*", "prepar*", "preproc*", "process", "processing", "postproc*", "mask*",
    "sampl*", "generat*", "infer*", "predict*", "compil*", "jit*", "trace", "tracing", "autotun*", "tune", "tuning", "quant*", "calib*",
    "bench*", "profil*", "warm*", "setup*", "init*", "import*", "analy*", "cluster*", "kmeans", "hash*", "matching", "matcher*", "search*", "mcts",
    "rollout*", "simul*", "env", "envs", "environment", "episode*", "solv*", "assign*", "hungarian", "partition*", "balanc*", "plan",
    "planning", "tree*", "graph*", "comput*", "calc*", "crunch*", "work", "works", "workload", "burn*", "report*", "summar*", "plot*",
    "draw*", "render*", "visuali*", "print*", "log", "logs", "logging", "collect", "gc", "walk*", "scan*", "skip*", "interpolat*",
)  # fmt: skip

WAITING: Final[tuple[str, ...]] = ("wait*", "poll*", "spin*", "until", "ready", "await*")
"""What is called so does nothing until another does something."""


@lru_cache(maxsize=8192)
def operation_words(name: str) -> frozenset[str]:
    """`Trainer._buildIndex2` -> trainer, build, index."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return frozenset(part.lower() for part in parts)


def has_word(name: str, words: tuple[str, ...]) -> bool:
    """Whether one of the words of a name is in `words`."""
    return _matches(name, words)


@lru_cache(maxsize=8192)
def _matches(name: str, words: tuple[str, ...]) -> bool:
    found = operation_words(name)
    return not found.isdisjoint(words) or any(
        word.startswith(stem[:-1]) for stem in words if stem.endswith("*") for word in found
    )
