"""The protocol without a transport: inference, streams, descriptions of models, and extensions."""
