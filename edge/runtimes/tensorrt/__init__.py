"""TensorRT: builds on the device or for desktop GPUs, and runs on this machine's GPU."""
