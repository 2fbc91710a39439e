"""Useful work against hand-counted numbers, timing on a clock that the test moves, and a run's metadata."""

import csv
import random
import shutil
import subprocess
from contextlib import contextmanager
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch

from flashattn import measure


@pytest.mark.parametrize(
    ("causal", "mode", "expected"),
    [
        (False, "forward", 2880),
        (True, "forward", 1440),
        (False, "backward", 7200),
        (True, "backward", 3600),
        (False, "forward+backward", 10080),
        (True, "forward+backward", 5040),
    ],
)
def test_flops(causal, mode, expected):
    # Q K^T: 2 x 3 heads x 4 x 5 scores of 6 multiply-adds; P V: as many
    assert measure.flops(2, 3, 4, 5, 6, causal, mode) == expected


@pytest.mark.parametrize(("mode", "expected"), [("forward", 16640), ("backward", 33024), ("forward+backward", 49664)])
def test_bytes_moved(mode, expected):
    # q: 2 x 4 x 8 x 32 x 2 bytes = 4096; k and v, 2 heads of length 16: 4096 each; lse: 2 x 4 x 8 x 4 = 256
    assert measure.bytes_moved(2, 4, 2, 8, 16, 32, itemsize=2, mode=mode) == expected


@pytest.mark.parametrize("count", [measure.flops, measure.bytes_moved])
def test_unknown_mode_is_refused_by_name(count):
    shape = (1,) * (5 if count is measure.flops else 7)
    with pytest.raises(ValueError, match=r"mode: got 'sideways', accepted are forward, backward"):
        count(*shape, mode="sideways")


def test_roofline_takes_the_longer_of_compute_and_traffic():
    ceilings = measure.Ceilings(tflops=50.0, gb_per_s=200.0)
    assert ceilings.roofline_ms(flops=1e12, n_bytes=1e8) == pytest.approx(20.0)
    assert ceilings.roofline_ms(flops=1e10, n_bytes=1e9) == pytest.approx(5.0)


