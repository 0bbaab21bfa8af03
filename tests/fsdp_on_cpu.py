"""Runs a script as accelerate's FSDP2 on CPU processes: `torchrun … fsdp_on_cpu.py SCRIPT ARGUMENTS`.

torch shards on CPUs as well, over gloo; accelerate asks for FSDP by the name of the distributed type, and knows the name of
several CPU processes for DDP alone. Under the name of several GPUs it does all that it does there, on the device it has.
"""

import runpy
import sys

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

initialise = AcceleratorState.__init__


def sharded(self, *args, cpu: bool = False, **kwargs):
    if not self._shared_state:  # the first of many that share it
        PartialState(cpu)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    initialise(self, *args, cpu=cpu, **kwargs)


if __name__ == "__main__":
    AcceleratorState.__init__ = sharded
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
