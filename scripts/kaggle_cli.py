"""The `kaggle` command, as the push and the pull use it: run as a process, believed only where its words are clear.

It alone reads the credentials. What it prints on failure is turned into a KaggleError, which says what to do.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

CALL_S = 600.0  # for one call of the command, which has no limit of its own
STATE_S = 120.0
PATIENCE_S = 1800.0  # how long no answer may make sense before waiting ends
APPEARS_S = 600.0  # how long Kaggle may take to know a kernel that was just pushed
OUTPUT_ATTEMPTS = 10
HEARTBEAT_S = 300.0  # the longest silence while waiting
POLL_S = (5.0, 3600.0)  # the least and the most between two questions; the command itself takes a second
LONGEST_S = 13 * 3600.0  # Kaggle ends a session after 12 hours; the rest is for its queue
LOG_LINES = 3

ENDED = ("COMPLETE", "ERROR", "CANCEL_ACKNOWLEDGED")
UNDER_WAY = {
    "NEW_SCRIPT": "saved, not started yet",
    "QUEUED": "waiting for one of Kaggle's GPUs",
    "RUNNING": "on a GPU",
    "CANCEL_REQUESTED": "being cancelled",
}

# What the command prints: the service's own words, of which nothing is known, and its hint, by the HTTP status.
NOT_THERE = r"\b404 Client Error|The resource was not found"
LOGGED_OUT = r"Authentication required|\b401 Client Error"
NO_ACCESS = r"\b403 Client Error|Permission '[\w.]+' was denied|You don't have access to this resource"

# What it prints, whether asking again may help, and what else there is to do. The first that matches counts.
REMEDIES = (
    (
        r"\b5\d\d Server Error|problem on Kaggle's side",
        True,
        "Kaggle has trouble of its own: try again later",
    ),
    (
        r"Max retries exceeded|Connection ?(Error|refused|reset|aborted)|RemoteDisconnected|ProxyError|timed? ?out",
        True,
        "no connection to Kaggle: check the network, then try again",
    ),
    (
        r"(?i)\b429 Client Error|too many requests|rate limited",
        True,
        "Kaggle asks for fewer requests: try again in some minutes",
    ),
    (
        LOGGED_OUT,
        False,
        "no credentials that Kaggle accepts: log in, once, with\n"
        '    PATH="$(dirname "$(scripts/setup.sh)"):$PATH" kaggle auth login\n'
        "  or save a token from kaggle.com/settings/api as ~/.kaggle/access_token; or go by hand, with --dry-run "
        "(docs/running.md, Kaggle)",
    ),
    (
        r"push error: .*not found",
        False,
        "Kaggle lets nobody push to that address: --owner is the account of the kaggle command; or give another --slug",
    ),
    (NOT_THERE, False, "Kaggle has no such kernel or version: check the address, OWNER/SLUG/VERSION"),
    (
        r"(?i)phone|verify your|verified",
        False,
        "verify your phone number at kaggle.com/settings: GPUs and the internet are for verified accounts",
    ),
    (
        r"(?i)quota",
        False,
        "the week's GPU hours are used up: `kaggle quota` says when they come back; nothing was started",
    ),
    (
        r"(?i)(max|limit|too many).*(session|batch|concurrent)|(session|batch).*(limit|max|cap)",
        False,
        "an account has two GPU sessions at most: wait for one to end, or stop one at kaggle.com, then push again",
    ),
    (r"No kernel name found", False, "the notebook has no metadata.kernelspec: restore kaggle/driver.ipynb from git"),
    (
        NO_ACCESS,
        False,
        "Kaggle refuses access: check --owner and the address (`kaggle config view` prints your user name), and that "
        "a new account's phone number is verified",
    ),
)


class KaggleError(Exception):
    """What the command said, cut at a word, and what to do about it; for a missing login that alone.

    passing: asking again may help; unknown: the service says of a kernel what it says of one that is not there.
    """

    def __init__(self, said: str, what: str = ""):
        lines = said.strip().splitlines() or ["nothing"]
        said = plain(" ".join(lines[-1:] if lines[0].startswith("Traceback") else lines))
        said = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1?...", said)  # a signed address is a key
        known = (entry for entry in REMEDIES if re.search(entry[0], said))
        pattern, self.passing, remedy = next(known, ("", False, ""))
        self.unknown = bool(re.search(f"{NOT_THERE}|{NO_ACCESS}", said))
        quote = f"{what or 'kaggle'} said: {textwrap.shorten(said, 600, placeholder=' ...')}"
        super().__init__("\n  ".join(filter(None, ["" if pattern == LOGGED_OUT else quote, remedy])))


def plain(text: str, width: int = 2000) -> str:
    """On one line, without what could steer a terminal: the text is a server's."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:width]


