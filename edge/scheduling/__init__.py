"""Scheduling: admission, queueing, batching, and the choice of tiers."""
