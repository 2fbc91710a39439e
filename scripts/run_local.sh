#!/usr/bin/env bash
# Makes the environment where there is none and executes the notebooks on this machine, into results/local/:
# scripts/run_local.sh [arguments for scripts/run_notebooks.py].
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

run() {
    local python
    python="$("$root/scripts/setup.sh")"
    cd "$root"
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for an interpreter into which nothing was installed
    "$python" -u scripts/run_notebooks.py --output results/local "$@"
}

keep() { # the log, unless no notebook was started, as by --help: then the last run's stays
    if grep -q '^== ' "$log.new"; then mv "$log.new" "$log"; else rm "$log.new"; fi
}

log="$root/results/local/run.log"
mkdir -p "$root/results/local"
trap keep EXIT
run "$@" 2>&1 | tee "$log.new"
