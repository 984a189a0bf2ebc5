"""Attacks on a running server, each measured by what a well-behaved client beside it notices."""
