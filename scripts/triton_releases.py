"""Triton releases side by side: each in a folder of its own, fetched once and kept.

"$(scripts/setup.sh)" scripts/triton_releases.py 3.6.0 3.9.0 fetches what is not there and prints the folders. With
one of them first on PYTHONPATH a process has that release, whatever is installed. They lie in .cache/triton/cp311/ (by
the version of Python, since each has wheels of its own) at the top of the repository, or in the folder that
FLASHATTN_TRITON_RELEASES names; one takes 0.5 to 1 GB.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def folder() -> Path:
    """Where the releases lie."""
    default = ROOT / ".cache" / "triton" / "cp{}{}".format(*sys.version_info[:2])
    return Path(os.environ.get("FLASHATTN_TRITON_RELEASES") or default).resolve()


def path(version: str) -> Path | None:
    """The folder of a release such as "3.6.0", for PYTHONPATH; None where it was not fetched."""
    release = folder() / version
    return release if (release / "triton" / "__init__.py").is_file() else None


def not_here(version: str) -> str:
    """What to say of a release that was not fetched."""
    return f'Triton {version} is not here: "$(scripts/setup.sh)" scripts/triton_releases.py {version} fetches it'


def fetch(version: str) -> Path:
    """path(version), after a download where there is none.

    Raises RuntimeError with pip's last line where the release cannot be had: no such version, no wheel for this
    Python or platform, no network.
    """
    if found := path(version):
        return found
    folder().mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{version}.", suffix=".partial", dir=folder()))
    try:
        _install(version, partial)
        partial.chmod(0o755)
        partial.rename(folder() / version)  # whole or not at all
    except OSError:
        if not path(version):  # else another process was the first to have it
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder() / version


def _install(version: str, target: Path) -> None:
    options = ["--disable-pip-version-check", "--no-color", "--no-input", "--no-cache-dir", "--no-deps", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", *options, "--only-binary=:all:", "--target", str(target)]
    done = subprocess.run([*command, f"triton=={version}"], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ")]  # warnings may come after them
        raise RuntimeError((errors or lines or [f"pip ended with {done.returncode}"])[-1].removeprefix("ERROR: "))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    missing = 0
    for version in parser.parse_args().versions:
        try:
            print(fetch(version), flush=True)
        except RuntimeError as error:
            missing += 1
            print(f"Triton {version} cannot be fetched: {error}", file=sys.stderr, flush=True)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
