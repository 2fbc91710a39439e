"""Measure the shipped tiles on this GPU and remember the fastest for each length bucket.

Writes a file into the user's cache folder, one for each GPU, Triton release and code path, which flashattn picks
up from then on; deleting it brings the shipped tiles back. float16 and bfloat16 share their tiles.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from functools import partial

import torch
from arguments import positive

from flashattn import configs, measure
from flashattn.backward import delta, dkdv_launches, dq_launch
from flashattn.forward import forward, forward_launch

NOISE = 1.02  # a tile that is no more than this faster than the shipped one does not replace it
TOKENS, WIDTH = 16384, 2048  # batch x length, and heads x head dim: enough to fill a GPU


def launches(q, k, v, do, causal):
    """{pass: a function of a tile that gives its launches}, on the result of a forward pass."""
    options = {"causal": causal, "scale": q.shape[-1] ** -0.5}
    o, lse_log2 = forward(q, k, v, **options)
    rows = delta(o, do, None)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    return {
        "forward": lambda tile: [forward_launch(q, k, v, o, lse_log2, **options, tile=tile)],
        "dkdv": lambda tile: dkdv_launches(q, k, v, do, dk, dv, lse_log2, rows, **options, tile=tile),
        "dq": lambda tile: [dq_launch(q, k, v, do, dk, lse_log2, rows, **options, tile=tile)],
    }


def run(made):
    for launch in made:
        launch.run()


def tune(device, dtype, head_dim, seqlen, causal, budget_ms):
    """The fastest tile of each pass at one length, by tuned_key; prints a line for each."""
    shape = (max(1, TOKENS // seqlen), max(1, WIDTH // head_dim), seqlen, head_dim)
    q, k, v, do = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    gpu = configs.device_of(q.device)
    fastest = {}
    for pass_, launch in launches(q, k, v, do, causal).items():
        tiles = configs.candidates(pass_, gpu, dtype, head_dim)
        calls = {tile: partial(nullcontext, partial(run, launch(tile))) for tile in tiles}
        kind = pass_, gpu, dtype, head_dim, configs.length_bucket(seqlen), causal
        shipped = configs.shipped_tile(*kind)
        where = f"  {pass_:8} d{head_dim} n{seqlen:<6} {'causal' if causal else 'full':7}"
        times = {}
        for tile, outcome in measure.time_in_turns(calls, budget_ms, device=q.device).items():
            if not isinstance(outcome, Exception):
                times[tile] = outcome[0].median_ms
            elif tile == shipped:
                raise outcome
            else:
                print(f"{where}{tile!s:34} left out: {outcome!r}", flush=True)
        best = min(times, key=times.get)
        if times[shipped] < NOISE * times[best]:
            best = shipped
        fastest[configs.tuned_key(*kind)] = best
        gain = times[shipped] / times[best]
        print(f"{where}{best!s:34} {gain:.2f}x the shipped", flush=True)
    return fastest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    lengths = list(configs.LENGTH_BUCKETS[:-1])  # the last has its neighbour's tile, and would take half of the time
    add = parser.add_argument
    dims = "each stands for those that share its tiles"
    add("--head-dims", type=positive, nargs="+", default=[64, 128], metavar="D", help=dims)
    add("--seq-lens", type=positive, nargs="+", default=lengths, metavar="N", help="one for each bucket to tune")
    add("--dtypes", nargs="+", choices=["float16", "bfloat16", "float32"], default=["float16"])
    add("--causal", choices=["no", "yes", "both"], default="both")
    add("--budget-ms", type=float, default=30.0, help="time for each measurement")
    args = parser.parse_args()
    if wrong := [d for d in args.head_dims if d > configs.MAX_HEAD_DIM]:
        parser.error(f"argument --head-dims: got {wrong[0]}, accepted are 1 to {configs.MAX_HEAD_DIM}")

    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        print("tune.py needs a CUDA device, and TRITON_INTERPRET unset: it measures tiles", file=sys.stderr)
        return 2
    device = measure.default_device()
    gpu = configs.device_of(device)
    print(f"{gpu.name}, {gpu.code_path} path; tuned tiles go to {configs.tuned_file(gpu)}")
    for dtype in (getattr(torch, name) for name in args.dtypes):
        for head_dim in args.head_dims:
            for causal in {"no": [False], "yes": [True], "both": [False, True]}[args.causal]:
                for seqlen in args.seq_lens:
                    configs.save_tuned(gpu, tune(device, dtype, head_dim, seqlen, causal, args.budget_ms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
