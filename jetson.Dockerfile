# The server on a Jetson Orin Nano, with TensorRT: one image for JetPack 6.2 and one for 7.2.
#
#   docker build -f jetson.Dockerfile --build-arg JETPACK=6.2 -t fewheads:jp6.2 .
#   docker build -f jetson.Dockerfile --build-arg JETPACK=7.2 -t fewheads:jp7.2 .
#
# Build on the board, or on any arm64 machine: no step needs a GPU. deploy/README.md shows how to run the image, and
# itemises its size. TensorRT's Python bindings are those of JetPack, because no package index has their versions.
# Package indexes come from the build arguments PIP_INDEX_URL and PIP_EXTRA_INDEX_URL, or are pip's own.

ARG JETPACK=6.2

# JetPack 6.2 is L4T r36.4 and r36.5.
ARG JETPACK6_IMAGE=nvcr.io/nvidia/l4t-jetpack:r36.4.0
ARG UBUNTU22_IMAGE=ubuntu:22.04
# JetPack 7.2 is L4T r39.2. It has no l4t-jetpack image: TensorRT comes from NVIDIA's repository of Debian packages.
ARG UBUNTU24_IMAGE=ubuntu:24.04
ARG L4T_REPOSITORY=https://repo.download.nvidia.com/jetson
ARG L4T_RELEASE=r39.2


# --- Where TensorRT comes from -------------------------------------------------------------------------------------

# JetPack 6.2: only the libraries and bindings that the server loads. `cp -a` keeps their links, which COPY of a
# pattern would follow, so that every library would be there three times.
FROM ${JETPACK6_IMAGE} AS libraries-jp6.2
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The builder resource is for builds on the device. libnvinfer links the compiler of the DLA, although an Orin Nano has
# none, and does not load without it; NVIDIA's runtime mounts the host's, too. Left out: cuDNN, cuBLAS, and the plugins of
# version-compatible engines.
RUN mkdir /libraries \
    && cp -a --parents /usr/lib/python3.10/dist-packages/tensorrt /usr/lib/python3.10/dist-packages/tensorrt-*.dist-info \
        /usr/lib/aarch64-linux-gnu/libnvinfer.so.* \
        /usr/lib/aarch64-linux-gnu/libnvinfer_plugin.so.* \
        /usr/lib/aarch64-linux-gnu/libnvinfer_builder_resource.so.* \
        /usr/lib/aarch64-linux-gnu/libnvonnxparser.so.* \
        /libraries \
    && mkdir -p /libraries/usr/local/cuda/lib64 \
    && cp -a /usr/local/cuda/lib64/libcudart.so.* /usr/local/cuda/lib64/libcudla.so.* \
        /usr/local/cuda/lib64/libnvrtc.so.* /usr/local/cuda/lib64/libnvrtc-builtins.so.* \
        /usr/local/cuda/lib64/libnvJitLink.so.* \
        /libraries/usr/local/cuda/lib64/ \
    && find /usr/lib/aarch64-linux-gnu -name libnvdla_compiler.so -size +0 -exec cp -a --parents {} /libraries \;

