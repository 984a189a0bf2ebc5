"""Whether the server is sound, and who is told."""
