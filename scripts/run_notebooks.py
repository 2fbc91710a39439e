"""Execute the notebooks: on the GPU where there is one, else small, with the kernels interpreted.

Each leaves NAME.ipynb (executed), NAME.log and NAME.json in the output folder, and its CSVs and figures.
A notebook has passed when the NAME.json that its last cell writes says so; how its cells ended is not asked.
"""

import argparse
import json
import logging
import os
import signal
import sys
from pathlib import Path
from time import perf_counter

os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel, not one of the home folder

import nbformat  # noqa: E402
import papermill  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

# Without a GPU: what a laptop does in a few minutes. Every other parameter stays as the notebook has it.
SMALL = {
    "01_tests": {"pytest_args": ["tests/test_attention.py", "tests/test_layouts.py", "-n", "2"]},
    "02_benchmark": {
        "seq_lens": [64, 128, 256],
        "head_dims": [64],
        "dtype": "float32",
        "tokens": 256,
        "width": 128,
        "long_seq_lens": [],
        "grouped_seq_lens": [128],
        "host_seq_lens": [128],
    },
}

# Run only where named: it downloads gigabytes.
ON_REQUEST = {"03_triton_versions"}


class Lines(logging.Formatter):
    """What a cell prints comes with its own line end."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).rstrip("\n")


def parameters_of(notebook: Path) -> list[str]:
    """What can be set in the notebook's cell tagged `parameters`, output_dir apart: --output sets that.

    Raises ValueError without such a cell, or where it has no output_dir.
    """
    cells = nbformat.read(notebook, as_version=4).cells
    if not any("parameters" in cell.metadata.get("tags", []) for cell in cells):
        raise ValueError(f"{notebook.name}: has no cell tagged `parameters`")
    names = list(papermill.inspect_notebook(str(notebook)))
    if "output_dir" not in names:
        raise ValueError(f"{notebook.name}: its parameters lack output_dir, where it leaves its result")
    return [name for name in names if name != "output_dir"]


def plan(notebooks: list[Path], given: dict[str, object], small: bool) -> list[dict[str, object]]:
    """The parameters of each notebook: the small ones if asked for, then those given that it knows.

    Raises ValueError for one that no notebook knows: papermill itself would only warn.
    """
    known = [parameters_of(notebook) for notebook in notebooks]
    for name in given:
        if not any(name in names for names in known):
            accepted = ", ".join(dict.fromkeys(n for names in known for n in names))
            raise ValueError(f"parameter: got {name!r}, accepted are {accepted}")
    return [
        (SMALL.get(notebook.stem, {}) if small else {}) | {n: v for n, v in given.items() if n in names}
        for notebook, names in zip(notebooks, known, strict=True)
    ]


def execute(notebook: Path, parameters: dict[str, object], output: Path) -> tuple[bool, str]:
    """Run one notebook and judge it by the result file alone. Returns (passed, what there is to say)."""
    executed, log, result = (output / f"{notebook.stem}.{kind}" for kind in ("ipynb", "log", "json"))
    for stale in (executed, log, result):
        stale.unlink(missing_ok=True)
    handler = logging.FileHandler(log)
    handler.setFormatter(Lines())
    logging.getLogger("papermill").addHandler(handler)
    error = ""
    try:
        papermill.execute_notebook(
            os.path.relpath(notebook),  # relative: what is executed may be published
            os.path.relpath(executed),
            {**parameters, "output_dir": os.path.relpath(output, notebook.parent)},
            cwd=os.path.relpath(notebook.parent),
            progress_bar=False,
            log_output=True,
        )
    except Exception as failure:  # a failing cell, a dead kernel: the next notebook runs all the same
        error = str(failure).strip().splitlines()[-1] if str(failure).strip() else type(failure).__name__
    finally:
        logging.getLogger("papermill").removeHandler(handler)
        handler.close()
    try:
        verdict = json.loads(result.read_text())
    except (OSError, ValueError):
        return False, f"its last cell wrote no {result.name}: {error or 'it never ran'}"
    return verdict["ok"] is True, ", ".join(f"{count} {name}" for name, count in verdict["counts"].items())


def main(argv: list[str] | None = None) -> int:
    by_name = {notebook.stem: notebook for notebook in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    parser = argparse.ArgumentParser(
        prog="scripts/run_local.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(by_name)}, or paths; default: all but {', '.join(ON_REQUEST)}"
    )
    parser.add_argument(
        "-p",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="a parameter, its value in YAML",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "local", help="default: results/local")
    parser.add_argument("--full", action="store_true", help="no small parameters, even without a GPU")
    args = parser.parse_args(argv)

    names = args.names or [name for name in by_name if name not in ON_REQUEST]
    notebooks = [by_name.get(name, Path(name)).resolve() for name in names]
    if missing := [name for name, notebook in zip(names, notebooks, strict=True) if not notebook.is_file()]:
        parser.error(f"names: got {', '.join(missing)}, accepted are {', '.join(by_name)} or paths of notebooks")
    gpu = torch.cuda.is_available()
    try:
        chosen = plan(notebooks, {n: yaml.safe_load(v) for n, v in args.p}, small=not (gpu or args.full))
    except ValueError as error:
        parser.error(str(error))

    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    terminal = logging.StreamHandler(sys.stdout)
    terminal.setFormatter(Lines())
    logging.basicConfig(level=logging.INFO, handlers=[terminal])
    logging.getLogger("papermill.translators").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an interrupt also ends the Jupyter kernel

    print(f"On {torch.cuda.get_device_name() if gpu else 'a CPU, kernels interpreted'}; results go to {output}")
    lines = []
    for notebook, parameters in zip(notebooks, chosen, strict=True):
        print(f"\n== {notebook.stem} {parameters or ''}", flush=True)
        start = perf_counter()
        passed, note = execute(notebook, parameters, output)
        lines.append((notebook.stem, "passed" if passed else "FAILED", f"{perf_counter() - start:.0f} s", note))
    print()
    for name, verdict, seconds, note in lines:
        print(f"{name:20}{verdict:8}{seconds:>7}  {note}")
    return int(any(line[1] == "FAILED" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
