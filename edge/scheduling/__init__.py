"""Which request is computed when, with which others, and by which tier."""
