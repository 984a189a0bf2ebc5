// Ask a calculator model in C++, with nothing but gRPC and the stubs that protoc makes of proto/inference.proto:
//
//     apt install g++ pkg-config libgrpc++-dev protobuf-compiler-grpc
//     make -f deploy/examples/Makefile
//     build/ask 127.0.0.1:8001 calculator-oracle "3 - -4 + 2"
//
// Exit code 0 with the answer on stdout; 1 with gRPC's status on stderr; 2 for wrong usage.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <thread>

#include <grpcpp/grpcpp.h>

#include "inference.grpc.pb.h"

namespace {

// BYTES travel as 4 bytes of little-endian length and the bytes themselves, for each element.
std::string bytes_tensor(const std::string& text) {
  const auto length = static_cast<std::uint32_t>(text.size());
  std::string raw;
  for (int shift = 0; shift < 32; shift += 8) raw.push_back(static_cast<char>(length >> shift));
  return raw + text;
}

// The time after which a full server suggests to retry, in ms; 0 if it suggests none.
long retry_after_ms(const grpc::ClientContext& context) {
  const auto& trailer = context.GetServerTrailingMetadata();
  const auto found = trailer.find("retry-after-ms");
  if (found == trailer.end()) return 0;
  return std::strtol(std::string(found->second.data(), found->second.size()).c_str(), nullptr, 10);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: ask HOST:PORT MODEL EXPRESSION\n";
    return 2;
  }
  const auto channel = grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials());
  const auto stub = inference::GRPCInferenceService::NewStub(channel);

  inference::ModelInferRequest request;
  request.set_model_name(argv[2]);
  auto* input = request.add_inputs();
  input->set_name("expression");
  input->set_datatype("BYTES");
  input->add_shape(1);
  input->add_shape(1);
  request.add_raw_input_contents(bytes_tensor(argv[3]));

  // One deadline for all attempts. An inference changes nothing at the server, so it may be sent again.
  const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(10);
  for (int attempt = 1;; ++attempt) {
    grpc::ClientContext context;
    context.set_deadline(deadline);
    inference::ModelInferResponse response;
    const grpc::Status status = stub->ModelInfer(&context, request, &response);
    if (status.ok()) {
      float value;
      if (response.raw_output_contents_size() < 1 || response.raw_output_contents(0).size() != sizeof value) {
        std::cerr << "the answer holds no FP32 value\n";
        return 1;
      }
      std::memcpy(&value, response.raw_output_contents(0).data(), sizeof value);  // little-endian, as on ARM and x86
      std::cout << value << "\n";
      return 0;
    }
    const auto pause = std::chrono::milliseconds(retry_after_ms(context));
    const bool full = status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED && pause.count() > 0;
    if (!full || attempt == 3 || std::chrono::system_clock::now() + pause >= deadline) {
      std::cerr << "status " << status.error_code() << ": " << status.error_message() << "\n";
      return 1;
    }
    std::this_thread::sleep_for(pause);
  }
}
