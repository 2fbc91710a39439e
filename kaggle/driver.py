"""Runs the notebooks on a Kaggle T4, each as a child with a time limit, and keeps account of them in status.json.

driver.ipynb unpacks the project and calls run(). Kaggle drops the files of a run that ends in an error, so that run()
never raises: what went wrong stands in status.json, and by that file alone the run is judged.
"""

import importlib
import json
import os
import re
import shutil
import sys
import threading
import traceback
import zipfile
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from time import monotonic

import plan
from child import Child, as_they_end
from plan import Step

ROOT = Path(__file__).resolve().parents[1]
T4 = "7.5"  # its compute capability
KINDS = (".ipynb", ".json", ".log", ".txt", ".csv", ".png", ".xml", ".md")  # of file that come back

# What the notebooks need, as pip has it: most of it is in the images of Kaggle and Colab.
PACKAGES = "papermill>=2.4 nbformat ipykernel pandas>=2 matplotlib>=3.6 PyYAML pytest>=7 pytest-xdist>=3".split()
MODULES = "papermill nbformat ipykernel pandas matplotlib yaml pytest".split()  # it can be done without xdist

PREPARING_LIMIT_S = 300.0  # for each of the preparations
LEAST_S = 60.0  # with less time left no step is started
LEAST_FREE_BYTES = 500 << 20  # with less the disk is as good as full

# What children do not get: what Jupyter sets for a kernel, and what may be a credential, since what they print is
# published.
LEFT_OUT = re.compile(
    r"MPLBACKEND|CLICOLOR.*|FORCE_COLOR|JPY_.*|TRITON_INTERPRET|.*(TOKEN|SECRET|PASSWORD|CREDENTIAL|JWT|KEY).*"
)


class Refused(Exception):
    """Why nothing is to be run here."""


class Log:
    """Prints lines, each with the minutes since the start, and keeps them in a file. Any thread may call it."""

    def __init__(self, path: Path):
        self._path, self._start, self._lock = path, monotonic(), threading.Lock()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return monotonic() - self._start

    def __call__(self, line: str) -> None:
        line = f"[{self.seconds / 60:5.1f} min] {line}"
        with self._lock:
            print(line, flush=True)
            try:
                with self._path.open("a", encoding="utf-8", errors="replace") as file:
                    file.write(line + "\n")
            except OSError:
                pass  # a full disk; it has been printed


def run(output: Path, parameters: dict, payload_sha256: str = "", *, root: Path = ROOT) -> dict:
    """Do what the parameters say, and return what `output`/status.json then says.

    Never raises, but for KeyboardInterrupt, after the children have ended and the status is written. Leaves a zip file
    of `output` beside it, and removes an earlier run there first. root is the unpacked project with its MANIFEST.json.
    """
    this = Run(output, parameters, payload_sha256, root)
    try:
        this.prepare()
        this.steps()
        this.end("finished")
    except Refused as refusal:
        this.end("refused", str(refusal))
    except KeyboardInterrupt:
        this.end("finished", "interrupted")
        raise
    except BaseException as error:
        traceback.print_exc()
        this.end("finished", f"the driver itself failed: {type(error).__name__}: {error}")
    return this.status


def unfit(gpus: list[dict]) -> str:
    """Why nothing is to be measured on these GPUs, "" where all are T4s."""
    if gpus and all(gpu["capability"] == T4 for gpu in gpus):
        return ""
    found = ", ".join(f"{gpu['name']} (compute capability {gpu['capability']})" for gpu in gpus)
    return (
        f"device: got {found or 'no GPU that torch can use'}, accepted is a T4 ({T4}). Choose the accelerator "
        'GPU T4 x2 in the settings of the notebook; for one that is pushed, "machine_shape": "NvidiaTeslaT4" in '
        "kernel-metadata.json"
    )


