"""Fewheads on the workstation: training, conversion and export to bundles, with PyTorch."""
