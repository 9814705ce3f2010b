"""Wheels for sandboxes: resolved and fetched outside, kept by content, installed inside without a network."""
