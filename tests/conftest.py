"""The device of a run, poisoned memory, and the record of every comparison.

With a GPU the kernels run on it, without one under Triton's interpreter. `--turing-path` has the GPU at hand run
the code of a T4 (turing_path.py).
"""

import json
import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch asks for it in deterministic mode

import turing_path  # noqa: E402

from flashattn import launcher, testing  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--turing-path", action="store_true", help="run a T4's code on this GPU, with a T4's tiles")


def pytest_configure(config):
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns with NaN
    if HAS_GPU and launcher._empty_strided_cuda:  # what is remembered comes past that mode
        allocate = launcher._empty_strided_cuda
        launcher._empty_strided_cuda = lambda *like: allocate(*like).fill_(float("nan"))
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)
    if config.getoption("--turing-path"):
        if not HAS_GPU:
            raise pytest.UsageError("--turing-path needs a GPU")
        turing_path.install()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def the_same_numbers_each_time():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def record_errors(record_property):
    """Leave every comparison with the oracle in the JUnit XML; a wrong one fails its test, or is meant to be wrong."""

    def listener(report):
        if report.ok:
            record_property("error", json.dumps(report._asdict()))

    testing.listeners.append(listener)
    yield
    testing.listeners.remove(listener)
