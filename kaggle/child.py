"""A child process with a time limit, whose lines are passed on as they come.

One whose time is up is interrupted first, so that it can end its Jupyter kernel: SIGTERM would orphan that. What is
then still there, in whatever process group or session, is killed.
"""

import os
import signal
import subprocess
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import psutil

GRACE_S = 30.0  # from the interrupt to the kill: a Jupyter kernel takes some of it
LINE = 4000  # characters; a longer line is passed on in parts
MAX_LINES = 10_000  # that are passed on; more are read and dropped
KEPT_LINES = 200


class Child:
    """A command that has been started. `say` gets its lines, less the empty ones, and must not raise in its thread."""

    def __init__(
        self,
        command: list[str],
        *,
        cwd: Path,
        environment: dict[str, str],
        limit_s: float,
        say: Callable[[str], None],
    ):
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)  # the last, until it was cut off
        self.timed_out = False
        self._limit_s, self._say = limit_s, say
        self._start = monotonic()
        self._cut, self._cut_at = "", 0.0  # why it was ended before its time
        self._end = 0.0
        self._mark = f"FLASHATTN_CHILD_{uuid.uuid4().hex}"  # whatever it starts inherits this
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment | {self._mark: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self._end or monotonic()) - self._start

    @property
    def last_line(self) -> str:
        """The last that it printed before it was cut off; "" where there is none."""
        return self.lines[-1] if self.lines else ""

    @property
    def failure(self) -> str:
        """How it ended, "" where well; for a child that has ended."""
        code = self._process.returncode
        if self._cut or not code:
            return self._cut
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def has_ended(self) -> bool:
        """Whether it and all that it started have ended; to be asked again and again, for that also keeps its limit."""
        if self._end:
            return True
        if self._process.poll() is None:
            if not self._cut and self.seconds > self._limit_s:
                self.timed_out = True
                self.cut_off(f"cut off after {self._limit_s:.0f} s")
            since_cut = monotonic() - self._cut_at if self._cut else 0.0
            if since_cut > GRACE_S:
                self._kill()
            if since_cut < 2 * GRACE_S:  # one that hangs in a driver outlives SIGKILL: it is left behind
                return False
        self._end = monotonic()
        self._kill()  # what it has left running would disturb what is timed next
        self._reader.join(timeout=5.0)
        return True

    def cut_off(self, why: str) -> None:
        """Begin to end it before its time; has_ended() does the rest."""
        if not (self._cut or self._end):
            self._cut, self._cut_at = why, monotonic()
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT)

    def _kill(self) -> None:
        """All of the family that is there, the orphans and those in a session of their own too."""
        for _ in range(20):  # what is being killed may just be starting another
            family = [process for process in psutil.process_iter() if self._is_ours(process)]
            if not family:
                return
            for process in family:
                with suppress(psutil.Error):
                    process.kill()
            sleep(0.05)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return self._mark in process.environ()
        except (psutil.Error, OSError):  # another user's, or gone
            return False

    def _read(self) -> None:
        parts = map(str.rstrip, iter(lambda: self._process.stdout.readline(LINE), ""))
        for number, line in enumerate(filter(None, parts)):
            if not self._cut:  # then it says how it was interrupted
                self.lines.append(line)
            if number < MAX_LINES:
                self._say(line)
            elif number == MAX_LINES:
                self._say(f"({MAX_LINES:,} lines were shown, and no more will be)")


def as_they_end(children: Iterable[Child], trouble: Callable[[], str] = lambda: "") -> Iterator[Child]:
    """Yield each child as it ends; a word from `trouble`, asked meanwhile, is why all that run must end.

    To be used under contextlib.closing(): closing it, or an exception within, ends those that still run.
    """
    running = list(children)
    try:
        while running:
            if why := trouble():
                for child in running:
                    child.cut_off(why)
            for child in [child for child in running if child.has_ended()]:
                running.remove(child)
                yield child
            if running:
                sleep(0.1)
    finally:
        for child in running:
            child.cut_off("interrupted")
        while not all([child.has_ended() for child in running]):
            sleep(0.1)
