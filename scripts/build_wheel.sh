#!/usr/bin/env bash
# Builds the wheel of the library into dist/ and prints its path, alone, on stdout: for a machine with no internet, such
# as a notebook of a Kaggle competition. It is for any Python from 3.11 on and any platform.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$("$root/scripts/setup.sh")"
cd "$root"
rm -rf build dist/flashattn-*.whl # what is left of an earlier build would go along
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist . >&2
ls "$root"/dist/flashattn-*.whl
