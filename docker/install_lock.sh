#!/bin/sh
# Install a lock, every file checked against its hash: install_lock.sh PYTHON LOCK [pip argument …]
# Files come from the wheelhouse that was made for this lock and interpreter, and then from nowhere else; without one
# they come from the index, torch's CPU build from PyTorch's.
set -eu
python=$1 lock=$2
shift 2
house=/wheelhouse/$LOCK-py$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ -d "$house" ]; then
  echo "$lock: offline, from ${house#/}"
  set -- --no-index --find-links "$house" "$@"
elif [ "$lock" = cpu ]; then
  set -- --find-links "$TORCH_CPU_INDEX/torch/" "$@"
fi
# The build tools are installed first, so that the one source archive is built by locked tools too.
exec "$python" -m pip install --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation --require-hashes \
  "$@" -r "/locks/$lock.txt"
