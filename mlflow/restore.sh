#!/bin/sh
# Bring a backup of the tracking server back, into databases that exist and with no server at work on them: artifacts first, then both databases.
#   MLFLOW_ENV=mlflow/server.env sh mlflow/restore.sh FOLDER/20261122T014300Z
# Each database is restored in one transaction: it is as it was in the backup, or as it was before. SYNC is as in backup.sh.
set -eu
folder=$1
: "${MLFLOW_ENV:=/etc/mlflow/server.env}"
: "${AUTH_INI:=/etc/mlflow/basic_auth.ini}"
set -a
. "$MLFLOW_ENV"
set +a
: "${SYNC:=aws s3 sync --only-show-errors --endpoint-url ${MLFLOW_S3_ENDPOINT_URL:-}}"
plain() { printf '%s\n' "$1" | sed 's/^postgresql+[a-z0-9]*:/postgresql:/'; } # pg_restore knows no Python driver
auth=$(sed -n 's/^database_uri *= *//p' "$AUTH_INI")
case $folder in *.part) echo "restore.sh: $folder is no whole backup" >&2; exit 1 ;; esac
for dump in mlflow mlflow_auth; do
    [ -s "$folder/$dump.dump" ] || { echo "restore.sh: there is no $folder/$dump.dump" >&2; exit 1; }
done
if [ -d "${folder%/*}/artifacts" ]; then # else they stay in their bucket, or come from its snapshot
    # shellcheck disable=SC2086 - SYNC is a program and its options
    $SYNC "${folder%/*}/artifacts" "$MLFLOW_ARTIFACTS_DESTINATION"
fi
restore() { pg_restore --clean --if-exists --no-owner --single-transaction --dbname="$2" "$folder/$1.dump"; }
restore mlflow "$(plain "$MLFLOW_BACKEND_STORE_URI")"
restore mlflow_auth "$(plain "$auth")"
