"""What stands around a measured call: useful work, time, memory, and the machine it ran on.

Times of a call are the median with the 20th and 80th percentile, in milliseconds. Nothing flushes the
L2 cache between launches: in a model the projection before an attention has just written q, k and v.
"""

import csv
import ctypes
import functools
import importlib.metadata
import math
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, sleep

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

# The NVML function behind a column of live_state(), what it is asked for, and the column's unit in its own.
NVML_QUERY = {
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", (1,), 1),
    "memory_clock_mhz": ("nvmlDeviceGetClockInfo", (2,), 1),
    "power_draw_w": ("nvmlDeviceGetPowerUsage", (), 1000),
    "temperature_c": ("nvmlDeviceGetTemperature", (0,), 1),
}
# NVML's bits for why the clocks are held down, without those for idling and for clocks that the user has set.
THROTTLE = {0x04: "power cap", 0x08: "hardware slowdown", 0x20: "thermal", 0x40: "thermal", 0x80: "power brake"}

MIN_SAMPLE_MS = 1.0  # shorter calls share a sample: an event resolves half a microsecond
WARMUP_MS = 20.0
MAX_SAMPLES = 100
ROUNDS = 5  # of calls that are timed in turns
TURN_WARMUP_MS = 2.0  # the clocks are up from the turn before
LONG_MS = 40.0  # from here on a call does not warm up at each turn
WALL_CALLS = 200  # at most, of one sample of wall time
WALL_ROUNDS = 25  # one sample each: a host's pace wanders more than a GPU's
CHUNK_S = 0.1  # how long sustained() runs between two looks at the clock
_orders = random.Random(0)  # of time_in_turns(): the same in every process, others from one of its calls to the next


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
    launches, count, _ = _plan(fn, budget_ms, min_samples, device)
    return _timing(_samples(fn, launches, count, device))


def time_in_turns(
    calls: Mapping[Hashable, Callable[[], AbstractContextManager[Callable[[], object]]]],
    budget_ms: float = 100.0,
    min_samples: int = 5,
    device: torch.device | None = None,
    *,
    wall: bool = False,
    warm_up: Collection[Hashable] = (),
) -> dict[Hashable, tuple[Timing, dict] | Exception]:
    """Time several calls as time() does, in turns, so that clocks that drift meet all of them alike.

    Each of `calls` makes a context that gives the call; it is entered anew at every turn, and what it holds is freed
    in between. The order of a round is shuffled, and that of the next its reverse: at its power limit a GPU is as fast
    as the call before has let it be. With `wall` a sample is the wall time of many calls in a row, up to when the
    device is done: what a call costs where Python cannot keep ahead of the GPU. Long calls do not warm up at each turn,
    but for those named in `warm_up`: such as need so much memory that the allocator must first take it back from the
    turns before.

    Returns for each name its timing and the median of live_state() while it ran, or the exception that it raised.
    """
    device, rounds = device or default_device(), WALL_ROUNDS if wall else ROUNDS
    plans, samples, states, failed = {}, {name: [] for name in calls}, {name: [] for name in calls}, {}

    def plan(name: str) -> None:
        with calls[name]() as call:
            launches, count, estimate_ms = _plan(call, budget_ms, min_samples, device)
        if wall:
            launches, count = min(max(int(budget_ms / ROUNDS / estimate_ms), 1), WALL_CALLS), rounds
        warmup = math.ceil(TURN_WARMUP_MS / estimate_ms) if estimate_ms < LONG_MS or name in warm_up else 0
        plans[name] = warmup, launches, math.ceil(count / rounds)

    def take(name: str) -> None:
        warmup, launches, count = plans[name]
        with calls[name]() as call:
            for _ in range(warmup):  # not awaited: the first sample finds the GPU at work
                call()
            sample = _wall_samples if wall else _samples
            samples[name] += sample(call, launches, count, device, lambda: states[name].append(live_state(device)))

    names = list(calls)
    for turn in range(rounds + 1):
        if turn % 2:
            _orders.shuffle(names)
        elif turn:
            names.reverse()
        for name in names:
            if name not in failed:
                try:
                    take(name) if turn else plan(name)
                except Exception as error:
                    failed[name] = error.with_traceback(None)  # whose frames hold tensors
    timings = {name: (_timing(samples[name]), _median_state(states[name])) for name in calls if name not in failed}
    if not all(state for _, state in timings.values()):  # no NVML, and nvidia-smi is too slow to be asked at every turn
        asked = gpu_state(device)
        timings = {name: (timing, state or asked) for name, (timing, state) in timings.items()}
    return timings | failed


