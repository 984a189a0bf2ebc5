"""Health of the server and its models, and the threads and messages that follow from it."""
