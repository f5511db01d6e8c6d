#!/bin/sh
# Back up the tracking server into a new folder: both databases, then the artifacts.
#   MLFLOW_ENV=mlflow/server.env KEEP_DAYS=30 sh mlflow/backup.sh FOLDER
# The databases come first: MLflow writes a file before it records it, so the later copy contains every file that a dump refers to.
# SYNC SOURCE TARGET copies new files; set SYNC to use another program, such as "rclone sync". The copy is not a snapshot.
# KEEP_DAYS: a complete backup deletes older dated folders, and interrupted backups after a day. Without it, all backups are kept.
set -eu
# shellcheck source-path=SCRIPTDIR source=databases.sh
. "$(dirname "$0")/databases.sh"
case ${KEEP_DAYS:-0} in *[!0-9]*) refuse "KEEP_DAYS is '$KEEP_DAYS'; expected a number of days" ;; esac

# Rename to *.part first: an interrupted deletion must not look like a complete backup.
remove_old() {
    four='[0-9][0-9][0-9][0-9]'
    dated="${four}${four}T${four}[0-9][0-9]Z"
    find "$1/." ! -name . -prune -type d ! -name "${folder##*/}" \
        \( -name "$dated" -mtime "+$KEEP_DAYS" -o -name "$dated.part" -mtime +0 \) \
        -exec sh -ec 'for one; do part=${one%.part}.part; [ "$one" = "$part" ] || mv "$one" "$part"; rm -rf "$part"; done' sh {} +
}

folder=$1/$(date -u +%Y%m%dT%H%M%SZ)
part=$folder.part
mkdir -p "$1"
mkdir "$part" # fails if another backup began in the same second
[ ! -e "$folder" ] || { rmdir "$part"; refuse "$folder already exists"; }
pg_dump --format=custom --file="$part/mlflow.dump" "$registry"
pg_dump --format=custom --file="$part/mlflow_auth.dump" "$users"
pg_restore --list "$part/mlflow.dump" > "$part/mlflow.list"
pg_restore --list "$part/mlflow_auth.dump" > "$part/mlflow_auth.list"
$SYNC "$MLFLOW_ARTIFACTS_DESTINATION" "$1/artifacts"
sync -f "$1" 2> /dev/null || sync
mv "$part" "$folder" # a folder without .part is a complete backup
echo "$folder"
[ -z "${KEEP_DAYS:-}" ] || remove_old "$1" || tell "not all old backups could be removed"
