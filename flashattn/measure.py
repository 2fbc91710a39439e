"""What stands around a measured call: useful work, time, memory, and the machine it ran on.

Times of a call are the median with the 20th and 80th percentile, in milliseconds. Nothing flushes the
L2 cache between launches: in a model the projection before an attention has just written q, k and v.
"""

import csv
import importlib.metadata
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import torch

# Useful work of each mode, in units of a forward pass: backward has five products to forward's two.
WORK = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}

# What nvidia-smi calls the columns of gpu_state().
GPU_QUERY = {
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_draw_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}

MIN_SAMPLE_MS = 1.0  # shorter calls share a sample: an event resolves half a microsecond
WARMUP_MS = 20.0
MAX_SAMPLES = 100


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median, the 20th and 80th percentile, and how many samples they are from."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches on a plain matrix product (TFLOP/s) and on a copy (GB/s read and written)."""

    tflops: float
    gb_per_s: float

    def roofline_ms(self, flops: float, n_bytes: float) -> float:
        """The least time in ms for so many operations and bytes of traffic, perfectly overlapped."""
        return max(flops / (self.tflops * 1e9), n_bytes / (self.gb_per_s * 1e6))


def flops(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    causal: bool = False,
    mode: str = "forward",
) -> float:
    """Useful floating point operations of an attention; `mode` is a key of WORK.

    Two per multiply-add of Q K^T and of P V, half of them where causal, 2.5 times as many in backward.
    Padding, masked scores and recomputation are not useful.
    """
    return 4 * batch * heads * seqlen_q * seqlen_k * head_dim * (0.5 if causal else 1) * _work(mode)


def bytes_moved(
    batch: int,
    heads: int,
    heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    itemsize: int,
    mode: str = "forward",
) -> int:
    """The least traffic of an attention with DRAM, in bytes: each input and output once, lse in fp32."""
    _work(mode)
    q = batch * heads * seqlen_q * head_dim * itemsize
    kv = 2 * batch * heads_kv * seqlen_k * head_dim * itemsize
    lse = batch * heads * seqlen_q * 4
    forward = 2 * q + kv + lse  # q, k, v -> o, lse
    backward = 4 * q + 2 * kv + lse  # q, k, v, o, dO, lse -> dq, dk, dv
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}[mode]


def _work(mode: str) -> float:
    if mode not in WORK:
        raise ValueError(f"mode: got {mode!r}, accepted are {', '.join(WORK)}")
    return WORK[mode]


def default_device() -> torch.device:
    """The current GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def time(
    fn: Callable[[], object],
    budget_ms: float = 100.0,
    min_samples: int = 5,
    device: torch.device | None = None,
) -> Timing:
    """Time `fn()` on `device` (the default device unless given) for about `budget_ms`.

    On a GPU the samples are differences of CUDA events, all enqueued before the first is read, so that a
    launch costs time only where the CPU cannot keep ahead. On a CPU they are wall time.
    At least `min_samples` are taken, however long they are; short calls share a sample.
    """
    device = device or default_device()
    fn()  # compiles, and allocates what later calls reuse
    estimate_ms = max(_samples(fn, 1, 1, device)[0], 1e-4)
    _samples(fn, 1, int(WARMUP_MS / estimate_ms), device)
    launches = math.ceil(MIN_SAMPLE_MS / estimate_ms)
    count = int(budget_ms / (launches * estimate_ms))
    samples = torch.tensor(_samples(fn, launches, min(max(count, min_samples), MAX_SAMPLES), device))
    p20, median, p80 = samples.quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return Timing(median, p20, p80, len(samples))


def _samples(fn: Callable[[], object], launches: int, count: int, device: torch.device) -> list[float]:
    """`count` samples of the milliseconds a call, each over `launches` calls."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                for _ in range(launches):
                    fn()
                event.record()
            torch.cuda.synchronize()
        return [a.elapsed_time(b) / launches for a, b in zip(events, events[1:], strict=False)]
    marks = [perf_counter()]
    for _ in range(count):
        for _ in range(launches):
            fn()
        marks.append(perf_counter())
    return [(b - a) * 1e3 / launches for a, b in zip(marks, marks[1:], strict=False)]


def peak_memory(fn: Callable[[], object], device: torch.device | None = None) -> int:
    """Bytes that a call of `fn` needs at its peak beyond what was allocated before it, its results included.

    A first call goes unmeasured: library workspaces stay allocated and are no cost of the call.
    Needs a CUDA device; raises ValueError for any other.
    """
    device = device or default_device()
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, accepted is a CUDA device: only its allocator knows a peak")
    fn()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def ceilings(dtype: torch.dtype, device: torch.device | None = None) -> Ceilings:
    """Measure both ceilings here and now: nominal rates say little about a card at its power limit."""
    device = device or default_device()
    size, n_bytes = (8192, 1 << 30) if device.type == "cuda" else (1024, 1 << 26)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    matmul = time(lambda: a @ b, device=device)
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = time(lambda: target.copy_(source), device=device)
    return Ceilings(tflops=2 * size**3 / matmul.median_ms / 1e9, gb_per_s=2 * n_bytes / copy.median_ms / 1e6)


def gpu_state(device: torch.device | None = None) -> dict[str, str]:
    """A GPU's driver, clocks, power and temperature this moment, by nvidia-smi: "" where it cannot say."""
    device = device or default_device()
    values: list[str] = []
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        query = f"--query-gpu={','.join(GPU_QUERY.values())}"
        values = _run("nvidia-smi", f"--id=GPU-{uuid}", query, "--format=csv,noheader,nounits").split(", ")
    if len(values) != len(GPU_QUERY):
        return dict.fromkeys(GPU_QUERY, "")
    known = ["" if value.startswith("[") else value for value in values]  # "[N/A]"
    return dict(zip(GPU_QUERY, known, strict=True))


def commit() -> dict[str, str]:
    """{"commit": hash, "dirty": "yes" | "no"} of the checkout this file lies in.

    Where the tree travelled without its .git, FLASHATTN_COMMIT and FLASHATTN_DIRTY (0 or 1) say them;
    else both are "unknown".
    """
    root = Path(__file__).resolve().parents[1]
    top = _run("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top and Path(top) == root:  # an installed copy may lie in a checkout of something else
        lines = _run("git", "-C", str(root), "status", "--porcelain=v2", "--branch").splitlines()
        heads = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
        if heads and heads[0] != "(initial)":
            changed = any(not line.startswith("#") for line in lines)
            return {"commit": heads[0], "dirty": "yes" if changed else "no"}
    dirty = {"0": "no", "1": "yes"}.get(os.environ.get("FLASHATTN_DIRTY", ""), "unknown")
    return {"commit": os.environ.get("FLASHATTN_COMMIT") or "unknown", "dirty": dirty}


def run_metadata(device: torch.device | None = None) -> dict[str, str]:
    """What a result must be read with, a column each: GPU and its state, versions, commit, UTC date."""
    device = device or default_device()
    gpu = {"gpu": "", "capability": ""}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        gpu = {"gpu": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}"}
    return {
        "device": device.type,
        **gpu,
        **gpu_state(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_csv(path: str | os.PathLike, rows: Iterable[Mapping[str, object]]) -> None:
    """Write `rows` to `path`, whose folder it makes: a column for each key of any row, as they appear."""
    rows = list(rows)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _run(*command: str) -> str:
    """Its standard output, stripped; empty where the command is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
