"""What the kernels' device helpers compute, one by one."""

import pytest
import torch
from oracle import DEVICE

triton = pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402

from flashattn.primitives import HALF_SCALE, HALF_SHIFT, to_half  # noqa: E402


@triton.jit
def half_kernel(p_ptr, half_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(half_ptr + offs, to_half(tl.load(p_ptr + offs, mask=offs < n, other=0.0)), mask=offs < n)


def test_integers_round_p_as_a_conversion_does():
    """All of fp16's numbers up to one, the midpoints between them and their neighbours; and what is too small."""

    def rounded(p):
        half = torch.empty_like(p, dtype=torch.float16)
        shifted = (p.double() * 2.0**-HALF_SHIFT.value).float()
        half_kernel[(triton.cdiv(p.numel(), 1024),)](shifted, half, p.numel(), BLOCK=1024)
        return half.double() / HALF_SCALE.value

    halves = torch.arange(0x0400, 0x7801, dtype=torch.int16, device=DEVICE).view(torch.float16).float()
    halves /= HALF_SCALE.value  # 2**-29 to 1
    midpoints = (halves[1:] + halves[:-1]) / 2
    assert torch.equal(rounded(halves), halves.double())
    assert torch.equal(rounded(midpoints), halves[1:].double())
    assert torch.equal(rounded(torch.nextafter(midpoints, halves[:-1])), halves[:-1].double())
    small = torch.linspace(0, 2.0**-29, 1000, device=DEVICE)
    assert (rounded(small) - small).abs().max() <= 2.0**-40  # half of fp16's smallest number, HALF_SCALE off