@pytest.fixture
def clock(monkeypatch):
    """A CPU clock, in seconds, that only the test moves."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(measure, "perf_counter", lambda: clock.now)
    return clock


def test_time_gives_median_and_percentiles(clock):
    # One call to warm up and one to estimate, at 10 ms; so two more to warm up, and ten samples in 100 ms.
    durations = iter([10.0] * 4 + [3.0, 1.0, 2.0, 10.0, 9.0, 4.0, 5.0, 6.0, 8.0, 7.0])

    def call():
        clock.now += next(durations) / 1e3

    timing = measure.time(call, budget_ms=100.5, device=torch.device("cpu"))
    assert timing.samples == 10 and next(durations, None) is None
    assert (timing.p20_ms, timing.median_ms, timing.p80_ms) == pytest.approx((2.8, 5.5, 8.2), rel=1e-5)


@pytest.mark.parametrize(("call_ms", "samples"), [(0.03, 100), (400.0, 5)])
def test_time_shares_samples_of_short_calls_and_takes_five_of_long_ones(clock, call_ms, samples):
    calls = 0

    def call():
        nonlocal calls
        calls += 1
        clock.now += call_ms / 1e3

    timing = measure.time(call, budget_ms=110.0, device=torch.device("cpu"))
    assert timing.median_ms == pytest.approx(call_ms, rel=1e-4)
    assert timing.samples == samples
    assert calls >= 34 * samples if call_ms < 1 else calls == 2 + samples


def turns(**fns):
    """What time_in_turns() takes, and a list of what entered and left."""
    log = []

    def entered(name):
        @contextmanager
        def context():
            log.append(name)
            yield fns[name]
            log.append(f"-{name}")

        return context

    return {name: entered(name) for name in fns}, log


def test_turns_change_neighbours_and_hold_one_call_at_a_time(clock, monkeypatch):
    monkeypatch.setattr(measure, "_orders", random.Random(0))

    def call():
        clock.now += 0.01

    calls, log = turns(**dict.fromkeys("abcdef", call))
    timings = measure.time_in_turns(calls, budget_ms=100.5, device=torch.device("cpu"))
    assert log[1::2] == [f"-{name}" for name in log[::2]]
    planned, *rounds = [log[i : i + 12 : 2] for i in range(0, len(log), 12)]
    assert planned == list("abcdef") and len(rounds) == measure.ROUNDS
    assert all(sorted(names) == planned for names in rounds)
    assert rounds[1] == rounds[0][::-1] and rounds[3] == rounds[2][::-1]
    followers = [set(pairwise(names)) for names in rounds]
    assert all(len(a & b) < 3 for a, b in combinations(followers, 2))  # of five; so for this seed
    assert [timing.samples for timing, _ in timings.values()] == [10] * 6
    assert timings["a"][0].median_ms == pytest.approx(10)
    assert timings["a"][1] == dict.fromkeys([*measure.GPU_QUERY, "throttle"], "")


def test_turns_share_a_clock_that_drifts(clock):
    """One after the other, the second of two equal calls would seem slower by half."""

    def call():
        clock.now += 0.01 * (1 + clock.now)

    timings = measure.time_in_turns(turns(a=call, b=call)[0], budget_ms=100.0, device=torch.device("cpu"))
    assert timings["a"][0].median_ms == pytest.approx(timings["b"][0].median_ms, rel=0.05)
    assert timings["a"][0].p80_ms > 1.1 * timings["a"][0].p20_ms


@pytest.mark.parametrize("fails_at", [1, 7])
def test_a_turn_that_fails_ends_only_its_own_call(clock, fails_at):
    count = 0

    def good():
        clock.now += 0.01

    def bad():
        nonlocal count
        count += 1
        good()
        if count == fails_at:
            raise torch.OutOfMemoryError("no room")

    timings = measure.time_in_turns(turns(bad=bad, good=good)[0], budget_ms=50.0, device=torch.device("cpu"))
    assert isinstance(timings["bad"], torch.OutOfMemoryError) and timings["bad"].__traceback__ is None
    assert timings["good"][0].samples == 5 and count == fails_at


@pytest.mark.parametrize(("call_ms", "warm_up", "calls"), [(30, (), 12), (50, (), 7), (50, ("a",), 12)])
def test_only_turns_of_long_calls_do_without_a_warm_up(clock, call_ms, warm_up, calls):
    count = 0

    def call():
        nonlocal count
        count += 1
        clock.now += call_ms / 1e3

    timings = measure.time_in_turns(turns(a=call)[0], 20.0, device=torch.device("cpu"), warm_up=warm_up)
    assert timings["a"][0].samples == 5 and count == calls  # two to plan, and five samples


def test_turns_in_wall_time_are_many_calls_a_sample(clock):
    calls = 0

    def call():
        nonlocal calls
        calls += 1
        clock.now += 0.0001

    timing, _ = measure.time_in_turns(turns(a=call)[0], 50.0, device=torch.device("cpu"), wall=True)["a"]
    assert timing.samples == measure.WALL_ROUNDS and timing.median_ms == pytest.approx(0.1)
    assert calls > measure.WALL_ROUNDS * 90


def test_turns_have_the_state_of_their_own_samples(clock, monkeypatch):
    temperatures = iter(range(100))
    running, seen = [], {"a": [], "b": []}
    reasons = {"a": "no", "b": "power cap"}

    def state(device):
        live = {"sm_clock_mhz": 1000.0, "memory_clock_mhz": "", "power_draw_w": 70.0}
        seen[running[-1]].append(next(temperatures))
        return live | {"temperature_c": seen[running[-1]][-1], "throttle": reasons[running[-1]]}

    def call(name):
        running.append(name)
        clock.now += 0.01

    monkeypatch.setattr(measure, "live_state", state)
    calls, _ = turns(a=lambda: call("a"), b=lambda: call("b"))
    timings = measure.time_in_turns(calls, 50.0, device=torch.device("cpu"))
    common = {"sm_clock_mhz": 1000.0, "memory_clock_mhz": "", "power_draw_w": 70.0}
    for name, own in seen.items():
        assert len(own) == measure.ROUNDS
        assert timings[name][1] == common | {"temperature_c": sorted(own)[2], "throttle": reasons[name]}


def test_sustained_tells_a_card_that_slows_down(clock, monkeypatch):
    rests = []

    def call():
        clock.now += 0.010 if clock.now < 1.5 else 0.020

    monkeypatch.setattr(measure, "sleep", rests.append)
    monkeypatch.setattr(measure, "live_state", lambda device: {"temperature_c": clock.now})
    first, whole, last = measure.sustained(call, 5.0, torch.device("cpu"), rest_s=20.0)
    assert rests == [20.0]
    assert [row["window"] for row in (first, whole, last)] == ["first second", "whole", "last second"]
    assert first["ms_per_call"] == pytest.approx(10) and last["ms_per_call"] == pytest.approx(20)
    assert 10 < whole["ms_per_call"] < 20 and whole["seconds"] == pytest.approx(5, abs=0.25)
    assert first["seconds"] == pytest.approx(1, abs=0.15) and last["seconds"] == pytest.approx(1, abs=0.25)
    assert first["temperature_c"] < 1.2 and last["temperature_c"] == whole["temperature_c"] > 5


def test_sustained_shorter_than_a_call(clock):
    def call():
        clock.now += 3.0

    rows = measure.sustained(call, 1.0, torch.device("cpu"))
    assert [row["calls"] for row in rows] == [1, 1, 1] and rows[0]["ms_per_call"] == pytest.approx(3000)


def test_peak_memory_is_refused_off_the_gpu():
    with pytest.raises(ValueError, match="device: got cpu, accepted is a CUDA device"):
        measure.peak_memory(lambda: None, torch.device("cpu"))


@pytest.mark.gpu
def test_peak_memory_counts_temporaries_and_results():
    mib = 1 << 20
    kept = torch.empty(5 * mib, dtype=torch.uint8, device="cuda")

    def call():
        temporary = torch.empty(3 * mib, dtype=torch.uint8, device="cuda")
        result = torch.empty(2 * mib, dtype=torch.uint8, device="cuda")
        del temporary
        return result

    assert measure.peak_memory(call) == 5 * mib
    assert kept.numel() == 5 * mib


@pytest.mark.gpu
def test_time_on_the_gpu_grows_with_the_work():
    small, large = (torch.randn(n, n, device="cuda") for n in (1024, 4096))
    short, long = measure.time(lambda: small @ small), measure.time(lambda: large @ large)
    assert 0 < short.p20_ms <= short.median_ms <= short.p80_ms
    assert long.median_ms > 10 * short.median_ms  # 64 times the work


def test_metadata_has_every_column():
    metadata = measure.run_metadata()
    gpu_only = ["gpu", "capability", *measure.GPU_QUERY, "throttle"]
    always = ["torch", "python", "platform", "commit", "dirty", "date"]
    assert list(metadata) == ["device", *gpu_only, "torch", "triton", "cuda", *always[1:]]
    assert all(metadata[name] for name in always)
    assert metadata["torch"] == torch.__version__
    assert bool(metadata["gpu"]) == torch.cuda.is_available()


def test_gpu_state_reads_nvidia_smi(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    asked = []

    def run(*command):
        asked.append(command)
        return "550.54, 1590, 5000, 68.31, [N/A], 61"

    monkeypatch.setattr(measure, "_run", run)
    state = measure.gpu_state(torch.device("cuda", 0))
    assert asked[0][:2] == ("nvidia-smi", "--id=GPU-1-2")
    assert state == {
        "driver": "550.54",
        "sm_clock_mhz": "1590",
        "memory_clock_mhz": "5000",
        "power_draw_w": "68.31",
        "power_limit_w": "",
        "temperature_c": "61",
        "throttle": "",
    }
    monkeypatch.setattr(measure, "_run", lambda *command: "")
    assert set(measure.gpu_state(torch.device("cuda", 0)).values()) == {""}


class FakeNvml:
    """NVML as a driver has it: functions that write through a pointer, 0 for success."""

    def __init__(self, bits, **functions):
        self.functions = {
            "nvmlDeviceGetClockInfo": lambda handle, which, out: self.write(out, {1: 1237, 2: 5000}[which]),
            "nvmlDeviceGetPowerUsage": lambda handle, out: self.write(out, 69_500),
            "nvmlDeviceGetTemperature": lambda handle, which, out: 3,  # NVML_ERROR_NOT_SUPPORTED
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle, out: self.write(out, bits),
            "nvmlInit_v2": lambda: 0,
            "nvmlDeviceGetHandleByUUID": lambda uuid, out: 0 if uuid == b"GPU-1-2" else 6,
        } | functions

    @staticmethod
    def write(out, value):
        out._obj.value = value
        return 0

    def __getattr__(self, name):
        try:
            return self.functions[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.fixture
def nvml(monkeypatch):
    """Gives a GPU of uuid 1-2 an NVML."""
    measure._nvml.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))

    def set_up(bits, **functions):
        measure._nvml.cache_clear()
        monkeypatch.setattr(measure.ctypes, "CDLL", lambda name: FakeNvml(bits, **functions))

    yield set_up
    measure._nvml.cache_clear()


@pytest.mark.parametrize(
    ("bits", "throttle"), [(0, "no"), (1 | 2, "no"), (4, "power cap"), (4 | 32 | 64, "power cap+thermal")]
)
def test_live_state_reads_nvml(nvml, bits, throttle):
    gpu = torch.device("cuda", 0)
    nvml(bits)  # of a driver that has the bits under their old name only
    state = {"sm_clock_mhz": 1237, "memory_clock_mhz": 5000, "power_draw_w": 69.5, "temperature_c": ""}
    assert measure.live_state(gpu) == state | {"throttle": throttle}
    nvml(0xFF, nvmlDeviceGetCurrentClocksEventReasons=lambda handle, out: FakeNvml.write(out, bits))
    assert measure.live_state(gpu)["throttle"] == measure.gpu_state(gpu)["throttle"] == throttle
    nvml(bits, nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle, out: 3)
    assert measure.live_state(gpu)["throttle"] == ""


def test_live_state_without_nvml(nvml, monkeypatch):
    assert measure.live_state(torch.device("cpu")) == {}
    nvml(0, nvmlInit_v2=lambda: 9)
    assert measure.live_state(torch.device("cuda", 0)) == {}
    nvml(0, nvmlDeviceGetHandleByUUID=lambda uuid, out: 6)
    assert measure.live_state(torch.device("cuda", 0)) == {}

    def missing(name):
        raise OSError(name)

    measure._nvml.cache_clear()
    monkeypatch.setattr(measure.ctypes, "CDLL", missing)
    assert measure.live_state(torch.device("cuda", 0)) == {}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder that the package seems to lie in."""
    (tmp_path / "tree" / "flashattn").mkdir(parents=True)
    (tmp_path / "tree" / "flashattn" / "measure.py").write_text("")
    monkeypatch.setattr(measure, "__file__", str(tmp_path / "tree" / "flashattn" / "measure.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("FLASHATTN_COMMIT", "FLASHATTN_DIRTY", "GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "tree"


def _git(folder, *command):
    settings = (
        "-c",
        "user.name=someone",
        "-c",
        "user.email=someone@example.org",
        "-c",
        "commit.gpgsign=false",
    )
    done = subprocess.run(["git", "-C", str(folder), *settings, *command], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _commit(folder):
    _git(folder, "init", "-q")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "--no-verify", "-m", "all")
    return _git(folder, "rev-parse", "HEAD")


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@needs_git
def test_commit_of_a_checkout(tree, monkeypatch):
    monkeypatch.setenv("FLASHATTN_COMMIT", "not this one")
    head = _commit(tree)
    assert measure.commit() == {"commit": head, "dirty": "no"}
    (tree / "new.py").write_text("")
    assert measure.commit() == {"commit": head, "dirty": "yes"}


@needs_git
def test_commit_of_what_lies_in_a_checkout_of_something_else(tree):
    _commit(tree.parent)
    assert measure.commit() == {"commit": "unknown", "dirty": "unknown"}


def test_commit_of_a_tree_without_git(tree, monkeypatch):
    assert measure.commit() == {"commit": "unknown", "dirty": "unknown"}
    monkeypatch.setenv("FLASHATTN_COMMIT", "abc123")
    assert measure.commit() == {"commit": "abc123", "dirty": "unknown"}
    monkeypatch.setenv("FLASHATTN_DIRTY", "0")
    assert measure.commit() == {"commit": "abc123", "dirty": "no"}
    monkeypatch.setenv("FLASHATTN_DIRTY", "1")
    assert measure.commit() == {"commit": "abc123", "dirty": "yes"}


def test_csv_round_trip(tmp_path):
    rows = [{"name": 'a "quoted", b', "ms": 0.1}, {"name": "c\nd", "note": None, "new": True}]
    path = tmp_path / "made" / "rows.csv"
    measure.write_csv(path, rows)
    with path.open(newline="") as file:
        back = list(csv.DictReader(file))
    assert back == [
        {"name": 'a "quoted", b', "ms": "0.1", "note": "", "new": ""},
        {"name": "c\nd", "ms": "", "note": "", "new": "True"},
    ]
