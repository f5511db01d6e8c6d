#!/bin/sh
# Back up a work folder: its registry, data repository, DVC remote, artifact store and the reports of its runs, into a folder named by the time.
#   KEEP_DAYS=30 sh backup.sh .tuneline /backups
# What names files comes first and the files after it: each is written before it is named, so that all that is named is in the copy, while
# runs go on. Only `tuneline gc --delete` must wait. What lies elsewhere (an MLflow server, a URL, a bucket) has a backup of its own.
# SYNC SOURCE TARGET copies an artifact's folder; another program is named by SYNC, such as "rsync -a".
# KEEP_DAYS: dated folders that are older are removed after a whole backup, interrupted ones after a day; without it all are kept.
set -eu
umask 077
: "${PYTHON:=python3}" "${SYNC:=cp -Rp}"

tell() { printf 'backup.sh: %s\n' "$1" >&2; }
refuse() { tell "$1"; exit 1; }
# Files among which others write meanwhile: without temporary names (those of tuneline and of DVC), and one that vanished is none.
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
# As *.part first, which is no backup: one whose removal is interrupted must not look whole.
remove_old() {
    four='[0-9][0-9][0-9][0-9]'
    dated="${four}${four}T${four}[0-9][0-9]Z"
    find "$1/." ! -name . -prune -type d ! -name "${folder##*/}" \
        \( -name "$dated" -mtime "+$KEEP_DAYS" -o -name "$dated.part" -mtime +0 \) \
        -exec sh -ec 'for one; do part=${one%.part}.part; [ "$one" = "$part" ] || mv "$one" "$part"; rm -rf "$part"; done' sh {} +
}

workdir=$1
store=${TUNELINE_STORE:-$workdir/store}
case ${KEEP_DAYS:-0} in *[!0-9]*) refuse "KEEP_DAYS is no number of days: $KEEP_DAYS" ;; esac
[ -d "$workdir" ] || refuse "there is no work folder $workdir"
case ${TUNELINE_STORE:-} in
'' | *://*) ;;
*) [ -d "$store" ] || refuse "TUNELINE_STORE: there is no folder $store" ;;
esac
folder=$2/$(date -u +%Y%m%dT%H%M%SZ)
part=$folder.part
mkdir -p "$2"
mkdir "$part" # fails where another backup began in this second
[ ! -e "$folder" ] || { rmdir "$part"; refuse "$folder is there already"; }

if [ -f "$workdir/mlflow.db" ]; then # a copy of one moment, whoever writes meanwhile
    "$PYTHON" -IS - "$workdir/mlflow.db" "$part/mlflow.db" <<'END'
import sqlite3, sys
source, target = map(sqlite3.connect, sys.argv[1:])
source.backup(target)
END
else
    tell "there is no $workdir/mlflow.db: back up the tracking server with mlflow/backup.sh"
fi
for one in data-repository dvc-remote mlflow-artifacts; do
    [ -d "$workdir/$one" ] || tell "there is no $workdir/$one: where it lies elsewhere, it is not in this backup"
done
repository=$workdir/data-repository
if [ -d "$repository" ]; then # a bare one, perhaps of a service's user; a clone is one of one moment, without hooks and settings
    git clone --quiet --mirror --no-local --template= --upload-pack "git -c safe.directory='*' upload-pack" "$repository" "$part/data-repository"
    cp -p "$repository/config" "$part/data-repository/config"
    collect "$repository/hooks" "$part/data-repository/hooks"
fi
for one in runs mlflow-artifacts dvc-remote; do
    collect "$workdir/$one" "$part/$one"
done
case $store in
*://*) tell "the store is at a URL: it is not in this backup" ;;
*)
    [ -d "$store" ] || tell "there is no $store: where the store lies elsewhere, name it by TUNELINE_STORE"
    mkdir "$part/store"
    for one in "$store"/*; do # keys, costs and pins, which name artifacts; not what jobs are about to finish, or left when they were killed
        [ "${one##*/}" = unfinished ] || [ -f "$one/manifest.json" ] || collect "$one" "$part/store/${one##*/}"
    done
    for one in "$store"/*; do
        if [ -f "$one/manifest.json" ]; then
            mkdir "$part/store/${one##*/}"
            $SYNC "$one/." "$part/store/${one##*/}/" # cp and rsync agree on what that means only with "/." at the end
        fi
    done
    ;;
esac
sync -f "$part" 2> /dev/null || sync
mv "$part" "$folder" # a folder without .part is a whole backup
echo "$folder"
[ -z "${KEEP_DAYS:-}" ] || remove_old "$2" || tell "not all old backups could be removed"
