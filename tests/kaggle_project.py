"""A made-up project, small enough to be run in a second, around the real kaggle/ folder; and kaggle/ on the path.

Its notebooks do what a test has them do: see Project.act().
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from children import ROOT

sys.path.insert(0, str(ROOT / "kaggle"))

T4 = {"name": "Tesla T4", "capability": "7.5"}
PARAMETERS = {
    "notebooks": ["01_tests", "02_benchmark", "03_triton_versions"],
    "quick": True,
    "tritons": ["image", "3.2.0"],
    "notebook_parameters": {},
    "limit_minutes": 10,
    "accept_any_device": False,
}

# Every script tells what it was asked, and with what environment.
ASKED = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

root = Path(__file__).resolve().parents[DEPTH]
with (root / "asked").open("a") as file:
    file.write(json.dumps([Path(__file__).stem, sys.argv[1:], dict(os.environ)]) + "\\n")
"""
SCRIPTS = {
    "kaggle/machine.py": """
gpus = json.loads((root / "gpus.json").read_text())
Path(sys.argv[1]).write_text(json.dumps({"gpus": gpus, "torch": "2.10.0", "triton": "3.6.0"}))
""",
    "pip/__main__.py": "",
    "flashattn/doctor.py": "print('Nothing is wrong.')",
    "scripts/triton_releases.py": """
package = root / "releases" / sys.argv[1] / "triton"
package.mkdir(parents=True, exist_ok=True)
(package / "__init__.py").touch()
print(package.parent)
""",
    "scripts/tune.py": """
folder = Path(os.environ["FLASHATTN_CACHE_DIR"])
folder.mkdir(exist_ok=True)
(folder / "Tesla_T4_triton3.6.0_restored.json").write_text("{}")
""",
    "scripts/run_notebooks.py": """
name, output = sys.argv[1], Path(sys.argv[3])
acts = json.loads((root / "acts.json").read_text())
output.mkdir(exist_ok=True)
exec(acts.get(f"{name} {output.name}", ""))
(output / f"{name}.json").write_text(json.dumps({"ok": True, "counts": {"passed": 3}}))
print(name, "is fine")
""",
}


class Project:
    """An unpacked project in a folder."""

    def __init__(self, root: Path, **scripts: str):
        self.root, self._acts = root, {}
        shutil.copytree(ROOT / "kaggle", root / "kaggle", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "notebooks", root / "notebooks")
        for name, text in SCRIPTS.items():
            self.script(name, text)
        for package in ("flashattn", "pip"):
            (root / package / "__init__.py").touch()  # else the installed one is found
        (root / "acts.json").write_text("{}")
        (root / "MANIFEST.json").write_text(json.dumps({"commit": "a" * 40, "dirty": False}))
        self.gpus(T4, T4)

    def script(self, name: str, text: str) -> None:
        """Have a script do this; it tells what it was asked, too."""
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(ASKED.replace("DEPTH", str(len(Path(name).parts) - 1)) + text)

    def act(self, step: str, text: str) -> None:
        """Have a notebook do this before it passes; step is "02_benchmark run" or "02_benchmark triton3.2.0"."""
        self._acts[step] = text
        (self.root / "acts.json").write_text(json.dumps(self._acts))

    def gpus(self, *gpus: dict) -> None:
        """Put these GPUs into the machine."""
        (self.root / "gpus.json").write_text(json.dumps(gpus))

    def asked(self, script: str) -> list[tuple[list[str], dict[str, str]]]:
        """The arguments and the environment of each call of a script."""
        lines = (self.root / "asked").read_text().splitlines()
        return [(argv, environment) for name, argv, environment in map(json.loads, lines) if name == script]

    def commit(self) -> str:
        """Make it a git repository with one commit, and return that."""
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        git(self.root, "init", "-q")
        git(self.root, "add", "-A")
        git(self.root, *identity, "commit", "-q", "--no-gpg-sign", "-m", "All of it")
        return git(self.root, "rev-parse", "HEAD")


def git(root: Path, *arguments: str) -> str:
    """What git prints; raises where it fails."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
