#!/bin/sh
# Trains $CONFIG (configs/digits.yaml) data-parallel on GPUS ranks of this machine, BATCH samples for each, for EPOCHS:
#
#   scripts/run_distributed.sh GPUS BATCH EPOCHS [OPTIONS AND OVERRIDES OF paceline train]      4 128 10
set -eu
case "$#-${1:-}-${2:-}-${3:-}" in
[012]-* | *[!0-9-]*)
    echo "run_distributed.sh takes GPUS BATCH EPOCHS: 4 128 10" >&2
    exit 2
    ;;
esac
gpus=$1 batch=$2 epochs=$3
shift 3
exec "$(dirname "$0")/launch_training.sh" "$gpus" ddp "$batch" "train.epochs=$epochs" "$@"
