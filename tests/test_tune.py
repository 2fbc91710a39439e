"""The tuner: refused without a GPU, and on one its file is picked up."""

import importlib
import subprocess
import sys

import pytest
import torch
from children import ROOT, environment
from oracle import DEVICE

from flashattn import configs, measure


def tune(tmp_path, *flags, **changes):
    command = [sys.executable, ROOT / "scripts" / "tune.py", *flags]
    changes |= {"FLASHATTN_CACHE_DIR": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, env=environment(interpreted=False, **changes))


def test_needs_a_gpu(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    done = tune(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "needs a CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [("--seq-lens", "0"), ("--head-dims", "257"), ("--head-dims", "-1")])
def test_wrong_sizes_are_named(tmp_path, flags):
    pytest.importorskip("triton", reason="Triton is not installed")
    done = tune(tmp_path, *flags)
    assert done.returncode == 2 and f"argument {flags[0]}: " in done.stderr


@pytest.mark.parametrize("faster, replaced", [(1.01, False), (1.05, True), (RuntimeError("ptxas"), False)])
def test_what_replaces_the_shipped_tile(faster, replaced, monkeypatch, capsys):
    """A tile that is faster by more than noise; one that fails is passed over and named."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    tuner = importlib.import_module("tune")
    monkeypatch.setattr(tuner, "TOKENS", 16)
    monkeypatch.setattr(tuner, "WIDTH", 64)

    kind = configs.device_of(torch.device(DEVICE)), torch.float16, 64, 16, False
    shipped = [configs.shipped_tile(pass_, *kind) for pass_ in configs.PASSES]
    others = []

    def time_in_turns(calls, budget_ms, device):
        others.append(next(tile for tile in calls if tile not in shipped))
        timed = dict.fromkeys(calls, (measure.Timing(1.0, 0, 0, 5), {}))
        timed[others[-1]] = faster if isinstance(faster, Exception) else (measure.Timing(1 / faster, 0, 0, 5), {})
        return timed

    monkeypatch.setattr(measure, "time_in_turns", time_in_turns)
    found = tuner.tune(DEVICE, torch.float16, 64, 16, False, 1.0)
    assert list(found.values()) == (others if replaced else shipped)
    assert capsys.readouterr().out.count("left out: RuntimeError('ptxas')") == 3 * isinstance(faster, Exception)


@pytest.mark.gpu
def test_tunes_and_is_picked_up(tmp_path, monkeypatch, pytestconfig):
    if pytestconfig.getoption("--turing-path"):
        pytest.skip("the tuner is a process of its own, which --turing-path does not reach")
    flags = ["--head-dims", "64", "--seq-lens", "256", "--causal", "yes", "--budget-ms", "1"]
    done = tune(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    assert str(path) in done.stdout
    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path))
    device = configs.device_of(torch.device("cuda", 0))
    configs.load_tuned.cache_clear()
    tuned = configs.load_tuned(device)
    assert len(tuned) == len(configs.PASSES)
    for pass_ in configs.PASSES:
        tile = tuned[configs.tuned_key(pass_, device, torch.float16, 64, 256, True)]
        assert tile in configs.candidates(pass_, device, torch.float16, 64)
    configs.load_tuned.cache_clear()
