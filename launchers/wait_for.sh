#!/usr/bin/env bash
# Wait until something listens at each address:   launchers/wait_for.sh HOST:PORT...
# Gives up after WAIT_SECONDS (600), with exit status 1 and the name of who didn't answer.
set -euo pipefail

limit=$((SECONDS + ${WAIT_SECONDS:-600}))
for address in "$@"; do
  address=${address#tcp://}
  host=${address%:*} port=${address##*:}
  # shellcheck disable=SC2016  # the inner shell expands its arguments
  until timeout 5 bash -c 'exec 3<>"/dev/tcp/$1/$2"' _ "${host//[\[\]]/}" "$port" 2>/dev/null; do
    if ((SECONDS >= limit)); then
      echo "launchers/wait_for.sh: nobody listens at $address (WAIT_SECONDS is ${WAIT_SECONDS:-600})" >&2
      exit 1
    fi
    sleep 1
  done
done
