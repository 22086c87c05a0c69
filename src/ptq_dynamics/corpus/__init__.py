"""From text to memory-mapped token shards: train, calibration, validation and out-of-domain sets."""
