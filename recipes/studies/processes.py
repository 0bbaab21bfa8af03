"""Commands as processes: several at a time, a log each, and none of them outlives the program that
started it."""

import functools
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from cli import NotPossible
from support.parents import end_with_parent

FINISHED, IMPOSSIBLE, FAILED = "finished", "not possible", "failed"


@dataclass
class Task:
    """A command, its log file and, when it has ended, its status and the reason of a failure."""

    name: str
    command: list[str]
    log: Path
    status: str = ""
    reason: str = ""

    def start(self, threads: int) -> subprocess.Popen:
        """The process, which the system ends together with this one where it can (Linux)."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        # so that it ends those that it has started
        end = functools.partial(end_with_parent, os.getpid(), signal.SIGTERM)
        with self.log.open("w", encoding="utf-8") as log:
            settings = {"env": environment, "stdout": log, "stderr": subprocess.STDOUT}
            return subprocess.Popen(self.command, preexec_fn=end, **settings)

    def finish(self, exit_status: int) -> None:
        """Records the status of the process, and why it did not finish: the error that a recipe
        ended with ([`cli.exit_on_error`]), or else the last line of what it printed. A model that
        its options cannot make is not possible, whatever else goes wrong is a failure."""
        self.status, self.reason = FINISHED, ""
        if exit_status != 0:
            text = self.log.read_text(encoding="utf-8", errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
            errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
            reason = errors[-1] if errors else f"exit status {exit_status}: {lines[-1]}"
            self.status = IMPOSSIBLE if reason.startswith(NotPossible.prefix) else FAILED
            self.reason = reason.removeprefix(NotPossible.prefix)


def run_tasks(tasks: list[Task], title: str, jobs: int = 1, threads: int = 1) -> None:
    """Runs the commands in their order, `jobs` at a time, with OMP_NUM_THREADS=`threads`.

    Whatever ends this function early ends the children first. On Linux they also end when this
    process is killed, so that no other process writes when the study is started again.
    """
    waiting, running = list(tasks), {}
    bar = tqdm(total=len(tasks), desc=title, unit="task", disable=not tasks)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop(0)
                running[task.start(threads)] = task
                bar.set_postfix_str(", ".join(task.name for task in running.values()))
            time.sleep(0.1)
            for process in [process for process in running if process.poll() is not None]:
                running.pop(process).finish(process.returncode)
                bar.update()
    finally:
        bar.close()
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
