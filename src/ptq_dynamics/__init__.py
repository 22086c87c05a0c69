"""How training dynamics shape post-training quantization error (arXiv 2510.06213)."""

__version__ = "0.1.0"
