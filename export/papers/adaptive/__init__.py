"""Paper 002's mechanisms on real encoders: heads in calibrated order, a score for each, and losses that reduce them."""
