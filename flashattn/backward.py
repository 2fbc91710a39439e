"""Backward pass: FlashAttention-2, algorithm 2, with a kernel for dK and dV and one for dQ: no sum needs an atomic.

With P = exp2(S * scale * log2(e) - lse_log2), dP = dO V^T and delta = rowsum(dO * O):
    dS = P * (dP - delta),   dV = P^T dO,   dK = scale * dS^T Q,   dQ = scale * dS K.
A gradient of the natural lse adds dlse * P to dS: it is subtracted from delta. Each kernel rebuilds P from
lse_log2, which is kept in base 2: a change of base would round it twice more, and P is as wrong as lse is.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from . import turing
from .configs import FUSED, Tile, choose, padded_head_dim, tile_constants
from .launcher import Launch, LaunchCache, constant_rows, empty, launch, pack_strides
from .primitives import (
    LOG2E,
    dot_parts,
    in_registers,
    key_range,
    load_ahead,
    load_parts,
    load_tile,
    loaded,
    query_range,
    row_stride,
    score_mask,
    sequence_span,
    store_parts,
)

DELTA_ROWS = 64
# Before 3.3 Triton gives the two pipelined loops, within the loop over heads, shared memory of their own where one of
# them is under a condition.
LOOPS_SHARE = tl.constexpr(turing.triton_release() >= (3, 3))


@triton.jit
def _load_lse_log2(lse_log2_ptr, offs_m, seqlen_q):
    """lse, +inf where there is no row or the row has no key: exp2(s - lse) is then 0, not NaN."""
    lse_log2 = tl.load(lse_log2_ptr + offs_m, mask=offs_m < seqlen_q, other=float("inf"))
    return tl.where(lse_log2 == float("-inf"), float("inf"), lse_log2)


@triton.jit(
    do_not_specialize=["seqlen_q", "heads_q"] + [f"stride_{tensor}{axis}" for tensor in ("o", "do") for axis in "bhm"]
)
def delta_kernel(
    o_ptr, do_ptr, dlse_log2_ptr, delta_ptr,
    seqlen_q, heads_q,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) of one query block."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    start_m = tl.program_id(0) % blocks * BLOCK_M
    batch_head = tl.program_id(0) // blocks
    batch = batch_head // heads_q
    head = batch_head % heads_q
    o_ptr = sequence_span(o_ptr, batch, head, stride_ob, stride_oh, STRIDE_UNIT)
    do_ptr = sequence_span(do_ptr, batch, head, stride_dob, stride_doh, STRIDE_UNIT)
    o = load_tile(o_ptr, start_m, seqlen_q, stride_om, stride_od, BLOCK_M, HEAD_DIM, BLOCK_D, STRIDE_UNIT, True)
    do = load_tile(do_ptr, start_m, seqlen_q, stride_dom, stride_dod, BLOCK_M, HEAD_DIM, BLOCK_D, STRIDE_UNIT, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    row = batch_head.to(tl.int64) * seqlen_q + offs_m
    if HAS_DLSE:
        delta -= tl.load(dlse_log2_ptr + row, mask=offs_m < seqlen_q, other=0.0) * LOG2E
    tl.store(delta_ptr + row, delta, mask=offs_m < seqlen_q)


@triton.jit
def _accumulate_dkdv(
    dk, dk_tail, dv, dv_tail, k, k_tail, v, v_tail,
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr,
    start_n, begin, full_begin, full_end, seqlen_q, seqlen_k, scale_log2,
    stride_qm, stride_qd,
    stride_kn, stride_kd,
    stride_vn, stride_vd,
    stride_dom, stride_dod,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, CAUSAL: tl.constexpr, PIPELINED: tl.constexpr,
    WITH_DK: tl.constexpr, WITH_DV: tl.constexpr, RELOAD: tl.constexpr, HOLD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The key block against its whole query blocks, or against all others: those at the diagonal and the edge.

    Scores are transposed: [BLOCK_N, BLOCK_M].
    """
    whole = full_end - full_begin
    if HOLD and not MASKED:
        q_bits, q_tail_bits = load_ahead(
            q_ptr, full_begin, full_end, stride_qm, stride_qd, BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True
        )
        do_bits, do_tail_bits = load_ahead(
            do_ptr, full_begin, full_end, stride_dom, stride_dod, BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True
        )
    for start in tl.range(begin if MASKED else full_begin, seqlen_q - whole if MASKED else full_end, BLOCK_M):
        start_m = start
        if MASKED:
            start_m += tl.where(start < full_begin, 0, whole)  # one loop over both sides of the whole blocks
        offs_m = start_m + tl.arange(0, BLOCK_M)
        if RELOAD:
            k, k_tail = load_parts(
                k_ptr, start_n, seqlen_k, stride_kn, stride_kd,
                BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True, VOLATILE=RELOAD,
            )  # fmt: skip
        if HOLD and not MASKED:
            q, q_tail = loaded(q_bits, q_tail_bits, q_ptr)
            do, do_tail = loaded(do_bits, do_tail_bits, do_ptr)
            following = tl.minimum(start + BLOCK_M, full_end - BLOCK_M)
            q_bits, q_tail_bits = load_ahead(
                q_ptr, following, full_end, stride_qm, stride_qd,
                BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, False,
            )  # fmt: skip
            do_bits, do_tail_bits = load_ahead(
                do_ptr, following, full_end, stride_dom, stride_dod,
                BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, False,
            )  # fmt: skip
        else:
            q, q_tail = load_parts(
                q_ptr, start_m, seqlen_q, stride_qm, stride_qd,
                BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, MASKED, NARROW=PIPELINED,
            )  # fmt: skip
        s = dot_parts(k, k_tail, q, q_tail, TAIL_D)
        if MASKED:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            live = score_mask(offs_m[None, :], offs_n[:, None], seqlen_q, seqlen_k, CAUSAL)
            s = tl.where(live, s, float("-inf"))
            lse_log2 = _load_lse_log2(lse_log2_ptr, offs_m, seqlen_q)
        else:
            lse_log2 = tl.load(lse_log2_ptr + offs_m)
        p = tl.exp2(s * scale_log2 - lse_log2[None, :])
        if MASKED or not HOLD:
            do, do_tail = load_parts(
                do_ptr, start_m, seqlen_q, stride_dom, stride_dod,
                BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, MASKED, NARROW=PIPELINED,
            )  # fmt: skip
        if WITH_DV:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")  # [BLOCK_N, BLOCK_D]
            if TAIL_D:
                dv_tail = tl.dot(p.to(do.dtype), do_tail, dv_tail, input_precision="ieee")
        if WITH_DK:
            if RELOAD:
                v, v_tail = load_parts(
                    v_ptr, start_n, seqlen_k, stride_vn, stride_vd,
                    BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True, VOLATILE=RELOAD,
                )  # fmt: skip
            dp = dot_parts(v, v_tail, do, do_tail, TAIL_D)  # [BLOCK_N, BLOCK_M]
            if MASKED:
                delta = tl.load(delta_ptr + offs_m, mask=offs_m < seqlen_q, other=0.0)
            else:
                delta = tl.load(delta_ptr + offs_m)
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee")  # [BLOCK_N, BLOCK_D]
            if TAIL_D:
                dk_tail = tl.dot(ds, q_tail, dk_tail, input_precision="ieee")
    return dk, dk_tail, dv, dv_tail


