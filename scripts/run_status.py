"""What a run's status.json says: the file that kaggle/driver.py writes, and by which alone a run is judged.

A run folder made by hand has none, and counts as whoever made it says.
"""

import json
import re
from pathlib import Path

FILE = "status.json"
FORMAT = 1
MAX_BYTES = 1 << 20
STATES = ("running", "finished", "refused")
VERDICTS = {
    "complete": "every step passed",
    "partial": "not every step passed",
    "unfinished": "it ended before its last step, and what it had left is here",
    "refused": "the machine was not one to measure on, and nothing ran",
}


def read(folder: Path) -> dict | None:
    """The status of a run folder, None where there is no status.json; raises ValueError for one that is malformed."""
    path = folder / FILE
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{FILE}: is {path.stat().st_size:,} bytes, accepted are {MAX_BYTES:,}")
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{FILE}: is no JSON: {error}") from None
    for name, right, accepted in (
        ("format", lambda x: x == FORMAT, FORMAT),
        ("commit", lambda x: re.fullmatch(r"[0-9a-f]{40}", x), "40 hexadecimal digits"),
        ("dirty", lambda x: x in ("yes", "no"), "yes, no"),
        ("state", lambda x: x in STATES, ", ".join(STATES)),
        ("started", lambda x: re.match(r"\d{4}-\d{2}-\d{2}T", x), "an ISO date and time"),
        ("accepts_any_device", lambda x: isinstance(x, bool), "true, false"),
        ("parameters", lambda x: isinstance(x, dict), "an object"),
        ("gpu", lambda x: isinstance(x, dict), "an object"),
        ("machine", lambda x: isinstance(x, dict), "an object"),
        ("steps", lambda x: isinstance(x, list) and all(isinstance(s, dict) for s in x), "a list of objects"),
    ):
        value = status.get(name) if isinstance(status, dict) else None
        try:
            good = right(value)
        except TypeError:
            good = False
        if not good:
            raise ValueError(f"{FILE}: {name}: got {str(value)[:80]!r}, accepted: {accepted}")
    return status


def verdict(status: dict) -> str:
    """A key of VERDICTS."""
    if status["state"] != "finished":
        return {"running": "unfinished", "refused": "refused"}[status["state"]]
    passed = [step.get("state") == "passed" for step in status["steps"]]
    return "complete" if passed and all(passed) else "partial"


def marks(status: dict) -> str:
    """The verdict and what else sets a run apart: "complete, quick, on any device"."""
    others = {
        "quick": status["parameters"].get("quick") is True,
        "on any device": status["accepts_any_device"],
        "uncommitted changes": status["dirty"] == "yes",
    }
    return ", ".join([verdict(status), *(name for name, holds in others.items() if holds)])


def feeds_tables(status: dict) -> bool:
    """Whether the README may quote its figures: a complete run of a commit, on the GPU that it was meant for."""
    return verdict(status) == "complete" and not status["accepts_any_device"] and status["dirty"] == "no"


def gpu_name(status: dict) -> str:
    """As in "NVIDIA H200" or "Tesla T4"; "CPU" where there was no GPU."""
    return str(status["gpu"].get("name") or status["machine"].get("gpu") or "CPU")


def folder_name(status: dict) -> str:
    """<date>_<gpu>_<commit>, such as 2026-11-29_h200_e652114."""
    gpu = re.match(r"[a-z0-9]*", (gpu_name(status).lower().split() or [""])[-1])[0] or "unknown"
    return f"{status['started'][:10]}_{gpu[:20]}_{status['commit'][:7]}"
