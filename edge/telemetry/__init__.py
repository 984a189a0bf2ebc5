"""What is told of the server: readings, Prometheus, and a page for people."""
