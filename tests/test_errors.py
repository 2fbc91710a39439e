"""Every refusal names the argument, what came, and what is accepted."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from oracle import DEVICE

from flashattn import attention, interface

Q = torch.zeros(2, 4, 5, 8)
K = torch.zeros(2, 2, 6, 8)


def on_device(x):  # where a call that can be remembered is looked at first
    return x.to(DEVICE)


def nested(x):
    with warnings.catch_warnings(action="ignore"):  # PyTorch's, that they are a prototype
        return torch.nested.nested_tensor(list(on_device(x)))


CASES = {
    "not a tensor": (lambda: attention([1.0], K, K), TypeError, "q must be a torch.Tensor, got list"),
    "three dimensions": (lambda: attention(Q, K[0], K), ValueError, r"k must have 4 dimensions .*\(2, 6, 8\)"),
    "integers": (
        lambda: attention(Q.int(), K, K),
        TypeError,
        "q must be float16, bfloat16 or float32, got torch.int32",
    ),
    "doubles": (lambda: attention(Q, K, K.double()), TypeError, "v must be float16, .* got torch.float64"),
    "mixed dtypes": (lambda: attention(Q, K.half(), K), TypeError, "k must have q's dtype torch.float32, got .*16"),
    "mixed devices": (lambda: attention(Q, K, K.to("meta")), ValueError, "v must be on q's device cpu, got meta"),
    "head dim 257": (lambda: attention(*[torch.zeros(1, 1, 2, 257)] * 3), ValueError, "q .* from 1 to 256, got 257"),
    "head dim 0": (lambda: attention(*[torch.zeros(1, 1, 2, 0)] * 3), ValueError, "q .* from 1 to 256, got 0"),
    "another batch": (lambda: attention(Q, K[:1], K[:1]), ValueError, r"k must have q's batch 2 .*\(1, 2, 6, 8\)"),
    "another head dim": (lambda: attention(Q, K[..., :4], K), ValueError, r"k must have .*head_dim 8.*\(2, 2, 6, 4\)"),
    "k and v differ": (lambda: attention(Q, K, K[:, :, :3]), ValueError, r"v must have k's shape \(2, 2, 6, 8\), got"),
    "heads": (lambda: attention(Q[:, :3], K, K), ValueError, "q's heads must be a multiple of k's heads, got 3 and 2"),
    "no key heads": (lambda: attention(Q, K[:, :0], K[:, :0]), ValueError, "multiple of k's heads, got 4 and 0"),
    "causal": (lambda: attention(Q, K, K, causal="yes"), TypeError, "causal must be True or False, got 'yes'"),
    "scale": (lambda: attention(Q, K, K, scale="big"), TypeError, "scale must be a float or None, got str"),
    "scale nan": (lambda: attention(Q, K, K, scale=float("nan")), ValueError, "scale must be finite.* got nan"),
    "scale 1e39": (lambda: attention(Q, K, K, scale=1e39), ValueError, "scale must be finite.* float32, got 1e\\+39"),
    "scale 10**400": (lambda: attention(Q, K, K, scale=10**400), ValueError, "scale must be finite"),
    "sparse": (lambda: attention(on_device(Q).to_sparse(), K, K), TypeError, "q must be a dense tensor, got torch.sp"),
    "nested": (lambda: attention(on_device(Q), nested(K), K), TypeError, "k must be a dense tensor, got a nested one"),
    "no string": (lambda: attention(Q, K, K, backend=None), ValueError, "backend must be one of .* got None"),
    "backend": (lambda: attention(Q, K, K, backend="cuda"), ValueError, "backend must be one of auto, .* got 'cuda'"),
}


@pytest.mark.parametrize("call, error, message", CASES.values(), ids=CASES.keys())
def test_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_double_backward_is_refused():
    for backend in ("triton", "reference"):
        if backend == "triton" and torch.cuda.is_available():
            q, k, v = (torch.randn(1, 1, 8, 16, device="cuda", requires_grad=True) for _ in range(3))
        else:
            q, k, v = (torch.randn(1, 1, 8, 16, requires_grad=True) for _ in range(3))
        o = attention(q, k, v, backend=backend)
        (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="flashattn.attention: double backward"):
            torch.autograd.grad(dq.sum(), q)


def test_forward_mode_is_refused():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q, Q)
        with pytest.raises(NotImplementedError, match="forward-mode differentiation is not supported"):
            attention(dual, K, K)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation is not supported"):
        torch.func.jvp(lambda q: attention(q, K, K), (Q,), (Q,))


def test_a_gpu_older_than_turing_runs_on_the_reference(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    q = SimpleNamespace(device=torch.device("cuda", 0), is_cuda=True, dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla P100-PCIE-16GB")
    for capability, backend in (((6, 0), "reference"), ((7, 0), "reference"), ((7, 5), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert interface.backend_for(q) == backend
        reason = interface._refusal(q)
        assert (reason is None) == (backend == "triton")
        assert reason is None or "Turing (sm_75) or later, got Tesla P100" in reason