@dataclass(frozen=True)
class Address:
    """A kernel, and one version of it; None is the latest."""

    owner: str
    slug: str
    version: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Reads OWNER/SLUG, OWNER/SLUG/VERSION or a kernel's page; raises ValueError for anything else."""
        name = re.sub(r"^https?://(www\.)?kaggle\.com/(code/)?", "", text.strip()).split("?")[0].rstrip("/")
        found = re.fullmatch(r"([A-Za-z0-9][\w-]*)/([A-Za-z0-9][\w-]*)(?:/v?(\d{1,9}))?", name, re.ASCII)
        if not found:
            raise ValueError(f"address: got {text!r}, accepted are OWNER/SLUG, OWNER/SLUG/VERSION or the kernel's URL")
        return cls(found[1], found[2], int(found[3]) if found[3] else None)

    def __str__(self) -> str:
        return "/".join(map(str, filter(None, (self.owner, self.slug, self.version))))

    @property
    def page(self) -> str:
        return f"https://www.kaggle.com/code/{self.owner}/{self.slug}"


def add_poll(parser: argparse.ArgumentParser) -> None:
    """Add --poll, which the push and the pull have alike."""
    what = f"between questions, {POLL_S[0]:g} at least; default: 30"
    parser.add_argument("--poll", type=_poll_s, default=30.0, metavar="SECONDS", help=what)


def _poll_s(text: str) -> float:
    with contextlib.suppress(ValueError):
        if POLL_S[0] <= float(text) <= POLL_S[1]:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, accepted are {POLL_S[0]:g} to {POLL_S[1]:g} seconds")


def environment() -> dict[str, str]:
    """This process's, less what makes the command print the Authorization header."""
    kept = {key: value for key, value in os.environ.items() if key not in ("VERBOSE", "VERBOSE_OUTPUT")}
    return kept | {"PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"}  # logs are UTF-8 whatever the terminal; lines at once


def command() -> str:
    """The `kaggle` of this environment, else of the PATH; raises KaggleError without one."""
    found = shutil.which("kaggle", path=Path(sys.executable).parent) or shutil.which("kaggle")
    if not found:
        raise KaggleError(
            "command not found: install kaggle==2.2.5 and six into the environment that FLASHATTN_PYTHON names, "
            "or go by hand, with --dry-run (docs/running.md, Kaggle)"
        )
    return found