@triton.jit(
    do_not_specialize=["scale", "scale_log2", "seqlen_q", "seqlen_k", "heads_k", "group"]
    + [f"stride_{tensor}{axis}" for tensor in ("q", "k", "v", "do", "dk", "dv") for axis in "bhmn"]
)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_log2_ptr, delta_ptr,
    scale, scale_log2, seqlen_q, seqlen_k, heads_k, group,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, CAUSAL: tl.constexpr, PIPELINED: tl.constexpr,
    WITH_DK: tl.constexpr, WITH_DV: tl.constexpr, RELOAD: tl.constexpr, HOLD: tl.constexpr,
    ROW_Q: tl.constexpr, ROW_DO: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key block, over every query head of its group; one of them where WITH_DV or WITH_DK is False.

    RELOAD loads K and V anew for every query block: shared memory then holds one of them at a time. HOLD, PIPELINED:
    see configs.Tile.
    """
    stride_qm = row_stride(stride_qm, ROW_Q)
    stride_dom = row_stride(stride_dom, ROW_DO)
    blocks = tl.cdiv(seqlen_k, BLOCK_N)
    start_n = tl.program_id(0) % blocks * BLOCK_N
    batch = tl.program_id(0) // blocks // heads_k
    head_k = tl.program_id(0) // blocks % heads_k

    k_ptr = sequence_span(k_ptr, batch, head_k, stride_kb, stride_kh, STRIDE_UNIT)
    v_ptr = sequence_span(v_ptr, batch, head_k, stride_vb, stride_vh, STRIDE_UNIT)
    dk_ptr = sequence_span(dk_ptr, batch, head_k, stride_dkb, stride_dkh, STRIDE_UNIT)
    dv_ptr = sequence_span(dv_ptr, batch, head_k, stride_dvb, stride_dvh, STRIDE_UNIT)
    k, k_tail = load_parts(
        k_ptr, start_n, seqlen_k, stride_kn, stride_kd,
        BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True, NARROW=PIPELINED,
    )  # fmt: skip
    v, v_tail = load_parts(
        v_ptr, start_n, seqlen_k, stride_vn, stride_vd,
        BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True, NARROW=PIPELINED,
    )  # fmt: skip
    if HOLD:
        k = in_registers(k)
        v = in_registers(v)
        if TAIL_D:
            k_tail = in_registers(k_tail)
            v_tail = in_registers(v_tail)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk_tail = tl.zeros([BLOCK_N, TAIL_D if TAIL_D else 1], tl.float32)
    dv_tail = tl.zeros([BLOCK_N, TAIL_D if TAIL_D else 1], tl.float32)
    begin, full_begin, full_end = query_range(start_n, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL)
    for head in tl.range(head_k * group, head_k * group + group):
        q_head = sequence_span(q_ptr, batch, head, stride_qb, stride_qh, STRIDE_UNIT)
        do_head = sequence_span(do_ptr, batch, head, stride_dob, stride_doh, STRIDE_UNIT)
        row = (batch.to(tl.int64) * heads_k * group + head) * seqlen_q
        for MASKED in tl.static_range(2):
            needed = True
            if MASKED and (PIPELINED and LOOPS_SHARE):
                needed = begin < seqlen_q - (full_end - full_begin)  # as in forward_kernel
            if needed:
                dk, dk_tail, dv, dv_tail = _accumulate_dkdv(
                    dk, dk_tail, dv, dv_tail, k, k_tail, v, v_tail,
                    q_head, k_ptr, v_ptr, do_head, lse_log2_ptr + row, delta_ptr + row,
                    start_n, begin, full_begin, full_end, seqlen_q, seqlen_k, scale_log2,
                    stride_qm, stride_qd,
                    stride_kn, stride_kd,
                    stride_vn, stride_vd,
                    stride_dom, stride_dod,
                    HEAD_DIM, BLOCK_D, TAIL_D, BLOCK_M, BLOCK_N, STRIDE_UNIT, CAUSAL, PIPELINED,
                    WITH_DK, WITH_DV, RELOAD, HOLD, MASKED,
                )  # fmt: skip
    if WITH_DK:
        store_parts(
            dk_ptr, dk * scale, dk_tail * scale, start_n, seqlen_k, stride_dkn, stride_dkd,
            BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, PIPELINED,
        )  # fmt: skip
    if WITH_DV:
        store_parts(
            dv_ptr, dv, dv_tail, start_n, seqlen_k, stride_dvn, stride_dvd,
            BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, PIPELINED,
        )  # fmt: skip


@triton.jit
def _accumulate_dq(
    dq, dq_tail, q, q_tail, do, do_tail, lse_log2, delta,
    k_ptr, v_ptr,
    start_m, begin, end, seqlen_q, seqlen_k, scale_log2,
    stride_kn, stride_kd,
    stride_vn, stride_vd,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, CAUSAL: tl.constexpr, PIPELINED: tl.constexpr, HOLD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The query block against the key blocks that start in [begin, end)."""
    if HOLD and not MASKED:
        k_bits, k_tail_bits = load_ahead(
            k_ptr, begin, seqlen_k, stride_kn, stride_kd, BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True
        )
        v_bits, v_tail_bits = load_ahead(
            v_ptr, begin, seqlen_k, stride_vn, stride_vd, BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True
        )
    for start_n in tl.range(begin, end, BLOCK_N):
        if HOLD and not MASKED:
            k, k_tail = loaded(k_bits, k_tail_bits, k_ptr)
            v, v_tail = loaded(v_bits, v_tail_bits, v_ptr)
            following = tl.minimum(start_n + BLOCK_N, end - 1)
            k_bits, k_tail_bits = load_ahead(
                k_ptr, following, seqlen_k, stride_kn, stride_kd,
                BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, False,
            )  # fmt: skip
            v_bits, v_tail_bits = load_ahead(
                v_ptr, following, seqlen_k, stride_vn, stride_vd,
                BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, False,
            )  # fmt: skip
        else:
            k, k_tail = load_parts(
                k_ptr, start_n, seqlen_k, stride_kn, stride_kd,
                BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, MASKED, NARROW=PIPELINED,
            )  # fmt: skip
        s = dot_parts(q, q_tail, k, k_tail, TAIL_D)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            offs_m = start_m + tl.arange(0, BLOCK_M)
            offs_n = start_n + tl.arange(0, BLOCK_N)
            live = score_mask(offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k, CAUSAL)
            s = tl.where(live, s, float("-inf"))
        p = tl.exp2(s * scale_log2 - lse_log2[:, None])
        if MASKED or not HOLD:
            v, v_tail = load_parts(
                v_ptr, start_n, seqlen_k, stride_vn, stride_vd,
                BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, MASKED, NARROW=PIPELINED,
            )  # fmt: skip
        dp = dot_parts(do, do_tail, v, v_tail, TAIL_D)  # [BLOCK_M, BLOCK_N]
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision="ieee")  # [BLOCK_M, BLOCK_D]
        if TAIL_D:
            dq_tail = tl.dot(ds, k_tail, dq_tail, input_precision="ieee")
    return dq, dq_tail


