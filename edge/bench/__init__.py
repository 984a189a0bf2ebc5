"""Load generators, and latencies of a device: of layers, of a bundle's files, and of requests."""
