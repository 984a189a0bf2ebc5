"""Tokens and scopes, rate limits and TLS."""
