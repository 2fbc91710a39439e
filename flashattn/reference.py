"""Attention in plain PyTorch: a dense oracle in fp64, and the kernels' own tiled algorithm, line by line.

The tiled pair is what runs where there is neither a GPU nor Triton's interpreter. Shapes in the comments:
B batch, K key heads, G query heads a key head, M and N lengths, D head dim, m and n a block's rows.
"""

import math

import torch

BLOCK = 128  # rows of a query block and of a key block
LOG2E = math.log2(math.e)


def live_scores(rows, cols, seqlen_q: int, seqlen_k: int, causal: bool):
    """Boolean mask of the scores that live: query i sees key j when j <= i + seqlen_k - seqlen_q, if causal."""
    return cols <= rows + (seqlen_k - seqlen_q if causal else seqlen_k)


def dense_attention(q, k, v, *, causal: bool = False, scale: float | None = None, dtype: torch.dtype = torch.float64):
    """Attention with the whole score matrix: in fp64 the oracle, in the inputs' dtype the baseline of a test.

    q (B, H, M, D), k and v (B, H_kv, N, D). Returns the output (B, H, M, D) and the natural log-sum-exp
    (B, H, M), both of dtype and differentiable. A row that sees no key has output 0, lse -inf, gradient 0.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _, group = _head_groups(q, k)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = scale * (q @ k.transpose(-2, -1))  # [B, H, M, N]
    rows = torch.arange(q.shape[2], device=q.device)[:, None]
    cols = torch.arange(k.shape[2], device=q.device)[None, :]
    live = live_scores(rows, cols, q.shape[2], k.shape[2], causal)
    has_key = live.any(-1)  # [M]
    # Rows without a key take part as rows of zeros, so that no -inf reaches a gradient.
    s = s.masked_fill(~live & has_key[:, None], -math.inf).masked_fill(~has_key[:, None], 0.0)
    p = torch.softmax(s, -1).masked_fill(~has_key[:, None], 0.0)
    lse = torch.logsumexp(s, -1).masked_fill(~has_key, -math.inf)
    return p @ v, lse


def _head_groups(q, k) -> tuple[int, int]:
    """Key heads, and query heads a key head."""
    return k.shape[1], q.shape[1] // max(k.shape[1], 1)


def _by_key_head(x, groups: tuple[int, int]):
    """(B, H, ...) to (B, K, G, ...) in fp32: the query heads that share a key head side by side."""
    return x.float().unflatten(1, groups)


def _blocks(length: int):
    return [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


def _key_end(rows: slice, seqlen_q: int, seqlen_k: int, causal: bool) -> int:
    """Keys from here on are seen by none of the rows."""
    return max(0, min(seqlen_k, rows.stop + seqlen_k - seqlen_q)) if causal else seqlen_k


def _scores_log2(q, k, rows: slice, cols: slice, seqlen_q, seqlen_k, causal, scale):
    """Scores of one pair of blocks times log2(e), -inf where none lives. [B, K, G, m, n]"""
    s = (scale * LOG2E) * (q[..., rows, :] @ k[..., cols, :].transpose(-2, -1))
    i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    j = torch.arange(cols.start, cols.stop, device=q.device)[None, :]
    return s.masked_fill(~live_scores(i, j, seqlen_q, seqlen_k, causal), -math.inf)


def forward(q, k, v, *, causal: bool, scale: float):
    """FlashAttention-2, algorithm 1, in fp32. Returns o in q's dtype and the base-2 lse (B, H, M) in fp32."""
    groups, seqlen_q, seqlen_k = _head_groups(q, k), q.shape[2], k.shape[2]
    o, lse_log2 = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    q, k, v = _by_key_head(q, groups), k.float().unsqueeze(2), v.float().unsqueeze(2)
    for rows in _blocks(seqlen_q):
        acc = torch.zeros_like(q[..., rows, :])  # [B, K, G, m, D]
        m_i = acc.new_full(acc.shape[:-1], -math.inf)  # running maximum, base 2
        l_i = acc.new_zeros(acc.shape[:-1])  # running sum
        for cols in _blocks(_key_end(rows, seqlen_q, seqlen_k, causal)):
            s = _scores_log2(q, k, rows, cols, seqlen_q, seqlen_k, causal, scale)
            m_new = torch.maximum(m_i, s.amax(-1))
            m_ref = m_new.masked_fill(m_new == -math.inf, 0.0)  # rows without a key so far
            p = torch.exp2(s - m_ref[..., None])
            alpha = torch.exp2(m_i - m_ref)
            l_i = l_i * alpha + p.sum(-1)
            acc = acc * alpha[..., None] + p @ v[..., cols, :]
            m_i = m_new
        empty = l_i == 0
        o[:, :, rows] = (acc / l_i.masked_fill(empty, 1.0)[..., None]).flatten(1, 2).to(o.dtype)
        lse_log2[:, :, rows] = (m_i + torch.log2(l_i)).masked_fill(empty, -math.inf).flatten(1, 2)
    return o, lse_log2


def delta(o, do, dlse_log2):
    """rowsum(dO * O) (B, H, M) in fp32, without log2(e) * dlse_log2, the gradient of lse_log2, which may be None."""
    rows = (o.float() * do.float()).sum(-1)
    return rows if dlse_log2 is None else rows - LOG2E * dlse_log2


def backward(q, k, v, do, lse_log2, delta, *, causal: bool, scale: float, needs=(True, True, True)):
    """FlashAttention-2, algorithm 2, in fp32: dq, dk, dv in their inputs' dtypes, None where not needed.

    dS = P * (dP - delta), dQ = scale * dS K, dK = scale * dS^T Q.
    """
    dtype, groups, seqlen_q, seqlen_k = q.dtype, _head_groups(q, k), q.shape[2], k.shape[2]
    q, k, v = _by_key_head(q, groups), k.float().unsqueeze(2), v.float().unsqueeze(2)
    do, delta = _by_key_head(do, groups), _by_key_head(delta, groups)
    lse_log2 = _by_key_head(lse_log2, groups)
    lse_log2 = lse_log2.masked_fill(lse_log2 == -math.inf, math.inf)  # a row without a key: P = exp2(s - inf) = 0
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in _blocks(seqlen_q):
        for cols in _blocks(_key_end(rows, seqlen_q, seqlen_k, causal)):
            s = _scores_log2(q, k, rows, cols, seqlen_q, seqlen_k, causal, scale)
            p = torch.exp2(s - lse_log2[..., rows, None])
            dp = do[..., rows, :] @ v[..., cols, :].transpose(-2, -1)
            ds = p * (dp - delta[..., rows, None])
            dv[..., cols, :] += (p.transpose(-2, -1) @ do[..., rows, :]).sum(2, keepdim=True)
            dk[..., cols, :] += scale * (ds.transpose(-2, -1) @ q[..., rows, :]).sum(2, keepdim=True)
            dq[..., rows, :] += scale * (ds @ k[..., cols, :])
    grads = dq.flatten(1, 2), dk.squeeze(2), dv.squeeze(2)
    return tuple(g.to(dtype) if need else None for g, need in zip(grads, needs, strict=True))
