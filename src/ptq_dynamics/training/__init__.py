"""Schedules, the training loop, runs and branches, and the studies made of them."""
