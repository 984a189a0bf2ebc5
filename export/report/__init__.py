"""Data and measures of a fine-tuned run, as numbers and as a page; tables and figures."""
