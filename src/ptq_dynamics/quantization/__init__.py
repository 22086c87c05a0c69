"""Round-to-nearest and GPTQ on a loaded model, dequantized in place."""
