"""The protocol over HTTP and JSON."""
