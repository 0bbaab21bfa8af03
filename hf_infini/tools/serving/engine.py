"""The thread of a loop: whoever asks is in others."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from .loop import Loop, Turn
from .requests import Ended, Request

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A request that is not taken now, and may be sent again later.

    Args:
        message: why.
        stopping: whether the server stops; else it has too many requests.
    """

    def __init__(self, message: str, stopping: bool = False):
        super().__init__(message)
        self.stopping = stopping


class Engine:
    """Runs a loop in a thread. Requests come from one other thread at a time.

    Args:
        loop: that nobody else calls from now on.
        queue_length: requests that may wait for a slot; more are [`Refused`].
    """

    def __init__(self, loop: Loop, queue_length: int = 100):
        self.loop, self.queue_length = loop, queue_length
        self.stopping = False
        self._open: set[Request] = set()
        self._turns: set[Future] = set()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock, self._running = threading.Lock(), True
        self._thread = threading.Thread(target=self._run, name="hf_infini engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that have no slot."""
        return len(self._open) - self.running

    @property
    def running(self) -> int:
        """Requests that are read or answered."""
        return min(len(self._open), self.loop.slots)

    def check(self, beside: int = 0) -> None:
        """[`Refused`] where one more request would not be taken; `beside`: others that will come
        before it."""
        if self.stopping:
            raise Refused("the server is stopping.", stopping=True)
        if (count := len(self._open) + beside) >= self.loop.slots + self.queue_length:
            raise Refused(
                f"{count} requests are answered or wait already, and this server takes no more: "
                "send it again later."
            )

    def ask(self, request: Request) -> None:
        """Has a `request` answered; what is told of it is told in the engine's thread. [`Refused`]
        where it is not taken."""
        told = request.tell

        def tell(part: str | Ended) -> None:
            if isinstance(part, Ended):
                self._open.discard(request)
            told(part)

        with self._lock:
            self.check()
            request.tell = tell
            self._open.add(request)
            self._inbox.put(lambda: self.loop.waiting.append(request))

    def cancel(self, request: Request) -> None:
        """Ends a `request` without a word, if it has not ended."""
        request.cancelled = True
        self._open.discard(request)

    def turn(self, function: Callable[[], None], tokens: int) -> None:
        """Calls a `function`, which has the model read so many `tokens`, in the engine's thread
        when it is its turn, and waits for it; raises what it raises, and [`Refused`] while the
        server stops."""
        done: Future = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    with torch.no_grad():  # which is said for each thread
                        function()
                except BaseException as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)

        with self._lock:
            if self.stopping:
                raise Refused("the server is stopping.", stopping=True)
            self._turns.add(done)
            self._inbox.put(lambda: self.loop.reading.append(Turn(run, tokens)))
        try:
            done.result()
        finally:
            self._turns.discard(done)

    def stop(self, grace: float = 0) -> None:
        """Takes nothing more, waits `grace` seconds at most for what is answered, ends the rest
        with an error, and then the thread."""
        with self._lock:
            self.stopping = True
        end = time.monotonic() + grace
        while self._open and time.monotonic() < end:
            time.sleep(0.02)
        self._inbox.put(self._end)
        self._thread.join()

    def _end(self) -> None:
        stopping = Refused("the server stopped before the answer was complete.", stopping=True)
        self.loop.end_all(stopping)
        for turn in [*self._turns]:
            turn.cancel()
        self._running = False

    def _run(self) -> None:
        idle = True
        while self._running:
            try:
                while True:
                    self._inbox.get(block=idle)()
                    idle = False
            except queue.Empty:
                pass
            if not self._running:
                return
            try:
                idle = not self.loop.step()
            except BaseException as error:  # of the loop itself, or a panic of a library in Rust
                logger.exception("a step has failed")
                self.loop.end_all(error)  # whoever asked hears of it
