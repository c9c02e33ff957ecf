"""Architectures by name: what they cost (`profile`) and how to make one (`build`).

Nothing is imported here: the controller and the simulator read profiles without onnx or numpy.
"""
