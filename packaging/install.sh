#!/bin/sh
# Install farspan from a folder or wheel, with every extra but deepspeed, on torch for CPUs (the default of pip on Linux
# brings CUDA, several GB): packaging/install.sh PLACE
set -eu
pip install --no-cache-dir --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$1[all]"
