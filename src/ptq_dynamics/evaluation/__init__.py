"""Per-sequence losses, paired intervals, and the table of measurements."""
