"""Commands as processes: several at a time, a log each, and none of them outlives the program that started it."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cli import FAILURE_FILE, NotPossible, UserError

FINISHED, IMPOSSIBLE, FAILED = "finished", NotPossible.status, UserError.status


@dataclass
class Task:
    """A command, the file that takes what it prints and, when it has ended, what became of it (see [`outcome`])."""

    name: str
    command: list[str]
    log: Path
    status: str = ""
    reason: str = ""

    @property
    def failure(self) -> Path:
        """The file that takes why it failed, while it runs."""
        return self.log.with_name(f"{self.log.name}.failure")


def run_tasks(tasks: list[Task], title: str, jobs: int = 1, threads: int = 1) -> None:
    """Runs the commands in their order, `jobs` at a time, with OMP_NUM_THREADS=`threads`.

    Whatever ends this function early ends the children first. Where the system is Linux they end also when this process is
    killed the hard way, so that a new start finds nobody else writing.
    """
    from tqdm import tqdm

    waiting, running = list(tasks), {}
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    bar, shown = tqdm(total=len(tasks), desc=title, unit="task", disable=not tasks), 0.0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop(0)
                task.log.parent.mkdir(parents=True, exist_ok=True)
                task.failure.unlink(missing_ok=True)
                told = environment | {FAILURE_FILE: str(task.failure.absolute())}
                with task.log.open("w", encoding="utf-8") as log:
                    running[start(task.command, env=told, stdout=log, stderr=subprocess.STDOUT)] = task
            if time.monotonic() > shown + 5:
                bar.set_postfix_str("; ".join(f"{task.name}{_progress(task.log)}" for task in running.values()))
                shown = time.monotonic()
            time.sleep(0.1)
            for process, task in [(process, task) for process, task in running.items() if process.poll() is not None]:
                del running[process]
                failure = json.loads(task.failure.read_text(encoding="utf-8")) if task.failure.is_file() else None
                task.failure.unlink(missing_ok=True)
                task.status, task.reason = outcome(process.returncode, failure, task.log.read_text(encoding="utf-8"))
                bar.update()
    finally:
        bar.close()
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def outcome(status: int, failure: dict | None, log: str) -> tuple[str, str]:
    """What became of a process, and why it did not finish.

    A model that its options cannot make is not possible, whatever else goes wrong is a failure.

    Args:
        status: the exit status.
        failure: what it wrote into its [`cli.FAILURE_FILE`], None where it wrote nothing.
        log: what it printed, whose last line is shown where nothing better is known.
    """
    if status == 0:
        return FINISHED, ""
    if failure is not None:
        return failure["status"], failure["reason"]
    lines = [line.strip() for line in log.replace("\r", "\n").splitlines() if line.strip()]
    return FAILED, f"exit status {status}: {lines[-1] if lines else 'no output'}"


def start(command: list[str], **settings) -> subprocess.Popen:
    """`subprocess.Popen`, of a process that the system ends together with this one where it can (Linux)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def end_with_parent() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # which is gone already, and will send nothing
            os._exit(1)

    return subprocess.Popen(command, preexec_fn=None if libc is None else end_with_parent, **settings)


def _progress(log: Path) -> str:
    """` 30/200` after the last progress bar in a log, but for the one of a checkpoint's single file; empty without one."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 1000))
        found = re.findall(rb"(\d+/(?!1 )\d+) \[", file.read())
    return f" {found[-1].decode()}" if found else ""
