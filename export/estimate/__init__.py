"""Latency of bundles on a Jetson Orin Nano, predicted by a roofline: no number of this package was measured on one."""
