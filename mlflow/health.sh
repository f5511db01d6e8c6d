#!/bin/sh
# Exit with status 0 if the tracking server answers, accepts this user and reads its database; otherwise print the problem and exit with status 1.
#   MLFLOW_TRACKING_URI=https://mlflow.example sh mlflow/health.sh
# A user with READ is sufficient; name and password are in ~/.netrc, or in the file of NETRC.
set -u
ask() { curl -sS -o /dev/null -w '%{http_code}' --max-time "${SECONDS_TO_WAIT:-10}" "$@"; }
alive=$(ask "$MLFLOW_TRACKING_URI/health") || { echo "the server does not answer"; exit 1; }
[ "$alive" = 200 ] || { echo "/health answers $alive"; exit 1; }
set -- "$MLFLOW_TRACKING_URI/api/2.0/mlflow/registered-models/search?max_results=1"
[ -f "${NETRC:-$HOME/.netrc}" ] && set -- --netrc-file "${NETRC:-$HOME/.netrc}" "$@"
read=$(ask "$@")
case $read in
  200) echo "the server answers and reads its database" ;;
  401 | 403) echo "the server rejects this user ($read)"; exit 1 ;;
  *) echo "the registry answers $read; check the server's log, the database may be unavailable"; exit 1 ;;
esac
