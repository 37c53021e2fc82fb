#!/bin/sh
''':'
# The command `paceline`: a shell script that starts Python with the rest of this file.
#
# Python answers Ctrl-C with a traceback while it starts itself. So the signal is held back from before that until
# main() takes it, where env can do so (GNU coreutils 8.31); elsewhere Python starts as ever.
self=$0
if [ -L "$self" ]; then self=$(readlink -f "$self"); fi
for python in "${self%/*}/python" "${self%/*}/python3" python3; do
    if command -v "$python" >/dev/null; then break; fi
done
if env --block-signal=INT true 2>/dev/null; then
    exec env --block-signal=INT "$python" "$self" "$@"
fi
exec "$python" "$self" "$@"
'''
from paceline.cli.main import main

if __name__ == "__main__":  # not in processes that it starts
    main(holds_interrupts=True)
