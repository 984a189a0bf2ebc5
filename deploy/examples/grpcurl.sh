#!/bin/sh
# Ask with grpcurl (https://github.com/fullstorydev/grpcurl). The server describes its messages by reflection, so no
# .proto file is needed.
#
#     sh deploy/examples/grpcurl.sh 127.0.0.1:8001
#
# In request.json the text is in base64, as JSON wants bytes: `printf '3 - -4 + 2' | base64`. The answer's
# rawOutputContents are base64 of little-endian FP32: `| base64 -d | od -An -tf4` shows them.
set -eu
server=${1:-127.0.0.1:8001}
here=$(dirname "$0")

grpcurl -plaintext "$server" list
grpcurl -plaintext "$server" grpc.health.v1.Health/Check
grpcurl -plaintext -d '{"name": "calculator-oracle"}' "$server" inference.GRPCInferenceService/ModelMetadata
grpcurl -plaintext -max-time 10 -d @ "$server" inference.GRPCInferenceService/ModelInfer <"$here/request.json"
grpcurl -plaintext "$server" fewheads.telemetry.v1.Telemetry/Get