@triton.jit(
    do_not_specialize=["scale", "scale_log2", "seqlen_q", "seqlen_k", "heads_q", "group"]
    + [f"stride_{tensor}{axis}" for tensor in ("q", "k", "v", "do", "dq") for axis in "bhmn"]
)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, lse_log2_ptr, delta_ptr,
    scale, scale_log2, seqlen_q, seqlen_k, heads_q, group,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, CAUSAL: tl.constexpr, PIPELINED: tl.constexpr, HOLD: tl.constexpr,
    ROW_K: tl.constexpr, ROW_V: tl.constexpr,
):  # fmt: skip
    """dQ of one query block. HOLD, PIPELINED: see configs.Tile."""
    stride_kn = row_stride(stride_kn, ROW_K)
    stride_vn = row_stride(stride_vn, ROW_V)
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest rows first, as in the forward pass
    start_m = block * BLOCK_M
    batch_head = tl.program_id(0) // blocks
    batch = batch_head // heads_q
    head = batch_head % heads_q

    q_ptr = sequence_span(q_ptr, batch, head, stride_qb, stride_qh, STRIDE_UNIT)
    k_ptr = sequence_span(k_ptr, batch, head // group, stride_kb, stride_kh, STRIDE_UNIT)
    v_ptr = sequence_span(v_ptr, batch, head // group, stride_vb, stride_vh, STRIDE_UNIT)
    do_ptr = sequence_span(do_ptr, batch, head, stride_dob, stride_doh, STRIDE_UNIT)
    dq_ptr = sequence_span(dq_ptr, batch, head, stride_dqb, stride_dqh, STRIDE_UNIT)
    row = batch_head.to(tl.int64) * seqlen_q
    offs_m = start_m + tl.arange(0, BLOCK_M)
    lse_log2 = _load_lse_log2(lse_log2_ptr + row, offs_m, seqlen_q)
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seqlen_q, other=0.0)
    q, q_tail = load_parts(
        q_ptr, start_m, seqlen_q, stride_qm, stride_qd,
        BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True, NARROW=PIPELINED,
    )  # fmt: skip
    do, do_tail = load_parts(
        do_ptr, start_m, seqlen_q, stride_dom, stride_dod,
        BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True, NARROW=PIPELINED,
    )  # fmt: skip
    if HOLD:
        q = in_registers(q)
        do = in_registers(do)
        if TAIL_D:
            q_tail = in_registers(q_tail)
            do_tail = in_registers(do_tail)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq_tail = tl.zeros([BLOCK_M, TAIL_D if TAIL_D else 1], tl.float32)
    full_stop, begin, end = key_range(start_m, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL)
    for MASKED in tl.static_range(2):
        needed = True
        if MASKED and PIPELINED:
            needed = begin < end  # as in forward_kernel
        if needed:
            dq, dq_tail = _accumulate_dq(
                dq, dq_tail, q, q_tail, do, do_tail, lse_log2, delta,
                k_ptr, v_ptr,
                start_m, begin if MASKED else 0, end if MASKED else full_stop, seqlen_q, seqlen_k, scale_log2,
                stride_kn, stride_kd,
                stride_vn, stride_vd,
                HEAD_DIM, BLOCK_D, TAIL_D, BLOCK_M, BLOCK_N, STRIDE_UNIT, CAUSAL, PIPELINED, HOLD, MASKED,
            )  # fmt: skip
    store_parts(
        dq_ptr, dq * scale, dq_tail * scale, start_m, seqlen_q, stride_dqm, stride_dqd,
        BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, PIPELINED,
    )  # fmt: skip


def delta_launch(o, do, dlse_log2, delta) -> Launch:
    """The launch that fills delta (batch, heads, seqlen_q) in fp32; dlse_log2 is None or contiguous as delta is."""
    batch, heads_q, seqlen_q, head_dim = o.shape
    strides, unit = pack_strides(o, do)
    return Launch(
        kernel=delta_kernel,
        grid=triton.cdiv(seqlen_q, DELTA_ROWS) * batch * heads_q,
        args=(o, do, delta if dlse_log2 is None else dlse_log2, delta, seqlen_q, heads_q, *strides),
        constants={
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded_head_dim(head_dim),
            "BLOCK_M": DELTA_ROWS,
            "STRIDE_UNIT": unit,
            "HAS_DLSE": dlse_log2 is not None,
        },
        options={"num_warps": 4, "num_stages": 1} | FUSED,
    )


def dkdv_launch(q, k, v, do, dk, dv, lse_log2, delta, *, causal: bool, scale: float, tile: Tile) -> Launch:
    """The launch that fills dk and dv; one that is None is not computed."""
    batch, heads_q, seqlen_q, head_dim = q.shape
    heads_k, seqlen_k = k.shape[1:3]
    outputs = (k if dk is None else dk, v if dv is None else dv)  # an input stands in, and is not written
    strides, unit = pack_strides(q, k, v, do, *outputs)
    return Launch(
        kernel=dkdv_kernel,
        grid=triton.cdiv(seqlen_k, tile.block_n) * batch * heads_k,
        args=(
            *(q, k, v, do, *outputs, lse_log2, delta),
            *(scale, scale * LOG2E.value, seqlen_q, seqlen_k, heads_k, heads_q // max(heads_k, 1)),
            *strides,
        ),
        constants=tile_constants(tile, head_dim, unit, causal)
        | constant_rows(unit, q=q, do=do)
        | {"WITH_DK": dk is not None, "WITH_DV": dv is not None, "RELOAD": tile.reload, "HOLD": tile.hold},
        options=tile.options,
    )


def dkdv_launches(q, k, v, do, dk, dv, lse_log2, delta, *, tile: Tile, **options) -> list[Launch]:
    """dkdv_launch() of both, or of each where the tile makes them apart."""
    made = [(dk, None), (None, dv)] if tile.apart and dk is not None and dv is not None else [(dk, dv)]
    return [dkdv_launch(q, k, v, do, *outputs, lse_log2, delta, tile=tile, **options) for outputs in made]


def dq_launch(q, k, v, do, dq, lse_log2, delta, *, causal: bool, scale: float, tile: Tile) -> Launch:
    """The launch that fills dq."""
    batch, heads_q, seqlen_q, head_dim = q.shape
    heads_k, seqlen_k = k.shape[1:3]
    strides, unit = pack_strides(q, k, v, do, dq)
    return Launch(
        kernel=dq_kernel,
        grid=triton.cdiv(seqlen_q, tile.block_m) * batch * heads_q,
        args=(
            *(q, k, v, do, dq, lse_log2, delta),
            *(scale, scale * LOG2E.value, seqlen_q, seqlen_k, heads_q, heads_q // max(heads_k, 1)),
            *strides,
        ),
        constants=tile_constants(tile, head_dim, unit, causal) | constant_rows(unit, k=k, v=v) | {"HOLD": tile.hold},
        options=tile.options,
    )


def delta(o, do, dlse_log2, *, cache: LaunchCache | None = None) -> torch.Tensor:
    """What backward() takes for delta, (batch, heads, seqlen_q) in fp32: the one thing that it needs o for.

    do, laid out in any way, and dlse_log2 are the gradients of o and lse_log2; dlse_log2 may be None. cache is that of
    backward().
    """
    rows = empty(lambda: torch.empty(o.shape[:3], dtype=torch.float32, device=o.device), "delta", cache)
    # autograd may hand its gradient over with any strides.
    dlse_log2 = None if dlse_log2 is None else dlse_log2.contiguous()
    tensors = (o, do, rows if dlse_log2 is None else dlse_log2, rows)
    launch(lambda: [delta_launch(o, do, dlse_log2, rows)], tensors, "delta kernel", cache)
    return rows


def backward(
    q, k, v, do, lse_log2, delta, *,
    causal: bool, scale: float, needs, dkdv_tile: Tile | None = None, dq_tile: Tile | None = None, dtype=None,
    cache: LaunchCache | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """dq, dk, dv, laid out as their inputs, in dtype (the inputs' unless given); None where needs is False.

    Tensors and tiles as of forward(), do with any strides; cache is one dictionary for each kind of q, k, v, o, do,
    dlse_log2, causal, scale and needs.
    """
    dq, dk, dv = (
        empty(partial(torch.empty_like, x, dtype=dtype), name, cache) if need else None
        for name, x, need in zip(("dq", "dk", "dv"), (q, k, v), needs, strict=True)
    )
    if dk is not None or dv is not None:

        def make_dkdv() -> list[Launch]:
            tile = dkdv_tile or choose("dkdv", q, k.shape[2], causal)
            return dkdv_launches(q, k, v, do, dk, dv, lse_log2, delta, causal=causal, scale=scale, tile=tile)

        tensors = (q, k, v, do, k if dk is None else dk, v if dv is None else dv, lse_log2, delta)
        launch(make_dkdv, tensors, "dkdv kernel", cache)
    if dq is not None:

        def make_dq() -> list[Launch]:
            tile = dq_tile or choose("dq", q, q.shape[2], causal)
            return [dq_launch(q, k, v, do, dq, lse_log2, delta, causal=causal, scale=scale, tile=tile)]

        launch(make_dq, (q, k, v, do, dq, lse_log2, delta), "dq kernel", cache)
    return dq, dk, dv
