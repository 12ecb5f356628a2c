#!/bin/sh
# Start the suite as the owner of the mounted report folder, with every cache in a place that can be written.
set -eu

# A run of `repro run --executor docker` comes as its user already, with a program of its own.
if [ "$(id -u)" = 0 ] && [ "${1-}" != python ]; then
  owner=$(stat -c '%u %g' /opt/unilab-repro/reports)
  # shellcheck disable=SC2086  # two words: user and group
  set -- $owner "$@"
  user=$1 group=$2
  shift 2
  if [ "$user" != 0 ]; then
    exec setpriv --reuid "$user" --regid "$group" --clear-groups --no-new-privs "$0" "$@"
  fi
fi

# The same path for everybody, so that a report does not tell who ran it.
volume=/var/cache/unilab/$(id -u)
if mkdir -p "$volume" 2>/dev/null && [ -w "$volume" ]; then
  ln -sfn "$volume" /tmp/cache
else
  echo "entrypoint: /var/cache/unilab cannot be written; compiled code is kept in /tmp/cache and lost at the end" >&2
fi
export HOME=/tmp/home XDG_CACHE_HOME=/tmp/cache MPLCONFIGDIR=/tmp/cache/matplotlib
export TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor TRITON_CACHE_DIR=/tmp/cache/triton
if ! mkdir -p "$HOME" "$MPLCONFIGDIR"; then
  echo "entrypoint: /tmp cannot be written; a read-only container needs --tmpfs /tmp:mode=1777,exec" >&2
  exit 2
fi

[ "${1-}" != python ] || exec "$@"
exec python /opt/unilab-repro/docker/session.py "$@"
