#!/usr/bin/env bash
# Compiles the software CUDA driver: build.sh INCLUDE DIRECTORY
#
# INCLUDE holds NVIDIA's cuda.h. DIRECTORY gets libcuda.so.1, and libcuda.so, which linkers look for. Every function that
# cuda.h declares and the driver does not have answers CUDA_ERROR_NOT_SUPPORTED.
set -euo pipefail
include=$1 directory=$2 sources=$(dirname "$0")
cc=${CC:-cc}
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
mkdir -p "$directory"

for source in "$sources"/*.c; do
    "$cc" -std=c11 -D_GNU_SOURCE -O1 -g -fPIC -Wall -Wextra -Werror -Wno-deprecated-declarations \
        -isystem "$include" -c "$source" -o "$objects/$(basename "$source" .c).o"
done

# Names of functions: the declared ones, and the versions that macros such as cuMemAlloc stand for.
{
    tr '\n' ' ' <"$include/cuda.h" | grep -oE 'CUDAAPI +cu[A-Z]\w+'
    grep -E '^ *# *define +cu[A-Z]' "$include/cuda.h" | grep -oE 'cu[A-Z]\w+\)?$' | tr -d ')'
    echo cuProfilerInitialize cuProfilerStart cuProfilerStop | tr ' ' '\n'
} | awk '{ print $NF }' | sort -u >"$objects/declared"
nm --defined-only "$objects"/*.o | awk '$2 == "T" { print $3 }' | sort -u >"$objects/defined"
comm -23 "$objects/declared" "$objects/defined" | awk '{ print "int " $1 "(void) { return 801; }" }' >"$objects/rest.c"

# A new file, so that a process that uses the old one keeps it.
"$cc" -shared -pthread -o "$objects/libcuda.so.1" "$objects"/*.o -fPIC "$objects/rest.c" -Wl,-soname,libcuda.so.1,-Bsymbolic
mv "$objects/libcuda.so.1" "$directory/libcuda.so.1"
ln -sf libcuda.so.1 "$directory/libcuda.so"
