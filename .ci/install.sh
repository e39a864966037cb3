#!/usr/bin/env bash
# Make a virtual environment and install Blendgate into it, with vLLM and everything for its tests.
#   .ci/install.sh VENV cpu|gpu PYTHON
# `make install` calls this; a finished VENV is reused, one for the other extra is made anew.
set -eu

venv=$1 extra=$2 python=$3
pytorch_cpu_index=https://download.pytorch.org/whl/cpu

step() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

case $extra in
  cpu | gpu) ;;
  *) fail "EXTRA is '$extra', expected cpu or gpu" ;;
esac
command -v "$python" >/dev/null || fail "'$python' not found; name one with: make PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' ||
  fail "Blendgate needs Python 3.11 to 3.14, and '$python' is $("$python" --version 2>&1);" \
    "name another one with: make PYTHON=python3.12"

if [ ! -x "$venv/bin/pip" ] || [ "$(cat "$venv/extra" 2>/dev/null)" != "$extra" ]; then
  step "Creating $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
  echo "$extra" >"$venv/extra"
fi

step "Installing Blendgate with vLLM for $extra: 4 GB on disk for cpu, 10 for gpu, some minutes"
# Most of what comes with PyTorch is never imported; the rest is compiled when it is.
install=("$venv/bin/pip" install --disable-pip-version-check --no-compile
  --editable ".[$extra,demo,dev]")
if ! "${install[@]}"; then
  [ "$extra" = cpu ] || fail "pip failed; its own message is above"
  # The CPU build of PyTorch for Linux is not on PyPI itself.
  step "Trying again with PyTorch's own index for its CPU build"
  "${install[@]}" --extra-index-url "$pytorch_cpu_index"
fi

# From PyPI, these are CUDA builds. vLLM pulls them in, text models do without them, and one that
# cannot be imported takes `import transformers` down with it.
for package in torchvision torchaudio torchcodec; do
  if "$venv/bin/pip" show --quiet "$package" 2>/dev/null &&
    ! "$venv/bin/python" -c "import $package" 2>/dev/null; then
    step "Removing $package: it does not load with this PyTorch"
    "$venv/bin/pip" uninstall --quiet --yes "$package"
  fi
done

step "Installed: $("$venv/bin/python" -c 'import sys, torch; print("Python", sys.version.split()[0] + ", PyTorch", torch.__version__)')"
