"""Runs a script as accelerate's FSDP2 or DeepSpeed on CPU processes: `accelerate launch …
sharded_on_cpu.py SCRIPT …`, or a recipe on the ranks of [`ranks.on_ranks`].

torch and DeepSpeed shard on CPUs as well, over gloo; accelerate does not ask them to where it was
told of a CPU, or knows its processes by the name of several CPUs. Under the name of several GPUs it
does all that it does there, on its device.
"""

import os
import runpy
import sys

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import distributed

from ranks import run_as_rank

initialise = AcceleratorState.__init__


def sharded(self, *args, cpu: bool = False, **kwargs):
    if not self._shared_state:  # the first of many that share it
        PartialState(cpu)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    initialise(self, *args, cpu=False, **kwargs)


def run_as_sharded_rank(config_file, name: str, command: list) -> list:
    """[`ranks.run_as_rank`] with the environment that `accelerate launch --config_file` gives its
    processes."""
    given = [
        *f"--config_file {config_file}".split(),
        *f"--num_processes {distributed.get_world_size()} {name}".split(),
    ]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    os.environ |= prepare_multi_gpu_env(arguments)
    AcceleratorState.__init__ = sharded
    return run_as_rank(name, command)


if __name__ == "__main__":
    AcceleratorState.__init__ = sharded
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
