#!/bin/sh
# Refuses a base image whose Triton has vulnerabilities that NVIDIA has published and fixed. install.sh runs it in every base; a base without
# Triton passes. The argument is Triton's folder. docs/explanation/security.md lists the bulletins and this minimum version: after a new bulletin,
# change the version here, on that page and in images/serving.Containerfile.
set -eu
minimum=26.07
version=${NVIDIA_TRITON_SERVER_VERSION:-} # the container version, such as 26.07; NVIDIA's images and compose.py set it
home=${1:-/opt/tritonserver}

if [ -z "$version" ] && [ ! -e "$home/bin/tritonserver" ]; then exit 0; fi
number=$(printf '%s' "$version" | sed -n 's/^\([0-9][0-9]\)\.\([0-9][0-9]\).*$/\1\2/p')
if [ -z "$number" ]; then
    echo "triton_version.sh: the base image has a Triton of unknown version: NVIDIA_TRITON_SERVER_VERSION is '$version'; expected YY.MM, at least $minimum. Use nvcr.io/nvidia/tritonserver:$minimum-py3 or later as BASE_IMAGE" >&2
    exit 1
fi
if [ "$number" -lt "$(printf '%s' "$minimum" | tr -d .)" ]; then
    echo "triton_version.sh: the base image has Triton $version; expected at least $minimum, which fixes the vulnerabilities in docs/explanation/security.md. Use nvcr.io/nvidia/tritonserver:$minimum-py3 or later as BASE_IMAGE" >&2
    exit 1
fi
