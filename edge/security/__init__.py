"""Who may ask what, how often, and over which connection."""
