"""The demonstration: a real network on real images, from float training to an ONNX file with the same bits."""
