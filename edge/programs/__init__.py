"""Programs: how a request is computed from one or several runners."""
