"""What the compiler makes of the shipped tiles, for every architecture, with no GPU."""

import json
import subprocess
import sys

import pytest
import torch
from children import ROOT, environment

triton = pytest.importorskip("triton", reason="Triton is not installed")

TURING_TENSOR_CORES = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3)
SHARED_BYTES = {75: 65536, 80: 166912, 86: 101376, 90: 232448}  # what a program may ask for


def compiled(capability, pass_, dtype, *head_dims):
    """The rows of compile_tiles.py."""
    command = [sys.executable, ROOT / "tests" / "compile_tiles.py", *map(str, (capability, pass_, dtype, *head_dims))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(interpreted=False))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("head_dims", [(32, 64), (128, 256)], ids=str)
@pytest.mark.parametrize("pass_", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_tile_for_sm_75(pass_, dtype, head_dims):
    """Fits the T4's shared memory, runs on its tensor cores, and takes the registers and stack that its table says."""
    if dtype == "float16" and not TURING_TENSOR_CORES:
        pytest.skip(f"Triton {triton.__version__} compiles fp16 for sm_75 without tensor cores")
    rows = compiled(75, pass_, dtype, *head_dims)
    assert {row["head_dim"] for row in rows} == set(head_dims)
    for row in rows:
        assert row["shared_bytes"] <= row["promised"] <= SHARED_BYTES[75], row
        assert (row["mma"] > 0) == (dtype == "float16"), row
        if TURING_TENSOR_CORES:  # the release that the tables were made with
            assert row["registers"] <= row["tile"]["registers"], row
            assert row["stack_bytes"] <= row["tile"]["stack_bytes"], row


@pytest.mark.parametrize("pass_", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("capability, head_dims", [(80, (64, 128)), (86, (64, 128)), (90, (64, 128))], ids=str)
def test_default_tiles_for_newer_architectures(capability, head_dims, pass_):
    for row in compiled(capability, pass_, "float16", *head_dims):
        assert row["shared_bytes"] <= row["promised"] <= SHARED_BYTES[capability], row
        assert row["mma"] > 0, row


def test_strides_are_packed_in_units_of_eight():
    from flashattn.codegen import pack_strides

    assert pack_strides(torch.empty(2, 3, 5, 40)) == ([75, 25, 5, 1], 8)
    assert pack_strides(torch.empty(2, 3, 5, 40), torch.empty(2, 3, 5, 4))[1] == 1
