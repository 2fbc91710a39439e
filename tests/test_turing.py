"""Tensor cores on Turing under the releases that lost them: for the library's kernels and for everybody's."""

import functools
import json
import subprocess
import sys

import pytest
import torch
from children import ROOT, environment, with_triton
from oracle import DEVICE

from flashattn import configs, turing
from flashattn.testing import check

triton = pytest.importorskip("triton", reason="Triton is not installed")
import foreign_kernels  # noqa: E402

HERE = configs.device_of(torch.device(DEVICE))


@functools.cache
def facts(release):
    """What turing_facts.py found under a release."""
    command = [sys.executable, ROOT / "tests" / "turing_facts.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=with_triton(release, triton.__version__))
    assert done.returncode == 0, done.stderr[-2000:]
    found = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


@pytest.fixture(params=turing.RESTORED)
def found(request):
    return facts(request.param)


def test_foreign_kernels_get_tensor_cores(found):
    for name, counts in found["foreign_kernels"].items():
        accumulator = "f16" if name == "fp16 accumulation" else "f32"
        assert list(counts["mma"]) == [f"m16n8k8.{accumulator}.f16.f16.{accumulator}"] and counts["cp.async"] == 0, name


def test_dots_that_turing_has_no_instruction_for_stay_stock(found):
    """Said once for each kernel and kind; of an IEEE dot nothing is said."""
    for kind, outcome in found["other_dots"].items():
        assert outcome["as stock"], kind
        if kind != "ieee" and not (kind == "fp64" and not outcome["said"]):  # up to 3.4 fp64 does not get so far
            (message,) = outcome["said"]
            assert f"a dot of {kind.replace('fp64', 'f64')}, for which" in message
    assert not found["other_dots"]["ieee"]["said"]


def test_enable_and_disable(found):
    made = found["switching"]
    restored = {name for name, kernel in made.items() if kernel["mma"]}
    assert restored == {"enabled", "nested", "outer"}


def test_the_two_kinds_share_no_cache_entry(found):
    made = found["switching"]
    stock = {made[name]["hash"] for name in ("before", "disabled", "left")}
    restored = {made[name]["hash"] for name in ("enabled", "nested", "outer")}
    assert len(stock) == len(restored) == 1 and not stock & restored


def test_tuning_is_kept_apart_too(found):
    assert found["tuning"] == [[2, False], [4, True], [4, False]]


def test_strings_of_a_kernel_are_its_own(found):
    assert found["strings"]["mma"] > 0 and found["strings"]["kept"]


def test_another_gpu_is_left_alone(found):
    before, enabled, beside = found["on_another_gpu"]
    assert before == enabled == beside


def test_torch_compile_compiles_here_under_another_key(found):
    before, within, after = found["inductor"]
    assert before == after == [3, "mine"] and within[0] == 1 and within[1] != "mine"


def test_a_kernel_that_fails_falls_back(found):
    for outcome in found["a_failure_falls_back"]:
        assert outcome["as stock"]
        (message,) = outcome["said"]
        assert "dots_kernel does not compile" in message


def test_an_unknown_triton_is_left_alone(found):
    unknown = found["an_unknown_triton"]
    assert unknown["mma"] == 0 and unknown["path"] == "scalar" and unknown["own options"] == {}
    (message,) = unknown["said"]
    assert "Triton 3.99.1" in message and "3.9.0" in message


def test_status_counts_what_is_in_the_code(found):
    t4, p100 = found["status"]["Tesla T4"], found["status"]["Tesla P100"]
    assert (t4["capability"], t4["path"], t4["enabled"]) == (75, "restored", False) and t4["mma"] > 0
    assert t4["words"].startswith("Tesla T4 (sm_75), Triton 3.") and f"; {t4['mma']} tensor-core" in t4["words"]
    assert (p100["path"], p100["mma"]) == (None, None) and "older than Turing" in p100["words"]
    assert found["status"]["a Triton that fails"]["mma"] is None


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a CUDA device")
def test_status_without_a_gpu():
    status = turing.status()
    assert status.gpu is status.path is None and str(status) == "no CUDA GPU: nothing to restore"


@pytest.mark.gpu
def test_status_on_this_gpu():
    status = turing.status()
    assert status.gpu == torch.cuda.get_device_name() and status.triton == triton.__version__
    assert status.mma > 0 and status.path in ("stock", "restored")


@pytest.mark.gpu
@pytest.mark.parametrize("restored", [False, True], ids=["stock", "restored"])
@pytest.mark.parametrize("case", foreign_kernels.CASES)
def test_foreign_kernels_are_right(case, restored):
    """On this GPU; by the code of a T4 under --turing-path."""
    if not restored and HERE.capability == 75 and triton.__version__.startswith("3.3."):
        pytest.skip("stock Triton 3.3 does not compile it")
    launch, out, exact, baseline, terms = foreign_kernels.CASES[case](DEVICE)
    options = launch.options | turing.compile_options(HERE.capability, restored)
    kernel = launch.kernel[(launch.grid,)](*launch.args, **launch.constants, **options)
    accumulated_in = torch.float16 if case == "fp16 accumulation" else out.dtype
    check(case, out, exact, baseline, accumulated_in, terms=float(terms))
    if HERE.capability == 75:
        on_tensor_cores = restored or HERE.code_path == "stock"
        assert (kernel.asm["ptx"].count("mma.sync.aligned.m16n8k8") > 0) == on_tensor_cores


@pytest.mark.gpu
@pytest.mark.skipif(triton.__version__ not in turing.RESTORED, reason="this Triton needs no help")
def test_torch_compile():
    """A kernel of the user's in a compiled function, by the code of a T4: stock, enabled and stock again."""
    command = [sys.executable, ROOT / "tests" / "turing_inductor.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    stock, enabled, again = (json.loads(line) for line in done.stdout.splitlines())
    assert [stock["new with mma"], stock["new without"]] == [0, 1]
    assert [enabled["new with mma"], enabled["new without"]] == [1, 0]
    assert [again["new with mma"], again["new without"]] == [0, 0]  # what the first left on disk
    assert stock["error"] < 1e-2 and enabled["error"] < 1e-2
    assert again["sum"] == stock["sum"]
