#!/bin/sh
# Trains a config, or a small example, on this machine or as one of several:
#
#   scripts/launch_training.sh --config FILE [OPTIONS AND OVERRIDES OF paceline train]
#   scripts/launch_training.sh N STRATEGY BATCH [OPTIONS AND OVERRIDES]      4 ddp 32: N ranks, BATCH samples for each
#
# N STRATEGY BATCH trains $CONFIG (configs/digits.yaml). On several machines N is the number of ranks of all of them:
# set MASTER_ADDR to the name of the first one, GPUS_PER_NODE to the GPUs of each, and start the same on every machine.
set -eu
root=$(dirname "$0")/..
paceline=$(command -v paceline || command -v "$root/.venv/bin/paceline" || true)
paceline=${paceline:?is not installed: run make run first}

if [ "${1:-}" = --config ] && [ $# -ge 2 ]; then
    shift
    exec "$paceline" train "$@"
fi
case "$#-${1:-}-${3:-}" in
[012]-* | *[!0-9-]*)
    echo "launch_training.sh takes --config FILE, or N STRATEGY BATCH: 4 ddp 32" >&2
    exit 2
    ;;
esac
ranks=$1 strategy=$2 batch=$3
shift 3
set -- "${CONFIG:-$root/configs/digits.yaml}" "parallel.strategy=$strategy" "train.global_batch=$((ranks * batch))" "$@"

if [ -z "${MASTER_ADDR:-}" ]; then
    exec "$paceline" train "$@" "parallel.ranks=$ranks"
fi
each=${GPUS_PER_NODE:?set it to the number of GPUs of each machine}
place=$MASTER_ADDR:${MASTER_PORT:-29400}
if [ $((ranks % each)) -ne 0 ]; then
    echo "$ranks ranks cannot be shared by machines with $each GPUs each" >&2
    exit 2
fi
unset MASTER_ADDR MASTER_PORT NODE_RANK # the launchers agree about ranks by themselves
exec "$paceline" train "$@" --nnodes "$((ranks / each))" --rdzv "$place" --node-ranks "$each"
