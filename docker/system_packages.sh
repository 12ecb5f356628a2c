#!/bin/sh
# Install what Debian must provide and the base image lacks; a base that has everything needs no package mirror.
# gcc: Inductor and Triton compile at run time. EGL: rendering without a display, on the GPU or by Mesa on the CPU.
set -eu
missing=
for name in gcc libc6-dev libegl1 libgl1 libglvnd0 libopengl0 libegl-mesa0 libgl1-mesa-dri; do
  dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q ' installed$' || missing="$missing $name"
done
[ -n "$missing" ] || exit 0
apt-get update
# shellcheck disable=SC2086  # a list of words
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing
rm -rf /var/lib/apt/lists/*
