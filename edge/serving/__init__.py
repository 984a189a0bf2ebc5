"""The protocol, without a transport: messages to tensors, requests to answers, streams, extensions."""
