#!/usr/bin/env bash
# Makes the environment where there is none and runs the tests: scripts/test.sh [arguments for pytest].
# JUnit XML: results/local/tests.xml.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$("$root/scripts/setup.sh")"
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for an interpreter into which nothing was installed
# At most 8 workers: on a GPU each has a CUDA context of its own.
exec "$python" -m pytest -n auto --maxprocesses 8 --dist worksteal --junitxml results/local/tests.xml "$@"
