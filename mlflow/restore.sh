#!/bin/sh
# Restore a backup of the tracking server into two empty databases while no server uses them: artifacts first, then the databases.
#   MLFLOW_ENV=mlflow/server.env sh mlflow/restore.sh FOLDER/20261122T014300Z
# Each database is restored in one transaction: afterwards it is as in the backup, or still empty. SYNC is as in backup.sh.
# If artifacts are in a folder instead of a bucket, the restored files belong to the user who restores them.
set -eu
# shellcheck source-path=SCRIPTDIR source=databases.sh
. "$(dirname "$0")/databases.sh"

# is_empty DATABASE: check that the database exists without tables; otherwise print the remedy. A remaining table of another version would stop the server.
is_empty() {
    tables=$(psql -XAtc "SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')" "$1") || tables=none
    [ "$tables" != 0 ] || return 0
    plain=${1%%\?*}
    name=${plain##*/}
    user=${plain#*://}
    owner="$name\" OWNER \"${user%%@*}"
    case $user in *@*) ;; *) owner=$name ;; esac
    tell "the database $name is not empty or cannot be reached. Stop all servers, then run: DROP DATABASE IF EXISTS \"$name\"; CREATE DATABASE \"$owner\";"
    return 1
}
restore() { pg_restore --no-owner --single-transaction --dbname="$2" "$folder/$1.dump"; }

[ -d "$1" ] || refuse "the backup $1 does not exist"
folder=$(CDPATH='' cd -- "$1" && pwd)
case $folder in *.part) refuse "$folder is not a complete backup" ;; esac
for dump in mlflow mlflow_auth; do
    [ -s "$folder/$dump.dump" ] || refuse "$folder/$dump.dump does not exist"
done
ready=yes
is_empty "$registry" || ready=no
is_empty "$users" || ready=no
[ "$ready" = yes ] || refuse "nothing was changed"
if [ -d "${folder%/*}/artifacts" ]; then
    $SYNC "${folder%/*}/artifacts" "$MLFLOW_ARTIFACTS_DESTINATION"
else
    tell "artifacts are not restored, because ${folder%/*}/artifacts does not exist; use the bucket or restore its snapshot"
fi
restore mlflow "$registry"
restore mlflow_auth "$users"
