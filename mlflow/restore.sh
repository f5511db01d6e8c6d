#!/bin/sh
# Bring a backup of the tracking server back, into two empty databases and with no server at work on them: artifacts first, then the databases.
#   MLFLOW_ENV=mlflow/server.env sh mlflow/restore.sh FOLDER/20261122T014300Z
# Each database is restored in one transaction: it is as it was in the backup, or still empty. SYNC is as in backup.sh;
# artifacts that lie in a folder, and no bucket, then belong to who restores them.
set -eu
# shellcheck source-path=SCRIPTDIR source=databases.sh
. "$(dirname "$0")/databases.sh"

# is_empty DATABASE: whether it is there with no tables in it, else what to do. A table of another version would stay, and stop the server.
is_empty() {
    tables=$(psql -XAtc "SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')" "$1") || tables=none
    [ "$tables" != 0 ] || return 0
    plain=${1%%\?*}
    name=${plain##*/}
    user=${plain#*://}
    owner="$name\" OWNER \"${user%%@*}"
    case $user in *@*) ;; *) owner=$name ;; esac
    tell "the database $name is not empty, or cannot be reached. With all servers stopped: DROP DATABASE IF EXISTS \"$name\"; CREATE DATABASE \"$owner\";"
    return 1
}
restore() { pg_restore --no-owner --single-transaction --dbname="$2" "$folder/$1.dump"; }

[ -d "$1" ] || refuse "there is no backup $1"
folder=$(CDPATH='' cd -- "$1" && pwd)
case $folder in *.part) refuse "$folder is no whole backup" ;; esac
for dump in mlflow mlflow_auth; do
    [ -s "$folder/$dump.dump" ] || refuse "there is no $folder/$dump.dump"
done
ready=yes
is_empty "$registry" || ready=no
is_empty "$users" || ready=no
[ "$ready" = yes ] || refuse "nothing was changed"
if [ -d "${folder%/*}/artifacts" ]; then
    $SYNC "${folder%/*}/artifacts" "$MLFLOW_ARTIFACTS_DESTINATION"
else
    tell "artifacts are not restored, as there is no ${folder%/*}/artifacts: they stay in their bucket, or come from its snapshot"
fi
restore mlflow "$registry"
restore mlflow_auth "$users"
