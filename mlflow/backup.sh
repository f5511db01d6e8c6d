#!/bin/sh
# Back up the tracking server into a new folder: both databases, then the artifacts.
#   MLFLOW_ENV=mlflow/server.env sh mlflow/backup.sh FOLDER
# The databases first: MLflow writes files before it names them, so that every file a dump names is in the copy made after it.
# SYNC SOURCE TARGET copies what is new; another program is named by SYNC, such as "rclone sync".
set -eu
folder=$1/$(date -u +%Y%m%dT%H%M%SZ)
: "${MLFLOW_ENV:=/etc/mlflow/server.env}"
: "${AUTH_INI:=/etc/mlflow/basic_auth.ini}"
set -a
. "$MLFLOW_ENV"
set +a
: "${SYNC:=aws s3 sync --only-show-errors --endpoint-url ${MLFLOW_S3_ENDPOINT_URL:-}}"
plain() { printf '%s\n' "$1" | sed 's/^postgresql+[a-z0-9]*:/postgresql:/'; } # pg_dump knows no Python driver
auth=$(sed -n 's/^database_uri *= *//p' "$AUTH_INI")
mkdir -p "$folder.part"
pg_dump --format=custom --file="$folder.part/mlflow.dump" "$(plain "$MLFLOW_BACKEND_STORE_URI")"
pg_dump --format=custom --file="$folder.part/mlflow_auth.dump" "$(plain "$auth")"
pg_restore --list "$folder.part/mlflow.dump" > "$folder.part/mlflow.list"
pg_restore --list "$folder.part/mlflow_auth.dump" > "$folder.part/mlflow_auth.list"
# shellcheck disable=SC2086 - SYNC is a program and its options
$SYNC "$MLFLOW_ARTIFACTS_DESTINATION" "$1/artifacts"
mv "$folder.part" "$folder" # a folder without .part is a whole backup
echo "$folder"
