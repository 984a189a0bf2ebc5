"""Programs: computation of a request with one or several runners."""
