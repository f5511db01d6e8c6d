#!/bin/sh
# Exit 0 when the tracking server answers, knows this user, and reads its database; 1, with what is wrong, when not.
#   MLFLOW_TRACKING_URI=https://mlflow.example sh mlflow/health.sh
# A user with READ is enough; name and password come from ~/.netrc, or from the file that NETRC names.
set -u
ask() { curl -sS -o /dev/null -w '%{http_code}' --max-time "${SECONDS_TO_WAIT:-10}" "$@"; }
alive=$(ask "$MLFLOW_TRACKING_URI/health") || { echo "the server does not answer"; exit 1; }
[ "$alive" = 200 ] || { echo "/health answers $alive"; exit 1; }
set -- "$MLFLOW_TRACKING_URI/api/2.0/mlflow/registered-models/search?max_results=1"
[ -f "${NETRC:-$HOME/.netrc}" ] && set -- --netrc-file "${NETRC:-$HOME/.netrc}" "$@"
read=$(ask "$@")
case $read in
  200) echo "the server answers and reads its database" ;;
  401 | 403) echo "the server does not let this user in ($read)"; exit 1 ;;
  *) echo "the registry answers $read: look into the server's log, its database may be away"; exit 1 ;;
esac
