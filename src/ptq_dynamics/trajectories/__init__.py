"""Checkpoints on disk and ordered lists of them, whatever they came from."""
