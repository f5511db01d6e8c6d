"""The models of customization.yaml and platform.yaml, and the reference pages and templates generated from them."""
