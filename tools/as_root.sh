#!/bin/sh
# Runs a command as root: taps, namespaces and unprivileged uids for VMMs need it. Uses sudo where we are not root.
set -eu
if [ "$(id -u)" = 0 ]; then exec "$@"; fi
exec sudo --preserve-env=CI,AENV_CACHE,AENV_NETWORK_UPLINK,AENV_VMM_KIND,HOME,PATH "$@"
