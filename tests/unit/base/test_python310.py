"""What Python 3.10 lacks: the same answers as the later standard library's."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from slurm_watchdog.base.deadline import _Timeout, wait_for
from slurm_watchdog.base.python310 import read_iso_time, run_code, run_module


def test_a_deadline_of_python_3_10_ends_what_is_inside_and_only_that() -> None:
    async def go() -> None:
        with pytest.raises(TimeoutError):
            async with _Timeout(0.01):
                await asyncio.sleep(60)
        async with _Timeout(60), _Timeout(None):
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with _Timeout(0.01), _Timeout(60):
                await asyncio.sleep(60)
        outer = asyncio.current_task()
        assert outer is not None
        asyncio.get_running_loop().call_soon(outer.cancel)
        with pytest.raises(asyncio.CancelledError):
            async with _Timeout(60):
                await asyncio.sleep(60)

    asyncio.run(go())


def test_who_waits_too_long_gets_the_builtin_timeout_error() -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(wait_for(asyncio.sleep(60), 0.01))


def test_nothing_is_imported_from_the_directory_of_a_start(tmp_path) -> None:
    (tmp_path / "msgspec.py").write_text("print('planted')")
    code = [*run_code("import sys, msgspec; print(sys.argv[1:])"), "a", "b"]
    module = [*run_module("slurm_watchdog.cli.main"), "--version"]
    said = [subprocess.run(each, cwd=tmp_path, capture_output=True, text=True, timeout=60) for each in (code, module)]
    assert said[0].stdout == "['a', 'b']\n", said
    assert said[1].stdout.startswith("slurm-watchdog"), said


def test_a_time_with_the_letter_for_utc_is_a_time() -> None:
    assert read_iso_time("2026-11-24T06:00:00Z") == read_iso_time("2026-11-24T06:00:00+00:00")
    assert read_iso_time("2026-11-24 06:00").tzinfo is None
