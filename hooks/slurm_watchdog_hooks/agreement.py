"""What any rank saw, known to all ranks at the same step. A rank that leaves alone makes the others wait for it."""

import sys


class Alone(object):
    """One process: nobody to agree with."""

    def agreed(self, seen):
        """Whether this process saw it."""
        return bool(seen)


class Torch(object):
    """torch.distributed: a one-number all_reduce over gloo, asked for at one call and read at the next, so
    that no step waits.

    group  a process group whose tensors may lie in the CPU's memory. Default: the default group if it is gloo, else
           one is made.
    """

    def __init__(self, group=None):
        self._group = group
        self._asked = None  # (the collective under way, its tensor)

    def agreed(self, seen):
        """Whether any rank had seen it at the last call: the same on all ranks, which call equally often."""
        if self._asked is not None and self._wait_for_all_ranks():
            return True
        self._ask(seen)
        return False

    def _wait_for_all_ranks(self):
        work, seen = self._asked
        work.wait()
        return bool(seen.item())

    def _ask(self, seen):
        torch, distributed = sys.modules["torch"], sys.modules["torch.distributed"]
        if self._group is None:
            gloo = distributed.get_backend() == "gloo"
            self._group = distributed.group.WORLD if gloo else distributed.new_group(backend="gloo")
        flag = torch.tensor([int(bool(seen))], dtype=torch.int32)
        work = distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._asked = (work, flag)


class Jax(object):
    """Several JAX processes: their flags are gathered. Each call waits for all processes: see `every` of KillSwitch."""

    def agreed(self, seen):
        """Whether any process has seen it by now."""
        import numpy
        from jax.experimental import multihost_utils

        return bool(numpy.max(multihost_utils.process_allgather(numpy.array([int(bool(seen))]))))


def find(group=None):
    """(how the ranks of this process agree, after how many steps each): what is initialised decides, else
    this process is alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return (Torch(group), 1) if distributed.get_world_size() > 1 else (Alone(), 1)
    jax = sys.modules.get("jax")
    if jax is not None and jax.process_count() > 1:
        return Jax(), 20
    return Alone(), 1
