"""Fewheads on the workstation: train, convert, export. It needs torch, and ends at a bundle."""
