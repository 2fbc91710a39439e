#!/usr/bin/env bash
# Makes the environment where there is none and runs the notebooks on a Kaggle T4, and brings the results back:
# scripts/push_to_kaggle.sh [arguments for scripts/kaggle_push.py].
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$("$root/scripts/setup.sh")"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for an interpreter into which nothing was installed
exec "$python" -u "$root/scripts/kaggle_push.py" "$@"
