"""SDPA's kernels in the model of a T4: the way through their code, and that predict_t4.py has what comes of it."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import predict_sdpa  # noqa: E402
import predict_t4  # noqa: E402

from flashattn import sass, sm75  # noqa: E402

READ = predict_sdpa.LIBRARY.is_file() and torch.__version__ == "2.6.0+cu124"


def test_a_way_through_branches_and_a_loop():
    names = ["MOV", "BRA", "FSEL", "LDG", "HMMA", "LDG", "BRA", "BRA", "FADD", "BRA", "FMUL", "BRA", "EXIT"]
    targets = {1: 3, 6: 3, 7: 9, 9: 12, 11: 0}
    predicates = {1: "P0", 5: "P1", 6: "P0", 9: "P2", 11: "P3"}
    code = [sass.Instruction(name, targets.get(n), predicates.get(n, "")) for n, name in enumerate(names)]
    kernel = predict_sdpa.KERNELS[0]._replace(spans=((0, 11),), trips={6: 2}, taken=frozenset({1}))
    trip = "LDG HMMA LDG BRA"
    last = "LDG HMMA BRA"  # the load with a predicate would be of a fourth trip
    assert " ".join(i.name for i in predict_sdpa.way(kernel, code)) == f"MOV BRA {trip} {trip} {last} BRA BRA FMUL BRA"
    twice = predict_sdpa.way(kernel._replace(spans=((3, 6), (3, 6))), code)
    assert " ".join(i.name for i in twice) == " ".join([trip, trip, last] * 2)


def test_a_torch_without_the_kernels_is_named(tmp_path):
    with pytest.raises(ValueError, match="libtorch_cuda.so is not there: torch .* was not built for CUDA"):
        predict_sdpa.cubins(tmp_path / "libtorch_cuda.so")


@pytest.mark.slow
@pytest.mark.skipif(not READ, reason="the ways were read from the code of torch 2.6.0 for CUDA 12.4")
def test_sdpa_as_predict_t4_has_it():
    cubins = predict_sdpa.cubins()
    for kernel in predict_sdpa.KERNELS:
        cubin = cubins[kernel.name]
        with pytest.raises(ValueError, match=f"{kernel.name}: not the code of torch 2.6.0"):
            predict_sdpa.instructions(kernel._replace(checksum=0), cubin)
        way = predict_sdpa.way(kernel, predict_sdpa.instructions(kernel, cubin))
        flops = 2 * predict_sdpa.products(kernel) * kernel.block_m * kernel.block_n * kernel.head_dim
        assert sum(i.name.startswith("HMMA") for i in way) * sm75.HMMA_FLOPS * kernel.num_warps == flops
        found = predict_sdpa.row(kernel, cubin)
        assert found["useful"] == pytest.approx(predict_t4.SDPA[kernel.pass_][kernel.head_dim], abs=0.001)
        assert found["useful"] == pytest.approx(found["utilisation"], abs=0.0002)  # no product is made twice
