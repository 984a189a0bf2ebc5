"""What computes: ONNX Runtime and TensorRT, how models are built for them, and where built models lie."""
