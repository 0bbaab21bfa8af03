"""Runs a function on several gloo processes, forked from a server that has imported the libraries
and done nothing."""

import contextlib
import faulthandler
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed


def on_ranks(function, size: int, *arguments, seconds: int = 200) -> list:
    """What `function(*arguments)` returned or raised on each rank of a process group of this
    size."""
    context = multiprocessing.get_context("forkserver")
    ours = ["hf_infini.tools.training", "hf_infini.tools.parallel"]
    context.set_forkserver_preload(["transformers.trainer", "datasets", *ours])
    answers, found = context.Queue(), {}
    with tempfile.TemporaryDirectory() as folder:
        given = (size, Path(folder) / "store", answers, function, arguments)
        processes = [context.Process(target=_run, args=(rank, *given)) for rank in range(size)]
        for process in processes:
            process.start()
        try:
            deadline = time.monotonic() + seconds
            while len(found) < size:
                with contextlib.suppress(queue.Empty):
                    rank, answer = answers.get(timeout=1)
                    found[rank] = answer
                    continue
                gone = [
                    rank
                    for rank, process in enumerate(processes)
                    if rank not in found and not process.is_alive()
                ]
                assert not gone and time.monotonic() < deadline, (
                    f"ranks {gone} ended without an answer; there are {found}"
                )
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    return [found[rank] for rank in range(size)]


def run_as_rank(name: str, *commands: list) -> list:
    """[`running.run_recipe`] of each command as a process of torchrun, inside [`on_ranks`]."""
    from running import run_recipe

    rank, size = str(distributed.get_rank()), str(distributed.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ["MASTER_ADDR"] = "localhost"  # only looked at
    return [run_recipe(name, *command, "--traceback", check=False) for command in commands]


def ended_well(answers: list) -> str:
    """What the first command printed to standard error on the first rank; all of [`run_as_rank`]
    must have ended well."""
    for answer in answers:
        assert isinstance(answer, list) and all(done.returncode == 0 for done in answer), answers
    return answers[0][0].stderr


def _run(rank: int, size: int, store: Path, answers, function, arguments) -> None:
    faulthandler.enable()  # native code that ends a rank says where, on standard error
    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", store=distributed.FileStore(str(store), size), **options)
    try:
        found = function(*arguments)
    except BaseException as error:
        error.add_note(traceback.format_exc())  # which a queue would lose
        found = error
    answers.put((rank, found))
    if distributed.is_initialized():
        distributed.destroy_process_group()
