"""Time flashattn, naive attention and PyTorch's SDPA backends: attention.csv and attention.png.

With no GPU it times PyTorch's own on the CPU and leaves flashattn's column empty.
"""

import sys

import benchmark
import benchmark_report
import pandas as pd

from flashattn import measure


def main() -> int:
    device = measure.default_device()
    flags = benchmark.flags(__doc__, device)
    flags.add_argument("--modes", nargs="+", choices=measure.WORK, default=[*measure.WORK], help="to be timed")
    flags.add_argument("--budget-ms", type=float, default=60.0, help="time for each measurement, in ms")
    args = flags.parse_args()

    cases = benchmark.cases_of(args)
    rows = benchmark.sweep(cases, args.modes, device, budget_ms=args.budget_ms, memory=False)
    measure.write_csv(args.output / "attention.csv", rows)
    frame = pd.DataFrame(rows)
    benchmark_report.save_figure(frame, "tflops", "TFLOP/s", args.output / "attention.png")

    print(f"\nTFLOP/s (median): {benchmark_report.describe(frame)}")
    print(benchmark_report.table(frame, "tflops").to_string(na_rep="-", float_format="{:.3g}".format))
    print(f"\nNot measured:\n{benchmark_report.not_measured(frame).to_string(index=False)}")
    return benchmark.exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
