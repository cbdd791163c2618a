#!/usr/bin/env bash
# Write requirements-lock.txt: the newest versions that pyproject.toml allows beside the Makefile's torch, in one file for
# every Python from 3.10 on. `make lock` runs it. The file leaves out torch, whose build the user chooses, and what a CUDA
# build brings along (nvidia-*, cuda-*, triton) at versions of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch=$(sed -n 's/^TORCH *?= *//p' Makefile)
locked=$(mktemp)
trap 'rm -f "$locked"' EXIT
{
    echo "# Written by \`make lock\`; used by \`make setup LOCK=1\`, which installs $torch or your TORCH first."
    "${PYTHON:-.venv/bin/python}" -m uv pip compile pyproject.toml --all-extras --universal --python-version 3.10 \
        --constraint <(echo "$torch") --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links |
        grep -vE '^(cuda|nvidia)-|^(torch|triton)=='
} > "$locked"
cp "$locked" requirements-lock.txt
