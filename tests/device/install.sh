#!/usr/bin/env bash
# An environment with the real pycuda on the software CUDA driver: install.sh DIRECTORY [PYTHON]
#
# Needs a C and a C++ compiler, and neither CUDA nor a GPU. NVIDIA's wheels hold the headers. pycuda has no wheel: pip
# compiles it once, and keeps the result in a cache of its own, apart from pycudas that are built for real devices.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "$1"
directory=$(cd "$1" && pwd)
python=${2:-python3}
pip=$directory/bin/pip

"$python" -m venv "$directory"
"$pip" install -q -c constraints.txt -e '.[cpu,otel,test]' \
    coverage nvidia-cuda-runtime-cu12 nvidia-cuda-profiler-api-cu12
packages=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
include=$packages/nvidia/cuda_runtime/include
ln -sfn "$include" "$directory/cuda-include"
tests/device/driver/build.sh "$include" "$directory/cuda"

# pycuda's setup reads this file from the home directory. cuRAND would be a library of 160 MB that nothing here uses.
mkdir -p "$directory/home"
cat >"$directory/home/.aksetup-defaults.py" <<END
CUDA_INC_DIR = ["$include", "$packages/nvidia/cuda_profiler_api/include"]
CUDADRV_LIB_DIR = ["$directory/cuda"]
CUDA_ENABLE_CURAND = False
CXXFLAGS = ["-O0", "-w"]
END
cache=$("$pip" cache dir)/software-cuda
settings=${XDG_CONFIG_HOME:-$HOME/.config} # of pip
XDG_CONFIG_HOME=$settings HOME=$directory/home "$pip" install -q -c constraints.txt --cache-dir "$cache" pycuda

LD_LIBRARY_PATH=$directory/cuda "$directory/bin/python" -c '
import pycuda.driver as cuda
cuda.init()
print("pycuda", ".".join(map(str, cuda.get_version())), "on", cuda.Device(0).name())'
