"""Inputs for tests and benchmarks, and the one tolerance helper."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

# Where the baseline is not finite it is no baseline: the error is then held to this share of max|exact|,
# 2**-6 for 16-bit inputs whose scores reach 1e5 (fp32 scores there are 0.008 apart).
ABSOLUTE_BOUND = 2.0**-6


class Report(NamedTuple):
    """One comparison: largest absolute errors against the oracle, and where ours is."""

    what: str
    dtype: str
    error: float
    baseline_error: float
    bound: float
    index: tuple[int, ...]

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # False for NaN

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "WRONG"
        return (
            f"{self.what} ({self.dtype}): error {self.error:.3e} at {self.index}, PyTorch {self.baseline_error:.3e}, "
            f"bound {self.bound:.3e}: {verdict}"
        )


# Called with every report; the test suite records them.
listeners: list[Callable[[Report], None]] = []


def _largest_error(actual: torch.Tensor, exact: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    """Largest |actual - exact| and its index; equal infinities differ by 0, NaN by infinity."""
    if exact.numel() == 0:
        return 0.0, ()
    difference = torch.where(actual == exact, 0.0, (actual - exact).abs())
    difference = difference.nan_to_num(nan=float("inf"), posinf=float("inf"))
    worst = int(difference.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), exact.shape))
    return float(difference.flatten()[worst]), index


def check(
    what: str,
    actual: torch.Tensor,
    exact: torch.Tensor,
    baseline: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    condition: float = 1.0,
    terms: float = 0.0,
) -> Report:
    """Hold a result to at most twice the error of PyTorch in the same dtype, plus 2 * eps * max|exact|.

    exact is the fp64 oracle, baseline the same in PyTorch in the inputs' dtype; dtype (actual's, unless given)
    is the one whose eps counts. Two arguments are for results that this is no measure of (docs/numerics.md):
    condition multiplies max|exact|, where P is rebuilt from scores whose own rounding, eps times their size, decides;
    terms is added to it, where the result is a difference of terms of that size. A baseline that is not finite is no
    baseline; ABSOLUTE_BOUND * max|exact| stands for it. Raises AssertionError with both errors and the worst index.
    """
    dtype = actual.dtype if dtype is None else dtype
    if actual.shape != exact.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)} is not {tuple(exact.shape)}")
    actual, exact, baseline = (x.detach().double() for x in (actual, exact, baseline))
    error, index = _largest_error(actual, exact)
    baseline_error, _ = _largest_error(baseline, exact)
    finite = exact[exact.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    allowed = ABSOLUTE_BOUND * largest if baseline_error == float("inf") else 2 * baseline_error
    bound = allowed + 2 * torch.finfo(dtype).eps * (condition * largest + terms)
    report = Report(what, str(dtype).removeprefix("torch."), error, baseline_error, bound, index)
    for listener in listeners:
        listener(report)
    if not report.ok:
        raise AssertionError(str(report))
    return report


def score_condition(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> float:
    """check()'s condition: how much fp32's relative rounding is magnified in P = exp2(score - lse), at least 1.

    It is the size of the two. 1 in 16 bits, where eps is far beyond it.
    """
    if q.dtype != torch.float32 or not q.numel() or not k.numel():
        return 1.0
    score = largest_score(q, k) * (q.shape[-1] ** -0.5 if scale is None else abs(scale))
    return max(1.0, (score + math.log(k.shape[2])) * math.log2(math.e))


def largest_score(x: torch.Tensor, y: torch.Tensor, rows: int = 1024) -> float:
    """The largest |x_i . y_j| in any head; some rows at a time."""
    x, y = x.detach().double(), y.detach().double().repeat_interleave(x.shape[1] // y.shape[1], 1)
    return max(float((part @ y.mT).abs().max()) for part in x.split(rows, 2))


def make_inputs(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    *,
    heads_k: int | None = None,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    requires_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard normal q (batch, heads, seqlen_q, head_dim), k and v (batch, heads_k, seqlen_k, head_dim)."""
    generator = torch.Generator(device).manual_seed(seed)
    heads_k = heads if heads_k is None else heads_k
    shapes = (batch, heads, seqlen_q, head_dim), *[(batch, heads_k, seqlen_k, head_dim)] * 2
    return tuple(
        torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_(requires_grad)
        for shape in shapes
    )