def _started(*args: str, stderr: int) -> subprocess.Popen:
    """The command with these arguments, and its output in a pipe."""
    return subprocess.Popen(
        [command(), "--no-warn", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment(),
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def call(*args: str, limit_s: float = CALL_S, watch: Callable[[], None] = lambda: None) -> str:
    """Run the command and return what it printed; raises KaggleError where it fails or takes longer than limit_s.

    `watch` is called meanwhile; what it raises ends the command.
    """
    process = _started(*args, stderr=subprocess.STDOUT)
    what = f"`kaggle {' '.join(args[:2])}`"
    start = monotonic()
    try:
        while True:
            try:
                said = process.communicate(timeout=0.2)[0]
                break
            except subprocess.TimeoutExpired:
                watch()
                if monotonic() - start > limit_s:
                    raise KaggleError(f"nothing for {limit_s:.0f} s: timed out", what) from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise KaggleError(said, what)
    return said


def user() -> str:
    """The name of the account, as the command knows it."""
    said = call("config", "view", limit_s=STATE_S)
    found = re.search(r"^- username: ([A-Za-z0-9][\w-]*)$", said, re.MULTILINE)
    if not found:
        raise KaggleError(said + " (no user name: give --owner)", "`kaggle config view`")
    return found[1]


def gpu_hours_left() -> tuple[float, str]:
    """GPU hours left this week, and when they come back; (inf, "") where Kaggle does not say."""
    with contextlib.suppress(KaggleError, StopIteration, ValueError):
        rows = [line.split(",") for line in call("quota", "--csv", limit_s=STATE_S).splitlines()]
        names = next(row for row in rows if "remaining" in row)
        gpu = dict(zip(names, next(row for row in rows if row[0] == "GPU"), strict=True))
        return float(gpu["remaining"].rstrip("h")), gpu["refreshAt"]
    return float("inf"), ""


def push(folder: Path, limit_s: float) -> Address:
    """Push a folder, to run for limit_s at most; returns the address that Kaggle gave it.

    The command exits with 0 where Kaggle refuses: only its "successfully pushed" is a success.
    """
    said = call("kernels", "push", "-p", str(folder), "-t", str(int(limit_s)))
    found = re.search(r"Kernel version (\d+) successfully pushed\.\s+.*?(https?://\S+)", said)
    if not found:
        raise KaggleError(said, "`kaggle kernels push`")
    page = re.search(r"/(?:code/)?([\w-]+/[\w-]+)/?(?:\?\S*)?$", found[2])
    if not page:
        raise KaggleError(said, "`kaggle kernels push`")
    return Address.parse(f"{page[1]}/{found[1]}")


def state(address: Address) -> tuple[str, str]:
    """(QUEUED or another status word, Kaggle's message on a failure); raises KaggleError for anything else."""
    said = call("kernels", "status", str(address), limit_s=STATE_S)
    found = re.search(r'has status "(?:KernelWorkerStatus\.)?(\w+)"', said)
    word = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found[1]).upper() if found else ""  # cancelAcknowledged, too
    if word not in ENDED and word not in UNDER_WAY:
        raise KaggleError(said, "`kaggle kernels status`")
    failure = re.search(r'Failure message: "(.*)"', said, re.DOTALL)
    return word, plain(failure[1], 300) if failure else ""


def output(address: Address, folder: Path, pattern: str, watch: Callable[[], None], poll_s: float) -> None:
    """Download the output files whose names match, and the log, as SLUG.log, into an empty folder.

    For a run whose state is known: that there is nothing, or no access to it, may only mean not yet.
    """
    arguments = ["-p", str(folder), "-o", "-q", "--page-size", "200", "--file-pattern", pattern]
    for attempt in range(1, OUTPUT_ATTEMPTS + 1):
        try:
            call("kernels", "output", str(address), *arguments, limit_s=3 * CALL_S, watch=watch)
            return
        except KaggleError as error:
            if not (error.passing or error.unknown) or attempt == OUTPUT_ATTEMPTS:
                raise
            print(f"no output yet, asking again: {str(error).splitlines()[0]}", flush=True)
            sleep(poll_s)


class Log:
    """The last lines of a running kernel, followed by a process of its own."""

    def __init__(self, address: Address):
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._process = _started("kernels", "logs", "--follow", str(address), stderr=subprocess.DEVNULL)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                if text := plain(line, 160):
                    self._lines.append(text)

    def news(self) -> list[str]:
        """The last lines since the last call."""
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines

    def close(self, grace_s: float = 0.0) -> None:
        """End it, after grace_s at most in which the last lines may come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()
        self._reader.join()


def wait(
    address: Address,
    poll_s: float,
    pushed: bool = False,
    *,
    patience_s: float = PATIENCE_S,
    appears_s: float = APPEARS_S,
    longest_s: float = LONGEST_S,
) -> tuple[str, str]:
    """Watch a run until it ends, printing its state and last log lines; returns state()'s last answer.

    Trouble is asked about again, for patience_s: a 5xx tells nothing about the run. So is a kernel that is not there
    yet though it was pushed, for appears_s. Raises KaggleError after that, after longest_s, and at once where already
    the first answer is one that asking again does not change.
    """
    start = told = answered = monotonic()
    known = False
    shown, log = "", None
    try:
        while True:
            line = ""
            try:
                word, message = state(address)
                answered, known = monotonic(), True
                line = word if word in ENDED else f"{word}: {UNDER_WAY[word]}"
            except KaggleError as error:
                appearing = pushed and error.unknown and not known
                bound_s = appears_s if appearing else patience_s if error.passing or known else 0.0
                if monotonic() - answered >= bound_s:
                    if appearing:
                        error.add_note(
                            f"  it was pushed from here, and is still not there after {appears_s / 60:.0f} minutes: "
                            f"look at {address.page}, then scripts/pull_from_kaggle.sh {address}"
                        )
                    raise
                word, line = "", f"no answer, asking again: {str(error).splitlines()[0]}"
            if word == "RUNNING" and log is None:
                log = Log(address)
            if log and word in ENDED:
                log.close(grace_s=10.0)
            news = log.news() if log else []
            if line != shown or news or monotonic() - told > HEARTBEAT_S:
                print(f"[{(monotonic() - start) / 60:4.0f} min] {line}", *(f"    {text}" for text in news), sep="\n")
                sys.stdout.flush()
                shown, told = line, monotonic()
            if word in ENDED:
                return word, message
            if monotonic() - start > longest_s:
                raise KaggleError(f"{word or 'nothing'} after {longest_s / 3600:.1f} hours: stop it at {address.page}")
            sleep(poll_s)
    finally:
        if log:
            log.close()
