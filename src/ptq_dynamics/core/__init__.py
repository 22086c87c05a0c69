"""Ground floor: errors, paths, files, configuration, provenance, fan-out. Imports nothing above it."""
