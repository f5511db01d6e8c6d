#!/bin/sh
# Back up a work folder: its registry, data repository, DVC remote, artifact store and the reports of its runs, into a folder named by the time.
#   sh backup.sh .tuneline /backups
# What names files comes first and the files after it: each is written before it is named, so that all that is named is in the copy, while
# runs go on. Only `tuneline gc --delete` must wait. What lies elsewhere (an MLflow server, a URL, a bucket) has a backup of its own.
# SYNC SOURCE TARGET copies folders; another program is named by SYNC, such as "rsync -a".
set -eu
workdir=$1
folder=$2/$(date -u +%Y%m%dT%H%M%SZ)
store=${TUNELINE_STORE:-$workdir/store}
: "${PYTHON:=python3}" "${SYNC:=cp -Rp}"
part=$folder.part

tell() { printf 'backup.sh: %s\n' "$1" >&2; }
# A file goes into the folder it is copied to, a folder becomes it: cp and rsync agree on that only with "/." at the end.
copy() {
    if [ -d "$1" ]; then
        mkdir -p "$2"
        # shellcheck disable=SC2086 - SYNC is a program and its options
        $SYNC "$1/." "$2/"
    fi
}

[ -d "$workdir" ] || { tell "there is no work folder $workdir"; exit 1; }
mkdir -p "$2"
mkdir "$part"
if [ -f "$workdir/mlflow.db" ]; then # a copy of one moment, whoever writes meanwhile
    "$PYTHON" - "$workdir/mlflow.db" "$part/mlflow.db" <<'END'
import sqlite3, sys
source, target = map(sqlite3.connect, sys.argv[1:])
source.backup(target)
END
else
    tell "there is no $workdir/mlflow.db: back up the tracking server with mlflow/backup.sh"
fi
if [ -d "$workdir/data-repository" ]; then # a bare repository; a clone of it is one of one moment
    git clone --quiet --mirror --no-hardlinks "$workdir/data-repository" "$part/data-repository"
    git -C "$part/data-repository" config --remove-section remote.origin
fi
copy "$workdir/runs" "$part/runs"
copy "$workdir/mlflow-artifacts" "$part/mlflow-artifacts"
copy "$workdir/dvc-remote" "$part/dvc-remote"
case $store in
*://*) tell "the store $store is not in this backup" ;;
*)
    for one in "$store"/*; do
        case ${one##*/} in
        unfinished) ;; # what jobs are about to finish, or left when they were killed
        *) copy "$one" "$part/store/${one##*/}" ;;
        esac
    done
    ;;
esac
mv "$part" "$folder" # a folder without .part is a whole backup
echo "$folder"
