"""The program that a job runs on a node: the modules of `probes` as text, so that a node needs no package."""

from __future__ import annotations

import base64
import importlib.resources
import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

SENT: Final = (
    "base.clock", "nodetest.probes.repeat", "nodetest.probes.cores", "nodetest.probes.disk", "nodetest.probes.state",
    "nodetest.probes.pair", "nodetest.probes.site_check", "nodetest.probes.fio", "nodetest.probes.gpu_dcgm",
    "nodetest.probes.kernel_log", "nodetest.probes.gpu_health", "nodetest.probes.gpu_nccl",
    "nodetest.probes.torch_program", "nodetest.probes.gpu_rate", "nodetest.probes.phases",
)  # fmt: skip
"""Each after those that it imports."""
CHOOSE: Final = (
    'p=$1; shift; for p in "$p" python3 /usr/libexec/platform-python; do '
    'if "$p" -I -c "import sys; sys.exit(sys.version_info < (3, 8))" 2>/dev/null; then exec "$p" -I -c "$@"; fi; done; '
    'echo "no Python from 3.8 on is installed on $(hostname)" >&2; exit 127'
)
"""For sh: our own interpreter where the node has it, else the system's. platform-python is Red Hat's."""
LOAD: Final = """\
import base64, json, sys, types, zlib
for name, text in json.loads(zlib.decompress(base64.b64decode(sys.argv[1]))):
    parent = ""
    for part in name.split("."):
        full = parent + part
        if full not in sys.modules:
            module = sys.modules[full] = types.ModuleType(full)
            module.__path__ = []
            if parent:
                setattr(sys.modules[parent[:-1]], part, module)
        parent = full + "."
    sys.modules[name].SOURCE_TEXT = text
    exec(compile(text, name, "exec"), sys.modules[name].__dict__)
sys.modules["slurm_watchdog.nodetest.probes.phases"].main(sys.argv[2])
"""


def sources() -> str:
    """The modules, compressed, as one word of a command line (Linux takes 128 KiB a word)."""
    root = importlib.resources.files("slurm_watchdog")
    named = []
    for module in SENT:
        path = root.joinpath(f"{module.replace('.', '/')}.py")
        named.append((f"slurm_watchdog.{module}", path.read_text(encoding="utf-8")))
    return base64.b64encode(zlib.compress(json.dumps(named).encode(), 9)).decode()


def command(python: str, question: Mapping[str, Any]) -> list[str]:
    """What a task runs: `python` is tried first."""
    return ["/bin/sh", "-c", CHOOSE, "sh", python, LOAD, sources(), json.dumps(question)]
