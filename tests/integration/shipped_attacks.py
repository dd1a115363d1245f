"""What an ordinary user of a machine tries against the services as they are installed there; and how each
defence is taken out.

A row is shell text. `attack` ends with 0 where it succeeds, within seconds; `weaken` takes exactly its
defence out, as root, and `mend` puts it back. `given` is done before: what the attacker is allowed to have (a
directory that is his, a first defence that is gone already).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

INSTALLED: Final = "/opt/slurm-watchdog"
PYTHON: Final = f"{INSTALLED}/bin/python3 -P"

PRELUDE: Final = r"""
set -u
unit() { echo "slurm-watchdog-$1.service"; }
pid() { systemctl show --value --property=MainPID "$(unit "$1")"; }
code() { echo /opt/slurm-watchdog/lib/python3*/site-packages/slurm_watchdog/$1; }
# One module of the installed code with a line changed; its byte code goes, too, which is valid whatever the file's time.
change() {
    file=$(code "$1"); folder=$(dirname "$file"); name=$(basename "$file" .py); mkdir -p /srv/whole/$1
    cp -a "$file" "$folder"/__pycache__/"$name".*.pyc /srv/whole/$1/ && rm "$folder"/__pycache__/"$name".*.pyc
    sed -i "$2" "$file" && ! cmp -s "$file" /srv/whole/$1/"$name".py
}
restore() {
    file=$(code "$1"); folder=$(dirname "$file")
    cp -a /srv/whole/$1/*.py "$folder"/ && cp -a /srv/whole/$1/*.pyc "$folder"/__pycache__/
}
drop_in() {
    mkdir -p /run/systemd/system/$(unit $1).d
    printf "[Service]\n$2\n" > /run/systemd/system/$(unit $1).d/attack.conf; systemctl daemon-reload; systemctl restart $(unit $1)
}
no_drop_in() { rm -r /run/systemd/system/$(unit $1).d; systemctl daemon-reload; systemctl restart $(unit $1); }
configure() { cp -a /etc/slurm-watchdog/config.yaml /srv/config.whole; sed -i "$1" /etc/slurm-watchdog/config.yaml; systemctl restart $(unit $2); }
no_configure() { cp -a /srv/config.whole /etc/slurm-watchdog/config.yaml; systemctl restart $(unit $1); }
"""
"""Functions of all rows."""


@dataclass(frozen=True)
class Row:
    """One attack. `by`: the user who runs it, root for a victim who does nothing but type a command of ours."""

    attack: str
    weaken: str
    mend: str
    given: str = ""
    by: str = "eve"


def _python(text: str) -> str:
    return f"{PYTHON} - <<'END'\n{text}\nEND\n"


STATUS = _python("""
import socket
api = socket.socket(socket.AF_UNIX)
api.settimeout(5)
api.connect("/run/slurm-watchdog/controller.sock")
api.sendall(b"GET /v1/status HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
assert b" 200 " in api.recv(64)
""")
REPORT = _python("""
from slurm_watchdog.agent.courier.process import controllers
from slurm_watchdog.model.report import (Report)
from slurm_watchdog.wire.codec import encode_report
from slurm_watchdog.wire.frames import REPORT, TAKEN
report = encode_report(Report(node="wd1", boot_id="b", agent_id="eve", sequence=1))
stream = controllers("wd1", "munge", "slurm-watchdog:", ["http://wd1:9765"])[0].open(5.0)
stream.send(REPORT, report)
assert stream.receive()[0] == TAKEN
""")
FILL = "head -c 16M /dev/zero > /run/slurm-watchdog/jobs/1.0/x"
NAMES = "python3 -c \"[open(f'/run/slurm-watchdog/jobs/1.0/{n}', 'x').close() for n in range(10_000)]\""
MY_PLACE = "install -d -o eve -m 700 /run/slurm-watchdog/jobs/1.0"
OFF_RUN = "rm -rf /run/slurm-watchdog/jobs/1.0"
LOOK = """
for each in agent controller; do
    for mine in $(pid $each) $(pgrep -P $(pid $each)); do
        kill -0 $mine 2>&- && head -c 1 /proc/$mine/environ > /dev/null 2>&1 && : < /proc/$mine/mem && exit 0
    done
done
exit 1
"""
PLANT = """setpriv --reuid=eve --regid=eve --clear-groups sh -c '
mkdir -p /home/eve/planted/slurm_watchdog && cd /home/eve/planted
echo "open(\\"/home/eve/planted/owned\\", \\"w\\").close()" | tee slurm_watchdog/__init__.py > msgspec.py'
"""
PLANTED = """
cd /home/eve/planted && rm -f owned && slurm-watchdog agent --once > /dev/null 2>&1
test "$(stat -c %U owned 2>&1)" = root
"""
JOURNAL = "/var/lib/slurm-watchdog"

ROWS: Final = {
    "the journal": Row(f"head -c 1 {JOURNAL}/journal.sqlite > /dev/null", f"chmod 755 {JOURNAL} && chmod 644 {JOURNAL}/journal.sqlite", f"chmod 700 {JOURNAL}; chmod 600 {JOURNAL}/journal.sqlite"),
    "the agent's state": Row(": > /run/slurm-watchdog-agent/x", "chmod 777 /run/slurm-watchdog-agent", "rm -f /run/slurm-watchdog-agent/x; chmod 755 /run/slurm-watchdog-agent"),
    "what the controller says": Row(STATUS, "chmod 666 /run/slurm-watchdog/controller.sock", "chmod 660 /run/slurm-watchdog/controller.sock"),
    "a switch of nobody's": Row("mkdir /run/slurm-watchdog/jobs/2.0", "chmod 1777 /run/slurm-watchdog/jobs", "rm -rf /run/slurm-watchdog/jobs/2.0; chmod 755 /run/slurm-watchdog/jobs"),
    "the socket's place": Row("touch /run/slurm-watchdog/x", "chmod 777 /run/slurm-watchdog", "rm -f /run/slurm-watchdog/x; chmod 755 /run/slurm-watchdog"),
    "bytes in /run": Row(FILL, MY_PLACE, OFF_RUN),
    "names in /run": Row(NAMES, MY_PLACE, OFF_RUN),
    "the configuration": Row(": >> /etc/slurm-watchdog/config.yaml", "chmod 666 /etc/slurm-watchdog/config.yaml", "chmod 644 /etc/slurm-watchdog/config.yaml"),
    "the program": Row(f"touch {INSTALLED}/lib/python3*/site-packages/slurm_watchdog/__init__.py", f"chmod 666 {INSTALLED}/lib/python3*/site-packages/slurm_watchdog/__init__.py", f"chmod 644 {INSTALLED}/lib/python3*/site-packages/slurm_watchdog/__init__.py"),
    "signals and memory": Row(LOOK, "drop_in agent 'User=eve\\nGroup=eve'", "no_drop_in agent"),
    "a module where root types": Row(PLANTED, "change base/python310.py 's/\"-P\", //'", "restore base/python310.py", by="root", given=PLANT),
    "a report of the node": Row(REPORT, r"configure 's/mode: munge/&, agent_user: eve/' controller", "no_configure controller"),
}  # fmt: skip
"""By what is tried."""

SQUATTER: Final = """
import socketserver
WELCOME = b"\\0\\0\\0\\x2ew\\x81\\xa9challenge\\xd9\\x20" + b"0" * 32
class Server(socketserver.BaseRequestHandler):
    def handle(self):
        said = [WELCOME, b"\\0\\0\\0\\x01o"]
        while data := self.request.recv(1 << 16):
            with open("/home/eve/heard", "ab") as file:
                file.write(data)
            if said:
                self.request.sendall(said.pop(0))
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("10.78.0.1", 9765), Server).serve_forever()
"""
"""Greets who comes to the controller's address, and opens streams as the controller does; but for what it cannot know."""
CREDULOUS: Final = (
    "change agent/courier/munge.py 's/or not incoming.is_of.*:$/or not incoming.mac(OPENED):/'"
    " && change agent/proc/job_membership.py 's/owners.get(claimed.job_id) == process.uid/claimed.job_id in owners/'"
    r" && change controller/state/door.py '/^def _is_of_job/a\    return True'"
)
"""An agent that believes any answer, and any claim; and a controller that believes both."""
WARY: Final = "restore agent/courier/munge.py; restore agent/proc/job_membership.py; restore controller/state/door.py"
