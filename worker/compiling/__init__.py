"""ONNX in; a graph, weights on pages and a measured profile out."""
