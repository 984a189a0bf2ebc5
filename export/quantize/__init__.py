"""FP16 and INT8: graphs in lower precision, and the ranges of their inputs."""
