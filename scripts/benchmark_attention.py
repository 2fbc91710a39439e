"""Time flashattn, naive attention, PyTorch's SDPA backends and FlexAttention: attention.csv and attention.png.

The packages flash-attn-triton and flash-attention-triton are timed with them where they are installed. With no GPU it
times PyTorch's own on the CPU and leaves flashattn's column empty.
"""

import sys
from functools import partial

import benchmark
import benchmark_report
import pandas as pd
from arguments import positive

from flashattn import measure


def main() -> int:
    device = measure.default_device()
    flags = benchmark.flags(__doc__, device)
    add = flags.add_argument
    add("--modes", nargs="+", choices=measure.WORK, default=[*measure.WORK], help="to be timed")
    add("--budget-ms", type=float, default=60.0, help="time for each measurement, in ms")
    lengths = {"type": positive, "nargs": "*", "metavar": "N"}
    add("--peer-seq-lens", **lengths, help="only here what compiles or tunes for each shape; None: at all lengths")
    add("--grouped-seq-lens", **lengths, default=[], help="also causal with 4 query heads a key head, and with 1")
    add("--host-seq-lens", **lengths, default=[], help="also the wall time of a call at batch 1, Python included")
    add("--sustained-s", type=float, default=0.0, help="first so long without a pause: sustained.csv; needs a GPU")
    args = flags.parse_args()

    if missing := benchmark.missing_packages():
        print(f"not installed, and so not measured: {', '.join(missing)}")
    work = {"dtype": args.dtype, "tokens": args.tokens, "width": args.width}
    if sustained := benchmark.sustained(benchmark.sustained_case(**work), args.sustained_s, device):
        measure.write_csv(args.output / "sustained.csv", sustained)
    sweep = partial(
        benchmark.sweep, device=device, budget_ms=args.budget_ms, memory=False, peer_seq_lens=args.peer_seq_lens
    )
    rows = sweep(benchmark.cases_of(args), args.modes)
    rows += sweep(benchmark.grouped_cases(args.grouped_seq_lens, **work), benchmark.EAGER_MODES)
    rows += sweep(benchmark.host_cases(args.host_seq_lens, args.dtype), benchmark.EAGER_MODES, wall=True)
    measure.write_csv(args.output / "attention.csv", rows)
    frame = pd.DataFrame(rows)
    lengths = benchmark_report.part(frame, benchmark.LENGTHS)
    benchmark_report.save_figure(lengths, "tflops", "TFLOP/s", args.output / "attention.png")

    for part, value, unit in (
        (benchmark.LENGTHS, "tflops", "TFLOP/s (median)"),
        (benchmark.GROUPED, "tflops", "TFLOP/s (median)"),
        (benchmark.HOST, "wall_us", "microseconds of wall time a call"),
    ):
        some = benchmark_report.part(frame, part)
        if not some.empty:
            print(f"\n{part}, {unit}: {benchmark_report.describe(some)}")
            print(benchmark_report.table(some, value).to_string(na_rep="-", float_format="{:.3g}".format))
    print(f"\nNot measured:\n{benchmark_report.not_measured(frame).to_string(index=False)}")
    return benchmark.exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
