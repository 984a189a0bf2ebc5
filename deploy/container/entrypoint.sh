#!/bin/sh
# Checks what only the start of a container can get wrong, then becomes `fewheads`. No Python runs before that: a
# TensorRT of another L4T release fails with undefined symbols when it is imported.
#
# Exit codes: 71 no L4T release of the host, 72 a release that this image is not for, 73 no CUDA driver, 74 no access to
# the GPU's devices, 75 a cache that cannot be written.
#
# FEWHEADS_IMAGE_L4T is the release that the image is for. FEWHEADS_ROOT is put before every path, in tests.
set -eu

root=${FEWHEADS_ROOT:-}
image=${FEWHEADS_IMAGE_L4T:?the image must say which L4T release it is for}

# fail CODE SUBJECT GIVEN EXPECTED FIX
fail() {
    printf 'fewheads: %s: got %s, expected %s. %s\n' "$2" "$3" "$4" "$5" >&2
    exit "$1"
}

# The image for a host, by the numbers of its release; empty where there is none.
tag_for() {
    case $1.$2 in
        36.[0-3]) ;;
        36.*) echo jp6.2 ;;
        39.*) echo jp7.2 ;;
    esac
}

check_release() {
    mount='-v /etc/nv_tegra_release:/etc/nv_tegra_release:ro'
    file=$root/etc/nv_tegra_release
    [ -f "$file" ] || fail 71 'host /etc/nv_tegra_release' 'no such file' 'the L4T release of a Jetson' \
        "Run the image on a Jetson, with $mount"
    # "# R36 (release), REVISION: 4.3, GCID: ..."
    release=$(sed -n '1s/^# *R\([0-9][0-9]*\) *(release), *REVISION: *\([0-9][0-9]*\).*/\1 \2/p' "$file")
    [ -n "$release" ] || fail 71 'host /etc/nv_tegra_release' 'a file without a release' \
        'a first line such as "# R36 (release), REVISION: 4.3"' "Mount the host's own file: $mount"
    major=${release% *} minor=${release#* }
    numbers=${image#r}
    image_major=${numbers%%.*} image_minor=${numbers#*.}
    # r36.4 broke with the releases before it; otherwise the major number decides.
    if [ "$major" -eq "$image_major" ] && { [ "$major" -ne 36 ] || [ "$minor" -ge 4 ]; }; then
        return
    fi
    expected=r$image_major
    [ "$image_major" -ne 36 ] || expected="$image or a later r36"
    given=r$major.$minor
    if [ "$major" -lt "$image_major" ] || { [ "$major" -eq "$image_major" ] && [ "$minor" -lt "$image_minor" ]; }; then
        given="$given, older than the image"
    fi
    tag=$(tag_for "$major" "$minor")
    if [ -n "$tag" ]; then
        fix="Run fewheads:$tag, or build it: docker build -f jetson.Dockerfile --build-arg JETPACK=${tag#jp}"
        fix="$fix -t fewheads:$tag ."
    else
        fix='No image is made for this host. Update it to JetPack 6.2 or 7.2.'
    fi
    fail 72 'host L4T release' "$given" "$expected, as the image is made for $image" "$fix"
}

check_driver() {
    libraries=$root/usr/lib/aarch64-linux-gnu
    for directory in "$libraries" "$libraries/tegra" "$libraries/nvidia"; do
        [ ! -e "$directory/libcuda.so.1" ] || return 0
    done
    fail 73 'libcuda.so.1' 'no such library' "the CUDA driver, which NVIDIA's container runtime mounts" \
        "Start the container with --runtime nvidia, in a compose file 'runtime: nvidia'."
}

check_devices() {
    for device in "$root/dev/nvmap" "$root/dev/nvgpu/igpu0/ctrl" "$root/dev/nvhost-ctrl-gpu"; do
        if [ -e "$device" ] && { [ ! -r "$device" ] || [ ! -w "$device" ]; }; then
            fail 74 "device ${device#"$root"}" "no access for user $(id -u)" 'one that this user may read and write' \
                "Start the container with --group-add $(stat -c %g "$device"), the group of the device."
        fi
    done
}

# The directory of --cache, else $FEWHEADS_CACHE.
cache_of() {
    cache=${FEWHEADS_CACHE:-/cache}
    while [ $# -gt 0 ]; do
        case $1 in
            --cache=*) cache=${1#--cache=} ;;
            --cache) cache=${2:-$cache} ;;
        esac
        shift
    done
    printf '%s\n' "$cache"
}

check_cache() {
    cache=$(cache_of "$@")
    probe=$root$cache/.entrypoint.$$
    if ! (umask 077 && : > "$probe") 2> /dev/null; then
        fail 75 "cache $cache" 'a directory that cannot be written' \
            "one that user $(id -u) may write, or engines are built at every start" \
            "Mount a volume: -v fewheads-cache:$cache. If it is a directory of the host: chown $(id -u) DIRECTORY"
    fi
    rm -f "$probe"
    mounts=$root/proc/self/mountinfo
    if [ -r "$mounts" ] && ! grep -q " $cache " "$mounts"; then
        echo "fewheads: the cache $cache is not a volume, and the next container builds its engines again." \
            "-v fewheads-cache:$cache keeps them." >&2
    fi
}

case ${1:-} in
    serve | build | bench | profile)
        check_release
        check_driver
        check_devices
        check_cache "$@"
        ;;
esac
exec fewheads "$@"
