"""Peak extra memory of flashattn, naive attention and PyTorch's SDPA backends: memory.csv and memory.png.

Needs a CUDA device.
"""

import sys

import benchmark
import benchmark_report
import pandas as pd

from flashattn import measure


def main() -> int:
    device = measure.default_device()
    args = benchmark.flags(__doc__, device).parse_args()
    if device.type != "cuda":
        print("benchmark_memory.py needs a CUDA device: peak memory is read from its allocator", file=sys.stderr)
        return 2

    rows = benchmark.sweep(benchmark.cases_of(args), benchmark.EAGER_MODES, device, time=False)
    measure.write_csv(args.output / "memory.csv", rows)
    frame = pd.DataFrame(rows)
    benchmark_report.save_figure(frame, "extra_mib", "peak extra MiB", args.output / "memory.png", log=True)

    print(f"\nPeak extra memory in MiB: {benchmark_report.describe(frame)}")
    print(benchmark_report.memory_reduction(frame).to_string(na_rep="-", float_format="{:.1f}".format))
    print(f"\nNot measured:\n{benchmark_report.not_measured(frame).to_string(index=False)}")
    return benchmark.exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
