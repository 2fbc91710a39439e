#!/usr/bin/env bash
# Makes the environment where there is none and brings a run on Kaggle back into results/:
# scripts/pull_from_kaggle.sh [arguments for scripts/kaggle_pull.py].
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$("$root/scripts/setup.sh")"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for an interpreter into which nothing was installed
exec "$python" -u "$root/scripts/kaggle_pull.py" "$@"
