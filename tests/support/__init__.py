"""Models, servers and clients that tests share."""
