"""`diagnose PATH…` finds out what it was given."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slurm_watchdog.cli.main import main
from tests.builders import stacks as at

LOG = "step 1/9 loss 2.0\nstep 2/9 loss 1.9\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
KERNEL = "".join(f"[ {n}.000123] usb 1-1: new device\n" for n in range(10, 30)) + (
    "[ 99.1] NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
)
STACKS = "".join(at.text_of(rank, at.BARRIER if rank else at.SAVE) for rank in range(4))
SORTS = {"logs": LOG, "kernel": KERNEL, "stacks": STACKS}


def run(*words: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["diagnose", *map(str, words)], input=stdin)


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("way", ["plain", "gzip", "utf-16", "stdin", "directory", "gzip on stdin"])
def test_a_file_is_read_by_what_it_holds(tmp_path: Path, sort: str, way: str) -> None:
    data = SORTS[sort].encode()
    data = gzip.compress(data) if "gzip" in way else data.decode().encode("utf-16") if way == "utf-16" else data
    (tmp_path / "given.log").write_bytes(data)
    words = ["-"] if "stdin" in way else [tmp_path if way == "directory" else tmp_path / "given.log"]
    done = run("--json", *words, stdin=data if "stdin" in way else None)
    assert [key for key in json.loads(done.stdout) if key != "schema_version"] == [sort], done.output
    assert done.exit_code == (0 if sort == "stacks" else 1)


def test_files_of_several_sorts_are_each_read_and_one_document_has_what_each_reader_says(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    names = {"logs": "slurm-7.out", "kernel": "dmesg", "stacks": "stacks/all"}
    for sort, name in names.items():
        (tmp_path / name).write_text(SORTS[sort])
    (tmp_path / "model.pt").write_bytes(bytes(range(256)) * 100)
    done = run("--json", tmp_path)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == 1
    for sort, command in (("logs", ["scan-log"]), ("kernel", ["scan-log", "--kernel"]), ("stacks", ["group-stacks"])):
        alone = CliRunner().invoke(main, [*command, "--json", str(tmp_path / names[sort])])
        assert found[sort] == {key: value for key, value in json.loads(alone.stdout).items() if key != "schema_version"}
    words = run(tmp_path).stdout
    assert all(text in words for text in ("Logs: 1 file", "Stacks: 1 file", "out of memory", "fallen off the bus"))


def test_a_job_of_which_a_file_has_the_name_is_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("4711").write_text(LOG)
    assert "out of memory" in run("4711").stdout
    assert run("4711", "4712").exit_code == 2


def test_the_log_of_a_crash_with_the_stacks_of_its_threads_is_a_log(tmp_path: Path) -> None:
    fatal = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f1 (most recent call first):\n  File "a.py", line 3 in step\n'
    (tmp_path / "stderr.log").write_text(fatal + "srun: error: n3: task 2: Segmentation fault\n")
    done = run("--json", tmp_path)
    (file,) = json.loads(done.stdout)["logs"]["files"]
    assert (done.exit_code, file["verdict"]["class"], file["verdict"]["rank"]) == (1, "segmentation_fault", 2)
