"""Runs a script as accelerate's FSDP2 or DeepSpeed on CPU processes: `accelerate launch … sharded_on_cpu.py SCRIPT …`.

torch and DeepSpeed shard on CPUs as well, over gloo; accelerate does not ask them to where it was told of a CPU, or knows
its processes by the name of several CPUs. Under the name of several GPUs it does all that it does there, on its device.
"""

import os
import runpy
import sys

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

initialise = AcceleratorState.__init__


def sharded(self, *args, cpu: bool = False, **kwargs):
    if not self._shared_state:  # the first of many that share it
        PartialState(cpu)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    initialise(self, *args, cpu=False, **kwargs)


if __name__ == "__main__":
    AcceleratorState.__init__ = sharded
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
