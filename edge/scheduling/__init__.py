"""Scheduling: admission, queueing, batching, and the selection of tiers."""
