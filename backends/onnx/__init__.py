"""ONNX: the files that integer models are exported to, the styles they are written in, and the runtimes that run them."""