def _plan(fn: Callable[[], object], budget_ms: float, min_samples: int, device: torch.device) -> tuple[int, int, float]:
    """How many calls share a sample, how many samples fill the budget, and what a call takes in ms, warmed up."""
    fn()  # compiles, and allocates what later calls reuse
    estimate_ms = max(_samples(fn, 1, 1, device)[0], 1e-4)
    _samples(fn, 1, int(WARMUP_MS / estimate_ms), device)
    launches = math.ceil(MIN_SAMPLE_MS / estimate_ms)
    count = int(budget_ms / (launches * estimate_ms))
    return launches, min(max(count, min_samples), MAX_SAMPLES), estimate_ms


def _timing(samples: list[float]) -> Timing:
    p20, median, p80 = torch.tensor(samples).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return Timing(median, p20, p80, len(samples))


def sustained(
    fn: Callable[[], object], seconds: float, device: torch.device | None = None, rest_s: float = 0.0
) -> list[dict]:
    """Run `fn()` without a pause for `seconds`, after a call that compiles and `rest_s` of rest.

    A row each for the first second, the whole time and the last second: window, seconds, calls, ms_per_call, and
    live_state() at its end, where NVML is there.
    """
    device = device or default_device()
    fn()
    _wait(device)
    sleep(rest_s)
    marks = [(0.0, 0, {})]  # seconds, calls until then, and the state
    chunk, start = 1, perf_counter()
    while marks[-1][0] < seconds:
        for _ in range(chunk):
            fn()
        state = live_state(device)  # while the last of them run
        _wait(device)
        marks.append((perf_counter() - start, marks[-1][1] + chunk, state))
        chunk = max(1, int(CHUNK_S * marks[-1][1] / marks[-1][0]))
    end = marks[-1][0]
    first = next((mark for mark in marks if mark[0] >= 1.0), marks[-1])
    before_last = next(mark for mark in reversed(marks[:-1]) if mark[0] <= max(end - 1.0, 0.0))
    rows = []
    for window, a, b in (
        ("first second", marks[0], first),
        ("whole", marks[0], marks[-1]),
        ("last second", before_last, marks[-1]),
    ):
        took, calls = b[0] - a[0], b[1] - a[1]
        state = b[2] or (gpu_state(device) if b is marks[-1] else {})
        rows.append({"window": window, "seconds": took, "calls": calls, "ms_per_call": took * 1e3 / calls, **state})
    return rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _samples(
    fn: Callable[[], object],
    launches: int,
    count: int,
    device: torch.device,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[float]:
    """`count` samples of the milliseconds a call, each over `launches` calls; `meanwhile()` while a GPU is at work."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                for _ in range(launches):
                    fn()
                event.record()
            meanwhile()
            torch.cuda.synchronize()
        return [a.elapsed_time(b) / launches for a, b in zip(events, events[1:], strict=False)]
    marks = [perf_counter()]
    for _ in range(count):
        for _ in range(launches):
            fn()
        marks.append(perf_counter())
    meanwhile()
    return [(b - a) * 1e3 / launches for a, b in zip(marks, marks[1:], strict=False)]


def _wall_samples(
    fn: Callable[[], object], launches: int, count: int, device: torch.device, meanwhile: Callable[[], object]
) -> list[float]:
    """As _samples(), but of wall time, from an idle device until it is done."""
    samples = []
    for _ in range(count):
        _wait(device)
        start = perf_counter()
        for _ in range(launches):
            fn()
        _wait(device)
        samples.append((perf_counter() - start) * 1e3 / launches)
    meanwhile()
    return samples


def peak_memory(fn: Callable[[], object], device: torch.device | None = None) -> int:
    """Bytes that a call of `fn` needs at its peak beyond what was allocated before it, its results included.

    A first call goes unmeasured: library workspaces stay allocated and are no cost of the call. Backward passes run in
    the calling thread: autograd's own lets go of the gradients a moment after it hands them over.
    Needs a CUDA device; raises ValueError for any other.
    """
    device = device or default_device()
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, accepted is a CUDA device: only its allocator knows a peak")
    with torch.autograd.set_multithreading_enabled(False):
        fn()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = fn()
        torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def matmul(dtype: torch.dtype, device: torch.device | None = None) -> tuple[Callable[[], torch.Tensor], float]:
    """A matrix product that is large enough to run at the device's rate, and its operations: cuBLAS on a GPU."""
    device = device or default_device()
    size = 8192 if device.type == "cuda" else 512
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return lambda: a @ b, 2.0 * size**3


def ceilings(dtype: torch.dtype, device: torch.device | None = None) -> Ceilings:
    """Measure both ceilings here and now: nominal rates say little about a card at its power limit."""
    device = device or default_device()
    product, product_flops = matmul(dtype, device)
    timing = time(product, device=device)
    n_bytes = 1 << (30 if device.type == "cuda" else 26)
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = time(lambda: target.copy_(source), device=device)
    return Ceilings(tflops=product_flops / timing.median_ms / 1e9, gb_per_s=2 * n_bytes / copy.median_ms / 1e6)


def gpu_state(device: torch.device | None = None) -> dict[str, str]:
    """A GPU's driver, clocks, power and temperature this moment, by nvidia-smi, and why its clocks are held down.

    The last is the column throttle, as in live_state(). "" for what cannot be said.
    """
    device = device or default_device()
    values: list[str] = []
    if device.type == "cuda":
        query = f"--query-gpu={','.join(GPU_QUERY.values())}"
        values = _run("nvidia-smi", f"--id={_uuid(device)}", query, "--format=csv,noheader,nounits").split(", ")
    if len(values) != len(GPU_QUERY):
        values = [""] * len(GPU_QUERY)
    known = ["" if value.startswith("[") else value for value in values]  # "[N/A]"
    throttle = live_state(device).get("throttle", "")
    return dict(zip(GPU_QUERY, known, strict=True)) | {"throttle": throttle}


def live_state(device: torch.device | None = None) -> dict[str, float | str]:
    """What changes of gpu_state(), by NVML: quick enough to be read while the GPU is at work; {} without NVML.

    throttle says why the clocks are held down, such as "power cap" or "power cap+thermal", or "no".
    """
    device = device or default_device()
    found = _nvml(_uuid(device)) if device.type == "cuda" else None
    if found is None:
        return {}
    nvml, handle = found

    def ask(function: str, what: tuple[int, ...] = (), kind: type = ctypes.c_uint) -> int | None:
        value = kind()
        try:
            failed = getattr(nvml, function)(handle, *what, ctypes.byref(value))
        except AttributeError:  # this driver does not have it
            return None
        return None if failed else value.value

    state: dict[str, float | str] = {}
    for column, (function, what, unit) in NVML_QUERY.items():
        value = ask(function, what)
        state[column] = "" if value is None else value / unit
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons", kind=ctypes.c_ulonglong)
    if bits is None:  # before driver 535 it had another name
        bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
    reasons = dict.fromkeys(name for bit, name in THROTTLE.items() if (bits or 0) & bit)
    state["throttle"] = "" if bits is None else "+".join(reasons) or "no"
    return state


def _median_state(states: list[dict]) -> dict:
    """One state of several: of numbers the median, of throttle all reasons that were seen; {} of empty ones."""
    states = [state for state in states if state]
    if not states:
        return {}
    joined = {}
    for column in NVML_QUERY:
        numbers = [state[column] for state in states if state[column] != ""]
        joined[column] = statistics.median(numbers) if numbers else ""
    told = dict.fromkeys(reason for state in states for reason in state["throttle"].split("+") if reason)
    joined["throttle"] = "+".join(reason for reason in told if reason != "no") or ("no" if told else "")
    return joined


@functools.cache
def _nvml(uuid: str) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """NVML, which comes with the driver, and its handle of a GPU; None where either is not to be had."""
    handle = ctypes.c_void_p()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None
    return nvml, handle


def _uuid(device: torch.device) -> str:
    return "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")


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
