"""The models that are served: found, checked, loaded, replaced."""
