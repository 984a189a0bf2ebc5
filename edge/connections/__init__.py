"""Connections of clients: how they are accepted, and what they may make the server hold or do."""
