#!/bin/sh
# Back up a workdir (registry, data repository, DVC remote, artifact store and run reports) into a new folder, named after the current UTC time.
#   KEEP_DAYS=30 sh backup.sh .tuneline /backups
# Runs can continue during a backup, but do not run `tuneline gc --delete`. References come first: tuneline writes a file before it refers to it, so
# the later copy contains every file that is referred to. An MLflow server, and data in a bucket or at a URL, need their own backup.
# SYNC SOURCE TARGET copies the folder of an artifact; set SYNC to use another program, such as "rsync -a".
# KEEP_DAYS: a complete backup deletes older dated folders, and interrupted backups after a day. Without it, all backups are kept.
set -eu
umask 077
: "${PYTHON:=python3}" "${SYNC:=cp -Rp}"

tell() { printf 'backup.sh: %s\n' "$1" >&2; }
refuse() { tell "$1"; exit 1; }
# collect SOURCE TARGET: copy a folder that is in use, without the temporary files of tuneline and DVC and without files that disappear meanwhile.
collect() {
    if [ -d "$1" ]; then
        "$PYTHON" -IS - "$1" "$2" <<'END'
import contextlib, re, shutil, sys
temporary = re.compile(r"\..*\.([0-9a-f]{8}|tmp)").fullmatch
def copy(source, target):
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)
shutil.copytree(*sys.argv[1:], symlinks=True, ignore=lambda _, names: list(filter(temporary, names)), copy_function=copy)
END
    fi
}
# Rename to *.part first: an interrupted deletion must not look like a complete backup.
remove_old() {
    four='[0-9][0-9][0-9][0-9]'
    dated="${four}${four}T${four}[0-9][0-9]Z"
    find "$1/." ! -name . -prune -type d ! -name "${folder##*/}" \
        \( -name "$dated" -mtime "+$KEEP_DAYS" -o -name "$dated.part" -mtime +0 \) \
        -exec sh -ec 'for one; do part=${one%.part}.part; [ "$one" = "$part" ] || mv "$one" "$part"; rm -rf "$part"; done' sh {} +
}

workdir=$1
store=${TUNELINE_STORE:-$workdir/store}
case ${KEEP_DAYS:-0} in *[!0-9]*) refuse "KEEP_DAYS is '$KEEP_DAYS'; expected a number of days" ;; esac
[ -d "$workdir" ] || refuse "the workdir $workdir does not exist"
case ${TUNELINE_STORE:-} in
'' | *://*) ;;
*) [ -d "$store" ] || refuse "TUNELINE_STORE: the folder $store does not exist" ;;
esac
folder=$2/$(date -u +%Y%m%dT%H%M%SZ)
part=$folder.part
mkdir -p "$2"
mkdir "$part" # fails if another backup began in the same second
[ ! -e "$folder" ] || { rmdir "$part"; refuse "$folder already exists"; }

if [ -f "$workdir/mlflow.db" ]; then # a consistent copy, even if other processes write to the database
    "$PYTHON" -IS - "$workdir/mlflow.db" "$part/mlflow.db" <<'END'
import sqlite3, sys
source, target = map(sqlite3.connect, sys.argv[1:])
source.backup(target)
END
else
    tell "$workdir/mlflow.db does not exist. Back up the tracking server with mlflow/backup.sh"
fi
for one in data-repository dvc-remote mlflow-artifacts; do
    [ -d "$workdir/$one" ] || tell "$workdir/$one does not exist. If it is elsewhere, it is not in this backup"
done
repository=$workdir/data-repository
if [ -d "$repository" ]; then # bare, and may belong to another user; a clone is consistent, but has no hooks and settings
    git clone --quiet --mirror --no-local --template= --upload-pack "git -c safe.directory='*' upload-pack" "$repository" "$part/data-repository"
    cp -p "$repository/config" "$part/data-repository/config"
    collect "$repository/hooks" "$part/data-repository/hooks"
fi
for one in runs mlflow-artifacts dvc-remote; do
    collect "$workdir/$one" "$part/$one"
done
case $store in
*://*) tell "the store is at a URL, so it is not in this backup" ;;
*)
    [ -d "$store" ] || tell "$store does not exist. If the store is elsewhere, set TUNELINE_STORE"
    mkdir "$part/store"
    for one in "$store"/*; do # keys, costs and pins, which refer to artifacts; not the unfinished artifacts of running or killed jobs
        [ "${one##*/}" = unfinished ] || [ -f "$one/manifest.json" ] || collect "$one" "$part/store/${one##*/}"
    done
    for one in "$store"/*; do
        if [ -f "$one/manifest.json" ]; then
            mkdir "$part/store/${one##*/}"
            $SYNC "$one/." "$part/store/${one##*/}/" # cp and rsync treat a source in the same way only if it ends in "/."
        fi
    done
    ;;
esac
sync -f "$part" 2> /dev/null || sync
mv "$part" "$folder" # a folder without .part is a complete backup
echo "$folder"
[ -z "${KEEP_DAYS:-}" ] || remove_old "$2" || tell "not all old backups could be removed"
