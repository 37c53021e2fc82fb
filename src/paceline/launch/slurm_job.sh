#!/bin/bash
@options@
# Written by paceline launch. Submit it again as it is: it goes on with the newest checkpoint.
set -u
export @launch@
cd @workdir@ || exit 1
@setup@head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$head" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
export MASTER_ADDR="${MASTER_ADDR:-$head}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"

asked=0
ask_to_save() {
  asked=1
  echo "paceline: the time limit is near: the run saves and leaves"
  kill -USR1 "$step"  # srun hands it on to all tasks
}
trap ask_to_save USR1

srun --kill-on-bad-exit=0 --wait=60 --gpu-bind=none @command@ &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do  # a signal to this script has ended the wait
  wait "$step"
  code=$?
done
wait "$step"
again=$?
[ "$again" -eq 127 ] || code=$again  # 127: it was waited for already

# The signal may come before there are ranks: then there is nothing to save, and the code is that of USR1.
[ "$asked" -eq 1 ] && [ "$code" -eq @by_signal@ ] && code=@preempted@
# A job that somebody has cancelled does not run any more, and is not queued again.
if [ "$code" -eq @preempted@ ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -lt @most@ ]; then
    echo "paceline: back into the queue (start $((${SLURM_RESTART_COUNT:-0} + 2)) of at most $((@most@ + 1)))"
    scontrol requeue "$SLURM_JOB_ID" && exit @preempted@
  fi
  echo "paceline: not queued again: it was started $((${SLURM_RESTART_COUNT:-0} + 1)) times"
fi
echo "$code" > @exit@.part && mv @exit@.part @exit@
exit "$code"
