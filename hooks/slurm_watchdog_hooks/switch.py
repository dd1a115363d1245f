"""The kill switch: a file that the watchdog writes when a training has to save and end. It is looked for, and
never removed."""

import contextlib
import os
import signal
import sys
import threading
import time

from slurm_watchdog_hooks import agreement


class KillSwitch(object):
    """The same answer on all ranks at the same step: shall we save now and leave?

    Make one after `init_process_group`, on all ranks. Call `agreed` once a step, on all ranks, equally often.

    path             the file that is looked for; "" or None: SLURM_WATCHDOG_KILL_SWITCH, which Slurm's task prolog
                     sets.
                     Without a path only the signals count.
    poll_seconds     how often a thread looks. It is a thread so that a filesystem that stopped answering stops only it.
    signals          they mean the same as the file; handlers that were there before are called as well.
    group            see agreement.Torch.
    every            the ranks agree at every so many calls. Default: each (PyTorch, where it waits for nothing),
                     every 20th (JAX).
    agreement        an object with `agreed(seen)` for ranks that talk in another way.
    """

    def __init__(self, path=None, poll_seconds=1.0, signals=(signal.SIGUSR1,), group=None, every=None, agreement=None):
        self.path = path or os.environ.get("SLURM_WATCHDOG_KILL_SWITCH", "")
        self.reason = ""  # on ranks that saw it themselves: what the file said, or which signal came
        self._poll_seconds = poll_seconds
        self._group, self._every, self._agreement = group, every, agreement
        self._calls = 0
        self._found_empty = False
        self._left_over = None if self._names_this_run() else self._identity()
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                self._listen(number)
        if self.path:
            threading.Thread(target=self._watch, name="kill-switch", daemon=True).start()

    def agreed(self):
        """Whether any rank saw the file or a signal. The same on all ranks; then stop calling.

        With torch.distributed the answer is one call old: it was asked for then, and came while the step was made.
        """
        if self._agreement is None:
            self._agreement, every = agreement.find(self._group)
            self._every = self._every or every
        self._calls += 1
        if self._calls % (self._every or 1):
            return False
        return self._agreement.agreed(bool(self.reason))

    def clear(self):
        """Remove the file. For scripts that start the next run themselves; the watchdog removes what it wrote."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _names_this_run(self):
        run = "{}.{}".format(os.environ.get("SLURM_JOB_ID", "?"), os.environ.get("SLURM_RESTART_COUNT", "0"))
        return run in self.path.split(os.sep)

    def _identity(self):
        # A file under a fixed name that was there before us was meant for the run before: it would end this
        # one at once.
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        sys.stderr.write("kill switch: {} was there before this run and is ignored\n".format(self.path))
        return (found.st_ino, found.st_mtime_ns)

    def _watch(self):
        while not self.reason:
            self._poll()
            time.sleep(self._poll_seconds)

    def _poll(self):
        try:
            found = os.stat(self.path)
            if (found.st_ino, found.st_mtime_ns) == self._left_over:
                return
            with open(self.path, encoding="utf-8", errors="replace") as file:
                # `echo why > file` makes the file before it writes to it: an empty one counts when the next
                # poll finds it empty, too.
                self.reason = file.readline(1000).strip() or (self.path if self._found_empty else "")
            self._found_empty = True
        except OSError:
            pass  # not there: the rule. Or it cannot be read: the next poll tries again.

    def _listen(self, number):
        before = signal.getsignal(number)

        def handler(received, frame):
            self.reason = self.reason or "signal {}".format(received)
            if callable(before) and before is not signal.default_int_handler:
                before(received, frame)

        signal.signal(number, handler)
