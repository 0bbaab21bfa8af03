"""Ranks do not outlive their launcher, and the folder stays locked as long as they live."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from filelock import FileLock, Timeout

from running import ROOT, prepared_data, recipe, self_options

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
SECONDS = 5  # in which the system has ended them and put them away, on a busy machine


@pytest.mark.slow
def test_ranks_end_with_their_launcher(base, tmp_path):
    out = tmp_path / "out"
    options = [*self_options(prepared_data(base)), "--max_steps", 100_000, "--save_steps", 100_000, "--out", out]
    command = [sys.executable, *LAUNCHER, *recipe("train")[1:], *map(str, options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    ranks = []
    try:
        deadline = time.monotonic() + 200
        while not (out / "metrics.jsonl").is_file():  # they train
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        ranks = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "train.py" in " ".join(child.cmdline())
        ]
        assert len(ranks) == 2
        lock = FileLock(out / ".stages" / "lock", timeout=0)
        with pytest.raises(Timeout):
            lock.acquire()
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, left = psutil.wait_procs(ranks, timeout=SECONDS)
        assert not [rank for rank in left if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
        lock.acquire()
        lock.release()
    finally:
        for left in (process, *ranks):
            try:
                left.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                pass
