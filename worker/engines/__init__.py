"""What runs a compiled graph: onnxruntime, torch, and the choice between them."""
