"""tests/own_namespaces.sh, in which the workers of the live tests run: what they see, and what is left of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.rig.filesystems import loop_devices

SCRIPT = Path(__file__).parents[1] / "own_namespaces.sh"
FREEZES = """
set -e
truncate -s 16M "$0/image"
mkfs.ext4 -q -F "$0/image"
mkdir "$0/mount"
mount -o loop "$0/image" "$0/mount"
ip netns add of-a-worker
fsfreeze --freeze "$0/mount"
(echo stuck >"$0/mount/file") &
until grep -q '^State:.D' /proc/$!/status; do sleep 0.05; done
cat - /proc/1/comm
ls /run
exit 7
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


def test_a_worker_has_a_machine_of_its_own_and_nothing_of_it_remains_not_even_what_is_frozen(
    tmp_path: Path,
) -> None:
    argv = [SCRIPT, "sh", "-c", FREEZES, tmp_path]
    done = subprocess.run(argv, input="as input\n", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (7, ["as input", "bash"]), done.stderr
    assert set(done.stdout.split()[3:]) == {"lock", "mount", "netns"}, "not the machine's /run"
    assert loop_devices(tmp_path) == []
    assert not Path("/run/netns/of-a-worker").exists()


def test_a_frozen_filesystem_of_another_worker_stays_frozen(tmp_path: Path) -> None:
    frozen = FREEZES.replace("exit 7", f"{SCRIPT} true\ngrep -q '^State:.D' /proc/$!/status && echo still stuck")
    done = subprocess.run(
        [SCRIPT, "sh", "-c", frozen, tmp_path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.endswith("still stuck\n"), done.stderr


def test_a_worker_whose_outer_process_is_killed_cleans_up(tmp_path: Path) -> None:
    waits = FREEZES.replace("exit 7", "sleep 100")
    worker = subprocess.Popen([SCRIPT, "sh", "-c", waits, tmp_path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"bash\n"
    worker.kill()
    worker.stdout.read()  # until nobody holds it
    worker.wait(10)
    gone = 'until ! losetup --all | grep -qF "$0"; do sleep 0.1; done'
    subprocess.run(["sh", "-c", gone, tmp_path], check=True, timeout=30)
