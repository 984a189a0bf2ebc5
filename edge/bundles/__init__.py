"""What crosses from the workstation to the device: bundles, what they promise, and the steps around a model."""
