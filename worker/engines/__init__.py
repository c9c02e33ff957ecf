"""Engines that run a compiled graph: onnxruntime, torch, and the choice between them.

Both engines take their weights from addresses that the caller chooses, so a device can keep them on pages.
`onnxruntime` binds a session to fixed memory. `torch_program` is a graph as a list of torch calls
(`torch_operators`) on views of plain bytes (`torch_tensors`). `choice` is plain data and needs neither.
"""