# JetPack 7.2: the packages, from a repository that outranks others. CUDA's own repository has TensorRT 10.16.1, whose
# engines are not those of JetPack's 10.16.2.
FROM ${UBUNTU24_IMAGE} AS packages-jp7.2
ARG L4T_REPOSITORY
ARG L4T_RELEASE
ENV DEBIAN_FRONTEND=noninteractive
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3020
ADD --chmod=644 ${L4T_REPOSITORY}/jetson-ota-public.asc /usr/share/keyrings/nvidia-jetson.asc
RUN for part in common som; do \
        echo "deb [signed-by=/usr/share/keyrings/nvidia-jetson.asc] $L4T_REPOSITORY/$part $L4T_RELEASE main"; \
    done > /etc/apt/sources.list.d/nvidia-jetson.list \
    && host=${L4T_REPOSITORY#*://} \
    && printf 'Package: *\nPin: origin "%s"\nPin-Priority: 700\n' "${host%%/*}" > /etc/apt/preferences.d/nvidia-jetson \
    && printf 'path-exclude=/usr/share/doc/*\npath-exclude=/usr/share/man/*\n' > /etc/dpkg/dpkg.cfg.d/no-documents


# --- Where Python packages are made --------------------------------------------------------------------------------

FROM ${JETPACK6_IMAGE} AS compilers-jp6.2
ENV DEBIAN_FRONTEND=noninteractive
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM packages-jp7.2 AS compilers-jp7.2
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends cuda-toolkit-13-2 g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM compilers-jp${JETPACK} AS wheels
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV CUDA_ROOT=/usr/local/cuda \
    PATH=/usr/local/cuda/bin:$PATH \
    LIBRARY_PATH=/usr/local/cuda/lib64/stubs \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY constraints.txt ./
# Debian's pip cannot install into another environment, so a newer one has an environment of its own. pycuda has no
# wheels; without curand, which it links by default, the image needs no libcurand.
# hadolint ignore=DL3013
RUN python3 -m venv /opt/pip \
    && /opt/pip/bin/pip install --upgrade pip \
    && echo 'CUDA_ENABLE_CURAND = False' > /etc/aksetup-defaults.py \
    && /opt/pip/bin/pip wheel --no-deps --wheel-dir /wheels -c constraints.txt pycuda
COPY pyproject.toml README.md LICENSE ./
COPY edge edge
COPY export export
# Everything else has wheels for aarch64, so nothing is compiled. The environment sees JetPack's `tensorrt` only
# afterwards: while it is made, it must not count a package of this stage as installed.
RUN python3 -m venv --without-pip /opt/fewheads \
    && /opt/pip/bin/pip --python /opt/fewheads/bin/python install --only-binary :all: -c constraints.txt \
        /wheels/pycuda-*.whl '.[device]' \
    && sed -i 's/^include-system-site-packages = false$/include-system-site-packages = true/' /opt/fewheads/pyvenv.cfg \
    && grep -q '^include-system-site-packages = true$' /opt/fewheads/pyvenv.cfg


# --- The image -----------------------------------------------------------------------------------------------------

FROM ${UBUNTU22_IMAGE} AS device-jp6.2
ENV DEBIAN_FRONTEND=noninteractive
# hadolint ignore=DL3008
RUN printf 'path-exclude=/usr/share/doc/*\npath-exclude=/usr/share/man/*\n' > /etc/dpkg/dpkg.cfg.d/no-documents \
    && apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=libraries-jp6.2 /libraries/ /
ENV FEWHEADS_IMAGE_L4T=r36.4
LABEL fewheads.l4t="r36.4" \
      fewheads.jetpack="6.2" \
      fewheads.tensorrt="10.3.0" \
      fewheads.cuda="12.6" \
      org.opencontainers.image.base.name="ubuntu:22.04"

# Of two gigabytes of builder resources an Orin loads sm86, and ptx. There is none for its own sm87.
FROM packages-jp7.2 AS device-jp7.2
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-libnvinfer tensorrt-libs cuda-cudart-13-2 cuda-nvrtc-13-2 \
    && test -e /usr/lib/python3.12/dist-packages/tensorrt \
    && find /usr/lib/aarch64-linux-gnu -name 'libnvinfer_builder_resource_sm86.so.*' | grep -q . \
    && find /usr/lib/aarch64-linux-gnu -name 'libnvinfer_builder_resource_sm*' ! -name '*_sm86.so*' -delete \
    && find /usr/lib/aarch64-linux-gnu \( -name 'libnvinfer_lean.so*' -o -name 'libnvinfer_dispatch.so*' \
        -o -name 'libnvinfer_vc_plugin.so*' \) -delete \
    && rm -rf /usr/local/cuda/compat /usr/local/cuda-13.2/compat /var/lib/apt/lists/* \
        /etc/apt/sources.list.d/nvidia-jetson.list /etc/apt/preferences.d/nvidia-jetson
ENV FEWHEADS_IMAGE_L4T=r39.2
LABEL fewheads.l4t="r39.2" \
      fewheads.jetpack="7.2" \
      fewheads.tensorrt="10.16.2" \
      fewheads.cuda="13.2" \
      org.opencontainers.image.base.name="ubuntu:24.04"

# hadolint ignore=DL3006
FROM device-jp${JETPACK} AS server
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Fewheads" \
      org.opencontainers.image.description="Transformers with fewer and smaller heads, served over gRPC with TensorRT" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
# NVIDIA's runtime mounts libcuda and its companions into the first two of these directories. LD_LIBRARY_PATH names
# them, too, because nothing can write ld.so.cache where the root is read-only.
RUN printf '%s\n' /usr/lib/aarch64-linux-gnu/tegra /usr/lib/aarch64-linux-gnu/nvidia /usr/local/cuda/lib64 \
        > /etc/ld.so.conf.d/fewheads.conf \
    && ldconfig \
    && groupadd --gid 65532 fewheads \
    && (getent group render || groupadd --system render) \
    && useradd --uid 65532 --gid 65532 --groups video,render --no-log-init --no-create-home --home-dir /cache \
        --shell /usr/sbin/nologin fewheads \
    && install -d -o 65532 -g 65532 -m 750 /cache \
    && install -d /repository
COPY --from=wheels /opt/fewheads /opt/fewheads
COPY --chmod=755 deploy/container/entrypoint.sh deploy/container/healthcheck.py /opt/fewheads/container/
# `all` among the capabilities breaks some releases of the runtime. The mounts of JetPack's own libraries are not wanted:
# the image has the ones that it was made with.
ENV PATH=/opt/fewheads/bin:$PATH \
    LD_LIBRARY_PATH=/usr/lib/aarch64-linux-gnu/tegra:/usr/lib/aarch64-linux-gnu/nvidia:/usr/local/cuda/lib64 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_JETPACK_HOST_MOUNTS=base-only \
    CUDA_MODULE_LOADING=LAZY \
    OPENBLAS_CORETYPE=ARMV8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    FEWHEADS_CACHE=/cache
# A number, so that Kubernetes can see that it is not root.
USER 65532
EXPOSE 8000 8001 8002
# A first start builds engines, which takes minutes for each model. SIGTERM, the default, drains.
HEALTHCHECK --interval=30s --timeout=15s --start-period=30m --retries=3 \
    CMD ["/opt/fewheads/bin/python", "/opt/fewheads/container/healthcheck.py"]
ENTRYPOINT ["/opt/fewheads/container/entrypoint.sh"]
CMD ["serve", "/repository", "--host=0.0.0.0", "--drain-seconds=10"]
