#!/bin/sh
# Back up the tracking server into a new folder: both databases, then the artifacts.
#   MLFLOW_ENV=mlflow/server.env KEEP_DAYS=30 sh mlflow/backup.sh FOLDER
# The databases first: MLflow writes files before it names them, so that every file a dump names is in the copy made after it.
# SYNC SOURCE TARGET copies what is new; another program is named by SYNC, such as "rclone sync". The copy is of no point in time.
# KEEP_DAYS: dated folders that are older are removed after a whole backup, interrupted ones after a day; without it all are kept.
set -eu
# shellcheck source-path=SCRIPTDIR source=databases.sh
. "$(dirname "$0")/databases.sh"
case ${KEEP_DAYS:-0} in *[!0-9]*) refuse "KEEP_DAYS is no number of days: $KEEP_DAYS" ;; esac

# As *.part first, which is no backup: one whose removal is interrupted must not look whole.
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
mkdir "$part" # fails where another backup began in this second
[ ! -e "$folder" ] || { rmdir "$part"; refuse "$folder is there already"; }
pg_dump --format=custom --file="$part/mlflow.dump" "$registry"
pg_dump --format=custom --file="$part/mlflow_auth.dump" "$users"
pg_restore --list "$part/mlflow.dump" > "$part/mlflow.list"
pg_restore --list "$part/mlflow_auth.dump" > "$part/mlflow_auth.list"
$SYNC "$MLFLOW_ARTIFACTS_DESTINATION" "$1/artifacts"
sync -f "$1" 2> /dev/null || sync
mv "$part" "$folder" # a folder without .part is a whole backup
echo "$folder"
[ -z "${KEEP_DAYS:-}" ] || remove_old "$1" || tell "not all old backups could be removed"
