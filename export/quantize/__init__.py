"""FP16 and INT8: graphs in lower precision, the ranges of their inputs, and training for them."""
