#!/usr/bin/env bash
# constraints/environment.sh TORCH FOLDER: a virtual environment in FOLDER with that version of torch, for `make TORCH=...`.
#
# A CUDA build of torch unpacks to several GB, so it lies once in a cache folder of the user, under a name made of the constraints and of
# the Python that runs it; FOLDER only points there. A build that fails leaves nothing behind and fails this script.
set -euo pipefail
version=$1 folder=$2 python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
constraints=$root/constraints/torch-$version.txt tools=$root/constraints/tools.txt
if [ ! -f "$constraints" ]; then
    echo "there is no constraints/torch-$version.txt; there are: $(cd "$root/constraints" && echo torch-*.txt)" >&2
    exit 2
fi
key=$("$python" - "$constraints" "$tools" <<'EOF'
import hashlib, platform, sys
text = "".join(open(each).read() for each in sys.argv[1:]) + sys.version + sys.base_prefix + platform.machine()
print(hashlib.sha256(text.encode()).hexdigest()[:12])
EOF
)
cached=${XDG_CACHE_HOME:-$HOME/.cache}/fsdp2/torch-$version-$key
if [ ! -d "$cached" ]; then
    echo "making $cached, once"
    building=$cached.building.$$
    trap 'rm -rf "$building"' EXIT
    "$python" -m venv "$building"
    "$building/bin/python" -m pip install -q --upgrade -c "$tools" pip
    "$building/bin/python" -m pip install -c "$constraints" -c "$tools" "$root" --group "$root/pyproject.toml:dev"
    "$building/bin/python" -m pip uninstall -q -y fsdp2
    "$python" -c 'import os, sys; os.rename(*sys.argv[1:])' "$building" "$cached" || test -d "$cached" # somebody else was faster
fi
rm -rf "$folder"
"$python" -m venv "$folder"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$cached/bin/python" -c "$site" >"$("$folder/bin/python" -c "$site")/cached.pth"
"$folder/bin/python" -m pip install -q --upgrade -c "$tools" pip
"$folder/bin/python" -m pip install -c "$constraints" -c "$tools" -e "$root" --group "$root/pyproject.toml:dev"
"$folder/bin/python" - "$version" <<'EOF'
import sys
import torch
assert torch.__version__.split("+")[0] == sys.argv[1], f"torch {torch.__version__} was installed instead of {sys.argv[1]}"
EOF
