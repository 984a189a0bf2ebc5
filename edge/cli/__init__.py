"""One file per command of the device; each imports heavy things only when it runs."""