class Run:
    """One run: its status, and the children that make it."""

    def __init__(self, output: Path, parameters: dict, payload_sha256: str, root: Path):
        self.output, self.root = Path(output).resolve(), root
        self.log = Log(self.output / "driver.log")
        self.batches: list[list[Step]] = []
        self.gpus: list[dict] = []
        self.releases: dict[str, Path] = {}  # the folder of Triton, by pass
        self.unfetched: dict[str, str] = {}  # why there is none
        self.lacking = ""  # what the notebooks need and have not
        self.status = {
            "format": 1,
            "commit": "unknown",
            "dirty": "unknown",
            "payload_sha256": payload_sha256,
            "parameters": parameters,
            "state": "running",
            "reason": "",
            "accepts_any_device": parameters.get("accept_any_device") is True,
            "gpu": {},
            "machine": {},
            "started": _now(),
            "ended": None,
            "steps": [],
        }

    # Preparations ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """All that the steps need; raises Refused where there are to be none."""
        if (self.output / "status.json").exists():
            shutil.rmtree(self.output)
        self.output.mkdir(parents=True, exist_ok=True)
        manifest = json.loads((self.root / "MANIFEST.json").read_text())
        self.status |= {"commit": manifest["commit"], "dirty": "yes" if manifest["dirty"] else "no"}
        self.write()
        try:
            notebooks = [path.stem for path in (self.root / "notebooks").glob("*.ipynb")]
            self.settings = plan.Settings.of(self.status["parameters"], notebooks)
        except ValueError as error:
            raise Refused(str(error)) from None
        self.check_device()
        self.batches = plan.batches(self.settings, len(self.gpus))
        self.write()
        self.install()
        for triton in self.settings.tritons:
            if triton != plan.IMAGE:
                self.fetch(triton)
        doctor = self.preparation("doctor", "-m", "flashattn.doctor")
        (self.output / "doctor.txt").write_text("\n".join([*doctor.lines, ""]))

    def check_device(self) -> None:
        """Put down what the machine is; raises Refused unless it is one to measure on."""
        path = self.output / "machine.json"
        child = self.preparation("machine", "kaggle/machine.py", str(path))
        if child.failure:
            raise Refused(f"machine: torch does not say what it is: {child.failure}: {child.last_line}")
        facts = json.loads(path.read_text())
        self.gpus = facts["gpus"]
        first = self.gpus[0] if self.gpus else {"name": "CPU", "capability": ""}
        self.status |= {"machine": facts, "gpu": first | {"count": len(self.gpus)}}
        self.log(f"GPUs: {len(self.gpus)} ({first['name']}), torch {facts['torch']}, Triton {facts['triton']}")
        if (why := unfit(self.gpus)) and not self.settings.accept_any_device:
            raise Refused(why)

    def install(self) -> None:
        """Add the packages that are missing; with no internet pip is content where none is."""
        options = "--quiet --disable-pip-version-check --no-input --retries 1 --timeout 20".split()
        child = self.preparation("packages", "-m", "pip", "install", *options, *PACKAGES)
        importlib.invalidate_caches()
        if lacking := [name for name in MODULES if not find_spec(name)]:
            self.lacking = f"not installed: {', '.join(lacking)}; pip said: {child.last_line or 'nothing'}"

    def fetch(self, triton: str) -> None:
        """A Triton release, for the pass that is named after it."""
        child = self.preparation(f"Triton {triton}", "scripts/triton_releases.py", triton)
        release = Path(child.last_line or ".")
        if child.failure or not (release / "triton" / "__init__.py").is_file():  # else the image's own would be taken
            self.unfetched[triton] = child.last_line or f"Triton {triton} cannot be fetched: {child.failure}"
        else:
            self.releases[triton] = release

    def preparation(self, name: str, *arguments: str) -> Child:
        """Run a child to its end, be it good or bad."""
        child = self.child(name, [*arguments], self.environment(plan.IMAGE), PREPARING_LIMIT_S)
        with closing(as_they_end([child], self.trouble)) as ended:
            for child in ended:
                self.log(f"{name}: {child.failure or 'done'}, {child.seconds:.0f} s")
        return child

    # Steps -----------------------------------------------------------------------------------------------------------

    def steps(self) -> None:
        """Each in its turn; whenever one has ended the status is written."""
        for steps in self.batches:
            children = {}
            for index, step in enumerate(steps):
                if why := self.hindrance(step):
                    step.note = why
                    self.log(f"{step}: not run: {why}")
                else:
                    children[self.begin(step, index, len(steps))] = step
            with closing(as_they_end(children, self.trouble)) as ended:
                for child in ended:
                    self.judge(children[child], child)
                    self.write()
        self.write()

    def hindrance(self, step: Step) -> str:
        """Why a step cannot be run, "" where it can."""
        if self.left_s() < LEAST_S:
            return f"the run's limit of {self.settings.limit_minutes:g} minutes is used up"
        lacking = self.lacking if step.name != plan.TUNE else ""
        return self.unfetched.get(step.triton, "") or lacking or self.trouble()

    def left_s(self) -> float:
        """Seconds to the limit of the run."""
        return self.settings.limit_minutes * 60 - self.log.seconds

    def trouble(self) -> str:
        """Why nothing more can be done, "" where there is no such thing."""
        free = min(shutil.disk_usage(path).free for path in (self.output, self.root))
        return f"the disk is full: {free >> 20} MB left" if free < LEAST_FREE_BYTES else ""

    def begin(self, step: Step, index: int, at_once: int) -> Child:
        """Start the child of a step, of so many at once the one at index."""
        limit_s = min(self.left_s(), 60 * step.limit_minutes(self.settings.quick))
        environment = self.environment(step.triton)
        if at_once > 1:  # each has all GPUs, since some tests need two, but another one comes first
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            visible = visible if all(visible) else [str(gpu) for gpu in range(len(self.gpus))]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[index:] + visible[:index])
        if step.name == plan.TUNE:
            arguments = ["scripts/tune.py", *(plan.QUICK_TUNE if self.settings.quick else [])]
        else:
            processes = max(1, min(8, os.cpu_count() // at_once)) if find_spec("xdist") else 0
            told = plan.notebook_parameters(step.name, self.settings, gpus=len(self.gpus), processes=processes)
            given = [word for name, value in told.items() for word in ("-p", name, json.dumps(value))]
            arguments = ["scripts/run_notebooks.py", step.name, "--output", str(self.folder(step)), *given]
        self.log(f"{step}: starts, {limit_s / 60:.0f} minutes at most")
        return self.child(str(step), arguments, environment, limit_s)

    def folder(self, step: Step) -> Path:
        """Where a step leaves its files."""
        return self.output if step.triton == plan.IMAGE else self.output / f"triton{step.triton}"

    def judge(self, step: Step, child: Child) -> None:
        """Put down how a step ended. run_notebooks.py has judged its notebook by the notebook's result file."""
        step.seconds = round(child.seconds, 1)
        step.state = "timed out" if child.timed_out else "failed" if child.failure else "passed"
        result = self.folder(step) / f"{step.name}.json"
        said = child.last_line if child.failure else ""
        if result.is_file():  # the tuner leaves none, and a notebook whose last cell was not reached
            try:
                said = ", ".join(f"{count} {name}" for name, count in json.loads(result.read_text())["counts"].items())
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                step.state, said = "failed", f"{result.name} is damaged"
        step.note = ": ".join(filter(None, (child.failure, said)))
        self.log(f"{step}: {step.state}, {step.seconds:.0f} s{step.note and ', '}{step.note}")

    # Children --------------------------------------------------------------------------------------------------------

    def child(self, name: str, arguments: list[str], environment: dict[str, str], limit_s: float) -> Child:
        """Start this Python with these arguments, in the project's folder."""

        def say(line: str) -> None:
            self.log(f"{name} | {line}")

        command = [sys.executable, *arguments]
        return Child(command, cwd=self.root, environment=environment, limit_s=limit_s, say=say)

    def environment(self, triton: str) -> dict[str, str]:
        """This process's, less LEFT_OUT, with the project and the pass's Triton first on the path."""
        kept = {name: value for name, value in os.environ.items() if not LEFT_OUT.fullmatch(name)}
        path = (self.releases.get(triton), self.root, os.environ.get("PYTHONPATH"))
        return kept | {
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder),
            "PYTHONUNBUFFERED": "1",  # lines come as they are printed
            "FLASHATTN_CACHE_DIR": str(self.output / "tuned"),  # so that tuned tiles come back
            "FLASHATTN_COMMIT": self.status["commit"],
            "FLASHATTN_DIRTY": "1" if self.status["dirty"] == "yes" else "0",
        }

    # The account -----------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """status.json: whole, or as it was."""
        self.status["steps"] = [asdict(step) for steps in self.batches for step in steps]
        partial = self.output / "status.partial"
        try:
            partial.write_text(json.dumps(self.status, indent=2, default=repr) + "\n")
            partial.replace(self.output / "status.json")
        except Exception as error:  # nothing may escape: see run()
            self.log(f"status.json cannot be written: {error}")

    def end(self, state: str, reason: str = "") -> None:
        """The last entry, a summary, and the zip file."""
        self.status |= {"state": state, "reason": reason, "ended": _now()}
        self.write()
        self.log(f"the run is {state}{reason and ': '}{reason}")
        for steps in self.batches:
            for step in steps:
                self.log(f"    {str(step):44}{step.state:10}{step.seconds:7.0f} s  {step.note}")
        path = self.output.with_name("flashattn_run.zip")
        try:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for file in sorted(self.output.rglob("*")):
                    if file.is_file() and file.suffix in KINDS:
                        archive.write(file, file.relative_to(self.output))
            self.log(f"all that it has left is in {path}")
        except Exception as error:
            self.log(f"there is no zip file: {error}; the files are in {self.output}")


def _now() -> str:
    """The time in UTC, as status.json has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
