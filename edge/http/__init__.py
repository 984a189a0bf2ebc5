"""The HTTP server of both HTTP ports: ASGI over HTTP/1.1, with limits on what clients make it hold or do."""
