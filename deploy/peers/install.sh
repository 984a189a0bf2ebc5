#!/bin/sh
# Install peers to compare with, each into an environment of its own: deploy/peers/install.sh [PEER...]
# They are in $FEWHEADS_PEERS, ~/.cache/fewheads-peers unless it says otherwise; nothing of them enters the tree.
# h2load, the client in C, comes from the system: apt-get install nghttp2-client
set -eu
home=${FEWHEADS_PEERS:-$HOME/.cache/fewheads-peers}
onnxruntime=onnxruntime==1.31.1

environment() { # NAME PYTHON REQUIREMENT...
    name=$1 python=$2
    shift 2
    rm -rf "${home:?}/$name"
    mkdir -p "$home"
    "$python" -m venv "$home/$name"
    "$home/$name/bin/pip" install -q --disable-pip-version-check "$@"
}

triton() {
    # Only a Python whose library is shared, as Debian's is, can be embedded by Triton's Python backend.
    python=/usr/bin/python3.11
    [ -x $python ] || { echo "triton: needs Debian's python3.11, libpython3.11 and python3.11-venv" >&2; exit 1; }
    environment triton $python nvidia-pytriton==0.7.0 "$onnxruntime" 'numpy<2'
    server=$home/triton/lib/python3.11/site-packages/pytriton/tritonserver
    mkdir "$home/triton/backends"
    cp -r "$server/backends/python" "$home/triton/backends/python"
    cp "$server/python_backend_stubs/3.11/triton_python_backend_stub" "$home/triton/backends/python/"
}

# uvloop 0.22 breaks MLServer's workers.
mlserver() { environment mlserver python3 mlserver==1.7.1 uvloop==0.21.0 "$onnxruntime"; }
kserve() { environment kserve python3 kserve==0.21.0 "$onnxruntime"; }
litserve() { environment litserve python3 litserve==0.2.19 "$onnxruntime"; }
bentoml() { environment bentoml python3 bentoml==1.4.39 "$onnxruntime"; }

[ $# -gt 0 ] || set -- triton mlserver kserve litserve bentoml
for peer; do
    case $peer in
    triton | mlserver | kserve | litserve | bentoml)
        "$peer"
        # Written last, so that an installation that broke off is not taken for one.
        "$home/$peer/bin/pip" freeze --disable-pip-version-check >"$home/$peer/versions.txt"
        echo "$peer: installed in $home/$peer"
        ;;
    *) echo "$peer: unknown; there are triton, mlserver, kserve, litserve and bentoml" >&2; exit 2 ;;
    esac
done
