#!/bin/sh
# Installs an image's packages in /opt/tuneline, separate from those of the base, as root during the build.
#
#   install.sh packages   the packages that tuneline with its extras requires
#   install.sh tuneline   tuneline itself, and the serving environment
#
# Each is a layer of the image. A new commit of tuneline changes only the second one, which is small.
#
#   EXTRAS    extras of the wheel, separated by commas
#   EMBEDDED  packages of embedded.txt, separated by spaces
#   PROGRAMS  Debian packages as name=version; skipped if the program already exists
#
# /context is the checkout, for `tuneline` with the wheel in dist/. For a site without a package index, wheels/ contains all other packages.
set -eu
umask 022
context=/context
home=/opt/tuneline
EMBEDDED=${EMBEDDED:-} PROGRAMS=${PROGRAMS:-} # an empty argument may be unset

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

# NVIDIA's and PyTorch's base images constrain pip to their own versions.
unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1
if [ -f /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi
if [ -f /run/secrets/ca.crt ]; then export PIP_CERT=/run/secrets/ca.crt SSL_CERT_FILE=/run/secrets/ca.crt; fi
if [ -n "$(ls "$context/wheels" 2>/dev/null)" ]; then export PIP_NO_INDEX=1 PIP_FIND_LINKS="$context/wheels"; fi

base=$(command -v python3) || fail "the base image has no python3"
python=$home/bin/python3
# The pip of hashes.txt, because older versions do not check the hashes of dependencies. An image does not keep it.
pip=/tmp/pip
install() {
    PYTHONPATH=$pip "$base" -m pip --python "$python" install --report "$home/report.json" "$@"
    "$base" "$context/images/contents.py" record "$home/report.json" "$home/archives.json"
}

install_packages() {
    sh "$context/images/triton_version.sh"
    for program in $PROGRAMS; do
        command -v "${program%%=*}" >/dev/null || missing="${missing:-} $program"
    done
    if [ -n "${missing:-}" ]; then
        apt-get update
        # shellcheck disable=SC2086 # several packages
        apt-get install -y --no-install-recommends $missing
        rm -rf /var/lib/apt/lists/*
    fi

    "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        fail "the base image has $("$base" --version); tuneline needs Python 3.11, 3.12 or 3.13"
    "$base" -m pip --version || fail "the base image has no pip for $base"

    # A separate environment, which can import the base's packages: pip then does not change the base's files, which a vendor or Debian
    # installed in ways that pip cannot undo. It refers to the packages by path, because the base's Python may itself belong to a virtual environment.
    "$base" -m venv --without-pip "$home"
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$base" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' >"$site/base.pth"

    grep '^pip==' "$context/hashes.txt" >"$home/pip.txt"
    "$base" -m pip install --quiet --no-deps --require-hashes --target "$pip" -r "$home/pip.txt"

    # Keep the base's own torch, which is built for the base's accelerator, and resolve the other packages against it. A build of torch determines
    # the versions of Triton's compiler and of CUDA's packages.
    cp "$context/hashes.txt" "$home/hashes.txt"
    find_torch() { "$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }
    case ,$EXTRAS, in
    *,models,* | *,training,* | *,gpu,* | *,deepspeed,* | *,evaluation,* | *,packaging,*)
        if ! find_torch && [ -n "${TORCH_INDEX_URL:-}" ]; then
            echo "install.sh: torch and its dependencies from TORCH_INDEX_URL are not checked against hashes" >&2
            sed 's/ .*//; /^\(cuda\|nvidia\|triton\)[-=]/d' "$context/hashes.txt" >"$home/torch.txt"
            install -c "$home/torch.txt" --index-url "$TORCH_INDEX_URL" torch
        fi
        if version=$(find_torch); then
            "$python" -c 'import re, sys
from importlib.metadata import distributions
names = (package.name.lower().replace("_", "-") for package in distributions() if package.name)  # a base may have damaged metadata
print(f"s/^torch==.*/torch=={sys.argv[1]}/", *(f"/^{name}==/d" for name in names if re.match("(cuda|nvidia|triton)(-|$)", name)), sep="\n")' \
                "$version" >"$home/torch.sed"
            sed -i -f "$home/torch.sed" "$home/hashes.txt"
        fi
        ;;
    esac
    "$base" -c 'import re, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
def expand(extra):
    for requirement in project["optional-dependencies"][extra]:
        nested = re.fullmatch(r"tuneline\[(.+)\]", requirement)
        yield from (one for name in nested[1].split(",") for one in expand(name)) if nested else [requirement]
print(*project["dependencies"], *(one for extra in sys.argv[2].split(",") for one in expand(extra)), sep="\n")' \
        "$context/pyproject.toml" "$EXTRAS" >"$home/requirements.txt"
    # The variables also apply to the packages that build a wheel from a source archive.
    export PIP_REQUIRE_HASHES=1 PIP_BUILD_CONSTRAINT="$home/hashes.txt"
    install -c "$home/hashes.txt" -r "$home/requirements.txt"

    for package in $EMBEDDED; do
        grep "^$package==" "$context/embedded.txt" >>"$home/embedded.txt" || fail "embedded.txt has no $package"
    done
    if [ -n "$EMBEDDED" ]; then install --no-deps -r "$home/embedded.txt"; fi

    # A name for user 1000, for programs that look it up, such as ssh. For any other user, LOGNAME sets the name.
    grep -q '^[^:]*:[^:]*:1000:' /etc/passwd || echo 'tuneline:x:1000:1000::/tmp:/usr/sbin/nologin' >>/etc/passwd
    grep -q '^[^:]*:[^:]*:1000:' /etc/group || echo 'tuneline:x:1000:' >>/etc/group
}

install_tuneline() {
    set -- "$context"/dist/tuneline-*.whl
    if [ $# -ne 1 ] || [ ! -f "$1" ]; then fail "dist/ must contain exactly one wheel of tuneline, which \`make images\` builds"; fi
    (unset PIP_FIND_LINKS && install --no-index "$1[$EXTRAS]") # the first layer contains all dependencies
    case " $EMBEDDED " in
    *" nvidia-pytriton "*)
        "$python" -c 'import sys
from components.triton_packaging import serving_env
print(serving_env.create_environment([path for path in sys.path if path.endswith("-packages")]))'
        ;;
    esac
    "$python" -P "$context/images/contents.py" write "$home/archives.json" "$home/sbom.cdx.json"
}

case ${1:-} in
packages) install_packages ;;
tuneline) install_tuneline ;;
*) fail "expected packages or tuneline" ;;
esac
rm -rf /root/.cache "$pip" "$home/report.json"
