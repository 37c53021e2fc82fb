#!/bin/sh
# Measures how training scales with ranks on this machine, and predicts more of them:
#
#   scripts/benchmark.sh [OPTIONS OF paceline bench scaling]
set -eu
root=$(dirname "$0")/..
paceline=$(command -v paceline || command -v "$root/.venv/bin/paceline" || true)
paceline=${paceline:?is not installed: run make run first}
exec "$paceline" bench scaling "${CONFIG:-$root/configs/digits.yaml}" "$@"
